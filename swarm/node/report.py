"""What a node reports about itself: rows of metrics.jsonl, /metrics and /health, the status file, a line on the terminal.

    compute thread ─ record(row) ─┐                     ┌─ metrics.jsonl · /metrics · terminal
                                  ├─→ [NodeReport] ─────┤
    network loop ─ refresh ───────┘                     └─ status.json · /health

All of it is for people and their tools; no other part of the node reads it. `Adviser` adds lines for `swarm status`: what is
wrong with the node's part in its swarm, and what a person can do about it. A reward that does not move gives no line: small
policies and hard tasks take their time.
"""

import asyncio
import logging
import math
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarm.config import Config
from swarm.dashboard.node_page import NodePage
from swarm.integrations.sink import Sink
from swarm.machine.node_folder import NodeFolder
from swarm.merging.node_merging import NodeMerging
from swarm.network.transport import Transport
from swarm.node.round_metrics import MetricsRow
from swarm.node.watchdog import Watchdog
from swarm.observability.http_server import HttpServer
from swarm.observability.metrics import Metrics, MetricsLog
from swarm.observability.plain_text import counted
from swarm.observability.status_file import NodeStatus, judge
from swarm.records.identity import Identity
from swarm.records.rejection import Rejection
from swarm.sharing.index import EntryValidator
from swarm.sharing.parts import SharingParts

logger = logging.getLogger(__name__)

ALONE_AFTER_S = 120.0
LEAST_FREE_BYTES = 1 << 30
_LOOK_BACK_S = 600.0
_LOOK_INTERVAL_S = 30.0
_LEAST_REJECTED = 10
_ROUNDS_WITHOUT_SIGNAL = 10
_NOBODYS_FAULT = frozenset({Rejection.REPLAY, Rejection.NO_SIGNAL, Rejection.STALE, Rejection.EXPIRED})
"""Reasons for rejections that occur in every healthy swarm."""
_REMEDIES = {
    Rejection.VERSION: "they speak another version of the protocol: update this software, or theirs",
    Rejection.FOREIGN_SWARM: "their records are of another swarm: use the same swarm.name, or the same manifest",
    Rejection.CLOCK_SKEW: "this clock or theirs is wrong: turn on time synchronization (NTP); `swarm doctor` measures",
    Rejection.UNKNOWN_TASK: "they work on tasks that are not here, or score them by other rules: use the same "
    "edition of the swarm's manifest, or the same tasks.sources, and the same version of swarm",
    Rejection.TASK_MISMATCH: "the same task has another prompt there: use the same versions of the task packages",
    Rejection.TASK_FAILED: "their tasks or verifiers fail here: see the log, and `swarm doctor`",
    Rejection.UNAVAILABLE: "their bodies cannot be fetched: `swarm doctor` tells how others reach this machine",
    Rejection.TOO_SLOW: "verifying their answers takes too long here: free the processor, or use quicker tasks",
    Rejection.BANNED: "this node banned their authors for false claims: `swarm peers` names them",
    Rejection.FORGED_EPISODE: "environments reply otherwise here: use the same versions of the task packages",
    Rejection.REWARD_MISMATCH: "rewards come out otherwise here: use the same versions of the task packages",
}


class Adviser:
    """Writes lines for `swarm status` about what is wrong with one node. It remembers the last minutes for that."""

    def __init__(self, clock: Callable[[], float], *, has_network: bool, has_initial_peers: bool) -> None:
        """`clock`: seconds of a monotonic clock."""
        self._clock = clock
        self._has_network = has_network
        self._has_initial_peers = has_initial_peers
        self._met_at = clock()
        """When somebody was last connected; at first the start."""
        self._rounds_without_signal = 0
        self._health: Sequence[str] = ()
        self._counts: deque[tuple[float, int, Counter[str]]] = deque([(clock(), 0, Counter())])
        """(when, records admitted, records rejected by reason), the oldest of the last minutes first."""

    def round_done(self, row: Mapping[str, Any]) -> None:
        """`row`: of a round, for metrics.jsonl. Called by the compute thread."""
        is_silent = row.get("rollout/groups", 0) > 0 and row.get("rollout/groups_with_signal", 1) == 0
        self._rounds_without_signal = self._rounds_without_signal + 1 if is_silent else 0
        self._health = tuple(row.get("health/warnings", ()))

    def look(
        self, num_peers: int, admitted: int, rejected: Counter[str], free_bytes: int, of_network: Sequence[str] = ()
    ) -> list[str]:
        """Lines for a person, the gravest first; none where all is well. `admitted`, `rejected`: records since the start.

        `of_network`: the lines of the transport. They say more than that no peer is connected.
        """
        now = self._clock()
        if num_peers:
            self._met_at = now
        if now - self._counts[-1][0] >= _LOOK_INTERVAL_S:
            self._counts.append((now, admitted, Counter(rejected)))
        while len(self._counts) > 1 and self._counts[1][0] <= now - _LOOK_BACK_S:
            self._counts.popleft()
        found = (
            self._of_disk(free_bytes),
            *(of_network or (self._of_loneliness(now),)),
            self._of_rejection(admitted, rejected),
            self._of_signal(),
            *self._health,
        )
        return [line for line in found if line]

    def _of_disk(self, free_bytes: int) -> str:
        if free_bytes >= LEAST_FREE_BYTES:
            return ""
        return f"disk nearly full, {free_bytes / 2**20:.0f} MiB free: make room, or lower checkpoint.keep"

    def _of_loneliness(self, now: float) -> str:
        alone_s = now - self._met_at
        if not self._has_network or alone_s < ALONE_AFTER_S:
            return ""
        text = f"no peer for {alone_s / 60:.0f} min: "
        if self._has_initial_peers:
            return text + "`swarm doctor` tells whether the initial peers answer"
        return text + "give others an address of this node, or set network.initial_peers to one of theirs"

    def _of_rejection(self, admitted: int, rejected: Counter[str]) -> str:
        """Where half as much was turned away in the last minutes as was admitted, or more."""
        _, admitted_before, rejected_before = self._counts[0]
        lately = Counter({why: n for why, n in (rejected - rejected_before).items() if why not in _NOBODYS_FAULT})
        taken = admitted - admitted_before
        if taken:  # anybody can send what is malformed; what follows from another setup has a remedy
            lately = Counter({why: count for why, count in lately.items() if why in _REMEDIES})
        if lately.total() < max(_LEAST_REJECTED, taken / 2):
            return ""
        why, count = lately.most_common(1)[0]
        remedy = _REMEDIES.get(Rejection(why)) if why in set(Rejection) else None
        text = f"{f'{taken} records' if taken else 'nothing'} of others admitted lately, {lately.total()} turned away, "
        text += f"{count} of them as {why}: "
        return text + (remedy or "docs/protocol.md says what that means")

    def _of_signal(self) -> str:
        if self._rounds_without_signal < _ROUNDS_WITHOUT_SIGNAL:
            return ""
        return (
            f"no signal in {self._rounds_without_signal} rounds: all answers to a task earn the same; "
            "raise rollouts.group_size, or take tasks that are sometimes solved"
        )


_SAY_INTERVAL_S = 5.0
_BY_REASON = {
    "exchange/rejected": "exchange/rejected_records",
    "train/dropped_groups": "train/dropped_groups",
    "exchange/beacons": "exchange/bodies_by_beacon",
    "network/refused": "network/refused",
    "merge/reasons": "merge/outer_steps_by_reason",
    "merge/declined": "merge/declined",
}
"""{entry of a row that counts by reason: name of its gauges}."""


@dataclass(frozen=True)
class NetworkSide:
    """The parts of a node with a network that its report reads."""

    sharing: SharingParts
    validator: EntryValidator
    """Of the index entries that this node hosts; it counts those that it rejected."""
    merging: NodeMerging | None

    @property
    def transport(self) -> Transport:
        return self.sharing.context.transport

    @property
    def rejected(self) -> Counter[str]:
        """Records of others, by reason. Safe from any thread: only copies are iterated."""
        return Counter(self.sharing.totals.rejected) + Counter(self.validator.rejected)

    def row(self) -> MetricsRow:
        """Traffic, and the totals of sharing and merging."""
        traffic, sharing = self.transport.traffic, self.sharing
        return {
            "exchange/bytes_sent": traffic.bytes_sent,
            "exchange/bytes_received": traffic.bytes_received,
            "network/refused": dict(self.transport.refused),
            "exchange/gossip_bytes_sent": traffic.gossip_bytes_sent,
            "exchange/gossip_bytes_received": traffic.gossip_bytes_received,
            **(self.merging.row() if self.merging else {}),
            **sharing.totals.row(),
            "exchange/beacons": dict(sharing.tracker.beacon_evidence),
            "exchange/bodies_taken": sharing.bodies.num_taken,
            "exchange/rejected": dict(self.rejected),
        }


class NodeReport:
    """The report of one node, from `start` to `stop`, after which nothing may be recorded."""

    def __init__(
        self,
        config: Config,
        folder: NodeFolder,
        identity: Identity,
        *,
        network: NetworkSide | None,
        watchdog: Watchdog,
        page: NodePage | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """`network`: None for a node without one. `page` shows, and `sinks` receive, every row, too."""
        self.phase = "starting"
        """As in `NodeStatus`."""
        self._failure = ""
        self._folder = folder
        self._identity = identity
        self._network = network
        self._watchdog = watchdog
        self._adviser = Adviser(
            time.monotonic,
            has_network=network is not None,
            has_initial_peers=bool(config.network.initial_peers),
        )
        self._sinks = sinks
        self._metrics = Metrics()
        self._log = MetricsLog(folder.metrics, config.observability.max_log_mib * 2**20)
        self._page = page if config.observability.http else None
        self._http = HttpServer(config.observability, self._metrics, self._health, pages=page.routes() if page else ())
        self._started_at = time.time()
        self._last_row: MetricsRow = {}
        self._resumed: MetricsRow = {}
        self._final_merge: MetricsRow = {}
        self._last_round_at = 0.0
        self._num_peers = 0
        self._said_at = -math.inf
        self._said_round = 0

    async def start(self) -> None:
        """Raises ConfigError where the address of /metrics cannot be bound."""
        if self._page is not None:
            await self._page.start()
        await self._http.start()
        self.write_status()

    async def stop(self) -> None:
        """Write the last status, and close log and sinks. Called also after a start that failed."""
        try:
            if self._page is not None:
                await self._page.stop()
            await self._http.stop()
        finally:
            try:
                self.write_status()
            except OSError as error:  # a full disk must not hide the error that ended the node
                logger.error("the last status was not written: %s", error)
            self._log.close()
            for sink in self._sinks:
                await asyncio.to_thread(sink.close)

    def fail(self, error: Exception) -> None:
        """Let the last status say which error ended the node."""
        self.phase, self._failure = "failed", " ".join(str(error).split()) or type(error).__name__

    async def refresh(self) -> None:
        """Count the peers and rewrite the status file."""
        if self._network is not None:
            self._num_peers = len(await self._network.transport.connected_peers())
        self._metrics.gauge("node/stuck_parts", len(self._watchdog.stuck()))
        self.write_status()

    def resume(self, round_number: int, policy_version: int) -> None:
        """Let the status name the round and version of the checkpoint until a round ends; version 0: not known yet."""
        self._resumed = {"round": round_number, "policy_version": policy_version}

    def count_failed_step(self) -> None:
        self._metrics.count("node/failed_steps")

    def record(self, row: MetricsRow) -> None:
        """Write one metrics row; that of a round gets the totals of the network, too. Called by the compute thread."""
        if row["kind"] == "round":
            row["network/peers"] = self._num_peers
            row |= self._network.row() if self._network else {}
            for name, value in row.items():
                if "/" in name and isinstance(value, int | float):
                    self._metrics.gauge(name, value)
            for name, gauge in _BY_REASON.items():
                for reason, count in row.get(name, {}).items():
                    self._metrics.gauge(gauge, count, reason=reason)
            self._last_row, self._last_round_at = row, time.time()
            self._adviser.round_done(row)
            self._say(row)
            if self._page is not None:
                self._page.show_row(row)
        elif row["kind"] == "evaluation":
            if self._page is not None:
                self._page.show_row(row)
        elif row["kind"] == "end":
            self._say(self._last_row, is_last=True)
        elif row["kind"] == "final_merge":
            self._final_merge = row
        self._log.write({"time_s": time.time(), **row})
        for sink in self._sinks:
            sink.write(row)

    def write_status(self) -> None:
        sharing = self._network.sharing if self._network and self.phase != "starting" else None
        reached = self._last_row or self._resumed
        status = NodeStatus(
            peer_id=self._identity.peer_id,
            peer_name=self._identity.peer_name,
            pid=os.getpid(),
            http_port=self._http.port,
            addresses=self._network.transport.addresses() if self._network else (),
            started_at=self._started_at,
            round=reached.get("round", 0),
            policy_version=reached.get("policy_version", 0),
            phase=self._page.phase(self.phase) if self._page else self.phase,
            last_round=self._last_row,
            final_merge=self._final_merge,
            peers=[asdict(peer) for peer in sharing.peers()] if sharing else [],
            contribution=self._contribution(sharing),
            stuck=self._watchdog.stuck(),
            num_connected=self._num_peers if self._network else None,
            last_round_at=self._last_round_at,
            written_at=time.time(),
            failure=self._failure,
        )
        if self._page is not None:
            health = judge(status, time.time())
            self._page.show_status({**asdict(status), "verdict": health.word.value, "why": health.why})
        status.write(self._folder.status)

    def _contribution(self, sharing: SharingParts | None) -> dict[str, Any]:
        """What others took from this node, and advice, which a node without a network gets, too."""
        facts = asdict(sharing.contribution()) if sharing else {}
        num_admitted = sharing.totals.num_records_admitted if sharing else 0
        rejected = self._network.rejected if self._network and sharing else Counter[str]()
        free_bytes = shutil.disk_usage(self._folder.path).free
        of_network = self._network.transport.advice() if self._network else ()
        advice = self._adviser.look(self._num_peers, num_admitted, rejected, free_bytes, of_network)
        return {**facts, "advice": advice}

    def _say(self, row: MetricsRow, *, is_last: bool = False) -> None:
        """Log the progress on the terminal, at most every few seconds; the last round in any case, and each round once."""
        number = row.get("round", 0)
        if number == self._said_round or not (is_last or time.monotonic() - self._said_at >= _SAY_INTERVAL_S):
            return
        self._said_at, self._said_round = time.monotonic(), number
        logger.info(
            "round %d: reward %.3f, trained on %d own + %d swarm groups, %.0f tokens/s, %s%s%s",
            row["round"], row["rollout/reward_mean"], row["train/own_groups"], row["train/swarm_groups"],
            row["rollout/tokens_per_s"], counted(self._num_peers, "peer"),
            f", {row['merge/merges_total']} merges" if "merge/merges_total" in row else "",
            f", {counted(row['rollout/failed_tasks'], 'task')} failed" if row.get("rollout/failed_tasks") else "",
        )  # fmt: skip

    def _health(self) -> dict[str, Any]:
        return {
            "phase": self._page.phase(self.phase) if self._page else self.phase,
            "round": self._last_row.get("round", 0),
            "peers": self._num_peers,
            "uptime_s": time.time() - self._started_at,
        }

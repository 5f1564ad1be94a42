"""What a node says of itself: rows of metrics.jsonl, /metrics and /health, the status file, a line for the terminal.

    compute thread ─ record(row) ─┐                     ┌─ metrics.jsonl · /metrics · terminal
                                  ├─→ [NodeReport] ─────┤
    network loop ─ refresh ───────┘                     └─ status.json · /health

All of it is for people and their tools: no other part of the node reads it.
"""

import asyncio
import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from swarm.config import ObservabilitySection
from swarm.config.node_folder import NodeFolder
from swarm.dashboard.node_page import NodePage
from swarm.integrations.sink import Sink
from swarm.merging.node_merging import NodeMerging
from swarm.network.transport import Transport
from swarm.node.advice import Adviser
from swarm.node.learner import MetricsRow
from swarm.node.watchdog import Watchdog
from swarm.observability.http_server import HttpServer
from swarm.observability.metrics import Metrics, MetricsLog
from swarm.observability.plain_text import counted
from swarm.observability.status_file import NodeStatus
from swarm.records.identity import Identity
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator

logger = logging.getLogger(__name__)

_SAY_INTERVAL_S = 5.0
_BY_REASON = {
    "exchange/rejected": "exchange/rejected_records",
    "train/dropped_groups": "train/dropped_groups",
    "exchange/beacons": "exchange/bodies_by_beacon",
    "network/refused": "network/refused",
    "merge/reasons": "merge/outer_steps_by_reason",
    "merge/declined": "merge/declined",
}
"""Entry of a row that counts by reason, and the name of its gauges."""


class NodeReport:
    """Of one run of one node, from `start` to `stop`, after which nothing may be recorded."""

    def __init__(
        self,
        config: ObservabilitySection,
        folder: NodeFolder,
        identity: Identity,
        transport: Transport | None,
        validator: EntryValidator,
        merging: NodeMerging | None = None,
        adviser: Adviser | None = None,
        watchdog: Watchdog | None = None,
        *,
        page: NodePage | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """`validator`: of the index entries that this node keeps; it counts what it turned away. `page`: shown the same.

        `sinks`: get every row, too.
        """
        self.phase = "starting"
        """As in `NodeStatus`."""
        self.exchange: Exchange | None = None
        """Set once it is wired: its totals go into every row of a round."""
        self._folder = folder
        self._identity = identity
        self._transport = transport
        self._validator = validator
        self._watchdog = watchdog or Watchdog(time.monotonic)
        has_network = transport is not None
        self._adviser = adviser or Adviser(time.monotonic, has_network=has_network, has_initial_peers=has_network)
        self._merging = merging
        self._sinks = sinks
        self._metrics = Metrics()
        self._log = MetricsLog(folder.metrics, config.max_log_mib * 2**20)
        self._page = page if config.http else None
        self._http = HttpServer(config, self._metrics, self._health, page.routes() if page else [])
        self._started_at = time.time()
        self._last_row: MetricsRow = {}
        self._final_merge: MetricsRow = {}
        self._last_round_at = 0.0
        self._num_peers = 0
        self._said_at = -math.inf

    async def start(self) -> None:
        """Raises ConfigError where the address of /metrics cannot be bound."""
        if self._page is not None:
            await self._page.start()
        await self._http.start()
        self.write_status()

    async def stop(self) -> None:
        """The last word in the status file: how far the node came. Also after a start that failed."""
        try:
            if self._page is not None:
                await self._page.stop()
            await self._http.stop()
        finally:
            try:
                self.write_status()
            except OSError as error:  # a full disk must not hide how the node ended
                logger.error("the last status was not written: %s", error)
            self._log.close()
            for sink in self._sinks:
                await asyncio.to_thread(sink.close)

    async def refresh(self) -> None:
        """Count the peers and rewrite the status file."""
        if self._transport is not None:
            self._num_peers = len(await self._transport.connected_peers())
        self._metrics.gauge("node/stuck_parts", len(self._watchdog.stuck()))
        self.write_status()

    def count_failed_step(self) -> None:
        self._metrics.count("node/failed_steps")

    def record(self, row: MetricsRow) -> None:
        """Write one metrics row, that of a round with the exchange's totals; called by the compute thread."""
        if row["kind"] == "round":
            row |= self._exchange_row()
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
        elif row["kind"] == "final_merge":
            self._final_merge = row
        self._log.write({"time_s": time.time(), **row})
        for sink in self._sinks:
            sink.write(row)

    def write_status(self) -> None:
        status = NodeStatus(
            peer_id=self._identity.peer_id,
            peer_name=self._identity.peer_name,
            pid=os.getpid(),
            http_port=self._http.port,
            addresses=self._transport.addresses() if self._transport else (),
            started_at=self._started_at,
            round=self._last_row.get("round", 0),
            policy_version=self._last_row.get("policy_version", 0),
            phase=self._page.phase(self.phase) if self._page else self.phase,
            last_round=self._last_row,
            final_merge=self._final_merge,
            peers=[asdict(peer) for peer in self.exchange.peers()] if self.exchange else [],
            contribution=self._contribution(),
            stuck=self._watchdog.stuck(),
            num_connected=self._num_peers if self._transport else None,
            last_round_at=self._last_round_at,
            written_at=time.time(),
        )
        if self._page is not None:
            self._page.show_status(asdict(status))
        status.write(self._folder.status)

    def _contribution(self) -> dict[str, Any]:
        """With advice, also where nothing is shared."""
        facts = asdict(self.exchange.contribution()) if self.exchange else {}
        admitted = self.exchange.reader.num_records_admitted if self.exchange else 0
        free_bytes = shutil.disk_usage(self._folder.path).free
        return {**facts, "advice": self._adviser.look(self._num_peers, admitted, self._rejected(), free_bytes)}

    def _rejected(self) -> Counter[str]:
        """Records of others, by reason."""
        return self.exchange.reader.rejected + Counter(self._validator.rejected) if self.exchange else Counter()

    def _say(self, row: MetricsRow) -> None:
        """Progress for whoever watches the terminal, at most every few seconds."""
        if time.monotonic() - self._said_at < _SAY_INTERVAL_S:
            return
        self._said_at = time.monotonic()
        logger.info(
            "round %d: reward %.3f, trained on %d own + %d swarm groups, %.0f tokens/s, %s%s",
            row["round"], row["rollout/reward_mean"], row["train/own_groups"], row["train/swarm_groups"],
            row["rollout/tokens_per_s"], counted(self._num_peers, "peer"),
            f", {row['merge/merges_total']} merges" if "merge/merges_total" in row else "",
        )  # fmt: skip

    def _exchange_row(self) -> MetricsRow:
        row: MetricsRow = {"network/peers": self._num_peers}
        if self._transport is not None:
            traffic = self._transport.traffic
            row |= {"exchange/bytes_sent": traffic.bytes_sent, "exchange/bytes_received": traffic.bytes_received}
            row["network/refused"] = dict(self._transport.refused)
            row |= {
                "exchange/gossip_bytes_sent": traffic.gossip_bytes_sent,
                "exchange/gossip_bytes_received": traffic.gossip_bytes_received,
            }
        if self._merging is not None:
            row |= self._merging.row()
        if self.exchange is not None:
            publisher, reader = self.exchange.publisher, self.exchange.reader
            row |= {
                "exchange/records_published": publisher.num_published,
                "exchange/records_indexed": publisher.num_indexed,
                "exchange/rounds_not_published": self.exchange.num_rounds_not_published,
                "exchange/records_admitted": reader.num_records_admitted,
                "exchange/groups_admitted": reader.num_groups_admitted,
                "exchange/beacons": dict(self.exchange.authors.beacon_evidence),
                "exchange/headers_gossiped": reader.num_headers_gossiped,
                "exchange/headers_swept": reader.num_headers_swept,
                "exchange/bodies_taken": self.exchange.num_bodies_taken,
                "exchange/rejected": dict(self._rejected()),
            }
        return row

    def _health(self) -> dict[str, Any]:
        return {
            "phase": self._page.phase(self.phase) if self._page else self.phase,
            "round": self._last_row.get("round", 0),
            "peers": self._num_peers,
            "uptime_s": time.time() - self._started_at,
        }

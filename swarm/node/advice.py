"""What is wrong with a node's part in its swarm, and what a person can do about it: lines for `swarm status`.

    network loop ─ look(...) every few seconds ─┐
    compute thread ─ round_done(row) ───────────┴─▶ lines: what is seen; what to do

A reward that does not move is no fault and gives no line: small policies and hard tasks take their time.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm.records.rejection import Rejection

ALONE_AFTER_S = 120.0
LEAST_FREE_BYTES = 1 << 30
_LOOK_BACK_S = 600.0
_LOOK_INTERVAL_S = 30.0
_LEAST_REJECTED = 10
_ROUNDS_WITHOUT_SIGNAL = 10
_NOBODYS_FAULT = frozenset({Rejection.REPLAY, Rejection.NO_SIGNAL, Rejection.STALE, Rejection.EXPIRED})
"""Turned away in every healthy swarm."""
_REMEDIES = {
    Rejection.VERSION: "they speak another version of the protocol: update this software, or theirs",
    Rejection.FOREIGN_SWARM: "their records are of another swarm: use the same swarm.name, or the same manifest",
    Rejection.CLOCK_SKEW: "this clock or theirs is wrong: turn on time synchronization (NTP); `swarm doctor` measures",
    Rejection.UNKNOWN_TASK: "they work on tasks that are not here: use the same tasks.sources",
    Rejection.TASK_MISMATCH: "the same task has another prompt there: use the same versions of the task packages",
    Rejection.TASK_FAILED: "their tasks or verifiers fail here: see the log, and `swarm doctor`",
    Rejection.UNAVAILABLE: "their bodies cannot be fetched: `swarm doctor` tells how others reach this machine",
    Rejection.TOO_SLOW: "verifying their answers takes too long here: free the processor, or use quicker tasks",
    Rejection.BANNED: "their authors are banned here, as they told what was not so: `swarm peers` names them",
    Rejection.REWARD_MISMATCH: "rewards come out otherwise here: use the same versions of the task packages",
}


class Adviser:
    """Remembers as much of a node's last minutes as its advice needs."""

    def __init__(self, clock: Callable[[], float], *, has_network: bool, has_initial_peers: bool) -> None:
        """`clock`: seconds, never backwards."""
        self._clock = clock
        self._has_network = has_network
        self._has_initial_peers = has_initial_peers
        self._met_at = clock()
        """When somebody was last connected; at first, when this began."""
        self._rounds_without_signal = 0
        self._health: Sequence[str] = ()
        self._counts: deque[tuple[float, int, Counter[str]]] = deque([(clock(), 0, Counter())])
        """(when, records admitted, records rejected by reason), the oldest of the last minutes first."""

    def round_done(self, row: Mapping[str, Any]) -> None:
        """`row`: of a round, for metrics.jsonl. Called by the compute thread."""
        is_silent = row.get("rollout/groups", 0) > 0 and row.get("rollout/groups_with_signal", 1) == 0
        self._rounds_without_signal = self._rounds_without_signal + 1 if is_silent else 0
        self._health = tuple(row.get("health/warnings", ()))

    def look(self, num_peers: int, admitted: int, rejected: Counter[str], free_bytes: int) -> list[str]:
        """Lines for a person, the gravest first; none where all is well. `admitted`, `rejected`: records since the start."""
        now = self._clock()
        if num_peers:
            self._met_at = now
        if now - self._counts[-1][0] >= _LOOK_INTERVAL_S:
            self._counts.append((now, admitted, Counter(rejected)))
        while len(self._counts) > 1 and self._counts[1][0] <= now - _LOOK_BACK_S:
            self._counts.popleft()
        found = (
            self._of_disk(free_bytes),
            self._of_loneliness(now),
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
        """Where nothing was admitted in the last minutes, and much was turned away."""
        _, admitted_before, rejected_before = self._counts[0]
        lately = Counter({why: n for why, n in (rejected - rejected_before).items() if why not in _NOBODYS_FAULT})
        if admitted > admitted_before or lately.total() < _LEAST_REJECTED:
            return ""
        why, count = lately.most_common(1)[0]
        remedy = _REMEDIES.get(Rejection(why)) if why in set(Rejection) else None
        text = f"nothing of others is admitted, {lately.total()} turned away, {count} as {why}: "
        return text + (remedy or "docs/protocol.md says what that means")

    def _of_signal(self) -> str:
        if self._rounds_without_signal < _ROUNDS_WITHOUT_SIGNAL:
            return ""
        return (
            f"no signal in {self._rounds_without_signal} rounds: all answers to a task earn the same; "
            "raise rollouts.group_size, or take tasks that are sometimes solved"
        )

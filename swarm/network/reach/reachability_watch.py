"""When to ask whether this node can be dialled, and what to believe between two answers."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from swarm.network.reach.reachability import Ask, look_from_outside
from swarm.network.tcp_address import TcpAddress

PROBE_INTERVAL_S = 1800.0
_FIRST_RETRY_S = 15.0
_RETRY_GROWTH = 2.0
_CONFIRM_AFTER_S = 60.0
_NUM_FAILURES_TO_DEMOTE = 2
"""A node that was reachable loses its part of the index only when a second look agrees."""


class ReachabilityWatch:
    """What this node knows of its reachability. `look` changes it, and says so."""

    def __init__(
        self,
        setting: Literal["auto", "public", "private"],
        *,
        is_local: bool,
        has_known_peers: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_local`: listens on loopback only, so that everyone who matters can reach it."""
        self.is_reachable = setting == "public" or is_local or (setting == "auto" and not has_known_peers)
        self.proven: TcpAddress | None = None
        """Where peers reached this node last."""
        self._is_open = setting == "auto" and not is_local
        self._clock = clock
        self._addresses: frozenset[str] = frozenset()
        self._due_at = -float("inf")
        self._retry_s = _FIRST_RETRY_S
        self._num_failures = 0

    def is_due(self, addresses: Sequence[str]) -> bool:
        """Whether to look now; `addresses` are those of this node at present, and a change of them makes it due."""
        if not self._is_open:
            return False
        own = frozenset(address for address in addresses if "/p2p-circuit" not in address)
        if own != self._addresses:
            self._addresses, self._due_at, self._retry_s = own, self._clock(), _FIRST_RETRY_S
        return self._clock() >= self._due_at

    async def look(self, ask: Ask, peer_ids: Sequence[str], ports: Sequence[int]) -> bool:
        """Ask peers; whether the node is reachable when it was not, the other way round, or at another address."""
        finding = await look_from_outside(ask, peer_ids, ports)
        if finding.is_reachable:
            self._num_failures, self._retry_s = 0, _FIRST_RETRY_S
            self._due_at = self._clock() + PROBE_INTERVAL_S
            has_moved = self.proven is not None and self.proven != finding.address
            self.proven = finding.address
            return self._set(True) or has_moved
        self._due_at = self._clock() + self._retry_s
        self._retry_s = min(self._retry_s * _RETRY_GROWTH, PROBE_INTERVAL_S)
        if finding.is_reachable is None:  # nobody could tell
            return False
        self._num_failures += 1
        if self.is_reachable and self._num_failures < _NUM_FAILURES_TO_DEMOTE:
            self._due_at = self._clock() + _CONFIRM_AFTER_S
            return False
        self.proven = None
        return self._set(False)

    def _set(self, is_reachable: bool) -> bool:
        has_changed, self.is_reachable = is_reachable != self.is_reachable, is_reachable
        return has_changed

"""Notices that the machine slept, or that it is in another network now."""

import ipaddress
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum

import psutil

from swarm.network.tcp_address import TcpAddress

MAX_GAP_S = 30.0
MAX_SILENCE_S = 60.0
"""Longest time between two looks of a running node: two searches that time out."""


class Change(Enum):
    """What has changed since the last look."""

    NONE = "none"
    ADDRESS_ADDED = "the machine has a new address"
    ADDRESS_LOST = "the machine has lost an address"
    GAP = "the machine or this process was suspended, or its clock was set"


def local_addresses() -> frozenset[str]:
    """Return the IP addresses of this machine that others can use: no loopback, no link-local ones."""
    found = set()
    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            try:
                address = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:  # a hardware address
                continue
            if not (address.is_loopback or address.is_link_local):
                found.add(str(address))
    return frozenset(found)


def announced_addresses(
    listening: Iterable[str], hosts: Callable[[], frozenset[str]] = local_addresses
) -> tuple[str, ...]:
    """Return the multiaddresses to announce, without /p2p, with 0.0.0.0 and :: replaced by the machine's addresses.

    Public addresses come first, for peers that store only a few.
    """
    own = sorted(hosts() or ("127.0.0.1",), key=lambda host: (not ipaddress.ip_address(host).is_global, host))
    announced: dict[str, None] = {}
    for address in map(TcpAddress.parse, listening):
        same_kind = [host for host in own if (":" in host) == (address.kind == "ip6")]
        for host in same_kind if address.is_wildcard else [address.host]:
            announced[replace(address, host=host).transport] = None
    return tuple(announced)


class Surroundings:
    """Compares the clocks and interfaces with those at the last look."""

    def __init__(
        self,
        wall_clock: Callable[[], float] = time.time,
        monotonic_clock: Callable[[], float] = time.monotonic,
        addresses: Callable[[], frozenset[str]] = local_addresses,
    ) -> None:
        self._wall_clock = wall_clock
        self._monotonic_clock = monotonic_clock
        self._addresses = addresses
        self._last = (wall_clock(), monotonic_clock(), addresses())

    def look(self) -> Change:
        """Return what has changed; the most serious change wins. Call it at every health check."""
        before, self._last = self._last, (self._wall_clock(), self._monotonic_clock(), self._addresses())
        wall_s, monotonic_s = self._last[0] - before[0], self._last[1] - before[1]
        lost, added = before[2] - self._last[2], self._last[2] - before[2]
        # During suspend the wall clock goes on while Linux's monotonic clock stands still. A stopped process misses
        # both.
        if abs(wall_s - monotonic_s) > MAX_GAP_S or monotonic_s > MAX_SILENCE_S:
            return Change.GAP
        if lost:
            return Change.ADDRESS_LOST
        return Change.ADDRESS_ADDED if added else Change.NONE

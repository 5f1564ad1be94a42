"""Connection slots, shared fairly between the addresses that connections come from."""

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_IPV6_PREFIX = 48


class NoPlace(Exception):
    """All slots are in use, and no address holds more than its fair share."""


class ConnectionSlots:
    """At most `max_places` slots. When all are in use, the address that holds most may lose its oldest one.

    It loses one to an address that would still hold fewer. With `newest_wins` it loses one to any address, itself
    included: that suits what an honest peer needs only for a moment, where a long stay suggests an attack. The
    addresses of one IPv6 network (/48) count as one, since whoever rents a machine has 2^64 of them.
    """

    def __init__(self, max_places: int, *, newest_wins: bool = False) -> None:
        self._max_places = max_places
        self._newest_wins = newest_wins
        self._holders: dict[str, dict[object, Callable[[], None]]] = {}  # oldest first
        self.num_taken = 0

    @contextmanager
    def hold(self, address: str, leave: Callable[[], None]) -> Iterator[None]:
        """Hold a slot for as long as the context lasts, or until `leave` is called, which must end the context soon.

        Raises NoPlace.
        """
        holder = network_of(address)
        if self.num_taken >= self._max_places:
            self._evict_for(holder)
        mark = object()
        self._holders.setdefault(holder, {})[mark] = leave
        self.num_taken += 1
        try:
            yield
        finally:
            self._give_back(holder, mark)

    def _evict_for(self, holder: str) -> None:
        largest = max(self._holders, key=lambda holder: len(self._holders[holder]))
        num_own = len(self._holders.get(holder, ()))
        if not self._newest_wins and len(self._holders[largest]) <= num_own + 1:
            raise NoPlace
        mark, leave = next(iter(self._holders[largest].items()))
        self._give_back(largest, mark)
        leave()

    def _give_back(self, holder: str, mark: object) -> None:
        if mark not in self._holders.get(holder, ()):
            return  # it has lost the slot before
        del self._holders[holder][mark]
        self.num_taken -= 1
        if not self._holders[holder]:
            del self._holders[holder]


def network_of(address: str) -> str:
    """Return what counts as one address: the address, or the /48 of a public IPv6 address. Other text is returned as it
    is.
    """
    try:
        ip = ipaddress.IPv6Address(address.partition("%")[0])  # one with a scope is of the local network
    except ValueError:
        return address
    if ip.ipv4_mapped is not None:  # this is how a socket for both families shows IPv4
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, _IPV6_PREFIX), strict=False)) if ip.is_global else str(ip)

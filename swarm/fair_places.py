"""Places of connections, shared out by the address that they come from."""

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class NoPlace(Exception):
    """All places are taken, and nobody holds more than would be fair."""


class FairPlaces:
    """At most `max_places`. Where all are taken, the address that holds most gives up its oldest one.

    It does so for an address that would still hold fewer; with `newest_wins` for any, itself included: for what an honest
    peer needs only for a moment, so that whoever stays long is most likely the one that means no good.

    The addresses of an IPv6 /48 count as one: whoever has one of them usually has all.
    """

    def __init__(self, max_places: int, *, newest_wins: bool = False) -> None:
        self._max_places = max_places
        self._newest_wins = newest_wins
        self._holders: dict[str, dict[object, Callable[[], None]]] = {}  # oldest first
        self.num_taken = 0

    @contextmanager
    def hold(self, address: str, leave: Callable[[], None]) -> Iterator[None]:
        """A place for as long as the context lasts, or until `leave` is called, which must end it soon.

        Raises NoPlace.
        """
        address = network_of(address)
        if self.num_taken >= self._max_places:
            self._evict_for(address)
        mark = object()
        self._holders.setdefault(address, {})[mark] = leave
        self.num_taken += 1
        try:
            yield
        finally:
            self._give_back(address, mark)

    def _evict_for(self, address: str) -> None:
        largest = max(self._holders, key=lambda holder: len(self._holders[holder]))
        num_own = len(self._holders.get(address, ()))
        if not self._newest_wins and len(self._holders[largest]) <= num_own + 1:
            raise NoPlace
        mark, leave = next(iter(self._holders[largest].items()))
        self._give_back(largest, mark)
        leave()

    def _give_back(self, address: str, mark: object) -> None:
        if mark not in self._holders.get(address, ()):
            return  # evicted before
        del self._holders[address][mark]
        self.num_taken -= 1
        if not self._holders[address]:
            del self._holders[address]


def network_of(address: str) -> str:
    """What counts as one address: an IPv4 address, or an IPv6 /48. Other text stands for itself."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4 or ip.is_loopback:
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.ip_network((int(ip), 48), strict=False))

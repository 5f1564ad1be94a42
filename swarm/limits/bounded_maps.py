"""Maps of bounded size for what a node remembers of other peers, however many identities an attacker makes up.

`BoundedMap` drops the oldest entry, `ExpiringKeys` expired ones, too, `FairMap` the oldest entry of the owner that
holds most, and `BoundedPeers` prefers peers that this node was connected to.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MIN_CLEANED_KEYS = 256


class BoundedMap(OrderedDict[K, V]):
    """A dictionary of at most `max_items` entries. The entry that was set or used longest ago is dropped first."""

    def __init__(self, max_items: int) -> None:
        super().__init__()
        self._max_items = max_items

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._max_items:
            self.popitem(last=False)

    def get_or_add(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made by `make` where there is none. The entry counts as used."""
        value = self[key] if key in self else make()
        self[key] = value
        return value

    def drop_oldest_while(self, is_over: Callable[[V], bool]) -> None:
        """Remove the oldest entries for as long as `is_over` holds for the value of the oldest one."""
        while self and is_over(next(iter(self.values()))):
            self.popitem(last=False)


class ExpiringKeys(Generic[K]):
    """Keys until they expire, at most `max_keys`: the key that was added longest ago goes first.

    Expired keys are dropped when there are twice as many keys as were alive at the last look, so that a key costs the same
    however many there are.
    """

    def __init__(self, clock: Callable[[], float], max_keys: int) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._expires_at: OrderedDict[K, float] = OrderedDict()
        self._clean_above = _MIN_CLEANED_KEYS

    def __len__(self) -> int:
        """Return the number of keys, including expired ones that were not removed yet."""
        return len(self._expires_at)

    def __contains__(self, key: K) -> bool:
        return self._expires_at.get(key, 0.0) > self._clock()

    def num_alive(self) -> int:
        """Keys that have not expired."""
        now = self._clock()
        return sum(expires_at > now for expires_at in self._expires_at.values())

    def add(self, key: K, expires_at: float) -> None:
        self._expires_at.pop(key, None)
        self._expires_at[key] = expires_at
        while len(self._expires_at) > self._max_keys or next(iter(self._expires_at.values())) <= self._clock():
            self._expires_at.popitem(last=False)
            if not self._expires_at:
                return
        if len(self._expires_at) > self._clean_above:
            now = self._clock()
            self._expires_at = OrderedDict((key, until) for key, until in self._expires_at.items() if until > now)
            self._clean_above = max(_MIN_CLEANED_KEYS, 2 * len(self._expires_at))


class FairMap(Generic[K, V]):
    """A map of at most `max_items` entries, each of which belongs to an owner, such as the author of a header.

    When it is full, the owner that holds most loses its oldest entry. Owners for whom `is_known` is true lose one only
    if nobody else is left, or if one of them holds more than `safe_per_known` entries and more than any other owner;
    otherwise many known owners would leave no room for new ones. No owner holds more than `max_per_owner`. An insertion
    costs about the same however many entries there are.
    """

    def __init__(
        self,
        max_items: int,
        max_per_owner: int | None = None,
        is_known: Callable[[str], bool] = frozenset[str]().__contains__,  # nobody
        safe_per_known: int | None = None,
    ) -> None:
        self._max_items = max_items
        self._safe_per_known = max_items if safe_per_known is None else safe_per_known
        self._max_per_owner = max_items if max_per_owner is None else max_per_owner
        self._is_known = is_known
        self._entries: OrderedDict[K, tuple[str, V]] = OrderedDict()
        self._owners: dict[str, OrderedDict[K, None]] = {}
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        """Owners by the number of their entries."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys, the oldest first."""
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def values(self) -> list[V]:
        """Return the values, the oldest first."""
        return [value for _, value in self._entries.values()]

    def add(self, owner: str, key: K, value: V) -> None:
        """Add an entry at the end. It replaces an earlier one of the same key."""
        self.pop(key)
        self._entries[key] = (owner, value)
        keys = self._owners.setdefault(owner, OrderedDict())
        keys[key] = None
        self._moved(owner, len(keys) - 1, len(keys))
        if len(keys) > self._max_per_owner:
            self.pop(next(iter(keys)))
        while len(self._entries) > self._max_items:
            self.pop(next(iter(self._owners[self._largest()])))

    def pop(self, key: K) -> V | None:
        """Remove an entry and return its value; None where there is none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        owner, value = entry
        keys = self._owners[owner]
        del keys[key]
        self._moved(owner, len(keys) + 1, len(keys))
        if not keys:
            del self._owners[owner]
        return value

    def _largest(self) -> str:
        """Return the owner that loses an entry next."""
        owners = ((count, owner) for count in sorted(self._by_count, reverse=True) for owner in self._by_count[count])
        largest_count, largest_known = 0, ""
        for count, owner in owners:
            if self._is_known(owner):
                if not largest_count:
                    largest_count, largest_known = count, owner
            elif largest_count > max(count, self._safe_per_known):
                return largest_known
            else:
                return owner
        return largest_known

    def _moved(self, owner: str, before: int, now: int) -> None:
        """Record that `owner` held `before` entries and holds `now`."""
        if before:
            del self._by_count[before][owner]
            if not self._by_count[before]:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, OrderedDict())[owner] = None


Value = TypeVar("Value")


class BoundedPeers(Generic[Value]):
    """A map with one value for each of at most `max_peers` peers.

    When it is full, the stranger that was updated longest ago is dropped. A peer counts as met once `met` was called
    for it. At most half of the peers count as met, so there is always room for new ones. New identities cost nothing,
    so beyond that half, the network with most met peers loses the one that was met first.
    """

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._values: OrderedDict[str, Value] = OrderedDict()
        """The peer updated last is last."""
        self._met: FairMap[str, None] = FairMap(max_peers // 2)
        """The met peers among the keys above, by the network at which each was met."""

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, peer_id: str) -> Value | None:
        return self._values.get(peer_id)

    def put(self, peer_id: str, value: Value) -> None:
        """Add or replace a value. When it is full, a stranger makes room."""
        self._values[peer_id] = value
        self._values.move_to_end(peer_id)
        while len(self._values) > self._max_peers:
            self.forget(next(one for one in self._values if one not in self._met))

    def met(self, peer_id: str, network: str = "") -> None:
        """Note that this node is connected to a peer of the map, which it sees at `network`. Ignores other peers."""
        if peer_id in self._values:
            self._met.add(network, peer_id, None)

    def is_met(self, peer_id: str) -> bool:
        return peer_id in self._met

    def forget(self, peer_id: str) -> None:
        self._values.pop(peer_id, None)
        self._met.pop(peer_id)

"""What was seen of strangers, for as long as it could come again."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_MIN_CLEANED_KEYS = 256


class ExpiringKeys(Generic[K]):
    """Keys until they expire, at most `max_keys`: the ones that came first go first.

    Expired ones are dropped when there are twice as many keys as were alive at the last look, so that a key costs the same
    however many there are.
    """

    def __init__(self, clock: Callable[[], float], max_keys: int) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._expires_at: OrderedDict[K, float] = OrderedDict()
        self._clean_above = _MIN_CLEANED_KEYS

    def __len__(self) -> int:
        """Expired ones that are still there included."""
        return len(self._expires_at)

    def __contains__(self, key: K) -> bool:
        return self._expires_at.get(key, 0.0) > self._clock()

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

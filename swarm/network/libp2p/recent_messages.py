"""What a node remembers of gossiped messages: which it has seen, and those of the last seconds in full.

py-libp2p's own tables have no bounds, keep a thread each, and know messages by author and number, which are anybody's
claim; here a message is known by the hash that is its id on the wire.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MAX_SEEN = 65_536
SEEN_S = 120.0
MAX_RECENT = 4096
HISTORY_HEARTBEATS = 5
"""So long a message can be asked for."""
WINDOW_HEARTBEATS = 3
"""So long its id is told."""
MAX_WINDOW_IDS = 200
"""Of a topic. Who joins is sent all of them at once, and in two topics must not take that for a flood."""


def message_id(topic: str, data: bytes) -> bytes:
    """16 bytes."""
    return hashlib.sha256(topic.encode() + b"\0" + data).digest()[:16]


class SeenMessages:
    """Ids of the last SEEN_S, at most MAX_SEEN."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_at: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen_at)

    def has(self, message_id: bytes) -> bool:
        return message_id in self._seen_at

    def add(self, message_id: bytes) -> None:
        now = self._clock()
        self._seen_at.setdefault(message_id, now)
        while self._seen_at and (len(self._seen_at) > MAX_SEEN or next(iter(self._seen_at.values())) < now - SEEN_S):
            self._seen_at.popitem(last=False)


class RecentMessages:
    """Messages of the last HISTORY_HEARTBEATS; stands in for py-libp2p's MessageCache."""

    def __init__(self) -> None:
        self._messages: OrderedDict[bytes, Any] = OrderedDict()
        self._history: list[list[tuple[str, bytes]]] = [[]]  # (topic, id) by heartbeat, newest first

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, topic: str, message_id: bytes, message: Any) -> None:
        if message_id in self._messages or len(self._messages) >= MAX_RECENT:
            return
        self._messages[message_id] = message
        self._history[0].append((topic, message_id))

    def get(self, mid: bytes) -> Any:
        """None for a message that is not there (any more)."""
        return self._messages.get(mid)

    def window(self, topic: str) -> list[bytes]:
        """Ids of the last WINDOW_HEARTBEATS in a topic, newest heartbeat first, at most MAX_WINDOW_IDS."""
        recent = (entry for entries in self._history[:WINDOW_HEARTBEATS] for entry in entries)
        return [name for place, name in recent if place == topic][:MAX_WINDOW_IDS]

    def shift(self) -> None:
        """A heartbeat has passed."""
        self._history.insert(0, [])
        for entries in self._history[HISTORY_HEARTBEATS:]:
            for _, name in entries:
                self._messages.pop(name, None)
        del self._history[HISTORY_HEARTBEATS:]

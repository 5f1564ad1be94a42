"""Takes the msgpack of a body apart item by item.

A third of a kilobyte may unpack to 8 MiB of empty arrays, and those to 550 MB of Python objects in 3 s, before anybody has
looked at one. So arrays are opened one at a time, where the format has one and with a bound on their length; everything
else must be a number, a text or bytes.
"""

from collections.abc import Callable
from typing import Any

import msgpack

from swarm.records.rejection import InvalidRecord, Rejection

MAX_ROLLOUTS_PER_BODY = 1024
MAX_TOKENS_PER_BODY = 1 << 19
"""Of all rollouts together; as Python numbers they take 68 bytes each."""


class BodyReader:
    """One body, first byte to last. Every method raises InvalidRecord for what does not fit."""

    def __init__(self, packed: bytes) -> None:
        self._num_bytes = len(packed)
        self._unpacker = msgpack.Unpacker(
            raw=False, max_buffer_size=max(1, len(packed)), max_array_len=0, max_map_len=0, max_ext_len=0
        )
        self._unpacker.feed(packed)
        self._num_rollouts = 0
        self._num_tokens = 0

    def array(self, least: int, most: int) -> int:
        """Open an array of `least` to `most` items, which are read next; its length."""
        length = self._next(self._unpacker.read_array_header)
        if not least <= length <= most:
            raise InvalidRecord(Rejection.MALFORMED, f"expected an array of {least} to {most}")
        return length

    def item(self) -> Any:
        """A number, text, bytes, boolean or nil; arrays and maps come empty or not at all."""
        return self._next(self._unpacker.unpack)

    def rollouts(self) -> int:
        """Open the array of a group's rollouts; its length."""
        length = self.array(2, MAX_ROLLOUTS_PER_BODY)
        self._num_rollouts += length
        if self._num_rollouts > MAX_ROLLOUTS_PER_BODY:
            raise InvalidRecord(Rejection.OVERSIZE, f"more than {MAX_ROLLOUTS_PER_BODY} rollouts")
        return length

    def count_tokens(self, num_tokens: int) -> None:
        """Of one more rollout, before they become numbers."""
        self._num_tokens += num_tokens
        if self._num_tokens > MAX_TOKENS_PER_BODY:
            raise InvalidRecord(Rejection.OVERSIZE, f"more than {MAX_TOKENS_PER_BODY} tokens")

    def finish(self) -> None:
        if self._unpacker.tell() != self._num_bytes:
            raise InvalidRecord(Rejection.MALFORMED, "bytes after the last item")

    def _next(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (ValueError, msgpack.UnpackException) as error:
            raise InvalidRecord(Rejection.MALFORMED, type(error).__name__) from None

# The part of msgpack that swarm uses: the library has no annotations of its own.
from collections.abc import Callable
from typing import Any, NamedTuple

class UnpackException(Exception): ...

class ExtType(NamedTuple):
    code: int
    data: bytes

def packb(
    o: object, *, use_bin_type: bool = True, datetime: bool = False, default: Callable[[Any], Any] | None = None
) -> bytes: ...
def unpackb(
    packed: bytes | bytearray | memoryview,
    *,
    raw: bool = False,
    strict_map_key: bool = True,
    use_list: bool = True,
    object_pairs_hook: Callable[[list[tuple[Any, Any]]], Any] | None = None,
    ext_hook: Callable[[int, bytes], Any] = ...,
    max_array_len: int = -1,
    max_map_len: int = -1,
    max_bin_len: int = -1,
    max_str_len: int = -1,
    max_ext_len: int = -1,
) -> Any: ...

class Unpacker:
    def __init__(
        self,
        *,
        raw: bool = False,
        max_buffer_size: int = ...,
        max_array_len: int = -1,
        max_map_len: int = -1,
        max_ext_len: int = -1,
    ) -> None: ...
    def feed(self, next_bytes: bytes | bytearray | memoryview) -> None: ...
    def unpack(self) -> Any: ...
    def read_array_header(self) -> int: ...
    def read_map_header(self) -> int: ...
    def tell(self) -> int: ...
    def skip(self) -> None: ...

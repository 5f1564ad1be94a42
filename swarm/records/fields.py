"""Fields of what peers send: msgpack arrays whose every element is checked for type and range.

All of it raises InvalidRecord and nothing else, whatever the bytes are.
"""

import math
from typing import Any

import msgpack

from swarm.records.rejection import InvalidRecord, Rejection

PROTOCOL_VERSION = 1
MAX_ARRAY_ITEMS = 16
"""More than any array of a record has, or one of a near version."""


def pack(fields: list[Any]) -> bytes:
    packed = msgpack.packb(fields)
    assert packed is not None, "only a streaming packer returns None"
    return packed


def unpack(data: bytes) -> Any:
    """For data of at most a kilobyte or two: what it unpacks to may be a hundred times larger."""
    try:
        return msgpack.unpackb(data, raw=False, max_array_len=MAX_ARRAY_ITEMS, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidRecord(Rejection.MALFORMED, type(error).__name__) from None


def check_version(version: Any) -> None:
    if isinstance(version, bool) or not isinstance(version, int):
        raise InvalidRecord(Rejection.MALFORMED, "expected a version")
    if version != PROTOCOL_VERSION:
        raise InvalidRecord(Rejection.VERSION, f"got {version}, this node speaks {PROTOCOL_VERSION}")


def check_versioned(value: Any, length: int) -> list[Any]:
    """The items after the version, which is looked at before their number: that may change with it."""
    fields = check_list(value, 1, MAX_ARRAY_ITEMS)
    check_version(fields[0])
    return check_array(fields, length)[1:]


def check_array(value: Any, length: int) -> list[Any]:
    return check_list(value, length, length)


def check_list(value: Any, least: int, most: int) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise InvalidRecord(Rejection.MALFORMED, f"expected an array of {least} to {most}")
    return value


def check_bytes(value: Any, length: int | None = None) -> bytes:
    if not isinstance(value, bytes) or (length is not None and len(value) != length):
        raise InvalidRecord(Rejection.MALFORMED, f"expected {'some' if length is None else length} bytes")
    return value


def check_text(value: Any, max_chars: int) -> str:
    if not isinstance(value, str) or len(value) > max_chars:
        raise InvalidRecord(Rejection.MALFORMED, f"expected text of at most {max_chars} characters")
    return value


def check_int(value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRecord(Rejection.MALFORMED, f"expected an integer from {least} to {most}")
    return value


def check_float(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRecord(Rejection.MALFORMED, "expected a number")
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidRecord(Rejection.MALFORMED, f"expected a number from {least} to {most}")
    return float(value)


def check_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRecord(Rejection.MALFORMED, "expected a boolean")
    return value

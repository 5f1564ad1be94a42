"""Signatures over payload bytes exactly as sent, separated by purpose and swarm, and checks of the fields inside.

Fields are msgpack arrays, and every element is checked for type and range. The checks raise only InvalidRecord,
whatever the bytes are.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from typing import Any

import msgpack

from swarm.records.identity import Identity, verify
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import SignedRecord, is_list

PROTOCOL_VERSION = 1
MAX_ARRAY_ITEMS = 16
"""More items than any array of a record has in this version or a near one."""


def pack(fields: list[Any]) -> bytes:
    return msgpack.packb(fields)


def unpack(data: bytes, *, max_bytes: int | None = None) -> Any:
    """Decode data of at most a kilobyte or two, which may unpack to a hundred times that.

    Raises InvalidRecord with MALFORMED, and OVERSIZE for more than `max_bytes`.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise InvalidRecord(Rejection.OVERSIZE, f"{len(data)} bytes > {max_bytes}")
    try:
        return msgpack.unpackb(data, raw=False, max_array_len=MAX_ARRAY_ITEMS, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidRecord(Rejection.MALFORMED, type(error).__name__) from None


def check_version(version: Any, expected: int = PROTOCOL_VERSION) -> None:
    if isinstance(version, bool) or not isinstance(version, int):
        raise InvalidRecord(Rejection.MALFORMED, "expected a version")
    if version != expected:
        raise InvalidRecord(Rejection.VERSION, f"got {version}, this node speaks {PROTOCOL_VERSION}")


def check_versioned(value: Any, length: int, version: int = PROTOCOL_VERSION) -> list[Any]:
    """Return the items after the version. The version is checked before their number, which may change with it."""
    fields = check_list(value, 1, MAX_ARRAY_ITEMS)
    check_version(fields[0], version)
    return check_array(fields, length)[1:]


def check_array(value: Any, length: int) -> list[Any]:
    return check_list(value, length, length)


def check_list(value: Any, least: int, most: int) -> list[Any]:
    if not is_list(value) or not least <= len(value) <= most:
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


Verify = Callable[[str, bytes, bytes], bool]
"""(peer id, signed bytes, signature) -> whether the owner of the peer id signed them."""

verify_once = lru_cache(maxsize=256)(verify)
"""A header comes by gossip and a moment later again, to be stored in the index; each check takes 0.1 ms."""
_verify: ContextVar[Verify] = ContextVar("verify", default=verify_once)


class Purpose(Enum):
    """What a signed payload is. A signature for one purpose is invalid for every other."""

    HEADER = b"swarm/record/1\x00"
    PRESENCE = b"swarm/presence/1\x00"
    ADAPTER_OFFER = b"swarm/adapter/1\x00"
    DONOR_OFFER = b"swarm/donor-offer/1\x00"
    FINAL_OFFER = b"swarm/final-offer/1\x00"
    COMMAND = b"swarm/order/2\x00"


def sign_record(identity: Identity, swarm_id: str, payload: bytes, purpose: Purpose = Purpose.HEADER) -> SignedRecord:
    return SignedRecord(identity.peer_id, payload, identity.sign(_signed_bytes(purpose, swarm_id, payload)))


def signature_is_valid(record: SignedRecord, swarm_id: str, purpose: Purpose = Purpose.HEADER) -> bool:
    """Return whether `record.author` signed this payload for this swarm. Never raises."""
    return _verify.get()(record.author, _signed_bytes(purpose, swarm_id, record.payload), record.signature)


@contextmanager
def verified_by(other: Verify) -> Generator[None, None, None]:
    """Check signatures by another function in this context and the tasks made in it: for simulations and fuzzing."""
    token = _verify.set(other)
    try:
        yield
    finally:
        _verify.reset(token)


def _signed_bytes(purpose: Purpose, swarm_id: str, payload: bytes) -> bytes:
    return purpose.value + bytes.fromhex(swarm_id) + payload

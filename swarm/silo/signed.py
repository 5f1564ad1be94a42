"""msgpack of a silo's owner or of somebody who wants to be a member: [payload, signature], bounded and checked."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgpack

from swarm.errors import SiloError
from swarm.records.fields import check_array, check_bytes, check_int, check_list, pack
from swarm.records.identity import SIGNATURE_BYTES, Identity, verify
from swarm.records.rejection import InvalidRecord

FORMAT = 1
MAX_TIME_S = 1e11
"""Latest time that anything of a silo names, in seconds since the epoch."""
P = ParamSpec("P")
T = TypeVar("T")


def sign(identity: Identity, domain: bytes, fields: list[Any]) -> bytes:
    payload = pack([FORMAT, *fields])
    return pack([payload, identity.sign(domain + payload)])


def open_envelope(data: bytes, max_bytes: int) -> tuple[bytes, bytes]:
    """(payload, signature) of what `sign` made. Raises SiloError or InvalidRecord; says nothing about the signature."""
    if len(data) > max_bytes:
        raise SiloError(f"it must have <= {max_bytes} bytes, got {len(data)}", "malformed")
    payload, signature = check_array(unpacked(data, 2), 2)
    return check_bytes(payload), check_bytes(signature, SIGNATURE_BYTES)


def fields_of(payload: bytes, count: int, max_items: int) -> list[Any]:
    """The fields after the format number. Arrays in it have at most `max_items`."""
    fields = check_list(unpacked(payload, max_items), 1, max_items)
    check_int(fields[0], FORMAT, FORMAT)
    return check_array(fields, count + 1)[1:]


def unpacked(data: bytes, max_items: int) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, max_array_len=max(max_items, 16), max_map_len=0, max_ext_len=0)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise SiloError(f"it must be msgpack, got {type(error).__name__}", "malformed") from None


def check_signed(peer_id: str, domain: bytes, payload: bytes, signature: bytes) -> None:
    if not verify(peer_id, domain + payload, signature):
        raise SiloError(f"it must carry the signature of {ascii(peer_id)[:80]}, got another", "forged")


def one_error(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decoder that raises SiloError for `what` and nothing else, whatever it was given."""

    def decorate(decode: Callable[P, T]) -> Callable[P, T]:
        def decoded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return decode(*args, **kwargs)
            except InvalidRecord as error:
                raise SiloError(f"{what} must be valid, got {error}; ask for another copy", "malformed") from None
            except SiloError as error:
                raise SiloError(f"{what}: {error}", error.fault) from None

        return decoded

    return decorate

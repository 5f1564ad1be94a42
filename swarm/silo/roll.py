"""The roll: the list of members, signed by the owner of the silo, with the group's key wrapped for each member.

    payload = msgpack [1, swarm id (16), version, epoch, issued at, key for the owner (80), [member, …]]
    member  = [peer id, X25519 key (32), until, key for the member (80)]
    roll    = msgpack [payload, signature]       the owner's, over "swarm/silo-roll/1\0" + payload

Versions only grow, and a node accepts no older one. A new epoch means a new key, and nobody is removed from the roll
without one. So within an epoch members are only added, and stay members until `until` at most. The functions at the top
encode and check such signed msgpack, of the owner or of somebody who wants to be a member.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import msgpack

from swarm.errors import SiloError
from swarm.records.identity import SIGNATURE_BYTES, Identity, is_peer_id, verify
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import check_array, check_bytes, check_float, check_int, check_list, check_text, pack
from swarm.silo.sealing import BOX_OVERHEAD_BYTES, KEY_BYTES, MAX_EPOCH

FORMAT = 1
MAX_TIME_S = 1e11
"""Latest time in any record of a silo, in seconds since the epoch."""
P = ParamSpec("P")
T = TypeVar("T")


def sign(identity: Identity, domain: bytes, fields: list[Any]) -> bytes:
    payload = pack([FORMAT, *fields])
    return pack([payload, identity.sign(domain + payload)])


def open_envelope(data: bytes, max_bytes: int) -> tuple[bytes, bytes]:
    """Return (payload, signature) of what `sign` made. Raises SiloError or InvalidRecord. Does not check the signature."""
    if len(data) > max_bytes:
        raise SiloError(f"it must have <= {max_bytes} bytes, got {len(data)}", "malformed")
    payload, signature = check_array(unpacked(data, 2), 2)
    return check_bytes(payload), check_bytes(signature, SIGNATURE_BYTES)


def fields_of(payload: bytes, count: int, max_items: int) -> list[Any]:
    """Return the fields after the format number. Arrays have at most `max_items`."""
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
    """Make a decoder raise SiloError for `what` and nothing else, whatever it is given."""

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


MAX_MEMBERS = 1024
MAX_ROLL_BYTES = 256 << 10
WRAPPED_BYTES = BOX_OVERHEAD_BYTES + KEY_BYTES
_DOMAIN = b"swarm/silo-roll/1\x00"
MAX_VERSION = 2**53


@dataclass(frozen=True, slots=True)
class Member:
    """One member on a roll."""

    peer_id: str
    box_key: bytes = field(repr=False)
    """32 bytes. What is boxed for this key can only be opened by the member."""
    until: float
    """End of the membership, seconds since the epoch."""
    wrapped: bytes = field(repr=False)
    """The epoch's key, boxed for `box_key`."""


@dataclass(frozen=True, slots=True)
class Roll:
    """A roll whose signature was checked, or that was just made."""

    swarm_id: str
    version: int
    epoch: int
    issued_at: float
    owner_wrapped: bytes = field(repr=False)
    """The epoch's key, boxed for the owner."""
    members: tuple[Member, ...]

    def member(self, peer_id: str) -> Member | None:
        return next((member for member in self.members if member.peer_id == peer_id), None)


def wrap_context(swarm_id: str, peer_id: str) -> bytes:
    """Return what a wrapped key is bound to, besides its epoch."""
    return f"wrapped/{swarm_id}/{peer_id}".encode()


def encode_roll(roll: Roll, owner: Identity) -> bytes:
    members = [[one.peer_id, one.box_key, float(one.until), one.wrapped] for one in roll.members]
    fields = [
        bytes.fromhex(roll.swarm_id), roll.version, roll.epoch, float(roll.issued_at), roll.owner_wrapped, members
    ]  # fmt: skip
    return sign(owner, _DOMAIN, fields)


@one_error("a silo's roll")
def decode_roll(data: bytes, owner: str, swarm_id: str) -> Roll:
    """Decode a roll from anybody's bytes. Raises SiloError unless the owner signed it for this swarm."""
    payload, signature = open_envelope(data, MAX_ROLL_BYTES)
    check_signed(owner, _DOMAIN, payload, signature=signature)
    named_swarm, version, epoch, issued_at, owner_wrapped, lines = fields_of(payload, 6, MAX_MEMBERS)
    if check_bytes(named_swarm, 16).hex() != swarm_id:
        raise InvalidRecord(Rejection.FOREIGN_SWARM)
    members = tuple(_member(line) for line in check_list(lines, 0, MAX_MEMBERS))
    if len({member.peer_id for member in members}) < len(members):
        raise InvalidRecord(Rejection.MALFORMED, "a member twice")
    return Roll(
        swarm_id=swarm_id,
        version=check_int(version, 1, MAX_VERSION),
        epoch=check_int(epoch, 1, MAX_EPOCH),
        issued_at=check_float(issued_at, 0.0, MAX_TIME_S),
        owner_wrapped=check_bytes(owner_wrapped, WRAPPED_BYTES),
        members=members,
    )


def _member(line: object) -> Member:
    peer_id, box_key, until, wrapped = check_array(line, 4)
    if not is_peer_id(check_text(peer_id, 64)):
        raise InvalidRecord(Rejection.MALFORMED, "expected a peer id")
    return Member(
        peer_id=peer_id,
        box_key=check_bytes(box_key, KEY_BYTES),
        until=check_float(until, 0.0, MAX_TIME_S),
        wrapped=check_bytes(wrapped, WRAPPED_BYTES),
    )

"""Presence: a node says, signed, that it is there and how it can be reached. At most 1 KiB, like a header.

payload = msgpack [version, swarm id, [address, …], [gossip address, …], hosts index, level, created at, expires at]
"""

from dataclasses import dataclass
from typing import Any

from swarm.records.codec import decode_record, encode_record
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import (
    PROTOCOL_VERSION,
    Purpose,
    check_bool,
    check_bytes,
    check_float,
    check_int,
    check_list,
    check_text,
    check_versioned,
    pack,
    sign_record,
    signature_is_valid,
    unpack,
)

MAX_ADDRESSES = 4
MAX_ADDRESS_CHARS = 96
MAX_LIFETIME_S = 600.0
MAX_SHARD_LEVEL = 16


@dataclass(frozen=True, slots=True)
class Presence:
    """One node's statement about itself."""

    peer_id: str
    addresses: tuple[str, ...]
    """Multiaddresses without /p2p, at most MAX_ADDRESSES; empty for a node that only calls others."""
    gossip_addresses: tuple[str, ...]
    hosts_index: bool
    """Whether it holds a part of the index and looks into it for others."""
    level: int
    """Level of the shard that it shares its experience in."""
    created_at: float
    """Swarm time, seconds since the epoch."""
    expires_at: float


def sign_presence(identity: Identity, swarm_id: str, presence: Presence) -> bytes:
    """The record as it is stored. Addresses beyond the bounds are left out."""
    payload = pack(
        [
            PROTOCOL_VERSION,
            bytes.fromhex(swarm_id),
            _within_bounds(presence.addresses),
            _within_bounds(presence.gossip_addresses),
            presence.hosts_index,
            presence.level,
            presence.created_at,
            presence.expires_at,
        ]
    )
    return encode_record(sign_record(identity, swarm_id, payload, Purpose.PRESENCE))


def verify_presence(data: bytes, swarm_id: str) -> Presence:
    """Decode a record and check its signature. Raises InvalidRecord for anything else than a peer's own statement."""
    record = decode_record(data)
    fields = check_versioned(unpack(record.payload), 8)
    named_swarm, addresses, gossip_addresses, hosts_index, level, created_at, expires_at = fields
    if check_bytes(named_swarm, 16).hex() != swarm_id:
        raise InvalidRecord(Rejection.FOREIGN_SWARM)
    presence = Presence(
        peer_id=record.author,
        addresses=_addresses(addresses),
        gossip_addresses=_addresses(gossip_addresses),
        hosts_index=check_bool(hosts_index),
        level=check_int(level, 0, MAX_SHARD_LEVEL),
        created_at=check_float(created_at, 0.0, 1e11),
        expires_at=check_float(expires_at, 0.0, 1e11),
    )
    if not signature_is_valid(record, swarm_id, Purpose.PRESENCE):
        raise InvalidRecord(Rejection.BAD_SIGNATURE)
    if presence.expires_at - presence.created_at > MAX_LIFETIME_S:
        raise InvalidRecord(Rejection.CLOCK_SKEW, f"lives longer than {MAX_LIFETIME_S:.0f} s")
    return presence


def _within_bounds(addresses: tuple[str, ...]) -> list[str]:
    return [address for address in addresses if len(address) <= MAX_ADDRESS_CHARS][:MAX_ADDRESSES]


def _addresses(value: Any) -> tuple[str, ...]:
    return tuple(check_text(item, MAX_ADDRESS_CHARS) for item in check_list(value, 0, MAX_ADDRESSES))

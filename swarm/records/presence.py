"""Presence: a signed statement of a node that it is there and how it can be reached. At most 1 KiB, like a header.

payload = msgpack [version, swarm id, [address, …], [gossip address, …], hosts index, level, created at, expires at]
"""

from dataclasses import dataclass
from typing import Any

from swarm.records.codec import check_lifetime, check_signature, open_fields, sign_fields
from swarm.records.identity import Identity
from swarm.records.signing import Purpose, check_bool, check_float, check_int, check_list, check_text

MAX_ADDRESSES = 4
MAX_ADDRESS_CHARS = 96
MAX_LIFETIME_S = 600.0
MAX_SHARD_LEVEL = 16


@dataclass(frozen=True, slots=True)
class Presence:
    """One node's statement about itself."""

    peer_id: str
    addresses: tuple[str, ...]
    """Multiaddresses without /p2p, at most MAX_ADDRESSES; empty for a node that others cannot dial."""
    gossip_addresses: tuple[str, ...]
    hosts_index: bool
    """Whether it holds a part of the index and searches it for others."""
    level: int
    """Level of the shard in which it shares its experience."""
    created_at: float
    """Swarm time, seconds since the epoch."""
    expires_at: float


def sign_presence(identity: Identity, swarm_id: str, presence: Presence) -> bytes:
    """Return the record as it is stored. Addresses above the limits are left out."""
    fields = [
        _within_bounds(presence.addresses),
        _within_bounds(presence.gossip_addresses),
        presence.hosts_index,
        presence.level,
        presence.created_at,
        presence.expires_at,
    ]
    return sign_fields(identity, swarm_id, fields, purpose=Purpose.PRESENCE)


def verify_presence(data: bytes, swarm_id: str) -> Presence:
    """Decode a record and check its signature. Raises InvalidRecord unless the peer itself made the statement."""
    record, fields = open_fields(data, swarm_id, num_fields=6)
    addresses, gossip_addresses, hosts_index, level, created_at, expires_at = fields
    presence = Presence(
        peer_id=record.author,
        addresses=_addresses(addresses),
        gossip_addresses=_addresses(gossip_addresses),
        hosts_index=check_bool(hosts_index),
        level=check_int(level, 0, MAX_SHARD_LEVEL),
        created_at=check_float(created_at, 0.0, 1e11),
        expires_at=check_float(expires_at, 0.0, 1e11),
    )
    check_signature(record, swarm_id, Purpose.PRESENCE)
    check_lifetime(presence.created_at, presence.expires_at, MAX_LIFETIME_S)
    return presence


def _within_bounds(addresses: tuple[str, ...]) -> list[str]:
    return [address for address in addresses if len(address) <= MAX_ADDRESS_CHARS][:MAX_ADDRESSES]


def _addresses(value: Any) -> tuple[str, ...]:
    return tuple(check_text(item, MAX_ADDRESS_CHARS) for item in check_list(value, 0, MAX_ADDRESSES))

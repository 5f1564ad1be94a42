"""An offer to merge: a signed statement which adapter a node offers, in which outer round. At most 1 KiB.

    payload = msgpack [version, swarm id, lineage, outer round, policy version, precision, bytes, SHA-256, level,
                       created at, expires at]

The same record is the entry in the index that says *ready*, the proposal to one peer, and the answer to it. An offer
counts only in the list for which it was signed, so nobody can list a peer elsewhere than where it lists itself.
"""

from dataclasses import dataclass
from typing import Literal, Self

from swarm.records.codec import check_lifetime, check_signature, open_fields, sign_fields
from swarm.records.identity import Identity
from swarm.records.presence import MAX_SHARD_LEVEL
from swarm.records.signing import (
    Purpose,
    check_bytes,
    check_float,
    check_int,
    check_text,
)
from swarm.types import MAX_ADAPTER_BYTES, MAX_PRECISION_CHARS, Partner, Snapshot

AdapterList = Literal["merge", "donors", "final"]
"""The lists of signed offers: of nodes ready to merge, of donors that give their adapter to newcomers, and of nodes
that have ended their training and wait for the final merge."""

_PURPOSES: dict[AdapterList, Purpose] = {
    "merge": Purpose.ADAPTER_OFFER,
    "donors": Purpose.DONOR_OFFER,
    "final": Purpose.FINAL_OFFER,
}
MAX_LIFETIME_S = 3600.0


@dataclass(frozen=True, slots=True)
class AdapterOffer:
    """One node's statement about the adapter that it offers."""

    peer_id: str
    lineage: str
    """32 hex digits: `Lineage.policy`."""
    outer_round: int
    """Merges that the adapter has been through, solo steps included."""
    policy_version: int
    precision: str
    """How the numbers are encoded, such as `bf16`. Together with the lineage it determines `num_bytes`."""
    num_bytes: int
    sha256: bytes
    """Address of the adapter's bytes, 32 bytes."""
    level: int
    """Level of the shard in which the offer is listed."""
    created_at: float
    """Swarm time, seconds since the epoch."""
    expires_at: float

    @classmethod
    def of(
        cls, snapshot: Snapshot, *, peer_id: str, sha256: bytes, level: int, created_at: float, expires_at: float
    ) -> Self:
        """The offer of a snapshot whose payload has this hash."""
        return cls(
            peer_id=peer_id,
            lineage=snapshot.lineage,
            outer_round=snapshot.outer_round,
            policy_version=snapshot.policy_version,
            precision=snapshot.precision,
            num_bytes=len(snapshot.payload),
            sha256=sha256,
            level=level,
            created_at=created_at,
            expires_at=expires_at,
        )

    def partner(self, payload: bytes) -> Partner:
        """The node that made this offer, as a partner whose adapter has arrived."""
        snapshot = Snapshot(self.lineage, self.precision, self.outer_round, self.policy_version, payload)
        return Partner(self.peer_id, snapshot, self.created_at)


def sign_offer(identity: Identity, swarm_id: str, offer: AdapterOffer, kind: AdapterList = "merge") -> bytes:
    """Return the record as it is stored and sent."""
    fields = [
        bytes.fromhex(offer.lineage),
        offer.outer_round,
        offer.policy_version,
        offer.precision,
        offer.num_bytes,
        offer.sha256,
        offer.level,
        offer.created_at,
        offer.expires_at,
    ]
    return sign_fields(identity, swarm_id, fields, purpose=_PURPOSES[kind])


def verify_offer(data: bytes, swarm_id: str, kind: AdapterList = "merge") -> AdapterOffer:
    """Decode a record and check that it was signed for this list. Does not check its times. Raises InvalidRecord."""
    record, fields = open_fields(data, swarm_id, num_fields=9)
    lineage, outer_round, version, precision, num_bytes, sha256, level, created_at, expires_at = fields
    offer = AdapterOffer(
        peer_id=record.author,
        lineage=check_bytes(lineage, 16).hex(),
        outer_round=check_int(outer_round, 0, 2**48),
        policy_version=check_int(version, 0, 2**48),
        precision=check_text(precision, MAX_PRECISION_CHARS),
        num_bytes=check_int(num_bytes, 1, MAX_ADAPTER_BYTES),
        sha256=check_bytes(sha256, 32),
        level=check_int(level, 0, MAX_SHARD_LEVEL),
        created_at=check_float(created_at, 0.0, 1e11),
        expires_at=check_float(expires_at, 0.0, 1e11),
    )
    check_signature(record, swarm_id, _PURPOSES[kind])
    check_lifetime(offer.created_at, offer.expires_at, MAX_LIFETIME_S)
    return offer

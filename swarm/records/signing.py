"""Signatures over payload bytes exactly as sent, separated by domain and swarm."""

from swarm.records.identity import Identity, verify
from swarm.types import SignedRecord

_DOMAIN = b"swarm/record/1\x00"


def sign_record(identity: Identity, swarm_id: str, payload: bytes) -> SignedRecord:
    return SignedRecord(identity.peer_id, payload, identity.sign(_signed_bytes(swarm_id, payload)))


def signature_is_valid(record: SignedRecord, swarm_id: str) -> bool:
    """Whether `record.author` signed this payload for this swarm. Never raises."""
    return verify(record.author, _signed_bytes(swarm_id, record.payload), record.signature)


def _signed_bytes(swarm_id: str, payload: bytes) -> bytes:
    return _DOMAIN + bytes.fromhex(swarm_id) + payload

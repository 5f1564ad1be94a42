"""Signatures over payload bytes exactly as sent, separated by purpose and swarm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

from swarm.records.identity import Identity, verify
from swarm.types import SignedRecord

Verify = Callable[[str, bytes, bytes], bool]
"""(peer id, signed bytes, signature) -> whether it is the owner's."""

_verify: ContextVar[Verify] = ContextVar("verify", default=verify)


class Purpose(Enum):
    """What a signed payload is; one signed for one purpose is worth nothing for another."""

    HEADER = b"swarm/record/1\x00"
    PRESENCE = b"swarm/presence/1\x00"
    ADAPTER_OFFER = b"swarm/adapter/1\x00"
    DONOR_OFFER = b"swarm/donor-offer/1\x00"
    FINAL_OFFER = b"swarm/final-offer/1\x00"
    ORDER = b"swarm/order/1\x00"


def sign_record(identity: Identity, swarm_id: str, payload: bytes, purpose: Purpose = Purpose.HEADER) -> SignedRecord:
    return SignedRecord(identity.peer_id, payload, identity.sign(_signed_bytes(purpose, swarm_id, payload)))


def signature_is_valid(record: SignedRecord, swarm_id: str, purpose: Purpose = Purpose.HEADER) -> bool:
    """Whether `record.author` signed this payload for this swarm. Never raises."""
    return _verify.get()(record.author, _signed_bytes(purpose, swarm_id, record.payload), record.signature)


@contextmanager
def verified_by(other: Verify) -> Iterator[None]:
    """Check signatures by another function in this context and the tasks made in it: for simulations and fuzzing."""
    token = _verify.set(other)
    try:
        yield
    finally:
        _verify.reset(token)


def _signed_bytes(purpose: Purpose, swarm_id: str, payload: bytes) -> bytes:
    return purpose.value + bytes.fromhex(swarm_id) + payload

"""What members seal opens for members, for its purpose, in its place, and for nothing and nobody else."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import SiloError
from swarm.silo.membership import KeyRing
from swarm.silo.sealing import (
    BOX_OVERHEAD_BYTES,
    MAX_EPOCH,
    OVERHEAD_BYTES,
    EpochKey,
    box,
    box_key,
    epoch_of,
    open_box,
    open_epoch_key,
)
from tests.unit.silo_factory import identity_of

KEY = EpochKey(b"k" * 32, 7)
ALICE, BOB = X25519PrivateKey.from_private_bytes(b"a" * 32), X25519PrivateKey.from_private_bytes(b"b" * 32)
ALICE_PUBLIC = ALICE.public_key().public_bytes_raw()
TEXTS = st.binary(max_size=2000)
CONTEXTS = st.binary(max_size=64)


def fault_of(call) -> str:
    with pytest.raises(SiloError) as caught:
        call()
    return caught.value.fault


@given(TEXTS, CONTEXTS, st.integers(0, MAX_EPOCH))
def test_sealed_text_opens_again_and_is_so_much_longer(text: bytes, context: bytes, epoch: int) -> None:
    key = EpochKey(b"k" * 32, epoch)
    sealed = key.seal("gossip", text, context)
    assert key.open("gossip", sealed, context) == text
    assert len(sealed) == len(text) + OVERHEAD_BYTES and epoch_of(sealed) == epoch


@given(TEXTS, st.data())
def test_one_flipped_bit_is_the_one_error(text: bytes, data: st.DataObject) -> None:
    sealed = bytearray(KEY.seal("gossip", text, b"here"))
    position = data.draw(st.integers(0, len(sealed) - 1))
    sealed[position] ^= 1 << data.draw(st.integers(0, 7))
    expected = "unknown_epoch" if position < 4 else "forged"
    assert fault_of(lambda: KEY.open("gossip", bytes(sealed), b"here")) == expected


@given(TEXTS, st.data())
def test_truncated_and_prolonged_bytes_are_the_one_error(text: bytes, data: st.DataObject) -> None:
    sealed = KEY.seal("gossip", text, b"here")
    shorter = sealed[: data.draw(st.integers(0, len(sealed) - 1))]
    assert fault_of(lambda: KEY.open("gossip", shorter, b"here")) in ("malformed", "forged")
    assert fault_of(lambda: KEY.open("gossip", sealed + b"\0", b"here")) == "forged"


@pytest.mark.parametrize(
    ("key", "purpose", "context"),
    [
        (KEY, "index", b"here"),
        (KEY, "gossip", b"there"),
        (EpochKey(b"x" * 32, 7), "gossip", b"here"),
    ],
    ids=["purpose", "place", "group"],
)
def test_sealed_text_opens_for_its_purpose_place_and_group_alone(key: EpochKey, purpose: str, context: bytes) -> None:
    sealed = KEY.seal("gossip", b"text", b"here")
    assert fault_of(lambda: key.open(purpose, sealed, context)) == "forged"


def test_the_same_secret_in_another_epoch_is_another_key() -> None:
    sealed = KEY.seal("gossip", b"text", b"")
    renumbered = (8).to_bytes(4, "big") + sealed[4:]
    assert fault_of(lambda: EpochKey(b"k" * 32, 8).open("gossip", renumbered, b"")) == "forged"


def test_equal_texts_look_different_each_time() -> None:
    assert len({KEY.seal("gossip", b"text", b"") for _ in range(100)}) == 100


def test_hidden_names_are_equal_for_members_and_tell_nothing() -> None:
    name = KEY.hidden("secret-lab/experience/0.0")
    assert name == EpochKey(b"k" * 32, 7).hidden("secret-lab/experience/0.0")
    assert len(name) == 64 and int(name, 16)
    others = [EpochKey(b"k" * 32, 8), EpochKey(b"x" * 32, 7)]
    assert name not in [key.hidden("secret-lab/experience/0.0") for key in others]


def test_keys_do_not_print_their_secret() -> None:
    assert repr(KEY) == "EpochKey(7)"


@given(TEXTS, CONTEXTS)
def test_box_opens_for_the_one_it_is_for_alone(text: bytes, context: bytes) -> None:
    boxed = box(ALICE_PUBLIC, text, context)
    assert open_box(ALICE, boxed, context) == text
    assert len(boxed) == len(text) + BOX_OVERHEAD_BYTES
    assert fault_of(lambda: open_box(BOB, boxed, context)) == "forged"
    assert fault_of(lambda: open_box(ALICE, boxed, context + b"\0")) == "forged"


@given(st.data())
def test_spoiled_box_is_the_one_error(data: st.DataObject) -> None:
    boxed = bytearray(box(ALICE_PUBLIC, b"text", b""))
    boxed[data.draw(st.integers(0, len(boxed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fault_of(lambda: open_box(ALICE, bytes(boxed), b"")) in ("forged", "malformed")
    assert fault_of(lambda: open_box(ALICE, bytes(boxed[:40]), b"")) == "malformed"


@pytest.mark.parametrize("public_key", [bytes(32), b"\x01" + bytes(31), b"short"], ids=["zero", "one", "length"])
def test_keys_of_small_order_are_refused(public_key: bytes) -> None:
    assert fault_of(lambda: box(public_key, b"text", b"")) == "malformed"


def test_wrapped_key_opens_for_its_member_and_epoch_alone() -> None:
    wrapped = KEY.boxed_for(ALICE_PUBLIC, b"lab/alice")
    opened = open_epoch_key(ALICE, 7, wrapped, b"lab/alice")
    assert opened.open("gossip", KEY.seal("gossip", b"text", b""), b"") == b"text"
    assert fault_of(lambda: open_epoch_key(BOB, 7, wrapped, b"lab/alice")) == "forged"
    assert fault_of(lambda: open_epoch_key(ALICE, 8, wrapped, b"lab/alice")) == "forged"


def test_box_key_follows_from_the_identity_and_is_not_its_seed() -> None:
    one, same, other = (box_key(identity_of(number)).private_bytes_raw() for number in (1, 1, 2))
    assert one == same != other
    assert one != identity_of(1).seed


def test_key_before_opens_for_the_time_of_grace_and_never_seals() -> None:
    now = [100.0]
    ring = KeyRing(lambda: now[0], grace_s=60.0)
    assert fault_of(lambda: ring.current) == "missing"
    assert ring.accept(EpochKey(b"1" * 32, 1)) and ring.accept(EpochKey(b"2" * 32, 2))
    old = EpochKey(b"1" * 32, 1).seal("gossip", b"text", b"")
    assert ring.current.epoch == 2 and ring.key_for(old).epoch == 1
    assert not ring.accept(EpochKey(b"x" * 32, 2)) and not ring.accept(EpochKey(b"1" * 32, 1))
    now[0] += 60.0
    assert fault_of(lambda: ring.key_for(old)) == "unknown_epoch"
    assert [key.epoch for key in ring.accepted()] == [2]


def test_two_rotations_in_the_time_of_grace_leave_one_key_before() -> None:
    ring = KeyRing(lambda: 100.0)
    for epoch in (1, 2, 3):
        ring.accept(EpochKey(bytes([epoch]) * 32, epoch))
    assert [key.epoch for key in ring.accepted()] == [3, 2]

"""What an author signed decides where, when and in which order its entries count; what strangers claim of them does not."""

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.node import _SearchState
from hivemind.dht.routing import DHTID

from swarm.network.hivemind.index_guard import IndexGuard, unwrap, wrap
from swarm.network.hivemind.index_storage import FlatSerializer
from swarm.network.hivemind.parts import DHTProtocol, DHTRecord, DictionaryDHTValue, ValueWithExpiration
from swarm.network.index_entry import CLOCK_SKEW_S
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.records.adapter_offer import AdapterOffer, sign_offer
from swarm.records.identity import verify
from swarm.records.presence import Presence, sign_presence
from swarm.records.signing import verified_by
from swarm.sharing.index import (
    WINDOW_S,
    EntryValidator,
    Shard,
    adapter_key,
    experience_key,
    presence_key,
    shard_of,
    subkey,
)
from tests.unit.experience_factory import (
    ALICE,
    LINEAGE,
    MALLORY,
    NOW,
    REASONS_OF_FLIPPED_BYTES,
    SWARM_ID,
    Clock,
    group,
    header_of,
    signed,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
EVERYBODY = Shard(0, 0)
LIFE_S = 120.0


def presence(created_at: float, life_s: float = LIFE_S) -> tuple[str, str, bytes]:
    said = Presence(ALICE.peer_id, ("/ip4/192.0.2.1/tcp/1",), (), True, 0, created_at, created_at + life_s)
    return presence_key(SWARM_ID, EVERYBODY), ALICE.peer_id, sign_presence(ALICE, SWARM_ID, said)


def offer(created_at: float, life_s: float = LIFE_S, kind: str = "merge") -> tuple[str, str, bytes]:
    said = AdapterOffer(
        ALICE.peer_id, LINEAGE.policy, 1, 0, "bf16", 9, b"h" * 32, 0, created_at, created_at + life_s
    )  # fmt: skip
    key = adapter_key(SWARM_ID, kind, LINEAGE.policy, EVERYBODY)  # type: ignore[arg-type]
    record = sign_offer(ALICE, SWARM_ID, said, *([] if kind == "merge" else [kind]))  # type: ignore[list-item]
    return key, ALICE.peer_id, record


def header(created_at: float, life_s: float = LIFE_S, sequence: int = 3) -> tuple[str, str, bytes]:
    """All in the slot and window of the first one."""
    said = header_of([group()], b"body", sequence=sequence, created_at=created_at, expires_at=created_at + life_s)
    return experience_key(SWARM_ID, EVERYBODY, NOW), subkey(ALICE.peer_id, sequence), signed(said)


Entry = Callable[..., tuple[str, str, bytes]]
ENTRIES = [
    presence,
    header,
    offer,
    lambda *args: offer(*args, kind="donors"),
    lambda *args: offer(*args, kind="final"),
]
KINDS = pytest.mark.parametrize("entry", ENTRIES, ids=["presence", "header", "merge", "donors", "final"])


class MemoryIndex:
    """One node's share of the index in memory."""

    def __init__(self, clock: Clock) -> None:
        network = MemoryNetwork(random.Random(0), clock)
        self._host = MemoryTransport(network, MALLORY.peer_id, EntryValidator(SWARM_ID))
        network.enter(self._host)

    def store(self, key: str, name: str, value: bytes, expires_at: float) -> bool:
        return self._host.take(key, name, value, expires_at)

    def held(self, key: str) -> dict[str, bytes]:
        return {name: value for name, (value, _) in self._host.index_share.get(key).items()}


class HivemindIndex:
    """One node's share of hivemind's DHT, which asks the validator first and then the storage."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._guard = IndexGuard(EntryValidator(SWARM_ID), clock)
        client = SimpleNamespace(control=SimpleNamespace(unary_handlers={}), add_unary_handler=None)
        self._protocol = SimpleNamespace(call_find=None, get_stub=None, p2p=SimpleNamespace(_client=client))
        self._guard.protect(self._protocol)  # type: ignore[arg-type]

    def store(self, key: str, name: str, value: bytes, expires_at: float) -> bool:
        key_id, stored = DHTID.generate(source=key), DHTProtocol.serializer.dumps(wrap(key, value))
        record = DHTRecord(key_id.to_bytes(), DHTProtocol.serializer.dumps(name), stored, expires_at)
        return self._guard.validate(record) and self._protocol.storage.store_subkey(key_id, name, stored, expires_at)

    def held(self, key: str) -> dict[str, bytes]:
        found = self._protocol.storage.get(DHTID.generate(source=key))
        return _values(found.value) if found is not None else {}

    def replied(self, key: str, *copies: tuple[str, bytes, float]) -> DictionaryDHTValue:
        """The reply of a host that gives these copies, as this node decodes it and leaves it to the search."""
        reply = DictionaryDHTValue()
        for name, value, expires_at in copies:
            reply.store(name, DHTProtocol.serializer.dumps(wrap(key, value)), expires_at)
        decoded = FlatSerializer.loads(DHTProtocol.serializer.dumps(reply))
        assert isinstance(decoded, DictionaryDHTValue)
        self._protocol._validate_dictionary(DHTID.generate(source=key).to_bytes(), decoded)
        return decoded


def _values(entries: DictionaryDHTValue) -> dict[str, bytes]:
    loads = FlatSerializer.loads
    return {name: unwrap(loads(item.value)) for name, item in entries.items()}  # type: ignore[arg-type]


INDEXES = pytest.mark.parametrize("index_of", [MemoryIndex, HivemindIndex])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(NOW)
    monkeypatch.setattr(time, "time", clock)  # hivemind reads the clock by itself
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", clock)
    return clock


@INDEXES
@KINDS
def test_a_stranger_cannot_freeze_an_entry_by_storing_it_again_with_a_later_expiration(
    index_of: type, entry: Entry, clock: Clock
) -> None:
    index = index_of(clock)
    key, name, first = entry(NOW)
    assert index.store(key, name, first, NOW + LIFE_S)
    assert not index.store(key, name, first, NOW + 3600)
    clock.now = NOW + 20
    _, _, renewed = entry(NOW + 20)
    assert index.store(key, name, renewed, NOW + 20 + LIFE_S)
    assert not index.store(key, name, first, NOW + LIFE_S)
    assert index.held(key) == {name: renewed}


@INDEXES
@KINDS
def test_the_newer_entry_stays_even_where_it_lives_for_a_shorter_time(
    index_of: type, entry: Entry, clock: Clock
) -> None:
    index = index_of(clock)
    key, name, first = entry(NOW - 20, 600.0)
    assert index.store(key, name, first, NOW + 580)
    _, _, second = entry(NOW)
    assert index.store(key, name, second, NOW + LIFE_S)
    assert not index.store(key, name, first, NOW + 580)
    assert index.held(key) == {name: second}
    clock.now = NOW + LIFE_S + 1
    assert index.store(key, name, first, NOW + 580), "the newer one has expired, and the older one is still signed"


@INDEXES
@KINDS
def test_a_copy_with_a_short_life_is_prolonged_by_its_owner(index_of: type, entry: Entry, clock: Clock) -> None:
    index = index_of(clock)
    key, name, record = entry(NOW)
    assert index.store(key, name, record, NOW + 1)
    assert index.store(key, name, record, NOW + LIFE_S)
    assert not index.store(key, name, record, NOW + 1)
    clock.now = NOW + 2
    assert index.held(key) == {name: record}


@INDEXES
@KINDS
def test_expired_entries_and_entries_of_the_future_are_refused(index_of: type, entry: Entry, clock: Clock) -> None:
    index = index_of(clock)
    key, name, expired = entry(NOW - LIFE_S - 1)
    assert not index.store(key, name, expired, NOW + 60)
    _, _, future = entry(NOW + CLOCK_SKEW_S + 1)
    assert not index.store(key, name, future, NOW + 60)
    assert index.held(key) == {}


@INDEXES
def test_a_header_lies_in_its_own_slot_and_window_alone(index_of: type, clock: Clock) -> None:
    index = index_of(clock)
    _, _, record = header(NOW)
    for back in range(-20, 20):
        window = experience_key(SWARM_ID, EVERYBODY, NOW + back * WINDOW_S)
        for slot in range(8):
            taken = index.store(window, subkey(ALICE.peer_id, slot), record, NOW + LIFE_S)
            assert taken == (slot == 3 and back == 0), "later windows come later"
    clock.now += WINDOW_S
    later = [experience_key(SWARM_ID, EVERYBODY, NOW + back * WINDOW_S) for back in (1, 2, 3)]
    clock.now = NOW + 3 * WINDOW_S
    assert [index.store(key, subkey(ALICE.peer_id, 3), record, NOW + LIFE_S) for key in later] == [True, True, False]


@INDEXES
def test_one_of_two_records_that_an_author_signed_for_one_moment_stays_on_every_host(
    index_of: type, clock: Clock
) -> None:
    key, name, first = header(NOW)
    _, _, other = header(NOW, LIFE_S + 1)
    held = []
    for order in ((first, other), (other, first)):
        index = index_of(clock)
        for record in order:
            index.store(key, name, record, NOW + LIFE_S)
        held.append(index.held(key))
    assert held[0] == held[1]


@KINDS
def test_no_flipped_bit_of_an_entry_is_believed_and_each_is_counted_for_what_it_broke(entry: Entry) -> None:
    key, name, value = entry(NOW)
    validator, num_bits = EntryValidator(SWARM_ID), 8 * len(value)
    for bit in range(num_bits):
        flipped = (int.from_bytes(value, "little") ^ 1 << bit).to_bytes(len(value), "little")
        assert validator(key, name, flipped) is None
    assert validator.rejected.total() == num_bits
    assert set(validator.rejected) <= REASONS_OF_FLIPPED_BYTES


@INDEXES
def test_copies_of_old_headers_do_not_fill_the_share_of_their_author(index_of: type, clock: Clock) -> None:
    """A header names no level of its shard, so strangers can list it under every level."""
    index = index_of(clock)
    assert index.store(*presence(NOW, 600.0), NOW + 600)
    levels = [shard_of(SWARM_ID, ALICE.peer_id, level, NOW) for level in range(17)]
    for sequence in range(90):
        clock.now = at = NOW + 4 * sequence
        said = header_of([group()], b"body", sequence=sequence, created_at=at, expires_at=at + 600)
        record = signed(said)
        for shard in levels:
            key = experience_key(SWARM_ID, shard, at)
            assert index.store(key, subkey(ALICE.peer_id, sequence), record, at + 600), (sequence, shard)
    assert index.held(presence_key(SWARM_ID, EVERYBODY))
    for shard in levels:  # the newest window is whole
        assert len(index.held(experience_key(SWARM_ID, shard, clock.now))) >= 1


def test_hosts_that_lie_about_expirations_do_not_hide_the_newest_entry(clock: Clock) -> None:
    index = HivemindIndex(clock)
    key, name, old = presence(NOW - 20, 600.0)
    _, _, new = presence(NOW)
    replies = [
        index.replied(key, (name, old, NOW + 580)),
        index.replied(key, (name, new, NOW + 1)),
        index.replied(key, (name, old, NOW + 3600), ("x", b"junk", NOW + 60)),
        index.replied(key, (name, new, NOW + LIFE_S)),
        index.replied(key, (name, new, NOW + 0.5)),
        index.replied(key, (name, old, NOW + 580)),
    ]
    state = SimpleNamespace(finished=False, binary_value=None, expiration_time=None, sufficient_expiration_time=1e99)
    for reply in replies:
        item = ValueWithExpiration(reply, NOW + 3000)
        _SearchState.add_candidate(state, item, None)  # type: ignore[arg-type]
    clock.now = NOW + 10
    assert state.binary_value is not None and _values(state.binary_value) == {name: new}


def test_what_is_handed_on_to_another_host_arrives_as_it_was_stored(clock: Clock) -> None:
    """hivemind packs the entries of a key for a peer that is nearer to it, and for whoever asks."""
    giver, taker = HivemindIndex(clock), HivemindIndex(clock)
    key, name, record = presence(NOW)
    giver.store(key, name, record, NOW + 60)
    key_id = DHTID.generate(source=key)
    entries: Any = FlatSerializer.loads(FlatSerializer.dumps(giver._protocol.storage.get(key_id).value))
    assert taker._protocol._validate_dictionary(key_id.to_bytes(), entries)
    for one, item in entries.items():
        assert taker._protocol.storage.store_subkey(key_id, one, item.value, item.expiration_time)
    assert taker.held(key) == {name: record}
    clock.now = NOW + 61
    assert taker.held(key) == {}


async def test_readers_take_the_newest_of_what_several_hosts_answer(clock: Clock) -> None:
    network = MemoryNetwork(random.Random(0), clock)
    hosts = [MemoryTransport(network, name) for name in ("a", "b", "c")]
    reader = MemoryTransport(network, "reader", EntryValidator(SWARM_ID))
    for one in (*hosts, reader):
        network.enter(one)
    key, name, old = presence(NOW - 20, 600.0)
    _, _, new = presence(NOW)
    _, _, expired = presence(NOW - 200)
    for host, (value, claimed) in zip(hosts, [(old, 580), (new, 60), (expired, 3000)], strict=True):
        assert host.take(key, name, value, NOW + claimed)
    assert await reader.load(key) == {name: new}


def test_one_signature_is_checked_once_when_an_entry_is_stored(clock: Clock) -> None:
    asked = []
    validator = EntryValidator(SWARM_ID)
    index = HivemindIndex(clock)
    index._guard = IndexGuard(lambda *entry: asked.append(entry) or validator(*entry), clock)
    index._guard.protect(index._protocol)  # type: ignore[arg-type]
    assert index.store(*presence(NOW), NOW + 60)
    assert len(asked) == 1


def test_an_entry_is_checked_once_however_many_hosts_give_it_and_however_often() -> None:
    checks: list[str] = []

    def count(peer_id: str, data: bytes, signature: bytes) -> bool:
        checks.append(peer_id)
        return verify(peer_id, data, signature)

    validator = EntryValidator(SWARM_ID)
    key, name, value = presence(NOW)
    forged = value[:-1] + bytes([value[-1] ^ 1])
    with verified_by(count):
        said = [validator(key, name, value) for _ in range(50)]
        assert [validator(key, name, forged) for _ in range(50)] == [None] * 50
        assert len(checks) == 2
        assert said[0] is not None
        assert said == said[:1] * 50
        assert validator(key, name + "\0" + value[:3].decode("latin-1"), value[3:]) is None
        assert validator(key + name, "", value) is None
    assert EntryValidator(SWARM_ID)(key, name, value) == said[0]


def test_what_is_remembered_of_checked_entries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.sharing.index.MAX_CHECKED", 100)
    validator = EntryValidator(SWARM_ID)
    key, name, value = presence(NOW)
    for number in range(1000):
        assert validator(key, name, b"%d" % number) is None
        assert validator(key, name, value) is not None
    assert len(validator._checked) == 100

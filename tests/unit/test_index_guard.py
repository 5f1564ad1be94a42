"""What the index believes: entries in our form, under their own key, of bounded life, one by one."""

import asyncio
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.hivemind.index_guard import IndexEntry, IndexGuard, decode_entry, unwrap, wrap
from swarm.network.index_entry import CLOCK_SKEW_S, MAX_ENTRIES_PER_KEY, MAX_LIFETIME_S, MAX_VALUE_BYTES, UNSIGNED

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NOW = 1_000.0
KEY = DHTID.generate(source="key")
PEER = PeerID(b"\x00\x24" + bytes(36))
packb = DHTProtocol.serializer.dumps


def record(
    subkey: object = "s",
    value: object = b"key\0value",
    *,
    key: DHTID = KEY,
    expires_at: float = NOW + 60,
) -> DHTRecord:
    return DHTRecord(key.to_bytes(), packb(subkey), packb(value), expires_at)


def guard(now: float = NOW) -> IndexGuard:
    return IndexGuard(lambda key, subkey, value: None if value == b"bad" else UNSIGNED, lambda: now)


def dictionary(entries: Mapping[Any, tuple[object, float]]) -> DictionaryDHTValue:
    with DictionaryDHTValue(maxsize=1).freeze() as value:  # as it comes from the wire, the size chosen by the peer
        for subkey, (item, expires_at) in entries.items():
            value.store(subkey, item, expires_at)
    return value


def stored(value: bytes) -> bytes:
    return packb(wrap("key", value))


def test_validator_sees_what_the_publisher_passed() -> None:
    seen = []
    IndexGuard(lambda *entry: seen.append(entry) or UNSIGNED, lambda: NOW).validate(record(value=wrap("key", b"a\0b")))
    assert seen == [("key", "s", b"a\0b")]
    assert unwrap(wrap("key", b"a\0b")) == b"a\0b"


@pytest.mark.parametrize(
    "bad",
    [
        record(subkey=None),  # hivemind's mark of a plain value, which would replace all subkeys
        DHTRecord(KEY.to_bytes(), DHTProtocol.IS_DICTIONARY, packb(b"key\0value"), NOW + 60),
        record(subkey=b"s"),
        record(subkey=["s"]),
        record(subkey=""),
        record(subkey="s" * 129),
        record(value="key\0value"),
        record(value=b"key"),  # no value: an empty one is "key NUL"
        record(value=b"other\0value"),
        record(value=b"\xff\0value"),
        record(value=wrap("key", bytes(MAX_VALUE_BYTES + 1))),
        record(key=DHTID.generate(source="other")),
        DHTRecord(KEY.to_bytes(), b"\xa1s", b"\xc1", NOW + 60),
        DHTRecord(KEY.to_bytes(), b"\xa1s", b"\x91" * 1100, NOW + 60),
        record(expires_at=NOW),
        record(expires_at=NOW + MAX_LIFETIME_S + CLOCK_SKEW_S + 1),
        record(expires_at=math.inf),
        record(expires_at=math.nan),
    ],
)
def test_entry_in_another_form_is_refused(bad: DHTRecord) -> None:
    assert guard().validate(record())
    assert not guard().validate(bad)


@given(subkey=st.binary(max_size=200), value=st.binary(max_size=1300))
def test_any_bytes_are_an_entry_or_none(subkey: bytes, value: bytes) -> None:
    entry = decode_entry(DHTRecord(KEY.to_bytes(), subkey, value, NOW))
    assert entry is None or entry.key == "key"


def test_empty_value_is_an_entry() -> None:
    assert decode_entry(record(value=b"key\0")) == IndexEntry("key", "s", b"")


def test_bad_subkeys_of_a_reply_are_dropped_and_the_others_kept() -> None:
    reply = dictionary(
        {
            "good": (stored(b"1"), NOW + 60),
            "bad": (stored(b"bad"), NOW + 60),
            "eternal": (stored(b"2"), math.inf),
            "expired": (stored(b"3"), NOW),
            5: (stored(b"4"), NOW + 61),
            "text": ("5", NOW + 60),
            "good too": (stored(b"6"), NOW + 3600),
        }
    )
    assert guard().keep_valid(KEY.to_bytes(), reply)
    assert {subkey: unwrap(msgpack.unpackb(value)) for subkey, (value, _) in reply.data.items()} == {
        "good": b"1",
        "good too": b"6",
    }
    assert reply.maxsize == math.inf


def test_reply_without_a_valid_subkey_is_refused() -> None:
    assert not guard().keep_valid(KEY.to_bytes(), dictionary({"bad": (stored(b"bad"), NOW + 60)}))


def test_reader_with_a_slow_clock_keeps_the_longest_life_of_an_honest_publisher() -> None:
    assert guard(NOW - 5).validate(record(expires_at=NOW + MAX_LIFETIME_S))


def test_reply_is_cut_to_the_bound_of_a_key() -> None:
    many = {f"{number}": (stored(b"x"), NOW + 60) for number in range(MAX_ENTRIES_PER_KEY + 5)}
    reply = dictionary(many)
    assert guard().keep_valid(KEY.to_bytes(), reply)
    assert len(reply.data) == MAX_ENTRIES_PER_KEY


def protected(replies: dict[DHTID, object] | None = None) -> SimpleNamespace:
    """A protocol of hivemind as far as the guard touches it."""

    async def call_find(peer: object, keys: object) -> dict[DHTID, object] | None:
        return replies

    now = get_dht_time()
    subject = guard(now)
    protocol = SimpleNamespace(
        call_find=call_find,
        get_stub=None,
        p2p=SimpleNamespace(
            _client=SimpleNamespace(control=SimpleNamespace(unary_handlers={}), add_unary_handler=None)
        ),
        _validate_record=lambda *parts: subject.validate(DHTRecord(*parts)),
        _validate_dictionary=None,
        now=now,
    )
    subject.protect(protocol)  # type: ignore[arg-type]
    return protocol


def test_replies_and_handed_over_keys_pass_the_guard() -> None:
    protocol = protected()
    reply = dictionary(
        {"good": (stored(b"1"), protocol.now + 60), "bad": (stored(b"bad"), protocol.now + 60)},
    )
    assert protocol._validate_dictionary(KEY.to_bytes(), reply)
    assert list(reply.data) == ["good"]


def test_stored_entries_are_bounded_and_the_cache_takes_none() -> None:
    protocol = protected()
    expires_at = protocol.now + 60
    assert protocol.storage.store(KEY, stored(b"x"), expires_at, subkey="author/0")
    assert not protocol.cache.store(KEY, stored(b"x"), expires_at, subkey="author/0")
    assert not protocol.storage.store(KEY, stored(b"x"), expires_at + 1)


def test_reply_with_an_endless_life_does_not_end_a_search() -> None:
    honest, neighbors = ValueWithExpiration(dictionary({}), get_dht_time() + 60), {KEY: "peer"}
    endless = ValueWithExpiration(dictionary({}), math.inf)
    replies = {DHTID(1): (honest, neighbors), DHTID(2): (endless, neighbors), DHTID(3): (None, neighbors)}
    assert asyncio.run(protected(replies).call_find(PEER, [])) == {
        DHTID(1): (honest, neighbors),
        DHTID(2): (None, neighbors),
        DHTID(3): (None, neighbors),
    }
    assert not asyncio.run(protected(None).call_find(PEER, []))

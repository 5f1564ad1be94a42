"""What stands between hivemind's DHT and peers that store or return bad entries.

Imports hivemind: only `hivemind_session` may import this module.

A validator in hivemind sees the SHA-1 of a key. So that ours sees what the publisher passed, the key travels in front
of the value, `key NUL value`, and counts only if it hashes to where the entry was found. Beyond validation, hivemind
1.1.12 needs protection in four places, each met by hostile peers or by clocks that differ:
- one bad subkey voids a whole reply, so that readers with a slow clock would lose a key altogether: drop the subkey;
- the expiration that a peer claims orders entries and ends their life: the entry itself says both (`IndexRule`);
- a plain value without subkeys and with a later expiration replaces all subkeys of a key: refuse plain values;
- a reply with an infinite expiration ends the search before other replicas are heard: ignore it;
- a key over 4 MiB cannot be read any more: bound the entries under a key (`index_storage`).
Bounds on memory are in `index_storage`, bounds on calls and replies in `index_calls`.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import msgpack

from swarm.network.hivemind.index_calls import CallLimits, CheckedStub, FlatSerializer, from_giver, giver
from swarm.network.hivemind.index_storage import IndexStorage, ValidatedValue
from swarm.network.hivemind.parts import (
    DHTID,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    PeerID,
    RecordValidatorBase,
    ValueWithExpiration,
)
from swarm.network.index_entry import (
    MAX_ENTRIES_PER_KEY,
    MAX_KEY_BYTES,
    MAX_SUBKEY_BYTES,
    MAX_VALUE_BYTES,
    IndexRule,
    IndexValidator,
    Validity,
    check_entry,
    is_live,
)
from swarm.network.peers.peer_routing import PeerRouting
from swarm.network.transport import Admits, everybody

_KEY_END = b"\0"
_MAX_STORED_BYTES = MAX_KEY_BYTES + MAX_VALUE_BYTES + 8
_MAX_STORED_SUBKEY_BYTES = MAX_SUBKEY_BYTES + 8


def wrap(key: str, value: bytes) -> bytes:
    """The value as it is stored under `key`."""
    return key.encode() + _KEY_END + value


def unwrap(stored: bytes) -> bytes:
    """The value as it was published."""
    return stored.partition(_KEY_END)[2]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    key: str
    subkey: str
    value: bytes


def decode_entry(record: DHTRecord) -> IndexEntry | None:
    """The entry in a record of the DHT; None for anything that this program would not have stored."""
    if len(record.value) > _MAX_STORED_BYTES or len(record.subkey) > _MAX_STORED_SUBKEY_BYTES:
        return None
    try:
        subkey = msgpack.unpackb(record.subkey)
        stored = msgpack.unpackb(record.value)
        if not (isinstance(subkey, str) and isinstance(stored, bytes) and _KEY_END in stored):
            return None
        key_bytes, _, value = stored.partition(_KEY_END)
        key = key_bytes.decode()
        check_entry(key, subkey, value)
    except (ValueError, msgpack.UnpackException):
        return None
    return IndexEntry(key, subkey, value) if DHTID.generate(source=key).to_bytes() == record.key else None


class IndexGuard(RecordValidatorBase):
    """The validator of one node as hivemind wants it."""

    def __init__(
        self,
        validator: IndexValidator | None,
        now: Callable[[], float],
        admits: Admits = everybody,
        routing: PeerRouting | None = None,
    ) -> None:
        """`now` gives swarm time; without a `validator` only form and expiration are checked.

        `routing` finds peers that replies name by their ids alone.
        """
        self._routing = routing
        self._rule = IndexRule(validator, now)
        self._now = now
        self._last: tuple[DHTRecord, Validity | None] | None = None  # that was validated last, and not stored yet
        self.calls = CallLimits(self._rule, admits)
        self.storage: IndexStorage | None = None
        """This node's share of the index, once there is a node."""

    @property
    def refused(self) -> Counter[str]:
        """Calls and entries that were refused, and entries evicted, by reason, since this guard was made."""
        stored = Counter[str]() if self.storage is None else self.storage.refused
        return self.calls.refused + self._rule.refused + stored

    def validate(self, record: DHTRecord) -> bool:
        self._last = record, self._judge(record)
        return self._last[1] is not None

    def _judge(self, record: DHTRecord) -> Validity | None:
        """The validity of a record; None where it does not count now."""
        entry = decode_entry(record)
        if entry is None:
            return None
        return self._rule.judge(entry.key, entry.subkey, entry.value, record.expiration_time, giver.get())

    def _judge_once(self, record: DHTRecord) -> Validity | None:
        """As `_judge`. hivemind has a record validated and stores it at once: its signature need not be checked again."""
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] == record else self._judge(record)

    def protect(self, protocol: DHTProtocol) -> None:
        """Put the guard into the protocol of a new DHTNode, before it meets a peer."""
        find, get_stub = protocol.call_find, protocol.get_stub

        async def find_sane(peer: PeerID, keys: Collection[DHTID]):
            results = await from_giver(peer, find(peer, keys)) or {}
            for key, (found, neighbors) in results.items():
                if self._routing is not None:
                    self._routing.named(peer.to_base58(), (one.to_base58() for one in neighbors.values()))
                if found is not None and not is_live(found.expiration_time, self._now()):
                    results[key] = None, neighbors
            return results

        # hivemind has no seam for these; the attributes are those of one object, its classes stay as they are.
        protocol.storage = self.storage = IndexStorage(self._now, judge=self._judge_once)
        protocol.cache = IndexStorage(self._now, max_bytes=0)  # where a stranger says "cache" we say no
        protocol.serializer = FlatSerializer  # type: ignore[assignment]
        protocol._validate_dictionary = self.keep_valid
        protocol.call_find = find_sane
        protocol.get_stub = lambda peer: CheckedStub(get_stub(peer), peer, self._reach(peer), self._rule.turn)  # type: ignore[assignment, return-value]
        self.calls.install(protocol.p2p._client)

    def _reach(self, peer: PeerID) -> Callable[[], Awaitable[bool]]:
        async def reach() -> bool:
            return self._routing is not None and await self._routing.reach(peer.to_base58())

        return reach

    def keep_valid(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Drop the subkeys of a reply (or a handed over key) that are not valid, and note the validity of the others.

        Returns whether any is left.
        """
        dictionary.maxsize = float("inf")  # chosen by the peer
        with dictionary.freeze():
            for subkey, (value, expires_at) in list(dictionary.items()):
                validity = None
                if isinstance(subkey, str) and isinstance(value, bytes) and isinstance(expires_at, float):
                    packed_subkey = DHTProtocol.serializer.dumps(subkey)
                    validity = self._judge(DHTRecord(key_bytes, packed_subkey, value, expires_at))
                if validity is None:
                    del dictionary[subkey]
                else:
                    dictionary.data[subkey] = ValueWithExpiration(ValidatedValue.of(value, validity), expires_at)
            for subkey in list(dictionary.data)[MAX_ENTRIES_PER_KEY:]:
                del dictionary[subkey]
            return bool(dictionary.data)

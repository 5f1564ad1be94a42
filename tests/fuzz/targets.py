"""Every decoder that sees bytes of a peer, as a function of bytes that raises only where the decoder breaks its promise.

Each says whether the bytes were taken; so a test can tell that the valid examples in the corpus still are.
"""

import asyncio
import functools
import math
import tomllib
from collections.abc import Callable, Coroutine
from typing import Any

import tomli_w
import zstandard

from swarm import manifest as manifests
from swarm.errors import ManifestError, RequestError
from swarm.network.hivemind.index_calls import FlatSerializer
from swarm.network.hivemind.index_guard import IndexGuard, decode_entry
from swarm.network.hivemind.parts import DHTID, DHTRecord, DictionaryDHTValue
from swarm.network.hivemind.relay_address import address_text
from swarm.network.index_gateway import read_loaded, read_stored
from swarm.network.reach.dial_back import is_signed_by
from swarm.network.reach.reachability import MAX_TEST_BYTES, ReachService, read_greeting
from swarm.network.requests.blob_protocol import BlobRequest
from swarm.network.requests.framing import FrameError, read_acknowledgement, read_request, read_response
from swarm.network.tcp_address import TcpAddress
from swarm.network.transport import RequestRefused
from swarm.records.codec import decode_body, decode_header
from swarm.records.identity import is_peer_id, verify
from swarm.records.presence import verify_presence
from swarm.records.rejection import InvalidRecord
from swarm.records.signing import verified_by
from swarm.sharing.index import EntryValidator, experience_key, presence_key
from swarm.sharing.shard import Shard
from swarm.tasks.answer_guard import ALPHABETS, admissible
from swarm.tasks.verifiers import VERIFIERS
from tests.unit.experience_factory import ALICE, LINEAGE, NOW, SWARM_ID, admission, group, header_of

MAX_FRAME_BYTES = 4096
SHARD = Shard(0, 0)
HEADER_KEY, PRESENCE_KEY = experience_key(SWARM_ID, SHARD, NOW), presence_key(SWARM_ID, SHARD)
_EXPECTED = {"exact": "1", "numeric": "-3/4", "regex": r"(?i)\s*yes[!.]*"}


def record(data: bytes) -> bool:
    """A header as it is gossiped, signatures checked."""
    try:
        admission().admit_header(data)
    except InvalidRecord:
        return False
    return True


def unsigned_record(data: bytes) -> bool:
    """The same for an attacker who signs whatever he likes."""
    with verified_by(lambda peer_id, signed, signature: True):
        return record(data)


def header(data: bytes) -> bool:
    try:
        decoded = decode_header(data, ALICE.peer_id)
    except InvalidRecord:
        return False
    assert decoded.groups
    assert math.isfinite(decoded.created_at) and math.isfinite(decoded.expires_at)
    return True


def presence(data: bytes) -> bool:
    with verified_by(lambda peer_id, signed, signature: True):
        try:
            decoded = verify_presence(data, SWARM_ID)
        except InvalidRecord:
            return False
    assert all(isinstance(address, str) for address in decoded.addresses + decoded.gossip_addresses)
    return True


def body(data: bytes) -> bool:
    """A body that its author announced correctly, through all of admission."""
    announced = header_of([group()], data)
    try:
        groups = decode_body(data, ALICE.peer_id, LINEAGE, 7)
        announced = header_of(list(groups), data)
    except InvalidRecord:
        groups = ()
    try:
        admitted = admission().admit_body(announced, data)
    except InvalidRecord:
        return False
    assert len(admitted) == len(groups)
    assert all(math.isfinite(value) for one in admitted for rollout in one.rollouts for value in rollout.logprobs)
    return True


def packed_body(data: bytes) -> bool:
    """The same, the fuzzer's bytes being what is inside the compression."""
    return body(zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data))


def entry(data: bytes) -> bool:
    """An entry of the index as a replica stores or returns it: `subkey NUL value`, under each kind of key."""
    name, _, value = data.partition(b"\0")
    text, is_valid = name.decode(errors="replace"), EntryValidator(SWARM_ID)
    believed = [
        is_valid(key, text, value) for key in (HEADER_KEY, PRESENCE_KEY, text)
    ]  # all three, whatever the first says
    return any(believed)


def stored_entry(data: bytes) -> bool:
    """Subkey and value as they are in a store call, each msgpack: the first byte is the length of the subkey."""
    length = data[0] if data else 0
    found = DHTRecord(DHTID.generate(source=HEADER_KEY).to_bytes(), data[1 : 1 + length], data[1 + length :], NOW + 60)
    assert IndexGuard(None, lambda: NOW).validate(found) == (decode_entry(found) is not None)
    return decode_entry(found) is not None


def dictionary(data: bytes) -> bool:
    """The entries of a key in one value, as a replica answers."""
    try:
        value = FlatSerializer.loads(data)
    except ValueError:
        return False
    if not isinstance(value, DictionaryDHTValue):
        return False
    return IndexGuard(None, lambda: NOW).keep_valid(DHTID.generate(source=HEADER_KEY).to_bytes(), value)


def request(data: bytes) -> bool:
    return _on_stream(data, lambda reader: read_request(reader, MAX_FRAME_BYTES))


def response(data: bytes) -> bool:
    async def read(reader: asyncio.StreamReader) -> None:
        answer = await read_response(reader, MAX_FRAME_BYTES)
        assert len(answer.body) <= MAX_FRAME_BYTES
        assert answer.reason.isprintable()
        await read_acknowledgement(reader)

    return _on_stream(data, read)


def blob_request(data: bytes) -> bool:
    try:
        return BlobRequest.decode(data).encode() == data
    except RequestRefused:
        return False


def reach(data: bytes) -> bool:
    """Both directions of `swarm/reach/1`, but for the dialling."""

    async def nowhere(peer_id: str) -> tuple[str, ...]:
        return ()

    try:
        read_greeting(data)
    except RequestError:
        pass
    service = ReachService(nowhere, lambda: NOW)
    try:
        return len(_run(service.answer(ALICE.peer_id, data))) <= MAX_TEST_BYTES
    except RequestRefused:
        return False


def gateway(data: bytes) -> bool:
    """What an index peer answers."""
    taken = 0
    for read in (read_stored, read_loaded):
        try:
            read(data)
        except RequestError:
            continue
        taken += 1
    return taken > 0


def certificate(data: bytes) -> bool:
    return is_signed_by(ALICE.peer_id, data)


def address(data: bytes) -> bool:
    text = data.decode(errors="replace")
    is_peer_id(text)
    assert not verify(text, b"data", data[:64])
    try:
        parsed = TcpAddress.parse(text)
    except ValueError:
        return False
    assert TcpAddress.parse(str(parsed)) == parsed
    assert isinstance(parsed.is_loopback and parsed.is_wildcard, bool)
    return True


def binary_address(data: bytes) -> bool:
    """As the daemon reports where a peer says that it is."""
    try:
        return bool(address_text(data))
    except (ValueError, LookupError):
        return False


def manifest(data: bytes) -> bool:
    try:
        manifests.parse(data)
    except ManifestError as error:
        assert "\n" not in str(error)
        return False
    return True


def manifest_content(data: bytes) -> bool:
    """The same for a founder who signs whatever he likes."""
    try:
        content = {**tomllib.loads(data.decode()), "founder": ALICE.peer_id}
        content.pop("signature", None)
        signature = ALICE.sign(manifests._signed_bytes(content)).hex()
        data = tomli_w.dumps({**content, "signature": signature}).encode()
    except (ValueError, TypeError, RecursionError, ManifestError):
        return False
    return manifest(data)


def answer(data: bytes) -> bool:
    """An answer's text, to the verifiers of this project and the guard in front of the others."""
    text = data.decode(errors="replace")
    rewards = [verify_text(_EXPECTED[name], text) for name, verify_text in VERIFIERS.items()]
    assert all(reward in (0.0, 1.0) for reward in rewards)
    return any(admissible(data_set, text) for data_set in ALPHABETS)


TARGETS: dict[str, Callable[[bytes], bool]] = {
    target.__name__: target
    for target in (
        record,
        unsigned_record,
        header,
        presence,
        body,
        packed_body,
        entry,
        stored_entry,
        dictionary,
        request,
        response,
        blob_request,
        reach,
        gateway,
        certificate,
        address,
        binary_address,
        manifest,
        manifest_content,
        answer,
    )
}


def _on_stream(data: bytes, read: Callable[[asyncio.StreamReader], Coroutine[Any, Any, Any]]) -> bool:
    async def conversation() -> bool:
        reader = asyncio.StreamReader(loop=_idle_loop())
        reader.feed_data(data)
        reader.feed_eof()
        try:
            await read(reader)
        except (FrameError, RequestRefused):
            return False
        return True

    return _run(conversation())


@functools.cache
def _idle_loop() -> asyncio.AbstractEventLoop:
    """A stream belongs to a loop; this one never runs."""
    return asyncio.new_event_loop()


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """To its end, without a loop: nothing it waits for is missing. A loop for each input would be most of the time."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the decoder waits although the stream has ended")

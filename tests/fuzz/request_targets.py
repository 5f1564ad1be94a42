"""Requests between two peers, and the addresses that they tell, as functions of bytes."""

import asyncio
import atexit
import contextlib
import functools
import math
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.errors import RequestError
from swarm.merging.exchange import final_list as final_message
from swarm.merging.exchange.offered_adapter import OfferedAdapter
from swarm.merging.exchange.proposal import MAX_MESSAGE_BYTES, Accepted, ProposalHandler, decode_answer
from swarm.merging.exchange.recent_partners import RecentPartners
from swarm.network.commands.envelope import CommandChannel, decode_opening, encode_opening
from swarm.network.hivemind.daemon_control import address_text, encoded
from swarm.network.index_entry import IndexRule, check_entry
from swarm.network.index_gateway import MAX_INDEX_RESPONSE_BYTES, IndexGateway, read_loaded, read_stored
from swarm.network.peers.dialling import dialable
from swarm.network.reach.dial_back import is_signed_by
from swarm.network.reach.reachability import MAX_TEST_BYTES, ReachService, read_greeting
from swarm.network.requests.blob_protocol import BlobRequest
from swarm.network.requests.framing import FrameError, parse_response, read_acknowledgement, read_request, read_response
from swarm.network.tcp_address import TcpAddress
from swarm.network.transport import RequestRefused
from swarm.records.adapter_offer import AdapterOffer, sign_offer
from swarm.records.identity import is_peer_id, verify
from swarm.records.rejection import InvalidRecord
from swarm.records.signing import verified_by
from tests.unit.experience_factory import ALICE, LINEAGE, MALLORY, NOW, SWARM_ID, context_of

MAX_FRAME_BYTES = 4096


def request(data: bytes) -> bool:
    return _on_stream(data, lambda reader: read_request(reader, MAX_FRAME_BYTES))


def response(data: bytes) -> bool:
    async def read(reader: asyncio.StreamReader) -> None:
        answer = await read_response(reader, MAX_FRAME_BYTES)
        assert len(answer.body) <= MAX_FRAME_BYTES
        assert answer.reason.isprintable()
        await read_acknowledgement(reader)

    with contextlib.suppress(FrameError):
        assert len(parse_response(data, MAX_FRAME_BYTES).body) <= MAX_FRAME_BYTES  # of a short call
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
        greeting = read_greeting(data)
        assert math.isfinite(greeting.time_s)
        kind = "ip6" if ":" in greeting.host else "ip4"
        assert not greeting.host or TcpAddress.parse(f"/{kind}/{greeting.host}/tcp/1")  # nodes announce it
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


class _Shelf:
    """An index that takes what is within the bounds."""

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        check_entry(key, subkey, value)
        assert math.isfinite(expires_at)
        return True

    async def load(self, key: str) -> dict[str, bytes]:
        return {key: bytes(1024)}


def gateway_request(data: bytes) -> bool:
    """What an index peer is asked."""
    try:
        gateway = IndexGateway(_Shelf(), IndexRule(None, lambda: NOW))  # type: ignore[arg-type]
        answer = _loop().run_until_complete(gateway.answer(ALICE.peer_id, data))
    except RequestRefused:
        return False
    assert len(answer) <= MAX_INDEX_RESPONSE_BYTES
    return True


ADAPTER = AdapterOffer(ALICE.peer_id, LINEAGE.policy, 3, 75, "bf16", 2_200_000, b"h" * 32, 0, NOW, NOW + 60)


def merge_request(data: bytes) -> bool:
    """What a node is asked by one that would merge with it and signs whatever it likes."""
    own = OfferedAdapter(ADAPTER, sign_offer(ALICE, SWARM_ID, ADAPTER), b"")
    door = ProposalHandler(context_of(ALICE, lambda: NOW), lambda: own, RecentPartners(), monotonic=lambda: 0.0)
    with verified_by(lambda peer_id, signed, signature: True):
        answer = _run(door.answer(MALLORY.peer_id, data))
    assert len(answer) <= MAX_MESSAGE_BYTES
    is_taken = isinstance(decode_answer(answer), Accepted)
    assert is_taken or own.partner is None
    return is_taken


def final_request(data: bytes) -> bool:
    return _comes_back(final_message.decode_request, data)


def final_answer(data: bytes) -> bool:
    return _comes_back(final_message.decode_answer, data)


def _comes_back(decode: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        decoded = decode(data)
    except InvalidRecord:
        return False
    assert decode(decoded.encode()) == decoded
    return True


def merge_answer(data: bytes) -> bool:
    try:
        decoded = decode_answer(data)
    except InvalidRecord:
        return False
    assert decode_answer(decoded.encode()) == decoded
    return True


COMMANDS = CommandChannel(SWARM_ID, "crew", ALICE.peer_id, (MALLORY.peer_id,))


def order(data: bytes) -> bool:
    """The opening of a line to a stage, by a driver that signs whatever it likes."""
    with verified_by(lambda peer_id, signed, signature: True):
        try:
            epoch = decode_opening(data, COMMANDS, MALLORY.peer_id)
        except InvalidRecord:
            return False
        again = encode_opening(ALICE, COMMANDS, MALLORY.peer_id, epoch)
        assert decode_opening(again, COMMANDS, MALLORY.peer_id) == epoch
    return True


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
    encoded(dialable(ALICE.peer_id, [text]))  # for the daemon
    return True


def binary_address(data: bytes) -> bool:
    """As the daemon reports where a peer says that it is."""
    try:
        return bool(address_text(data))
    except (ValueError, LookupError):
        return False


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


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all inputs of what needs one."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """To its end, without a loop: nothing it waits for is missing. A loop for each input would be most of the time."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the decoder waits although the stream has ended")

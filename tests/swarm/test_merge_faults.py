"""A partner that vanishes, lies or floods costs the other a solo step and nothing more."""

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from swarm.errors import NetworkError
from swarm.merging.exchange.proposal import (
    ADAPTER_PROTOCOL,
    MAX_MESSAGE_BYTES,
    MERGE_PROTOCOL,
    Accepted,
    Fetched,
    Proposal,
)
from swarm.network.memory.network import MemoryNetwork
from swarm.network.memory.transport import Faults, MemoryTransport
from swarm.network.memory.virtual_clock import virtual_now
from swarm.network.requests.blob_protocol import BLOB_REQUEST_BYTES, BlobRequest, manifest_of, serve_blobs
from swarm.network.requests.framing import Response, Stream, StreamRequests
from swarm.records.adapter_offer import AdapterOffer, sign_offer
from swarm.records.identity import Identity
from swarm.sharing.index import Shard, adapter_key
from swarm.types import Alone, Partner
from tests.swarm.merge_swarm import PIECES, SMALL, MergeNode, in_merge_swarm, tell
from tests.unit.experience_factory import LINEAGE, SWARM_ID

QUIET = Faults(delay_s=(0.05, 0.05))


async def both_offer(nodes: list[MergeNode], num_bytes: int) -> None:
    """Whatever comes of it, it comes in time."""
    limit_s = nodes[0].exchange.time_limit_s(num_bytes)
    async with asyncio.timeout(limit_s):
        await asyncio.gather(*(node.offer(num_bytes) for node in nodes))


# ---- vanishing


def num_messages_of_an_exchange() -> int:
    messages: list[str] = []

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        network.observer = lambda what, sender, recipient, num_bytes: messages.append(what)
        await both_offer(nodes, PIECES)

    in_merge_swarm(2, scenario, faults=QUIET)
    return len(messages)


@pytest.mark.parametrize("how", ["crash", "freeze"])
def test_partner_that_vanishes_at_any_message_costs_a_solo_step_at_most(how: str) -> None:
    def vanish_after(num_messages: int) -> None:
        async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
            seen: list[str] = []

            def watch(what: str, sender: str, recipient: str, num_bytes: int) -> None:
                seen.append(what)
                if len(seen) == num_messages:
                    getattr(network, how)(nodes[1].peer_id)

            network.observer = watch
            await both_offer(nodes[:2], PIECES)
            network.observer = None
            again = await asyncio.gather(nodes[0].offer(), nodes[2].offer())
            assert [isinstance(outcome, Partner) for outcome in again] == [True, True]

        in_merge_swarm(3, scenario, faults=QUIET)

    for num_messages in range(1, num_messages_of_an_exchange() + 1):
        vanish_after(num_messages)


class ForgetfulTransport(MemoryTransport):
    """Loses the first answer to a proposal, after the handler has given it."""

    has_lost = False

    async def answer(self, caller: str, protocol: str, request: bytes) -> Response:
        response = await super().answer(caller, protocol, request)
        if protocol == MERGE_PROTOCOL and not self.has_lost:
            self.has_lost = True
            await asyncio.get_running_loop().create_future()
        return response


def test_partner_whose_answer_was_lost_is_asked_again_and_both_have_each_other() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        outcomes = await asyncio.gather(*(node.offer(PIECES) for node in nodes))
        assert all(isinstance(outcome, Partner) for outcome in outcomes)
        assert all(not node.exchange.declined for node in nodes)

    in_merge_swarm(2, scenario, faults=QUIET, make_transport=ForgetfulTransport)


class _Pipe:
    """One direction of a stream in memory; its writer's side ends when the owner has sent its last byte."""

    def __init__(self, owner: "StreamedTransport") -> None:
        self.reader = asyncio.StreamReader()
        self.transport = self
        self._owner = owner
        self._is_closing = False

    def write(self, data: bytes | memoryview) -> None:
        if self._is_closing:
            return
        data = bytes(data)[: self._owner.bytes_left]
        self._owner.bytes_left -= len(data)
        self.reader.feed_data(data)
        if self._owner.bytes_left == 0:
            self._owner.vanish()

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.reader.feed_eof()

    abort = close


class StreamedTransport(MemoryTransport):
    """Requests as they are on real streams, byte by byte, until this node has sent `bytes_left`."""

    bytes_left = 1 << 40

    def __init__(self, network: MemoryNetwork, peer_id: str, *arguments: Any, **settings: Any) -> None:
        super().__init__(network, peer_id, *arguments, **settings)
        self._requests = StreamRequests(self._open, self.traffic)
        self._pipes: list[_Pipe] = []
        self._conversations: list[asyncio.Task[None]] = []

    async def request(self, *arguments: Any, **limits: Any) -> bytes:
        return await self._requests.request(*arguments, **limits)

    def vanish(self) -> None:
        self._network.crash(self.peer_id)
        for pipe in self._pipes:
            pipe.close()

    async def _open(self, peer_id: str, protocol: str) -> Stream:
        other = await self._network.carry(self.peer_id, peer_id)
        if not isinstance(other, StreamedTransport):
            raise NetworkError("gone")
        there, back = _Pipe(self), _Pipe(other)
        for one in (self, other):
            one._pipes += [there, back]
        answering = other._server.answer_stream(self.peer_id, protocol, there.reader, back)  # type: ignore[arg-type]
        self._conversations.append(asyncio.create_task(answering))
        return back.reader, there  # type: ignore[return-value]


def bytes_of_an_exchange() -> int:
    sent: list[int] = []

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        await both_offer(nodes, PIECES)
        transport = nodes[1].transport
        assert isinstance(transport, StreamedTransport)
        sent.append(StreamedTransport.bytes_left - transport.bytes_left)
        assert tell(nodes) == {"merged": 2}

    in_merge_swarm(2, scenario, faults=QUIET, make_transport=StreamedTransport)
    return sent[0]


def test_partner_that_vanishes_at_any_byte_costs_a_solo_step_at_most() -> None:
    outcomes: list[str] = []

    def vanish_after(num_bytes: int) -> None:
        async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
            transport = nodes[1].transport
            assert isinstance(transport, StreamedTransport)
            transport.bytes_left = num_bytes
            limit_s = nodes[0].exchange.time_limit_s(PIECES)
            async with asyncio.timeout(limit_s):
                survivor, _ = await asyncio.gather(nodes[0].offer(PIECES), nodes[1].offer(PIECES))
            outcomes.append(survivor.reason if isinstance(survivor, Alone) else "merged")
            again = await asyncio.gather(nodes[0].offer(), nodes[2].offer())
            assert [isinstance(outcome, Partner) for outcome in again] == [True, True]

        in_merge_swarm(3, scenario, seed=2, faults=QUIET, make_transport=StreamedTransport)

    total = bytes_of_an_exchange()
    assert total > PIECES
    small = range(1, 1200, 97)  # the proposal, byte counts and manifest
    for num_bytes in (*small, *range(1200, total, 200_003), total - 1):
        vanish_after(num_bytes)
    assert len(set(outcomes)) > 1 and outcomes.count("merged") < len(outcomes) / 3


# ---- lying


class Liar:
    """A member with a key of its own that is always ready, and answers as it likes."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.identity = Identity(b"m" * 32)
        self.transport = MemoryTransport(network, self.identity.peer_id)
        self.blob = random.Random(0).randbytes(PIECES)
        self.served: bytes | None = None
        """Sent in place of the blob that was announced; None: nothing ever."""
        self.answer: Callable[[], bytes] | None = None
        """To proposals; None: the own offer, in order."""
        self.num_asked = 0
        self.transport.serve(MERGE_PROTOCOL, self._take, max_request_bytes=MAX_MESSAGE_BYTES)
        self.transport.serve(ADAPTER_PROTOCOL, self._serve, max_request_bytes=BLOB_REQUEST_BYTES)

    def offer(self, **changes: object) -> AdapterOffer:
        now, digest = virtual_now(), hashlib.sha256(self.blob).digest()
        offer = AdapterOffer(
            self.identity.peer_id, LINEAGE.policy, 0, 0, "bf16", PIECES, digest, 0, now, now + 600
        )  # fmt: skip
        return replace(offer, **changes)  # type: ignore[arg-type]

    def record(self, **changes: object) -> bytes:
        return sign_offer(self.identity, SWARM_ID, self.offer(**changes))

    async def enlist(self) -> None:
        key = adapter_key(SWARM_ID, "merge", LINEAGE.policy, Shard(0, 0))
        assert await self.transport.store(key, self.identity.peer_id, self.record(), virtual_now() + 600)

    async def _take(self, peer_id: str, request: bytes) -> bytes:
        self.num_asked += 1
        return Accepted(self.record()).encode() if self.answer is None else self.answer()

    async def _serve(self, peer_id: str, request: bytes) -> bytes:
        if self.served is None:
            await asyncio.get_running_loop().create_future()
        wanted, served = BlobRequest.decode(request), self.served or b""
        if wanted.length == 0:
            return manifest_of(served)
        return served[wanted.offset : wanted.offset + wanted.length]


@contextlib.asynccontextmanager
async def liar_in(network: MemoryNetwork) -> AsyncIterator[Liar]:
    liar = Liar(network)
    await liar.transport.start()
    await liar.enlist()
    try:
        yield liar
    finally:
        await liar.transport.stop()


async def assert_honest_nodes_go_on(nodes: list[MergeNode]) -> None:
    """Whatever came of the meeting with the liar, the next offers find each other."""
    for _ in range(3):
        outcomes = await asyncio.gather(*(node.offer(PIECES) for node in nodes))
        if all(isinstance(outcome, Partner) for outcome in outcomes):
            return
    raise AssertionError(tell(nodes))


FLIPPED = 2 << 20
"""Where a byte of the liar's adapter differs: in the last piece."""


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("wrong_bytes", "damaged"),
        ("too_short", "damaged"),
        ("endless", "oversize"),
        ("silent", "deadline"),
    ],
)
def test_adapter_that_is_not_as_announced_costs_a_solo_step(deed: str, reason: str) -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with liar_in(network) as liar:
            flipped = bytearray(liar.blob)
            flipped[FLIPPED] ^= 1
            deeds = {"wrong_bytes": bytes(flipped), "too_short": liar.blob[:-1], "silent": None, "endless": None}
            liar.served = deeds[deed]
            if deed == "endless":
                liar._serve = _endless  # type: ignore[method-assign]
                liar.transport._server._services.pop(ADAPTER_PROTOCOL)
                liar.transport.serve(ADAPTER_PROTOCOL, _endless, max_request_bytes=BLOB_REQUEST_BYTES)
            async with asyncio.timeout(nodes[0].exchange.time_limit_s(PIECES)):
                assert await nodes[0].offer(PIECES) == Alone(reason)
            nodes[1].outer_round = nodes[0].outer_round
            await assert_honest_nodes_go_on(nodes)

    in_merge_swarm(2, scenario)


async def _endless(peer_id: str, request: bytes) -> bytes:
    return bytes(16 << 20)


def test_answers_that_no_honest_peer_gives_leave_the_node_unpaired() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        node = nodes[0]
        async with liar_in(network) as liar:
            third = Identity(b"o" * 32)
            replayed = sign_offer(third, SWARM_ID, liar.offer(peer_id=third.peer_id))
            # Made when they are sent: what is old is turned away for that alone.
            answers: list[Callable[[], bytes]] = [
                lambda: b"",
                lambda: b"junk",
                lambda: bytes(2000),
                lambda: Accepted(b"").encode(),
                lambda: Accepted(replayed).encode(),
                lambda: Accepted(liar.record()[:-1] + b"\0").encode(),
                lambda: Accepted(sign_offer(third, SWARM_ID, liar.offer(peer_id=third.peer_id))).encode(),
                lambda: Accepted(sign_offer(liar.identity, "cd" * 16, liar.offer())).encode(),
                lambda: Accepted(liar.record(lineage="33" * 16)).encode(),
                lambda: Accepted(liar.record(num_bytes=1 << 30)).encode(),
                lambda: Accepted(liar.record(outer_round=100)).encode(),
                lambda: Accepted(liar.record(created_at=virtual_now() - 900, expires_at=virtual_now() - 300)).encode(),
                lambda: Fetched(bytes(32)).encode(),
            ]
            for answer in answers:
                liar.answer, asked = answer, liar.num_asked
                node.outer_round = 0
                assert await node.offer(PIECES) == Alone("declined")
                assert liar.num_asked > asked
                await liar.enlist()
                await asyncio.sleep(2000)  # until it is no longer left alone
                await liar.enlist()

    in_merge_swarm(1, scenario)


def test_always_busy_and_silent_members_cost_time_but_honest_ones_are_found() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with liar_in(network) as liar:
            network.freeze(liar.identity.peer_id)
            outcomes = await asyncio.gather(*(node.offer(PIECES) for node in nodes))
            assert all(isinstance(outcome, Partner) for outcome in outcomes)

    in_merge_swarm(4, scenario)


def test_member_that_proposes_to_everybody_at_once_gets_its_turn_and_no_more() -> None:
    num_offers = 16

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with liar_in(network) as liar:
            liar.blob = liar.served = bytes(SMALL)
            key = adapter_key(SWARM_ID, "merge", LINEAGE.policy, Shard(0, 0))

            async def court() -> None:
                """Whoever is listed is asked at once; the answers do not matter, nor those it gives."""
                while True:
                    for peer_id in await liar.transport.load(key):
                        proposal = Proposal(liar.record(num_bytes=SMALL, outer_round=nodes[0].outer_round)).encode()
                        with contextlib.suppress(NetworkError):
                            await liar.transport.request(
                                peer_id, MERGE_PROTOCOL, proposal, max_response_bytes=MAX_MESSAGE_BYTES, deadline_s=1.0
                            )
                    await asyncio.sleep(0.2)

            courting = asyncio.create_task(court())
            for _ in range(num_offers):
                await asyncio.gather(*(node.offer() for node in nodes))
            courting.cancel()
            shares = [node.partners[liar.identity.peer_id] / num_offers for node in nodes]
            assert 0 < sum(shares) / len(shares) < 0.4 and max(shares) < 0.6, shares  # of 16 offers of each
            assert tell(nodes)["merged"] > 0.9 * num_offers * len(nodes)

    in_merge_swarm(8, scenario)


def test_partner_whose_adapter_was_of_no_use_is_not_chosen_again_soon() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with liar_in(network) as liar:
            liar.blob = liar.served = bytes(SMALL)
            honest_record, node = liar.record, nodes[0]
            liar.record = lambda **changes: honest_record(  # type: ignore[method-assign]
                **({"num_bytes": SMALL, "outer_round": node.outer_round} | changes)
            )
            for _ in range(10):
                await liar.enlist()
                outcome, *_ = await asyncio.gather(*(one.offer() for one in nodes))
                if isinstance(outcome, Partner) and outcome.peer_id == liar.identity.peer_id:
                    node.exchange.report_unusable(outcome.peer_id)
            assert node.partners[liar.identity.peer_id] <= 2

    in_merge_swarm(3, scenario)


def test_flood_of_proposals_and_fetches_leaves_the_honest_ones_their_exchange() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with liar_in(network) as liar:
            victims = [node.peer_id for node in nodes]

            requests = [b"junk", Proposal(liar.record(outer_round=1000)).encode()] * 60

            async def flood(victim: str) -> None:
                for request in requests:
                    with contextlib.suppress(NetworkError):
                        await liar.transport.request(
                            victim, MERGE_PROTOCOL, request, max_response_bytes=MAX_MESSAGE_BYTES, deadline_s=5.0
                        )

            liar.answer = lambda: b"junk"
            floods = [asyncio.create_task(flood(victim)) for victim in victims for _ in range(2)]
            outcomes = await asyncio.gather(*(node.offer(SMALL) for node in nodes))
            assert all(isinstance(outcome, Partner) for outcome in outcomes)
            await asyncio.gather(*floods)
            declined = sum(node.exchange.declined["rate"] for node in nodes)
            assert declined > 700

    in_merge_swarm(4, scenario)


def test_a_stranger_gets_nothing_of_an_adapter() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with liar_in(network) as liar:
            offers = asyncio.gather(*(node.offer(PIECES) for node in nodes))
            liar.answer = lambda: b"junk"
            await asyncio.sleep(0.3)
            digest = hashlib.sha256(nodes[0].payload(PIECES)).digest()
            with pytest.raises(NetworkError, match="unknown adapter"):
                await liar.transport.request(
                    nodes[0].peer_id,
                    ADAPTER_PROTOCOL,
                    BlobRequest(digest, 0, 1000).encode(),
                    max_response_bytes=1000,
                    deadline_s=5.0,
                )
            await offers

    in_merge_swarm(2, scenario)


def test_honest_server_of_blobs_is_what_the_liar_differs_from() -> None:
    """The liar's bytes, served in order, are taken: so the tests above fail for their own reason."""

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with liar_in(network) as liar:
            liar.served = liar.blob
            outcome = await nodes[0].offer(PIECES)
            assert isinstance(outcome, Partner) and outcome.snapshot.payload == liar.blob
            assert serve_blobs is not None

    in_merge_swarm(1, scenario)

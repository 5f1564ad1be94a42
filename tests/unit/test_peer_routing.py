"""Where a peer is of which only the id is known: asked of connected peers, dialled once, and believed of nobody."""

import asyncio
import random
from collections.abc import Iterable, Sequence

import msgpack
import pytest

from swarm.errors import RequestError
from swarm.network.memory.virtual_clock import run
from swarm.network.peers.peer_routing import MAX_ASKED_PEERS, MAX_IN_VAIN, PeerRouting, SessionSlot
from swarm.network.transport import RequestRefused
from swarm.records.identity import Identity

ANN, BEN, CARL, EVE = (Identity(bytes([number]) * 32).peer_id for number in range(4))
HERE, THERE = "/ip4/192.0.2.1/tcp/4001", "/ip4/192.0.2.2/tcp/4001"


class FakeSession:
    """The daemon of one node: who is connected, where peers listen, and which addresses work."""

    def __init__(self, connected: Iterable[str], works: dict[str, str]) -> None:
        self.connected = set(connected)
        self.works = works
        self.dialled: list[tuple[str, tuple[str, ...]]] = []
        self.num_lists = 0
        self.num_lookups = 0

    @property
    def neighbors(self) -> frozenset[str]:
        return frozenset(self.connected)

    async def peers(self) -> dict[str, tuple[str, ...]]:
        self.num_lists += 1
        await asyncio.sleep(0.01)
        return dict.fromkeys(self.connected, ())

    async def listening_addresses(self, peer_ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
        wanted = list(peer_ids)
        self.num_lookups += len(wanted)
        return {peer_id: (self.works[peer_id],) for peer_id in wanted if peer_id in self.works}

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> bool:
        self.dialled.append((peer_id, tuple(addresses)))
        await asyncio.sleep(0.1)
        if self.works.get(peer_id) in addresses:
            self.connected.add(peer_id)
            return True
        return False


class Node:
    def __init__(self, connected: Iterable[str] = (), works: dict[str, str] | None = None) -> None:
        self.session = FakeSession(connected, works or {})
        self.asked: list[str] = []
        self.answers: dict[str, object] = {}
        sessions = SessionSlot()
        sessions.current = self.session  # type: ignore[assignment]
        self.routing = PeerRouting(sessions, self._ask, random.Random(0))

    async def _ask(self, peer_id: str, request: bytes) -> bytes:
        self.asked.append(peer_id)
        if peer_id not in self.answers:
            raise RequestError("no answer", "deadline")
        answer = self.answers[peer_id]
        return answer if isinstance(answer, bytes) else msgpack.packb(answer) or b""


def test_the_peer_that_named_another_is_asked_where_it_is() -> None:
    async def main() -> None:
        node = Node([BEN, CARL], {EVE: THERE})
        node.routing.named(BEN, [EVE])
        node.answers[BEN] = {EVE: [HERE, THERE]}
        assert await node.routing.reach(EVE)
        assert node.asked == [BEN]
        assert node.session.dialled == [(EVE, (HERE, THERE))]
        assert not await node.routing.reach(EVE), "it is connected: an address is not what is missing"

    run(main())


def test_what_a_peer_announced_of_itself_is_tried_before_anybody_is_asked() -> None:
    async def main() -> None:
        node = Node([BEN], {EVE: THERE})
        node.routing.learn(EVE, [THERE, "nonsense"])
        assert await node.routing.reach(EVE)
        assert node.asked == []

    run(main())


def test_others_are_asked_where_the_namer_is_gone_or_lies() -> None:
    async def main() -> None:
        node = Node([BEN, CARL], {EVE: THERE})
        node.routing.named(BEN, [EVE])
        node.answers = {BEN: {EVE: [HERE]}, CARL: {EVE: [THERE]}}
        assert await node.routing.reach(EVE)
        assert node.asked == [BEN, CARL]

    run(main())


@pytest.mark.parametrize(
    "answer",
    [b"", b"\xc1", [], {EVE: "x"}, {EVE: [1]}, {EVE: ["nonsense"]}, {EVE: [HERE] * 5}, {EVE: [f"{THERE}/p2p/{CARL}"]}],
)
def test_an_answer_that_is_none_costs_one_question_and_no_dial(answer: object) -> None:
    async def main() -> None:
        node = Node([BEN], {EVE: THERE})
        node.answers[BEN] = answer
        assert not await node.routing.reach(EVE)
        assert (node.asked, node.session.dialled) == ([BEN], [])

    run(main())


def test_callers_share_one_search_and_a_peer_that_was_not_found_is_left_alone_for_a_while() -> None:
    async def main() -> None:
        node = Node([BEN], {})
        node.answers[BEN] = {EVE: [HERE]}
        assert not any(await asyncio.gather(*(node.routing.reach(EVE) for _ in range(50))))
        assert not await node.routing.reach(EVE)
        assert len(node.asked) == len(node.session.dialled) == 1
        await asyncio.sleep(11)
        node.session.works[EVE] = HERE
        assert await node.routing.reach(EVE)

    run(main())


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_peer_that_sends_others_to_where_nobody_is_costs_few_dials_and_keeps_nobody_from_being_found(
    is_silent: bool,
) -> None:
    """BEN names made-up peers, and an honest one as well; CARL knows where that is."""

    async def main() -> None:
        node = Node([BEN, CARL], {EVE: THERE})
        made_up = [Identity(number.to_bytes(2, "big") * 16).peer_id for number in range(1, 101)]
        node.routing.named(BEN, [*made_up, EVE])
        node.answers = {CARL: {EVE: [THERE]}}
        if not is_silent:
            node.answers[BEN] = {name: [HERE] for name in made_up}
        for name in made_up:
            assert not await node.routing.reach(name)
        assert node.asked.count(BEN) == MAX_IN_VAIN
        assert len(node.session.dialled) <= MAX_IN_VAIN
        assert await node.routing.reach(EVE)
        await asyncio.sleep(31)
        node.answers[BEN] = {ANN: [HERE]}
        node.session.works[ANN] = HERE
        node.routing.named(BEN, [ANN])
        assert await node.routing.reach(ANN), "it is asked again after a while"

    run(main())


def test_a_peer_that_knows_nothing_of_others_is_asked_as_often_as_there_is_something_to_ask() -> None:
    async def main() -> None:
        node = Node([BEN], {EVE: THERE})
        node.answers[BEN] = {EVE: [THERE]}
        others = [Identity(number.to_bytes(2, "big") * 16).peer_id for number in range(1, 101)]
        for name in others:
            assert not await node.routing.reach(name)
        assert await node.routing.reach(EVE)
        assert node.asked.count(BEN) == len(others) + 1

    run(main())


def test_a_node_tells_where_connected_and_announced_peers_are_and_of_no_others() -> None:
    async def main() -> None:
        node = Node([BEN], {BEN: HERE, CARL: THERE})
        node.routing.learn(EVE, [THERE])
        answer = msgpack.unpackb(await node.routing.answer(ANN, msgpack.packb([BEN, CARL, EVE]) or b""))
        assert answer == {BEN: [HERE], EVE: [THERE]}

    run(main())


def test_questions_by_the_thousand_cost_the_daemon_a_bounded_number_of_answers() -> None:
    async def main() -> None:
        silent = [Identity(number.to_bytes(2, "big") * 16).peer_id for number in range(300, 600)]
        node = Node([BEN, *silent], {BEN: HERE})
        for second in range(20):
            asked = [[BEN, *silent[start : start + 10]] for start in range(0, 300, 10)]
            questions = (node.routing.answer(f"name {second}", msgpack.packb(one) or b"") for one in asked)
            answers = await asyncio.gather(*questions)
            assert all(msgpack.unpackb(answer) == {BEN: [HERE]} for answer in answers)
            await asyncio.sleep(1.0)
        assert node.session.num_lists <= 20 * 4
        assert node.session.num_lookups <= 20 * 40 + 80
        node.session.connected.add(CARL)
        node.session.works[CARL] = THERE
        await asyncio.sleep(1.0)
        assert msgpack.unpackb(await node.routing.answer(ANN, msgpack.packb([CARL]) or b"")) == {CARL: [THERE]}

    run(main())


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xc1",
        b"\x91" * 1000,
        msgpack.packb(EVE),
        msgpack.packb(["x"]),
        msgpack.packb([EVE] * (MAX_ASKED_PEERS + 1)),
    ],
)
def test_a_malformed_question_is_refused(request_bytes: bytes) -> None:
    async def main() -> None:
        with pytest.raises(RequestRefused):
            await Node([EVE], {EVE: HERE}).routing.answer(ANN, request_bytes)

    run(main())


def test_what_is_remembered_of_peers_is_bounded() -> None:
    async def main() -> None:
        routing = Node([EVE], {}).routing
        routing.named(EVE, map(str, range(10_000)))
        assert len(routing._named_by) == 4096
        assert "9999" in routing._named_by

    run(main())

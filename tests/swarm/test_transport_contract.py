"""The contract of `network.transport.Transport`: the same assertions over every transport, in memory and over real sockets."""

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import psutil
import pytest
import pytest_asyncio

from swarm.config import NetworkSection
from swarm.errors import RequestError
from swarm.network.index_entry import CLOCK_SKEW_S, MAX_KEY_BYTES, MAX_SUBKEY_BYTES, MAX_VALUE_BYTES, Validity
from swarm.network.make_transport import TRANSPORTS, make_transport
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.transport import MAX_GOSSIP_BYTES, Contact, RequestRefused, Transport, ValidationResult
from swarm.records.identity import Identity

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
STRANGER = Identity(b"s" * 32).peer_id
TOPIC = "swarm/contract"
DEADLINE_S = 20.0


def longest_value_wins(key: str, subkey: str, value: bytes) -> Validity | None:
    """Every value but `bad` is valid; of two entries the longer value is the newer one."""
    return None if value == b"bad" else Validity(-math.inf, math.inf, (float(len(value)), 0, b""))


async def echo(peer_id: str, request: bytes) -> bytes:
    return peer_id.encode() + b":" + request


async def large(peer_id: str, request: bytes) -> bytes:
    return bytes(300_000)


async def refuse(peer_id: str, request: bytes) -> bytes:
    raise RequestRefused("not now")


async def break_down(peer_id: str, request: bytes) -> bytes:
    raise KeyError("secret")


async def hang(peer_id: str, request: bytes) -> bytes:
    return await asyncio.get_running_loop().create_future()


class GossipLine(MemoryNetwork):
    """A network in memory on which the gossip of the two ends finds the node in the middle alone."""

    ends: tuple[str, ...] = ()

    def find_in_topic(self, topic: str, seen_by: str, count: int) -> list[str]:
        found = super().find_in_topic(topic, seen_by, count)
        return [one for one in found if not {one, seen_by} <= set(self.ends)]


@dataclass
class Swarm:
    """Two ends of the transport under test, and a node in the middle through which both join.

    The index of a light node lies on a full peer, so a daemon node stands in the middle of a swarm of light nodes.
    """

    backend: str
    folder: Path
    network: GossipLine = field(default_factory=lambda: GossipLine(random.Random(0), time.time))
    nodes: list[Transport] = field(default_factory=list)
    received: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    """{peer id: (forwarder, message) of each message that its gossip handler was given}"""

    async def start_node(self) -> Transport:
        identity = Identity(os.urandom(32))
        node = self._make(identity, is_middle=not self.nodes)
        assert node is not None
        for handler in (echo, large, refuse, break_down, hang):
            node.serve(f"test/{handler.__name__}", handler, max_request_bytes=1000)
        await node.start()
        return node

    def _make(self, identity: Identity, *, is_middle: bool) -> Transport | None:
        if self.backend == "memory":
            return MemoryTransport(self.network, identity.peer_id, longest_value_wins)
        folder = self.folder / identity.peer_name
        folder.mkdir()
        backend = "hivemind" if is_middle else self.backend
        peers = () if is_middle else self.middle.addresses()
        config = NetworkSection.model_validate({"backend": backend, "initial_peers": peers, "request_timeout_s": 5})
        return make_transport(config, identity, folder, longest_value_wins)

    @property
    def middle(self) -> Transport:
        return self.nodes[0]

    @property
    def ends(self) -> tuple[Transport, Transport]:
        return self.nodes[1], self.nodes[2]

    def join_topic(self, node: Transport) -> None:
        received = self.received.setdefault(node.peer_id, [])

        def judge(forwarder: str, message: bytes) -> ValidationResult:
            received.append((forwarder, message))
            return ValidationResult.REJECT if message.startswith(b"bad") else ValidationResult.ACCEPT

        node.subscribe(TOPIC, judge)


def contact_of(node: Transport, *, gossips: bool) -> Contact:
    addresses = tuple(address.rpartition("/p2p/")[0] for address in node.addresses())
    return Contact(node.peer_id, addresses, node.gossip_addresses() if gossips else (), node.hosts_index)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["memory", *TRANSPORTS])
async def swarm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    made = Swarm(request.param, tmp_path_factory.mktemp("contract"))
    try:
        for _ in range(3):
            made.nodes.append(await made.start_node())
        one, other = made.ends
        made.network.ends = (one.peer_id, other.peer_id)
        for near, far in ((one, other), (other, one)):
            near.meet(contact_of(made.middle, gossips=True))
            near.meet(contact_of(far, gossips=False))
        yield made
    finally:
        for node in made.nodes:
            await node.stop()


async def ask(node: Transport, peer_id: str, name: str, request: bytes = b"hi", **limits: float) -> bytes:
    return await node.request(
        peer_id,
        f"test/{name}",
        request,
        max_response_bytes=int(limits.get("max_response_bytes", 1000)),
        deadline_s=limits.get("deadline_s", 10.0),
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_every_backend_of_the_settings_is_in_the_registry() -> None:
    assert {*TRANSPORTS, "off"} == set(get_args(NetworkSection.model_fields["backend"].annotation))


async def test_a_node_knows_the_time_and_its_own_addresses(swarm: Swarm) -> None:
    for node in swarm.nodes:
        assert abs(node.now() - time.time()) < CLOCK_SKEW_S
        assert node.addresses() and all(one.endswith(f"/p2p/{node.peer_id}") for one in node.addresses())


async def test_an_entry_is_found_by_every_node_and_the_newer_one_stays(swarm: Swarm) -> None:
    (one, other), now = swarm.ends, time.time()
    assert await one.store("replaced", "s", b"newer", now + 60)
    await other.store("replaced", "s", b"old", now + 600)
    assert await other.store("replaced", "t", b"far", now + 1e9), "a longer life than an hour is cut, not refused"
    for node in swarm.nodes:
        assert await node.load("replaced") == {"s": b"newer", "t": b"far"}
        assert await node.load("other") == {}


async def test_an_entry_is_gone_once_it_has_expired(swarm: Swarm) -> None:
    one, other = swarm.ends
    assert not await one.store("expiring", "past", b"x", time.time() - 1)
    expires_at = time.time() + 1.0
    assert await one.store("expiring", "s", b"x", expires_at)
    async with asyncio.timeout(DEADLINE_S):
        while found := await other.load("expiring"):
            assert found == {"s": b"x"}
            await asyncio.sleep(0.2)  # a full peer answers a light node five times a second
    assert time.time() >= expires_at


async def test_invalid_and_oversize_entries_are_refused(swarm: Swarm) -> None:
    one, other = swarm.ends
    assert not await one.store("invalid", "s", b"bad", time.time() + 60)
    assert await other.load("invalid") == {}
    for key, subkey, size in [
        ("key", "s", MAX_VALUE_BYTES + 1),
        ("k" * (MAX_KEY_BYTES + 1), "s", 1),
        ("key", "s" * (MAX_SUBKEY_BYTES + 1), 1),
        ("a\0b", "s", 1),
        ("", "s", 1),
    ]:
        with pytest.raises(ValueError, match="bytes"):
            await one.store(key, subkey, bytes(size), time.time() + 60)


async def test_a_handler_is_told_who_calls_and_its_response_comes_back(swarm: Swarm) -> None:
    for caller, server in (swarm.ends, swarm.ends[::-1], (swarm.ends[0], swarm.middle), (swarm.middle, swarm.ends[1])):
        assert await ask(caller, server.peer_id, "echo") == caller.peer_id.encode() + b":hi"
    assert len(await ask(swarm.ends[0], swarm.ends[1].peer_id, "large", max_response_bytes=300_000)) == 300_000


@pytest.mark.parametrize(
    ("name", "request_bytes", "limits", "reason", "words"),
    [
        ("refuse", 1, {}, "refused", "not now"),
        ("break_down", 1, {}, "refused", "the handler broke"),
        ("echo", 1001, {}, "refused", "a request must be <= 1000 bytes, got 1001"),
        ("large", 1, {"max_response_bytes": 299_999}, "oversize", "a response must be <= 299999 bytes, got 300000"),
        ("hang", 1, {"deadline_s": 0.2}, "deadline", "no answer within 0.2 s"),
        ("none", 1, {}, None, "test/none"),
    ],
)
async def test_a_request_without_a_response_is_an_error_with_the_reason(
    swarm: Swarm, name: str, request_bytes: int, limits: dict[str, float], reason: str | None, words: str
) -> None:
    one, other = swarm.ends
    num_failed = one.traffic.requests_failed
    with pytest.raises(RequestError, match=words) as error:
        await ask(one, other.peer_id, name, bytes(request_bytes), **limits)
    assert reason is None or error.value.reason == reason
    assert "secret" not in str(error.value)
    assert one.traffic.requests_failed == num_failed + 1
    assert await ask(one, other.peer_id, "echo") == one.peer_id.encode() + b":hi", "the next request is answered"


async def test_requests_that_are_given_up_half_way_leave_the_connection_whole(swarm: Swarm) -> None:
    one, other = swarm.ends
    for _ in range(10):
        with pytest.raises(RequestError, match="a response must be"):
            await ask(one, other.peer_id, "large", max_response_bytes=299_999)
        assert await ask(one, other.peer_id, "echo") == one.peer_id.encode() + b":hi"


@pytest.mark.parametrize("peer_id", [STRANGER, "nonsense"])
async def test_a_peer_that_is_nowhere_is_unreachable(swarm: Swarm, peer_id: str) -> None:
    with pytest.raises(RequestError) as error:
        await ask(swarm.ends[0], peer_id, "echo")
    assert error.value.reason == "unreachable"


async def test_a_protocol_has_one_handler(swarm: Swarm) -> None:
    if swarm.backend == "memory":  # the others take handlers before they start only
        with pytest.raises(ValueError, match="one handler"):
            swarm.ends[0].serve("test/echo", echo, max_request_bytes=1)


async def test_gossip_is_validated_before_it_is_forwarded(swarm: Swarm) -> None:
    one, other = swarm.ends
    for node in swarm.nodes:
        swarm.join_topic(node)
    at_middle, at_end = swarm.received[swarm.middle.peer_id], swarm.received[other.peer_id]
    async with asyncio.timeout(DEADLINE_S):  # until the three have found each other
        number = 0
        while not at_end:
            await one.publish(TOPIC, b"good %d" % number)
            number += 1
            await asyncio.sleep(0.1)
    await one.publish(TOPIC, b"bad")
    await until(lambda: b"bad" in [message for _, message in at_middle])
    await one.publish(TOPIC, b"good at last")
    await until(lambda: b"good at last" in [message for _, message in at_end])
    assert b"bad" not in [message for _, message in at_end], "the middle forwarded what it had rejected"
    assert {forwarder for forwarder, _ in at_end} == {swarm.middle.peer_id}
    assert not swarm.received[one.peer_id], "a node is not given its own messages"
    other.unsubscribe(TOPIC)
    num_received = len(at_end)
    await one.publish(TOPIC, b"good after all")
    await until(lambda: b"good after all" in [message for _, message in at_middle])
    assert len(at_end) == num_received
    with pytest.raises(ValueError, match=f"<= {MAX_GOSSIP_BYTES} bytes"):
        await one.publish(TOPIC, bytes(MAX_GOSSIP_BYTES + 1))


async def test_stop_ends_everything_and_may_be_repeated(swarm: Swarm) -> None:
    one, children, tasks = swarm.ends[0], set(psutil.Process().children()), asyncio.all_tasks()
    leaving = await swarm.start_node()
    one.meet(contact_of(leaving, gossips=False))
    assert await ask(one, leaving.peer_id, "echo") == one.peer_id.encode() + b":hi"
    await leaving.stop()
    await leaving.stop()
    assert await leaving.connected_peers() == ()
    assert set(psutil.Process().children()) <= children, "a child process was left behind"
    with pytest.raises(RequestError):
        await ask(leaving, one.peer_id, "echo", deadline_s=2.0)
    with pytest.raises(RequestError):
        await ask(one, leaving.peer_id, "echo", deadline_s=5.0)
    own = {task for task in asyncio.all_tasks() - tasks if "network-supervisor" in task.get_name()}
    assert not own, "a task of the node goes on"

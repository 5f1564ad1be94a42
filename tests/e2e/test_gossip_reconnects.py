"""Gossip comes back after what breaks connections without a word: a sleep, another address, a peer that starts anew."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import pytest

from swarm.config import NetworkSection
from swarm.network.libp2p.gossip import Libp2pGossip
from swarm.network.libp2p.host_hardening import SILENCE_S
from swarm.network.network_context import NetworkContext
from swarm.network.transport import ValidationResult
from swarm.records.identity import Identity

TOPIC = "test/topic"


class Plane:
    """A gossip plane and what it has heard."""

    def __init__(self, number: int) -> None:
        identity = Identity(bytes([number]) * 32)
        self.peer_id = identity.peer_id
        self.gossip = Libp2pGossip(NetworkContext.of(NetworkSection(), identity))
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.gossip.subscribe(TOPIC, self._hear)

    def _hear(self, peer_id: str, message: bytes) -> ValidationResult:
        self.heard.put_nowait(message)
        return ValidationResult.ACCEPT


@pytest.fixture
async def planes() -> AsyncIterator[tuple[Plane, Plane]]:
    """Two that are connected."""
    async with contextlib.AsyncExitStack() as stack:
        made = Plane(1), Plane(2)
        for plane in made:
            await plane.gossip.start()
            stack.push_async_callback(plane.gossip.stop)
        made[0].gossip.meet(made[1].peer_id, made[1].gossip.addresses)
        await until_heard(*made)
        yield made


async def until_heard(speaker: Plane, listener: Plane, deadline_s: float = 90.0) -> None:
    """Speak until it arrives: who joins a topic hears only what is said from then on."""
    while not listener.heard.empty():
        listener.heard.get_nowait()
    async with asyncio.timeout(deadline_s):
        for number in range(10_000):
            await speaker.gossip.publish(TOPIC, number.to_bytes(4, "big") + speaker.peer_id.encode())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await listener.heard.get()
                    return


async def test_system_gives_up_connections_on_which_nothing_comes_back(planes: tuple[Plane, Plane]) -> None:
    for plane in planes:
        assert plane.gossip._host is not None
        (connection,) = plane.gossip._host._host.get_network().get_connections()
        muxed: Any = connection.muxed_conn
        line = muxed.secured_conn.conn.conn.stream.stream.socket
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_S * 1000


async def test_peer_whose_subscriptions_were_lost_is_heard_again(planes: tuple[Plane, Plane]) -> None:
    """What py-libp2p does when the older of two connections to a peer ends."""
    first, second = planes
    await until_heard(second, first)
    assert second.gossip._pubsub is not None
    second.gossip._wake.set()  # have it look once who is subscribed
    async with asyncio.timeout(60):
        while first.peer_id not in second.gossip._subscribers:
            await asyncio.sleep(0.05)
    second.gossip._pubsub.peer_topics.clear()
    for mesh in second.gossip._pubsub.router.mesh.values():
        mesh.clear()
    await until_heard(second, first)
    await until_heard(first, second)


async def test_a_peer_that_stays_silent_is_hung_up_on_again_and_later_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the old connection may come after what the peer has said on the new one, and undo it."""
    gossip, now, hung_up = Libp2pGossip(NetworkContext.of(NetworkSection(), Identity(bytes(32)))), [0.0], list[float]()

    class Host:
        def peers(self) -> tuple[str, ...]:
            return ("peer",)

        async def disconnect(self, peer_id: str, streams: Sequence[object] = ()) -> None:
            hung_up.append(now[0])

    class Pubsub:
        peers: ClassVar[dict[str, object]] = {}
        peer_topics: ClassVar[dict[str, set[str]]] = {TOPIC: {"peer"}}

    monkeypatch.setattr("swarm.network.libp2p.gossip.time.monotonic", lambda: now[0])
    gossip._pubsub = Pubsub()  # type: ignore[assignment]

    async def look_until(time_s: float) -> None:
        while now[0] < time_s:
            await gossip._hang_up_on_forgotten(Host())  # type: ignore[arg-type]
            now[0] += 1

    await look_until(10)
    assert not hung_up
    Pubsub.peer_topics.clear()
    await look_until(100)
    assert hung_up == [15, 26, 47, 88], "after 5, 10, 20 and 40 s of silence"
    Pubsub.peer_topics[TOPIC] = {"peer"}
    await look_until(110)
    Pubsub.peer_topics.clear()
    await look_until(117)
    assert hung_up[4:] == [115], "heard in between: as the first time"
    await look_until(20_000)
    assert hung_up[-1] - hung_up[-2] == 601

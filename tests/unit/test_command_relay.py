"""Commands that machines of a pipeline pass on to each other: the last one replies, and nobody else can pass anything on."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from swarm.errors import RequestError
from swarm.network.commands.caller import CommandCaller
from swarm.network.commands.envelope import RELAY_HEAD, RELAY_PROTOCOL, CommandChannel
from swarm.network.commands.service import CommandService
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.records.identity import Identity

DRIVER, STRANGER, *STAGES = (Identity(bytes([number]) * 32) for number in range(1, 6))
PEERS = [stage.peer_id for stage in STAGES]
CHANNEL = CommandChannel("0" * 32, "crew", DRIVER.peer_id, tuple(PEERS))


@dataclass
class Chain:
    """A driver and three machines, each of which adds its number to a payload and passes it on."""

    caller: CommandCaller
    network: MemoryNetwork
    transports: dict[str, MemoryTransport]
    services: list[CommandService] = field(default_factory=list)
    heard: list[tuple[int, str | None]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    refusing: int | None = None

    async def send(self, kind: str = "add", max_reply_bytes: int = 100, silence_s: float | None = None) -> bytes:
        return await self.caller.send(
            PEERS[0],
            kind,
            b"x",
            max_reply_bytes=max_reply_bytes,
            deadline_s=10,
            silence_s=silence_s,
            relayed_to=PEERS[1:],
        )

    def work(self, place: int, sender: str | None, kind: str, payload: bytes) -> bytes | tuple[str, bytes]:
        self.heard.append((place, sender))
        if kind == "hold" and place > 0:
            self.hold.wait(10)
        if self.refusing == place:
            return b"refused"
        if kind == "long":
            return bytes(10_000)
        return (PEERS[place + 1], payload + b"%d" % place) if place < 2 else payload + b"%d" % place


def serve(chain: Chain, place: int) -> CommandService:
    def relayed(sender: str, kind: str, payload: bytes) -> bytes | tuple[str, bytes]:
        return chain.work(place, sender, kind, payload) if sender == PEERS[place - 1] else b"refused"

    return CommandService(
        CHANNEL,
        chain.transports[PEERS[place]],
        carry_out=lambda kind, payload: chain.work(place, None, kind, payload),
        max_payload=lambda kind: 1000,
        carry_out_relayed=relayed,
    )


@asynccontextmanager
async def chain_of_three() -> AsyncIterator[Chain]:
    network = MemoryNetwork(random.Random(0), time.time)
    peers = [DRIVER.peer_id, STRANGER.peer_id, *PEERS]
    transports = {peer_id: MemoryTransport(network, peer_id) for peer_id in peers}
    chain = Chain(CommandCaller(CHANNEL, DRIVER, transports[DRIVER.peer_id], time.time), network, transports)
    chain.services = [serve(chain, place) for place in range(3)]
    for transport in transports.values():
        await transport.start()
    try:
        yield chain
    finally:
        chain.hold.set()
        for service in chain.services:
            await service.close()
        for transport in transports.values():
            await transport.stop()


async def test_each_machine_passes_on_and_the_last_one_replies() -> None:
    async with chain_of_three() as chain:
        assert await asyncio.gather(*(chain.send() for _ in range(5))) == [b"x012"] * 5
        assert set(chain.heard) == {(0, None), (1, PEERS[0]), (2, PEERS[1])} and len(chain.heard) == 15
        driver = chain.transports[DRIVER.peer_id].traffic
        assert driver.requests_failed == 0


async def test_a_machine_cannot_answer_commands_of_the_driver_through_another() -> None:
    """It passes on what nobody asked it to, under numbers that the driver uses next, and more than has room."""
    async with chain_of_three() as chain:
        assert await chain.send() == b"x012"
        victim, hostile = PEERS[2], chain.transports[PEERS[0]]

        def direct(kind: str) -> asyncio.Task[bytes]:
            return asyncio.create_task(chain.caller.send(victim, kind, b"a", max_reply_bytes=100, deadline_s=5))

        first = direct("hold")
        while (2, None) not in chain.heard:
            await asyncio.sleep(0)
        line = await hostile.open_line(victim, RELAY_PROTOCOL, deadline_s=1)
        for number in range(3, 60):
            await line.send(RELAY_HEAD.pack(chain.caller._epoch, number) + b"add", b"y")
        while len(chain.services[2]._relayed) < 32:
            await asyncio.sleep(0)
        second = direct("add")
        while len(chain.services[2]._replies) < 2:
            await asyncio.sleep(0)
        chain.hold.set()
        assert await first == await second == b"a2"


async def test_a_machine_cannot_have_the_line_of_the_next_one_cut() -> None:
    """It passes on, where it may, what nobody asked it to; the answer is longer than a refusal."""
    async with chain_of_three() as chain:
        assert await chain.send() == b"x012"
        before = chain.caller._lines[PEERS[2]]
        line = await chain.transports[PEERS[1]].open_line(PEERS[2], RELAY_PROTOCOL, deadline_s=1)
        await line.send(RELAY_HEAD.pack(chain.caller._epoch, 1000) + b"long", b"y")
        while chain.heard[-1] != (2, PEERS[1]) or len(chain.heard) < 4:
            await asyncio.sleep(0)
        assert await chain.send() == b"x012"
        assert chain.caller._lines[PEERS[2]] is before


async def test_a_bug_on_the_way_reaches_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    async with chain_of_three() as chain:
        chain.services[1]._carry_out_relayed = lambda *_: bytes(1 // len(chain.services[:0]))
        with pytest.raises(RequestError, match="refused: the command broke"):
            await chain.send()
        assert "ZeroDivisionError" in caplog.text


async def test_a_refusal_on_the_way_reaches_the_driver() -> None:
    async with chain_of_three() as chain:
        chain.refusing = 1
        assert await chain.send() == b"refused"
        chain.refusing = None
        assert await chain.send() == b"x012"


@pytest.mark.parametrize("place", [1, 2])
async def test_a_machine_that_dies_on_the_way_is_noticed_at_once(place: int) -> None:
    async with chain_of_three() as chain:
        assert await chain.send() == b"x012"
        sending = asyncio.create_task(chain.send("hold"))
        while (1, PEERS[0]) not in chain.heard[3:]:
            await asyncio.sleep(0)
        chain.network.crash(PEERS[place])
        chain.hold.set()
        started = time.monotonic()
        with pytest.raises(RequestError):
            await sending
        assert time.monotonic() - started < 2


async def test_a_frozen_machine_on_the_way_is_named() -> None:
    async with chain_of_three() as chain:
        assert await chain.send() == b"x012"
        chain.network.freeze(PEERS[2])
        with pytest.raises(RequestError, match=f"{PEERS[2]} failed: no sign of life"):
            await chain.send(silence_s=0.3)


async def test_a_broken_line_between_two_machines_fails_what_was_on_it_and_is_opened_again() -> None:
    async with chain_of_three() as chain:
        assert await chain.send() == b"x012"
        sending = asyncio.create_task(chain.send("hold"))
        while (1, PEERS[0]) not in chain.heard[3:]:
            await asyncio.sleep(0)
        for line in list(chain.network._lines):
            if set(line.ends) == set(PEERS[:2]):
                line.cut()
        with pytest.raises(RequestError, match="lost its line"):
            await sending
        chain.hold.set()
        assert await chain.send() == b"x012"


async def test_only_the_machine_before_can_pass_anything_on() -> None:
    async with chain_of_three() as chain:
        assert await chain.send() == b"x012"
        chain.heard.clear()
        epoch = chain.services[2]._epoch
        for sender in (STRANGER.peer_id, PEERS[0]):
            line = await chain.transports[sender].open_line(PEERS[2], RELAY_PROTOCOL, deadline_s=5)
            await line.send(RELAY_HEAD.pack(epoch, 99) + b"add", b"y")
        line = await chain.transports[PEERS[1]].open_line(PEERS[2], RELAY_PROTOCOL, deadline_s=5)
        await line.send(RELAY_HEAD.pack(epoch - 1, 98) + b"add", b"of an earlier run")
        assert await chain.send() == b"x012", "what was passed on before has been read"
        assert chain.heard == [(0, None), (1, PEERS[0]), (2, PEERS[1])]


async def test_a_machine_that_replies_in_place_of_the_last_one_is_read_no_further_than_a_refusal() -> None:
    async with chain_of_three() as chain:
        chain.services[1]._carry_out_relayed = lambda *_: bytes(5000)
        with pytest.raises(RequestError) as error:
            await chain.send(max_reply_bytes=1 << 20)
        assert error.value.reason == "oversize"

"""Commands over lines of a network that strangers share: who is answered, how often, and with how much memory."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256

import pytest

from swarm.errors import RequestError
from swarm.network.commands.caller import CommandCaller
from swarm.network.commands.envelope import (
    ALIVE_PROTOCOL,
    COMMAND_HEAD,
    COMMAND_PROTOCOL,
    DONE,
    OLD_PROTOCOL,
    REPLY_HEAD,
    CommandChannel,
    decode_opening,
    encode_opening,
)
from swarm.network.commands.service import CommandLimits, CommandService
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.transport import Line, RequestRefused
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord

SWARM = "0" * 32
LIMIT = 4 << 20
EPOCH = 1_000_000
DRIVER, MEMBER, STRANGER = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
CHANNEL = CommandChannel(SWARM, "crew", DRIVER.peer_id, (MEMBER.peer_id,))


@dataclass
class Side:
    """One crew of two, a stranger beside it."""

    caller: CommandCaller
    service: CommandService
    transports: dict[str, MemoryTransport]
    network: MemoryNetwork
    heard: list[tuple[str, bytes]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    async def give(self, kind: str, payload: bytes, max_reply_bytes: int = 1 << 20) -> bytes:
        return await self.caller.send(MEMBER.peer_id, kind, payload, max_reply_bytes=max_reply_bytes, deadline_s=10)

    async def open(self, sender: Identity, opening: bytes | None = None, epoch: int = EPOCH) -> tuple[Line, bytes]:
        """Open a line by hand; returns it and what the member answers to the opening."""
        transport = self.transports[sender.peer_id]
        line = await transport.open_line(MEMBER.peer_id, COMMAND_PROTOCOL, deadline_s=10)
        await line.send(encode_opening(DRIVER, CHANNEL, MEMBER.peer_id, epoch=epoch) if opening is None else opening)
        return line, await line.receive(300)


async def order(line: Line, number: int, payload: bytes = b"x", kind: str = "do") -> bytes:
    """Send one command and return the reply. Raises RequestError (refused) with the reason of a refusal."""
    await line.send(COMMAND_HEAD.pack(number) + kind.encode(), payload)
    return await reply_on(line, number)


async def reply_on(line: Line, number: int) -> bytes:
    answered, status = REPLY_HEAD.unpack(await line.receive(REPLY_HEAD.size))
    body = await line.receive(1 << 20)
    assert answered == number
    if status != DONE:
        raise RequestError(body.decode(), "refused")
    return body


@asynccontextmanager
async def crew_of_two(limits: CommandLimits = CommandLimits()) -> AsyncIterator[Side]:
    network = MemoryNetwork(random.Random(0), time.time)
    transports = {one.peer_id: MemoryTransport(network, one.peer_id) for one in (DRIVER, MEMBER, STRANGER)}
    caller = CommandCaller(CHANNEL, DRIVER, transports[DRIVER.peer_id], lambda: 1000.0)

    def carry_out(kind: str, payload: bytes) -> bytes:
        side.heard.append((kind, payload))
        if kind == "hold":
            side.hold.wait(10)
        return sha256(payload).digest()

    member = transports[MEMBER.peer_id]
    service = CommandService(CHANNEL, member, carry_out=carry_out, max_payload=lambda kind: LIMIT, limits=limits)
    side = Side(caller, service, transports, network)
    for transport in transports.values():
        await transport.start()
    try:
        yield side
    finally:
        side.hold.set()
        await service.close()
        for transport in transports.values():
            await transport.stop()


async def watched_command(side: Side, silence_s: float) -> bytes:
    return await side.caller.send(MEMBER.peer_id, "hold", b"x", max_reply_bytes=100, deadline_s=30, silence_s=silence_s)


async def test_a_peer_that_works_for_long_is_waited_for_and_a_frozen_one_is_not() -> None:
    async with crew_of_two() as side:
        command = asyncio.create_task(watched_command(side, 0.2))
        await asyncio.wait([command], timeout=0.8)
        assert not command.done(), "its loop answers while its thread works"
        side.hold.set()
        assert await command == sha256(b"x").digest()
        side.hold.clear()
        side.network.freeze(MEMBER.peer_id)
        started = time.monotonic()
        with pytest.raises(RequestError, match="no sign of life") as error:
            await watched_command(side, 0.2)
        assert error.value.reason == "deadline" and time.monotonic() - started < 5
        side.network.thaw(MEMBER.peer_id)
        side.hold.set()
        assert await side.give("do", b"y") == sha256(b"y").digest(), "on another line"


async def test_strangers_are_not_told_that_a_stage_lives() -> None:
    async with crew_of_two() as side:
        for sender, answers in ((DRIVER, True), (STRANGER, False)):
            asked = side.transports[sender.peer_id].request(
                MEMBER.peer_id, ALIVE_PROTOCOL, b"", max_response_bytes=1, deadline_s=10
            )
            if answers:
                assert await asked == b"\x01"
            else:
                with pytest.raises(RequestError, match="refused"):
                    await asked


@pytest.mark.parametrize("num_bytes", [0, 1000, 1 << 20, 3 << 20])
async def test_payloads_of_all_sizes_arrive_whole(num_bytes: int) -> None:
    payload = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    async with crew_of_two() as side:
        assert await side.give("do", payload) == sha256(payload).digest()
        assert side.heard == [("do", payload)]


async def test_only_the_driver_is_answered() -> None:
    async with crew_of_two() as side:
        for sender, signer in ((STRANGER, STRANGER), (STRANGER, DRIVER), (DRIVER, STRANGER)):
            opening = encode_opening(signer, CHANNEL, MEMBER.peer_id, epoch=EPOCH)
            line, answer = await side.open(sender, opening)
            assert answer[:1] != bytes([DONE])
            with pytest.raises(RequestError, match="cut"):
                await order(line, 1)
        assert not side.heard


@pytest.mark.parametrize(
    ("channel", "addressee"),
    [
        (CommandChannel(SWARM, "other", DRIVER.peer_id, ()), MEMBER.peer_id),
        (CommandChannel("1" * 32, "crew", DRIVER.peer_id, ()), MEMBER.peer_id),
        (CHANNEL, STRANGER.peer_id),
    ],
    ids=["pipeline", "swarm", "addressee"],
)
async def test_an_opening_for_another_pipeline_swarm_or_machine_is_refused(
    channel: CommandChannel, addressee: str
) -> None:
    async with crew_of_two() as side:
        line, answer = await side.open(DRIVER, encode_opening(DRIVER, channel, addressee, epoch=EPOCH))
        assert b"no valid opening" in answer
        with pytest.raises(RequestError, match="cut"):
            await order(line, 1)
        assert not side.heard


async def test_a_command_is_carried_out_once_and_answered_as_often_as_it_comes() -> None:
    async with crew_of_two() as side:
        lines = [(await side.open(DRIVER))[0] for _ in range(2)]
        replies = [await order(line, 1) for line in (*lines, lines[0])]
        assert replies == [sha256(b"x").digest()] * 3
        assert len(side.heard) == 1


async def test_a_command_whose_line_breaks_is_sent_again_and_carried_out_once() -> None:
    async with crew_of_two() as side:
        command = asyncio.create_task(side.give("hold", b"x"))
        while not side.heard:
            await asyncio.sleep(0)
        for line in list(side.network._lines):
            line.cut()
        side.hold.set()
        assert await command == sha256(b"x").digest()
        assert side.heard == [("hold", b"x")]


async def test_commands_of_the_past_are_refused_and_stored_replies_are_few() -> None:
    async with crew_of_two(CommandLimits(max_stored_replies=2)) as side:
        line, _ = await side.open(DRIVER)
        for number in range(1, 6):
            await order(line, number)
        with pytest.raises(RequestError, match="past"):
            await order(line, 1)
        await order(line, 5)
        again, _ = await side.open(DRIVER, epoch=EPOCH + 1)  # the driver came back
        await order(again, 1)
        with pytest.raises(RequestError, match="past"):
            await order(line, 6)
        assert b"past" in (await side.open(DRIVER))[1]
        assert len(side.heard) == 6


async def test_waiting_commands_are_bounded_and_the_loop_goes_on() -> None:
    async with crew_of_two(CommandLimits(max_waiting=2)) as side:
        waiting = [asyncio.create_task(side.give("hold", b"x")) for _ in range(2)]
        while not side.heard:
            await asyncio.sleep(0)
        line, _ = await side.open(DRIVER)
        with pytest.raises(RequestError, match="busy"):
            await order(line, 99)
        side.hold.set()
        assert len(await asyncio.gather(*waiting)) == 2


async def test_a_payload_that_is_too_long_is_refused_unread_and_ends_the_line() -> None:
    async with crew_of_two() as side:
        line, _ = await side.open(DRIVER)
        with pytest.raises(RequestError, match="must be <= 4194304 bytes"):
            await order(line, 1, bytes(LIMIT + 1))
        with pytest.raises(RequestError, match="cut"):
            await order(line, 2)
        assert not side.heard
        with pytest.raises(RequestError, match="must be <= 4194304 bytes"):
            await side.give("do", bytes(LIMIT + 1))


async def test_the_driver_reads_no_longer_reply_than_it_asked_for_and_goes_on() -> None:
    async with crew_of_two() as side:
        with pytest.raises(RequestError) as error:
            await side.give("do", b"x", max_reply_bytes=31)
        assert error.value.reason == "oversize"
        assert await side.give("do", b"y", max_reply_bytes=32) == sha256(b"y").digest()


@pytest.mark.parametrize("num_bytes", [10, 1 << 20])
async def test_a_reply_to_no_command_is_dropped_where_it_is_short_and_never_held(num_bytes: int) -> None:
    async def lie(line: Line) -> None:
        await line.receive(1024)
        await line.send(bytes([DONE]))
        while True:
            (number,) = COMMAND_HEAD.unpack((await line.receive(100))[: COMMAND_HEAD.size])
            await line.receive(100)
            await line.send(REPLY_HEAD.pack(77, DONE), bytes(num_bytes), REPLY_HEAD.pack(number, DONE), b"true")

    async with crew_of_two() as side:
        side.transports[MEMBER.peer_id].serve_lines(COMMAND_PROTOCOL, lie)
        if num_bytes == 10:
            assert await side.give("do", b"x") == b"true"
        else:
            with pytest.raises(RequestError, match=r"cut|must have <= 4096 bytes"):
                await side.give("do", b"x")


async def test_garbage_is_refused() -> None:
    async with crew_of_two() as side:
        whole = encode_opening(DRIVER, CHANNEL, MEMBER.peer_id, epoch=EPOCH)
        for opening in (b"", b"\xff", whole[:50], whole[:-1], whole + b"y", bytes(1024)):
            _, answer = await side.open(DRIVER, opening)
            assert answer[:1] != bytes([DONE])
        with pytest.raises(InvalidRecord):
            decode_opening(whole, CommandChannel("1" * 32, "crew", DRIVER.peer_id, ()), MEMBER.peer_id)
        line, _ = await side.open(DRIVER)
        await line.send(b"short", b"x")
        with pytest.raises(RequestError, match="cut"):
            await line.receive(100)
        assert not side.heard


async def test_a_driver_that_begins_epoch_after_epoch_leaves_no_payloads_behind() -> None:
    """While a command runs, each new epoch cancels the commands of the one before."""
    async with crew_of_two() as side:
        line, _ = await side.open(DRIVER)
        await line.send(COMMAND_HEAD.pack(1) + b"hold", b"x")
        while not side.heard:
            await asyncio.sleep(0)
        for epoch in range(EPOCH + 1, EPOCH + 21):
            line, _ = await side.open(DRIVER, epoch=epoch)
            await line.send(COMMAND_HEAD.pack(1) + b"do", b"p" * 1000)
            await asyncio.sleep(0.001)
        assert side.service._thread._work_queue.qsize() <= 1
        assert len(side.service._replies) == 1
        side.hold.set()
        assert await reply_on(line, 1) == sha256(b"p" * 1000).digest(), "the newest epoch is served"
        assert [kind for kind, _ in side.heard] == ["hold", "do"]


async def test_machines_of_another_release_are_refused_in_words() -> None:
    async def old_stage(peer_id: str, request: bytes) -> bytes:
        raise RequestRefused("no valid command: malformed")

    network = MemoryNetwork(random.Random(0), time.time)
    transports = {one.peer_id: MemoryTransport(network, one.peer_id) for one in (DRIVER, MEMBER)}
    transports[MEMBER.peer_id].serve(OLD_PROTOCOL, old_stage, max_request_bytes=1 << 20)
    caller = CommandCaller(CHANNEL, DRIVER, transports[DRIVER.peer_id], time.time)
    for transport in transports.values():
        await transport.start()
    with pytest.raises(RequestError, match="must speak swarm/order/2, got swarm/order/1") as error:
        await caller.send(MEMBER.peer_id, "do", b"x", max_reply_bytes=10, deadline_s=10)
    assert error.value.reason == "refused"
    for transport in transports.values():
        await transport.stop()
    async with crew_of_two() as side:
        with pytest.raises(RequestError, match="speaks swarm/order/2"):  # an old driver
            await side.transports[DRIVER.peer_id].request(
                MEMBER.peer_id, OLD_PROTOCOL, b"x", max_response_bytes=1 << 20, deadline_s=10
            )

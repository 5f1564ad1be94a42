"""Signed commands over a network that strangers share: who is answered, how often, and with how much memory."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest

from swarm.errors import RequestError
from swarm.network.commands.caller import CommandCaller
from swarm.network.commands.envelope import (
    ALIVE_PROTOCOL,
    COMMAND_PROTOCOL,
    MAX_INLINE_BYTES,
    PAYLOAD_PROTOCOL,
    CommandChannel,
    CommandHead,
    decode_command,
    digest_of,
    encode_command,
)
from swarm.network.commands.service import CommandLimits, CommandService
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.requests.blob_protocol import BlobRequest
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord

SWARM = "0" * 32
LIMIT = 4 << 20
DRIVER, MEMBER, STRANGER = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


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

    async def send(self, sender: Identity, request: bytes) -> bytes:
        transport = self.transports[sender.peer_id]
        return await transport.request(
            MEMBER.peer_id, COMMAND_PROTOCOL, request, max_response_bytes=1 << 20, deadline_s=10
        )


@asynccontextmanager
async def crew_of_two(limits: CommandLimits = CommandLimits()) -> AsyncIterator[Side]:
    network = MemoryNetwork(random.Random(0), time.time)
    transports = {one.peer_id: MemoryTransport(network, one.peer_id) for one in (DRIVER, MEMBER, STRANGER)}
    channel = CommandChannel(SWARM, "crew", DRIVER.peer_id, (MEMBER.peer_id,))
    caller = CommandCaller(channel, DRIVER, transports[DRIVER.peer_id], lambda: 1000.0)

    def carry_out(kind: str, payload: bytes) -> bytes:
        side.heard.append((kind, payload))
        if kind == "hold":
            side.hold.wait(10)
        return sha256(payload).digest()

    member = transports[MEMBER.peer_id]
    service = CommandService(channel, member, carry_out=carry_out, max_payload=lambda kind: LIMIT, limits=limits)
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
        assert not side.caller._payloads


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


def head(number: int, payload: bytes = b"x", **other: Any) -> CommandHead:
    fields: dict[str, Any] = {
        "author": DRIVER.peer_id, "pipeline": "crew", "addressee": MEMBER.peer_id, "epoch": 1_000_000, "number": number,
        "kind": "do", "payload_bytes": len(payload), "payload_digest": digest_of(payload),
    }  # fmt: skip
    return CommandHead(**{**fields, **other})


@pytest.mark.parametrize("num_bytes", [0, 1000, MAX_INLINE_BYTES + 1, 3 * MAX_INLINE_BYTES])
async def test_payloads_of_all_sizes_arrive_whole(num_bytes: int) -> None:
    payload = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    async with crew_of_two() as side:
        assert await side.give("do", payload) == sha256(payload).digest()
        assert side.heard == [("do", payload)]
        assert not side.caller._payloads, "nothing is offered any longer"


async def test_only_the_driver_is_answered() -> None:
    async with crew_of_two() as side:
        for sender, signer in ((STRANGER, STRANGER), (STRANGER, DRIVER), (DRIVER, STRANGER)):
            request = encode_command(signer, SWARM, head(1, author=sender.peer_id), b"x")
            with pytest.raises(RequestError, match="refused"):
                await side.send(sender, request)
        assert not side.heard


@pytest.mark.parametrize(
    "odd",
    [
        {"pipeline": "other"},
        {"addressee": STRANGER.peer_id},
        {"payload_digest": bytes(32)},
        {"payload_bytes": LIMIT + 1},
    ],
)
async def test_commands_for_others_or_with_another_payload_are_refused(odd: dict[str, Any]) -> None:
    async with crew_of_two() as side:
        with pytest.raises(RequestError, match="refused"):
            await side.send(DRIVER, encode_command(DRIVER, SWARM, head(1, **odd), b"x"))
        assert not side.heard


async def test_a_command_is_carried_out_once_and_answered_as_often_as_it_comes() -> None:
    async with crew_of_two() as side:
        request = encode_command(DRIVER, SWARM, head(1), b"x")
        replies = await asyncio.gather(*(side.send(DRIVER, request) for _ in range(3)))
        assert replies == [sha256(b"x").digest()] * 3
        assert len(side.heard) == 1


async def test_commands_of_the_past_are_refused_and_stored_replies_are_few() -> None:
    async with crew_of_two(CommandLimits(max_stored_replies=2)) as side:
        requests = [encode_command(DRIVER, SWARM, head(number), b"x") for number in range(1, 6)]
        for request in requests:
            await side.send(DRIVER, request)
        with pytest.raises(RequestError, match="past"):
            await side.send(DRIVER, requests[0])
        await side.send(DRIVER, requests[-1])
        await side.send(DRIVER, encode_command(DRIVER, SWARM, head(1, epoch=1_000_001), b"x"))  # the driver came back
        with pytest.raises(RequestError, match="past"):
            await side.send(DRIVER, requests[-1])
        assert len(side.heard) == 6


async def test_waiting_commands_are_bounded_and_the_loop_goes_on() -> None:
    async with crew_of_two(CommandLimits(max_waiting=2)) as side:
        waiting = [asyncio.create_task(side.give("hold", b"x")) for _ in range(2)]
        while not side.heard:
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="busy"):
            await side.send(DRIVER, encode_command(DRIVER, SWARM, head(99), b"x"))
        side.hold.set()
        assert len(await asyncio.gather(*waiting)) == 2


async def test_payloads_are_handed_to_members_alone() -> None:
    async with crew_of_two() as side:
        payload = b"p" * (MAX_INLINE_BYTES + 1)
        held = asyncio.create_task(side.give("hold", payload))
        while not side.heard:
            await asyncio.sleep(0)
        for asker, is_member in ((STRANGER, False), (MEMBER, True)):
            asked = side.transports[asker.peer_id].request(
                DRIVER.peer_id,
                PAYLOAD_PROTOCOL,
                BlobRequest(digest_of(payload), 0, 1000).encode(),
                max_response_bytes=1 << 20,
                deadline_s=5,
            )
            if is_member:
                assert await asked == payload[:1000]
            else:
                with pytest.raises(RequestError, match="not a member of this pipeline"):
                    await asked
        side.hold.set()
        await held


async def test_garbage_is_refused() -> None:
    async with crew_of_two() as side:
        whole = encode_command(DRIVER, SWARM, head(1), b"x")
        for request in (b"", b"\xff", whole[:50], whole[:-1], whole + b"y", b"\x00\x00" + whole, bytes(1 << 20)):
            with pytest.raises(RequestError, match="refused"):
                await side.send(DRIVER, request)
        with pytest.raises(InvalidRecord):
            decode_command(whole, "1" * 32)
        assert not side.heard


async def test_a_driver_that_begins_epoch_after_epoch_leaves_no_payloads_behind() -> None:
    """While a command runs, each new epoch cancels the commands of the one before."""
    async with crew_of_two() as side:
        running = asyncio.create_task(side.send(DRIVER, encode_command(DRIVER, SWARM, head(1, kind="hold"), b"x")))
        while not side.heard:
            await asyncio.sleep(0)
        waiting = [running]
        for epoch in range(1_000_001, 1_000_021):
            request = encode_command(DRIVER, SWARM, head(1, epoch=epoch, payload=b"p" * 1000), b"p" * 1000)
            waiting.append(asyncio.create_task(side.send(DRIVER, request)))
            await asyncio.sleep(0.001)
        assert side.service._thread._work_queue.qsize() <= 1
        assert len(side.service._replies) == 1
        side.hold.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert results[-1] == sha256(b"p" * 1000).digest(), "the newest epoch is served"
        assert [kind for kind, _ in side.heard] == ["hold", "do"]

"""Hostile peers against whole nodes in processes of their own, on both real transports.

Each attack ends with its reason counted, the honest nodes still exchanging, and the memory of the victim flat.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard

from swarm.config import NetworkSection
from swarm.network.hivemind.index_guard import wrap
from swarm.network.hivemind.parts import DHTID, DHTProtocol, PeerID, StreamInfo
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.libp2p.host import Libp2pHost
from swarm.network.libp2p.parts import rpc_pb2
from swarm.network.libp2p.pubsub import encode_frame
from swarm.network.requests.framing import Response, Status, read_request, write_response
from swarm.network.tcp_address import TcpAddress
from swarm.records.adapter_offer import AdapterOffer, sign_offer
from swarm.records.codec import MAX_BODY_BYTES, body_hash, encode_body
from swarm.records.identity import Identity
from swarm.sharing.body_store import BODY_PROTOCOL
from swarm.sharing.inbox import MAX_CANDIDATES_PER_AUTHOR
from swarm.sharing.index import Shard, adapter_key, experience_topic
from tests.e2e.exchange_process import ExchangeProcess
from tests.unit.experience_factory import MALLORY, SWARM_ID, group, header_of, signed

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
WHOLE_SWARM = Shard(0, 0)
TOPIC = experience_topic(SWARM_ID, WHOLE_SWARM)
GOSSIP_PROTOCOL = "/meshsub/1.1.0"
LOOPBACK = (TcpAddress.parse("/ip4/127.0.0.1/tcp/0"),)
DEADLINE_S = 90.0
MAX_GROWTH_MIB = 48.0
"""Of the victim and its daemon, over all attacks; the attackers sent hundreds of MiB."""
NUM_HONEST = 24
FLOOD = 10_000

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


@dataclass
class Scene:
    """Two honest nodes that exchange, one of them the victim, and the attacker's own transport and gossip host."""

    honest: ExchangeProcess
    victim: ExchangeProcess
    mallory: HivemindTransport
    host: Libp2pHost
    bodies: dict[bytes, Serve]

    async def until(self, condition: Callable[[dict[str, Any]], bool], node: ExchangeProcess | None = None) -> None:
        """Wait until what a node (the victim) says of itself fulfils a condition."""
        node, state = node or self.victim, {}
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition(state := await node.state()):
                    await asyncio.sleep(0.1)  # it sends no event
        except TimeoutError:
            pytest.fail(f"never came to be: {state}")

    async def exchange(self) -> None:
        """One group each way."""
        for sender, reader in ((self.honest, self.victim), (self.victim, self.honest)):
            before = (await reader.state())["admitted"]
            await sender.publish()
            await self.until(lambda state, before=before: state["admitted"] > before, reader)

    async def gossip(self, *messages: bytes) -> None:
        """Hand messages to the victim as a neighbour in gossip would."""
        _, writer = await self.host.open_stream(self.victim.peer_id, GOSSIP_PROTOCOL)
        with suppress(OSError):  # the victim hung up, which it may
            for start in range(0, len(messages), 20):
                some = messages[start : start + 20]
                call = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=data, topicIDs=[TOPIC]) for data in some])
                writer.write(encode_frame(call.SerializeToString()))
                await writer.drain()
        writer.close()


@asynccontextmanager
async def scene(folder: Path, backend: str) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        honest = await stack.enter_async_context(ExchangeProcess(folder / "honest", "hivemind"))
        victim = await stack.enter_async_context(ExchangeProcess(folder / "victim", backend, *honest.addresses))
        (folder / "mallory").mkdir()
        settings = NetworkSection(gossip="off", initial_peers=honest.addresses)
        mallory = HivemindTransport(settings, MALLORY, folder / "mallory")
        await mallory.start()
        stack.push_async_callback(mallory.stop)
        assert mallory._session is not None
        await mallory._session.control.connect(victim.peer_id, [victim.addresses[0].partition("/p2p/")[0]])
        host = await Libp2pHost.open(Identity(b"n" * 32), LOOPBACK, timeout_s=10)
        stack.push_async_callback(host.close)
        await host.connect(victim.peer_id, victim.gossip_addresses)
        bodies: dict[bytes, Serve] = {}

        async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                wanted = await read_request(reader, 64)
                await bodies[wanted](reader, writer, wanted)
            except (OSError, KeyError):
                pass  # the victim hung up, which it may
            finally:
                writer.transport.abort()

        await mallory._session._p2p.add_binary_stream_handler(BODY_PROTOCOL, serve)
        yield Scene(honest, victim, mallory, host, bodies)


def record(number: int, now: float, body: bytes | None = None, **changes: Any) -> tuple[bytes, bytes]:
    """A header of the attacker's, well signed, and the hash that it announces."""
    groups = [group(index=number, author=MALLORY.peer_id)]
    body = encode_body(groups) if body is None else body
    fields = {"author": MALLORY.peer_id, "sequence": number, "created_at": now, "expires_at": now + 600} | changes
    header = header_of(groups, body, **fields)
    return signed(header, MALLORY), header.body_hash


async def _respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    await write_response(writer, Response(Status.OK, body))
    await reader.read(1)


async def _never_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wanted: bytes) -> None:
    """As much as was asked for, announced; a byte at a time, without an end."""
    writer.write(struct.pack(">BQ32s", 0, 1000, wanted))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _announce_a_terabyte(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wanted: bytes) -> None:
    writer.write(struct.pack(">BQ32s", 0, 2**40, wanted))
    while True:
        writer.write(bytes(65_536))
        await writer.drain()


def _giving(body: bytes) -> Serve:
    return lambda reader, writer, wanted: _respond(reader, writer, body)


def _hostile_bodies() -> dict[str, tuple[bytes, Serve]]:
    """By the reason they are turned away for: the body to announce, and what is sent instead."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))
    body = encode_body([group(index=900, author=MALLORY.peer_id)])
    return {
        "oversize": (bomb, _giving(bomb)),
        "malformed": (b"garbage" * 50, _giving(b"garbage" * 50)),
        "wrong_hash": (body, _giving(body[:-1] + b"x")),
        "unavailable": (b"endless" * 200, _never_end),
    }


@pytest.mark.parametrize("backend", ["hivemind", "libp2p"])
async def test_hostile_peers_cost_a_node_neither_its_peers_nor_its_memory(tmp_path: Path, backend: str) -> None:
    async with scene(tmp_path, backend) as at:
        await at.exchange()
        before = (await at.victim.state())["rss_mib"]
        await _send_hostile_bodies(at)
        await _send_hostile_headers(at)
        await at.exchange()
        await _send_ten_thousand_headers(at)
        await _fill_the_index(at, at.victim if backend == "hivemind" else at.honest)
        if backend == "libp2p":
            await _hold_connections_without_a_word(at)
        await at.exchange()
        state = await at.victim.state()
        assert state["rss_mib"] - before < MAX_GROWTH_MIB, state


async def _earn_trust(at: Scene) -> None:
    """Honest bodies, so that the first false one gets nobody banned and all are looked at."""
    before = (await at.victim.state())["admitted"]
    for number in range(200, 200 + NUM_HONEST):
        body = encode_body([group(index=number, author=MALLORY.peer_id)])
        data, digest = record(number, at.mallory.now(), body)
        at.bodies[digest] = _giving(body)
        await at.gossip(data)
        if (sent := number - 199) % (MAX_CANDIDATES_PER_AUTHOR // 2) == 0:  # of more the oldest would be dropped
            await at.until(lambda state, sent=sent: state["admitted"] >= before + sent)


async def _send_hostile_bodies(at: Scene) -> None:
    await _earn_trust(at)
    for number, (reason, (body, serve)) in enumerate(_hostile_bodies().items()):
        assert len(body) <= MAX_BODY_BYTES
        data, digest = record(number, at.mallory.now(), body)
        at.bodies[digest] = serve
        await at.gossip(data)
        await at.until(lambda state, reason=reason: state["rejected"].get(reason, 0) > 0)
    data, digest = record(50, at.mallory.now(), b"terabyte")
    at.bodies[digest] = _announce_a_terabyte
    await at.gossip(data)


async def _send_hostile_headers(at: Scene) -> None:
    now = at.mallory.now()
    forged = record(100, now)[0]
    future = record(101, now + 3600)[0]
    await at.gossip(b"garbage", forged[:-1] + bytes([forged[-1] ^ 1]), future, bytes(900))
    reasons = {"malformed", "bad_signature", "clock_skew"}
    await at.until(lambda state: reasons <= state["rejected"].keys())


async def _send_ten_thousand_headers(at: Scene) -> None:
    """In about a second, over gossip, all of them well signed."""
    now, body = at.mallory.now(), encode_body([group(author=MALLORY.peer_id)])
    hashes = [body_hash(b"%d" % number) for number in range(FLOOD)]
    flood = await asyncio.to_thread(
        lambda: [record(number, now, body, body_hash=digest)[0] for number, digest in enumerate(hashes)]
    )
    await at.gossip(*flood)
    await at.until(lambda state: state["refused"].get("gossip/flood", 0) > 0)
    await at.until(lambda state: state["rejected"].get("rate", 0) > 0)


async def _fill_the_index(at: Scene, host: ExchangeProcess) -> None:
    """10,000 valid entries under as many keys, straight to a node that hosts the index."""
    now = at.mallory.now()
    assert at.mallory._session is not None
    protocol = at.mallory._session._node.protocol
    for start in range(0, FLOOD, 100):
        offers = [_offer(number, now) for number in range(start, start + 100)]
        names = [adapter_key(SWARM_ID, "merge", offer.lineage, WHOLE_SWARM) for offer in offers]
        records = [sign_offer(MALLORY, SWARM_ID, offer) for offer in offers]
        await protocol.call_store(
            PeerID.from_base58(host.peer_id),
            [DHTID.generate(source=name) for name in names],
            [DHTProtocol.serializer.dumps(wrap(name, data)) for name, data in zip(names, records, strict=True)],
            [now + 600.0] * 100,
            [MALLORY.peer_id] * 100,
        )
    reasons = ("index/author_full", "index/evicted", "index/rate")
    await at.until(lambda state: any(reason in state["refused"] for reason in reasons), host)


def _offer(number: int, now: float) -> AdapterOffer:
    """An adapter of a lineage that nobody else has."""
    lineage = number.to_bytes(16, "big").hex()
    return AdapterOffer(MALLORY.peer_id, lineage, 1, 0, "bf16", 100, b"h" * 32, 0, now, now + 600)


async def _hold_connections_without_a_word(at: Scene) -> None:
    """More than there are places for handshakes, before a newcomer comes."""
    address = TcpAddress.parse(at.victim.addresses[0])
    async with AsyncExitStack() as stack:
        for _ in range(200):
            stack.enter_context(closing(socket.create_connection((address.host, address.port))))
        newcomer = await Libp2pHost.open(Identity(b"w" * 32), LOOPBACK, timeout_s=10)
        stack.push_async_callback(newcomer.close)
        await newcomer.connect(at.victim.peer_id, [address.transport])
        await at.until(lambda state: state["refused"].get("host/handshake", 0) > 0)

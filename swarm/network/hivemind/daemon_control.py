"""Requests to the libp2p daemon: over its control socket, and short calls to peers over the connection that is open
anyway.

Each request over the control socket has a connection of its own, which is always closed. A short call sends a request
and its response as one message each: for 8 KiB that takes 0.7 ms of processor time in four processes, where a stream
with its two new sockets and three round trips takes 1.9 ms.

Two things are repaired that hivemind 1.1.12 leaves behind when a call is cancelled (`OpenCalls`,
`forget_when_cancelled`), and messages are written in one piece (`WholeMessages`). Circuit addresses
(`.../p2p/RELAY/p2p-circuit`) are written and read here from the relay's id on, since hivemind's own multiaddr codec
writes a peer id inside an address in a way that the daemon cannot read. Only modules of this package may import this
one, since it imports hivemind.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

import base58
from google.protobuf.message import DecodeError

from swarm.errors import NetworkError
from swarm.network.hivemind.parts import (
    ControlClient,
    Multiaddr,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    p2pd_pb2,
    read_pbmsg_safe,
)
from swarm.network.peers.dialling import MAX_CLAIMED
from swarm.network.requests.framing import Response, encode_frame, response_frame
from swarm.network.tcp_address import CIRCUIT
from swarm.records.identity import is_peer_id


class OpenCalls(dict[UUID, asyncio.Future[Any]]):
    """The calls that wait for an answer. A cancelled call no longer counts.

    hivemind sets the result of any call in its table. If an answer arrives between the cancellation and the caller's
    clean-up, that raises in the task which reads the connection, and every later call of the process hangs.
    """

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)  # type: ignore[call-overload]
        return call is not None and not call.done()


class WholeMessages(ControlClient):
    """Writes each message to the daemon in one piece, and those that wait at the same time together.

    hivemind writes the length byte by byte. Each byte is a system call here, and the daemon wakes up for each.
    """

    async def _write_to_persistent_conn(self, writer: asyncio.StreamWriter) -> None:
        waiting = self._pending_messages
        with contextlib.closing(writer):
            while True:
                messages = [await waiting.get()]
                while not waiting.empty():
                    messages.append(waiting.get_nowait())
                writer.writelines([encode_frame(message.SerializeToString()) for message in messages])
                await writer.drain()


def install(control: Any) -> None:
    """Install `OpenCalls` in hivemind's client of the daemon, once."""
    control._pending_calls = OpenCalls(control._pending_calls)


def forget_when_cancelled(control: Any) -> None:
    """Remove the task of a call that its caller cancelled, which hivemind would keep forever. Call it in a handler."""

    def forget(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            for call_id in [call_id for call_id, known in control._handler_tasks.items() if known is task]:
                del control._handler_tasks[call_id]

    task = asyncio.current_task()
    assert task is not None, "handlers run in tasks"
    task.add_done_callback(forget)


_P2P_CODE = b"\xa5\x03"  # 421 as a varint
_CIRCUIT_CODE = b"\xa2\x02"  # 290
_MAX_PEER_ID_BYTES = 127  # so that its length is a varint of one byte


def address_bytes(text: str) -> bytes:
    """Encode an address, circuits included. Raises ValueError or LookupError for a malformed multiaddress."""
    if not text.endswith(CIRCUIT):
        return Multiaddr(text).to_bytes()
    way, separator, relay_id = text.removesuffix(CIRCUIT).partition("/p2p/")
    peer_id = base58.b58decode(relay_id)
    if not separator or not 0 < len(peer_id) <= _MAX_PEER_ID_BYTES:
        raise ValueError(f"a circuit address must name its relay, got {text!r}")
    return Multiaddr(way).to_bytes() + _P2P_CODE + bytes([len(peer_id)]) + peer_id + _CIRCUIT_CODE


def address_text(data: bytes) -> str:
    """Decode an address. Raises ValueError or LookupError for a kind of address that hivemind does not know."""
    if not data.endswith(_CIRCUIT_CODE):
        return _text(data)
    for start in range(
        len(data)
    ):  # the peer id is the last part before the circuit, and its length tells where it begins
        head, rest = data[:start], data[start : -len(_CIRCUIT_CODE)]
        if rest.startswith(_P2P_CODE) and len(rest) > 3 and rest[2] == len(rest) - 3:
            return f"{_text(head)}/p2p/{base58.b58encode(rest[3:]).decode()}{CIRCUIT}"
    raise ValueError("a circuit address without a relay")


def _text(data: bytes) -> str:
    try:
        return str(Multiaddr(data))
    except (TypeError, OverflowError):  # what hivemind raises for a number that ends too early, or never
        raise ValueError("an address with a broken number") from None


CallHandler = Callable[[str, str, bytes], Awaitable[Response]]
"""(peer id, protocol, request) -> response; raises nothing."""

_SUFFIX = "/call"
"""Appended to the protocol's name. A node that serves only streams does not know these protocols."""


class ShortCalls:
    """The short calls of one session. Deadlines are up to the caller."""

    def __init__(self, client: Any) -> None:
        """`client` is hivemind's client of the daemon."""
        self._client = client

    async def serve(self, protocol: str, handler: CallHandler) -> None:
        """Raises P2PDaemonError."""

        async def answer(request: bytes, peer_id: PeerID) -> bytes:
            forget_when_cancelled(self._client.control)
            return response_frame(await handler(peer_id.to_base58(), protocol, request))

        await self._client.add_unary_handler(protocol + _SUFFIX, answer)

    async def ask(self, peer_id: str, protocol: str, request: bytes) -> bytes:
        """Return the frame of the response. Raises NetworkError: no such peer, not reachable, or it serves only
        streams.
        """
        try:
            return await self._client.call_unary_handler(PeerID.from_base58(peer_id), protocol + _SUFFIX, request)
        except (P2PDaemonError, P2PHandlerError) as error:
            raise NetworkError(str(error)) from None


# pyright: reportAttributeAccessIssue=false
# (the classes of hivemind's generated protobuf module are made at run time)


_MAX_CAUSE_CHARACTERS = 1000
"""The daemon's message includes who answered at each dialled address."""
_OTHER_PEER = re.compile(
    r"\[(/ip[46]/[^]\s]+)] failed to negotiate security protocol: "
    r"peer id mismatch: expected \w+, but remote key matches (\w+)"
)
_PREFERRED_TAG, _PREFERRED_WEIGHT = "swarm", 100
_NO_ANSWER = (OSError, EOFError, DecodeError, ValueError)
"""The daemon is gone, or sent a malformed message: ValueError for a length out of bounds."""


class DaemonControl:
    """The requests that hivemind's own client also offers, but without leaving a connection open after a failure.

    Every method raises NetworkError with the daemon's answer, or where the daemon is gone. Deadlines are up to the
    caller.
    """

    def __init__(self, control_socket: Path) -> None:
        self._socket = control_socket

    async def identity(self) -> tuple[str, tuple[str, ...]]:
        """Return (peer id, addresses) of this node."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        return base58.b58encode(response.identify.id).decode(), _decoded(response.identify.addrs)

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses at which this node can be reached, without /p2p."""
        _, addresses = await self.identity()
        return addresses

    async def peers(self) -> dict[str, tuple[str, ...]]:
        """Return peers with an open connection, and the addresses at which they are seen."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        peers: dict[str, tuple[str, ...]] = {}
        for peer in response.peers:  # one item per connection
            peer_id = base58.b58encode(peer.id).decode()
            peers[peer_id] = tuple(dict.fromkeys((*peers.get(peer_id, ()), *_decoded(peer.addrs))))
        return peers

    async def seen_at(self, peer_id: str) -> tuple[str, ...]:
        """Return where one connected peer is seen. The others are not decoded, which would take longest."""
        response, wanted = (
            await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)),
            base58.b58decode(peer_id),
        )
        return tuple(text for peer in response.peers if peer.id == wanted for text in _decoded(peer.addrs))

    async def listening_addresses(self, peer_id: str) -> tuple[str, ...]:
        """Return where a connected peer listens, as it told the daemon. For another peer this searches the daemon's
        DHT.
        """
        find = p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.FIND_PEER, peer=base58.b58decode(peer_id))
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=find))
        return _decoded(response.dht.peer.addrs)

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer."""
        disconnect = p2pd_pb2.DisconnectRequest(peer=base58.b58decode(peer_id))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=disconnect))

    async def prefer(self, peer_id: str) -> None:
        """Where there are too many connections, close others first. This ends with the last connection to the peer."""
        await self._ask_manager(peer_id, p2pd_pb2.ConnManagerRequest.TAG_PEER)

    async def prefer_no_more(self, peer_id: str) -> None:
        """Undo `prefer`."""
        await self._ask_manager(peer_id, p2pd_pb2.ConnManagerRequest.UNTAG_PEER)

    async def _ask_manager(self, peer_id: str, kind: int) -> None:
        order = p2pd_pb2.ConnManagerRequest(
            type=kind, peer=base58.b58decode(peer_id), tag=_PREFERRED_TAG, weight=_PREFERRED_WEIGHT
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNMANAGER, connManager=order))

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Open a connection, or use the one that is open."""
        connect = p2pd_pb2.ConnectRequest(peer=base58.b58decode(peer_id), addrs=encoded(addresses))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect))

    async def open_stream(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw stream to a peer, whose address the daemon finds. The caller closes it."""
        stream = p2pd_pb2.StreamOpenRequest(peer=base58.b58decode(peer_id), proto=[protocol])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=stream)
        _, reader, writer = await self._exchange(request)
        return reader, writer

    async def publish(self, topic: str, message: bytes) -> None:
        """Publish a message on the daemon's pubsub."""
        publish = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=topic, data=message)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=publish))

    async def subscribe(self, topic: str) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (peer id of the author, message) of a topic, own ones included, until the daemon ends or the caller
        stops.
        """
        subscribe = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.SUBSCRIBE, topic=topic)
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=subscribe)
        _, reader, writer = await self._exchange(request)
        try:
            while True:
                message = p2pd_pb2.PSMessage()
                await read_pbmsg_safe(reader, message)
                yield base58.b58encode(getattr(message, "from")).decode(), message.data
        except _NO_ANSWER as error:
            raise NetworkError(f"the libp2p daemon does not answer: {error or type(error).__name__}") from None
        finally:
            writer.transport.abort()

    async def _ask(self, request: p2pd_pb2.Request) -> p2pd_pb2.Response:
        response, _, writer = await self._exchange(request)
        writer.close()
        return response

    async def _exchange(
        self, request: p2pd_pb2.Request
    ) -> tuple[p2pd_pb2.Response, asyncio.StreamReader, asyncio.StreamWriter]:
        response, has_answer = p2pd_pb2.Response(), False
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
            try:
                writer.write(encode_frame(request.SerializeToString()))
                await read_pbmsg_safe(reader, response)
                has_answer = response.type != p2pd_pb2.Response.ERROR
            finally:
                if not has_answer:
                    writer.transport.abort()
        except _NO_ANSWER as error:
            raise NetworkError(f"the libp2p daemon does not answer: {error or type(error).__name__}") from None
        if not has_answer:
            raise NetworkError(_printable(response.error.msg))
        return response, reader, writer


def _printable(cause: str | bytes) -> str:
    """Return one line of the daemon's message. protobuf gives bytes where a stranger's words in it are not text."""
    text = cause.decode(errors="replace") if isinstance(cause, bytes) else cause
    words = " ".join(text.split())[:_MAX_CAUSE_CHARACTERS]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def answered_instead(error: NetworkError, dialled: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (peer id, address) of the peers that answered at dialled addresses in place of the peer that was dialled."""
    for address, peer_id in _OTHER_PEER.findall(str(error)):
        if address in dialled and is_peer_id(peer_id):
            yield peer_id, address


def encoded(addresses: Iterable[str]) -> list[bytes]:
    """Encode addresses. One that hivemind cannot encode, such as a made-up host name, is skipped."""
    binary = []
    for address in addresses:
        try:
            binary.append(address_bytes(address))
        except (ValueError, LookupError):
            continue
    return binary


def _decoded(addresses: Iterable[bytes]) -> tuple[str, ...]:
    """Decode at most MAX_CLAIMED addresses. A kind that hivemind does not know is skipped."""
    texts = []
    for address in islice(addresses, MAX_CLAIMED):
        try:
            texts.append(address_text(address))
        except (ValueError, LookupError):
            continue
    return tuple(texts)

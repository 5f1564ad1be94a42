"""Questions to the libp2p daemon over its control socket, each on a connection of its own that is closed for certain.

Imports hivemind: only `hivemind_session` may import this module.

Two things that hivemind 1.1.12 leaves behind when a call over the daemon's connection is cancelled.

It goes by hivemind's names alone and imports nothing of it.

Circuit addresses (`.../p2p/RELAY/p2p-circuit`: to a peer through a relay) as the libp2p daemon wants and gives them.

hivemind's own multiaddr codec writes a peer id inside an address in a way that the daemon cannot read, so the part from
the relay's id on is written and read here. Imports hivemind: only `daemon_control` may import this module.

Short requests as one message each way, over the connection to the daemon that is open anyway.

A stream takes two new sockets and three round trips between four processes, for 8 KiB 1.9 ms of their time; this 0.7.

Imports hivemind: only `session` may import this module.
"""

import asyncio
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
    Multiaddr,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)
from swarm.network.peers.dialling import MAX_CLAIMED
from swarm.network.requests.framing import Response, response_frame
from swarm.network.tcp_address import CIRCUIT
from swarm.records.identity import is_peer_id


class OpenCalls(dict[UUID, asyncio.Future[Any]]):
    """Calls that wait for an answer; one that was cancelled waits no more.

    hivemind sets the result of any call that is in its table. Where an answer comes in between the cancellation and the
    caller's clearing up, that raises in the task which reads the connection, and every later call of the process hangs.
    """

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)  # type: ignore[call-overload]
        return call is not None and not call.done()


def install(control: Any) -> None:
    """Into hivemind's client of the daemon, once."""
    control._pending_calls = OpenCalls(control._pending_calls)


def forget_when_cancelled(control: Any) -> None:
    """To be called by a handler: hivemind keeps the task of a call for ever that its caller cancelled."""

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
    """The binary form of an address, circuits included. Raises ValueError or LookupError for what is no multiaddress."""
    if not text.endswith(CIRCUIT):
        return Multiaddr(text).to_bytes()
    way, separator, relay_id = text.removesuffix(CIRCUIT).partition("/p2p/")
    peer_id = base58.b58decode(relay_id)
    if not separator or not 0 < len(peer_id) <= _MAX_PEER_ID_BYTES:
        raise ValueError(f"a circuit address must name its relay, got {text!r}")
    return Multiaddr(way).to_bytes() + _P2P_CODE + bytes([len(peer_id)]) + peer_id + _CIRCUIT_CODE


def address_text(data: bytes) -> str:
    """The opposite. Raises ValueError or LookupError for a kind of address that hivemind does not know."""
    if not data.endswith(_CIRCUIT_CODE):
        return _text(data)
    for start in range(
        len(data)
    ):  # the peer id is the last part before the circuit, and its length says where it begins
        head, rest = data[:start], data[start : -len(_CIRCUIT_CODE)]
        if rest.startswith(_P2P_CODE) and len(rest) > 3 and rest[2] == len(rest) - 3:
            return f"{_text(head)}/p2p/{base58.b58encode(rest[3:]).decode()}{CIRCUIT}"
    raise ValueError("a circuit address without a relay")


def _text(data: bytes) -> str:
    try:
        return str(Multiaddr(data))
    except (TypeError, OverflowError):  # hivemind's words for a number that ends too early, or never
        raise ValueError("an address with a broken number") from None


CallHandler = Callable[[str, str, bytes], Awaitable[Response]]
"""(peer id, protocol, request) -> response; raises nothing."""

_SUFFIX = "/call"
"""After the protocol's name: a node that serves only streams does not know these."""


class ShortCalls:
    """Calls of one session. A deadline is the caller's business."""

    def __init__(self, client: Any) -> None:
        """`client`: hivemind's, of the daemon."""
        self._client = client

    async def serve(self, protocol: str, handler: CallHandler) -> None:
        """Raises P2PDaemonError."""

        async def answer(request: bytes, peer_id: PeerID) -> bytes:
            forget_when_cancelled(self._client.control)
            return response_frame(await handler(peer_id.to_base58(), protocol, request))

        await self._client.add_unary_handler(protocol + _SUFFIX, answer)

    async def ask(self, peer_id: str, protocol: str, request: bytes) -> bytes:
        """The frame of the response. Raises NetworkError: no such peer, not reachable, or it serves only streams."""
        try:
            return await self._client.call_unary_handler(PeerID.from_base58(peer_id), protocol + _SUFFIX, request)
        except (P2PDaemonError, P2PHandlerError) as error:
            raise NetworkError(str(error)) from None


# pyright: reportAttributeAccessIssue=false
# (the classes of hivemind's generated protobuf module are made at run time)


_MAX_CAUSE_CHARACTERS = 1000
"""Who answered at each address that was dialled is among them."""
_OTHER_PEER = re.compile(
    r"\[(/ip[46]/[^]\s]+)] failed to negotiate security protocol: "
    r"peer id mismatch: expected \w+, but remote key matches (\w+)"
)
_PREFERRED_TAG, _PREFERRED_WEIGHT = "swarm", 100
_NO_ANSWER = (OSError, EOFError, DecodeError, ValueError)
"""It is gone, or what it sent is no message: ValueError for a length out of bounds."""


class DaemonControl:
    """What hivemind's own client does as well, but without leaving a connection open after a failure or cancellation.

    Every method raises NetworkError with the daemon's answer, or where the daemon is gone. Deadlines are the caller's.
    """

    def __init__(self, control_socket: Path) -> None:
        self._socket = control_socket

    async def identity(self) -> tuple[str, tuple[str, ...]]:
        """(peer id, addresses) of this node."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        return base58.b58encode(response.identify.id).decode(), _decoded(response.identify.addrs)

    async def addresses(self) -> tuple[str, ...]:
        """Multiaddresses under which this node can be reached, without /p2p."""
        _, addresses = await self.identity()
        return addresses

    async def peers(self) -> dict[str, tuple[str, ...]]:
        """Peers with an open connection, and the addresses at which they were seen."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        peers: dict[str, tuple[str, ...]] = {}
        for peer in response.peers:  # one item per connection
            peer_id = base58.b58encode(peer.id).decode()
            peers[peer_id] = tuple(dict.fromkeys((*peers.get(peer_id, ()), *_decoded(peer.addrs))))
        return peers

    async def seen_at(self, peer_id: str) -> tuple[str, ...]:
        """Where one connected peer is seen. The others are not decoded, which takes longer than all the rest."""
        response, wanted = (
            await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)),
            base58.b58decode(peer_id),
        )
        return tuple(text for peer in response.peers if peer.id == wanted for text in _decoded(peer.addrs))

    async def listening_addresses(self, peer_id: str) -> tuple[str, ...]:
        """Where a connected peer listens, as it told the daemon. For a peer that is not connected, a search in the DHT."""
        find = p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.FIND_PEER, peer=base58.b58decode(peer_id))
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=find))
        return _decoded(response.dht.peer.addrs)

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer."""
        disconnect = p2pd_pb2.DisconnectRequest(peer=base58.b58decode(peer_id))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=disconnect))

    async def prefer(self, peer_id: str) -> None:
        """Where there are too many connections, close those of others first; until the last one to this peer has ended."""
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
        """Open a connection, at once if there is one already."""
        connect = p2pd_pb2.ConnectRequest(peer=base58.b58decode(peer_id), addrs=encoded(addresses))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect))

    async def open_stream(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw stream to a peer; the daemon finds its address. To be closed by the caller."""
        stream = p2pd_pb2.StreamOpenRequest(peer=base58.b58decode(peer_id), proto=[protocol])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=stream)
        _, reader, writer = await self._exchange(request)
        return reader, writer

    async def publish(self, topic: str, message: bytes) -> None:
        """Spread a message over the daemon's pubsub."""
        publish = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=topic, data=message)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=publish))

    async def subscribe(self, topic: str) -> AsyncIterator[tuple[str, bytes]]:
        """(peer id of the author, message) of a topic, own ones too, until the daemon goes or the caller stops."""
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
                await write_pbmsg(writer, request)
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
    """One line of the daemon's words; protobuf gives bytes where those of a stranger in them are no text."""
    text = cause.decode(errors="replace") if isinstance(cause, bytes) else cause
    words = " ".join(text.split())[:_MAX_CAUSE_CHARACTERS]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def answered_instead(error: NetworkError, dialled: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(peer id, address) of those who were found at dialled addresses in place of the peer that was looked for."""
    for address, peer_id in _OTHER_PEER.findall(str(error)):
        if address in dialled and is_peer_id(peer_id):
            yield peer_id, address


def encoded(addresses: Iterable[str]) -> list[bytes]:
    """In binary; one that hivemind cannot write, such as a host name that a stranger made up, is left out."""
    binary = []
    for address in addresses:
        try:
            binary.append(address_bytes(address))
        except (ValueError, LookupError):
            continue
    return binary


def _decoded(addresses: Iterable[bytes]) -> tuple[str, ...]:
    """As text, at most MAX_CLAIMED of them; an address of a kind that hivemind does not know is left out."""
    texts = []
    for address in islice(addresses, MAX_CLAIMED):
        try:
            texts.append(address_text(address))
        except (ValueError, LookupError):
            continue
    return tuple(texts)

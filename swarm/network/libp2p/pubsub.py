"""py-libp2p's Pubsub, hardened: every message is validated before it is forwarded, and every call uses up its sender's
rate.

    stream ─ frames ─ call ─┬ messages ─ seen? ─ guard (banned?) ─ handler's decision ─ router ─ queues ─ streams
                            ├ subscriptions, bounded
                            └ control ─ router

py-libp2p ends a whole host when a handler raises anything, so nothing leaves `stream_handler`. In GossipSub's framing
each remote procedure call is a length (unsigned varint) followed by that many bytes of protobuf. It is read in large
pieces here: py-libp2p reads the length byte by byte, which costs more than the message.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from swarm.network.gossip import ForwarderGuard, message_id
from swarm.network.libp2p.parts import ID, IHost, INetStream, Pubsub, RpcQueue, StreamError, rpc_pb2, trio
from swarm.network.libp2p.router import BoundedGossipSub, SeenMessages
from swarm.network.requests.framing import encode_frame
from swarm.network.transport import GossipHandler, TrafficCounter, ValidationResult

logger = logging.getLogger(__name__)


class OversizeFrame(ValueError):
    """A peer announces a frame longer than allowed, or a malformed length."""


class FrameReader:
    """Turns the bytes that arrive into whole frames. It never holds more than one frame and one piece."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the frames that `piece` completes; exhaust it. Raises OversizeFrame as soon as a length is too large."""
        self._buffer += piece
        position = 0
        while (head := self._read_length(position)) is not None:
            length, start = head
            if len(self._buffer) - start < length:
                break
            position = start + length
            yield bytes(self._buffer[start:position])
        del self._buffer[:position]

    def _read_length(self, position: int) -> tuple[int, int] | None:
        """Return (length, start of the frame), or None while the length is incomplete."""
        length = 0
        for shift in range(0, 35, 7):
            if position >= len(self._buffer):
                return None
            byte = self._buffer[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if length > self._max_frame_bytes:
                raise OversizeFrame(f"a gossip frame must be <= {self._max_frame_bytes} bytes, got {length}")
            if byte < 0x80:
                return length, position
        raise OversizeFrame("the length of a gossip frame must be a varint of at most 5 bytes, got more")


MAX_CALL_BYTES = 64 * 1024
MAX_TOPIC_CHARS = 128
MAX_TOPICS_PER_PEER = 64
MAX_QUEUED_CALLS = 256
"""Calls queued for one peer. What a slow peer cannot take is dropped, and it asks for it later."""
_MAX_STREAMS_PER_PEER = 4
_READ_BYTES = 16 * 1024
_WRITE_BYTES = 16 * 1024
_SEND_TIMEOUT_S = 10.0
_CREDIT_BYTES = 64 * 1024
_MESSAGES_AT_ONCE = 16
_GATHER_S = 0.02
"""Shortest time between two writes to one peer: a fraction of what a message takes from one place to another."""


class GuardedPubsub(Pubsub):
    """The pubsub of one host. `handlers` by topic may change at any time."""

    router: BoundedGossipSub

    def __init__(
        self,
        host: IHost,
        router: BoundedGossipSub,
        guard: ForwarderGuard,
        handlers: Mapping[str, GossipHandler],
        traffic: TrafficCounter,
    ) -> None:
        super().__init__(
            host,
            router,
            strict_signing=False,
            max_inbound_rpc_size=MAX_CALL_BYTES,
            max_subscriptions_per_rpc=MAX_TOPICS_PER_PEER,
            max_subscriptions_per_peer=MAX_TOPICS_PER_PEER,
        )
        self.seen_messages.stop()  # it has a thread
        self.seen_messages = SeenMessages(trio.current_time)  # pyright: ignore[reportAttributeAccessIssue]
        self._guard = guard
        self._handlers = handlers
        self._traffic = traffic
        self._num_streams: Counter[str] = Counter()

    # ---- inbound

    async def stream_handler(self, stream: INetStream) -> None:
        """Read one inbound stream for as long as its peer behaves. Raises nothing."""
        peer_id = stream.muxed_conn.peer_id
        name = str(peer_id)
        self._num_streams[name] += 1
        try:
            if self._num_streams[name] <= _MAX_STREAMS_PER_PEER and not self._guard.is_banned(name):
                await self._read(stream, peer_id)
        except StreamError as error:  # py-libp2p raises it at a normal end, too
            logger.debug("a gossip stream of %s ended: %s", name, error)
        except Exception as error:  # a malformed frame, malformed protobuf, a field that py-libp2p did not expect, ...
            logger.debug("a gossip stream of %s broke: %s: %s", name, type(error).__name__, error)
            self._guard.blame(name)
        finally:
            self._num_streams[name] -= 1
            if not self._num_streams[name]:
                del self._num_streams[name]
            with contextlib.suppress(Exception):
                await stream.reset()

    async def _read(self, stream: INetStream, peer_id: ID) -> None:
        _grant_credit_in_bulk(stream)
        frames, name = FrameReader(MAX_CALL_BYTES), str(peer_id)
        while piece := await stream.read(_READ_BYTES):
            self._traffic.bytes_received += len(piece)
            self._traffic.gossip_bytes_received += len(piece)
            for frame in frames.feed(piece):
                await self._process(rpc_pb2.RPC.FromString(frame), peer_id, name)
                if self._guard.is_banned(name):
                    return

    async def _process(self, call: rpc_pb2.RPC, peer_id: ID, name: str) -> None:
        control = call.control
        num_controls = len(control.graft) + len(control.prune) + len(control.ihave) + len(control.iwant)
        cost = len(call.subscriptions) + num_controls
        # Messages are counted one by one. An empty call is not free either: 16,384 of them fit into one read.
        charge = cost if call.publish else max(cost, 1)
        if charge and not self._guard.admit(name, charge):
            return
        self._traffic.gossip_messages_received += len(call.publish) + cost
        for subscription in call.subscriptions:
            if not subscription.subscribe or len(subscription.topicid) <= MAX_TOPIC_CHARS:
                self.handle_subscription(peer_id, subscription)
        for number, message in enumerate(call.publish, 1):
            self._judge(peer_id, name, message)
            if number % _MESSAGES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        if num_controls:
            await self.router.handle_rpc(call, peer_id)

    def _judge(self, forwarder: ID, name: str, message: rpc_pb2.Message) -> None:
        if len(message.topicIDs) != 1:
            self._guard.blame(name)
            return
        topic, data = message.topicIDs[0], message.data
        handler, known_as = self._handlers.get(topic), message_id(topic, data)
        if self.seen_messages.has(known_as):
            self._guard.admit(name, 1)  # one copy per neighbour is normal; many copies cost time
            self.router.recent.note_holder(known_as, forwarder)
            return

        def remember() -> None:
            self.seen_messages.add(known_as)

        def judge(peer: str, data: bytes) -> ValidationResult:
            assert handler is not None, "else the guard calls nobody"
            remember()
            return handler(peer, data)

        if (
            self._guard.judge(name, data, judge if handler is not None else None, mark_seen=remember)
            is ValidationResult.ACCEPT
        ):
            # a new message, since unknown fields of a stranger's message would be forwarded
            self.router.forward(forwarder, topic, known_as, message=rpc_pb2.Message(data=data, topicIDs=[topic]))

    # ---- outbound

    async def publish(self, topic_id: str | list[str], data: bytes) -> None:
        assert isinstance(topic_id, str), "one topic per message"
        known_as = message_id(topic_id, data)
        if not self.seen_messages.has(known_as):
            self.seen_messages.add(known_as)
            message = rpc_pb2.Message(data=data, topicIDs=[topic_id])
            self.router.forward(self.my_id, topic_id, known_as, message=message)

    async def handle_sending_messages(self, peer_id: ID, stream: INetStream, queue: RpcQueue) -> None:
        """Write what is queued for a peer, as much as possible at once. Ends with the queue or the stream.

        A first message is written at once. What comes within _GATHER_S of it is written together: many nodes publish at
        the same time, and what the peer has sent meanwhile is left out.
        """
        queue.max_message_size = MAX_CALL_BYTES
        waiting = queue._queue  # there is no public way to take without waiting
        waiting.max_size = MAX_QUEUED_CALLS
        next_at = -math.inf
        try:
            while (call := await queue.pop()) is not None:
                if next_at > trio.current_time():
                    await trio.sleep_until(next_at)
                data = bytearray()
                while call is not None:
                    if not self._is_held_by(peer_id, call):
                        data += self._encode(call)
                    call = waiting.pop() if len(data) < _WRITE_BYTES else None
                if data:
                    with trio.fail_after(_SEND_TIMEOUT_S):
                        await stream.write(bytes(data))
                    next_at = trio.current_time() + _GATHER_S
                    self._count_out(len(data))
        except Exception as error:  # slow or gone
            logger.debug("gossip to %s ended: %s: %s", peer_id, type(error).__name__, error)
            with contextlib.suppress(Exception):
                await stream.reset()
            self._handle_dead_peer(peer_id)

    def _encode(self, call: rpc_pb2.RPC) -> bytes:
        control = call.control
        num_controls = len(control.graft) + len(control.prune) + len(control.ihave) + len(control.iwant)
        self._traffic.gossip_messages_sent += len(call.publish) + len(call.subscriptions) + num_controls
        return encode_frame(call.SerializeToString())

    def _is_held_by(self, peer_id: ID, call: rpc_pb2.RPC) -> bool:
        """Return whether a call forwards one message, and the peer has sent that message since it was queued."""
        if len(call.publish) != 1 or call.HasField("control") or call.subscriptions:
            return False
        message = call.publish[0]
        return self.router.recent.is_held_by(message_id(message.topicIDs[0], message.data), peer_id)

    def _count_out(self, num_bytes: int) -> None:
        self._traffic.bytes_sent += num_bytes
        self._traffic.gossip_bytes_sent += num_bytes

    # ---- what py-libp2p would add or remember

    def get_hello_packet(self) -> rpc_pb2.RPC:
        topics = [rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic) for topic in self.topic_ids]
        hello = rpc_pb2.RPC(subscriptions=topics)
        self._count_out(len(self._encode(hello)))  # py-libp2p writes it directly
        return hello

    def _build_announce_rpc(self, topic_id: str, subscribe: bool) -> tuple[rpc_pb2.RPC, rpc_pb2.RPC.SubOpts]:
        announcement = rpc_pb2.RPC.SubOpts(subscribe=subscribe, topicid=topic_id)
        return rpc_pb2.RPC(subscriptions=[announcement]), announcement

    async def _replay_recent_messages(self, peer_id: ID, topic: str) -> None:
        if topic in self._handlers:
            await super()._replay_recent_messages(peer_id, topic)

    def _forget_subscription(self, peer_id: ID, topic: str) -> None:
        # A peer that leaves and joins a topic again and again is not sent all of it each time.
        replayed = self._replayed_recent_topics.get(peer_id, set()) & self._handlers.keys()
        super()._forget_subscription(peer_id, topic)
        if replayed:
            self._replayed_recent_topics[peer_id] = replayed


def _grant_credit_in_bulk(stream: INetStream) -> None:
    """Grant window to the sender once per _CREDIT_BYTES. py-libp2p does so after every read, in a frame of its own."""
    muxed: Any = getattr(stream, "muxed_stream", None)
    grant = getattr(muxed, "_auto_tune_and_send_window_update", None)
    if grant is None:  # another multiplexer
        return
    num_read = 0

    async def grant_rarely(*, bytes_read: int = 0) -> None:
        nonlocal num_read
        num_read += bytes_read
        if num_read >= _CREDIT_BYTES:
            granted, num_read = num_read, 0
            await grant(bytes_read=granted)

    muxed._auto_tune_and_send_window_update = grant_rarely

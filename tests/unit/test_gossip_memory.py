"""Frames arrive whole however they are cut, and what is remembered of gossiped messages is bounded."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.gossip import (
    HISTORY_HEARTBEATS,
    MAX_RECENT,
    MAX_SEEN,
    SEEN_S,
    WINDOW_HEARTBEATS,
    ForwarderGuard,
    message_id,
)
from swarm.network.libp2p.parts import ID, GossipSub, Multiaddr, RpcQueue, create_new_key_pair, new_host, rpc_pb2
from swarm.network.libp2p.pubsub import FrameReader, GuardedPubsub, OversizeFrame, encode_frame
from swarm.network.libp2p.router import (
    MAX_GIVEN,
    MAX_WINDOW_IDS,
    BoundedGossipSub,
    RecentMessages,
    SeenMessages,
)
from swarm.network.transport import TrafficCounter


def test_lengths_are_unsigned_varints() -> None:
    assert encode_frame(b"") == b"\x00"
    assert encode_frame(bytes(127))[:1] == b"\x7f"
    assert encode_frame(bytes(300))[:2] == b"\xac\x02"


@given(st.lists(st.binary(max_size=300)), st.data())
def test_frames_come_out_whole_however_they_are_cut(frames: list[bytes], data: st.DataObject) -> None:
    stream, reader, out = b"".join(map(encode_frame, frames)), FrameReader(300), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        out += reader.feed(stream[:size])
        stream = stream[size:]
    assert out == frames


@given(st.binary(max_size=500), st.integers(0, 64))
def test_random_bytes_end_in_frames_or_one_named_error(stream: bytes, limit: int) -> None:
    try:
        assert all(len(frame) <= limit for frame in FrameReader(limit).feed(stream))
    except OversizeFrame:
        pass


@pytest.mark.parametrize("start", [b"\x65", b"\xff\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x80"])
def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come(start: bytes) -> None:
    with pytest.raises(OversizeFrame, match="gossip frame"):
        list(FrameReader(100).feed(start))


def test_a_reader_holds_no_more_than_one_frame() -> None:
    reader = FrameReader(100)
    for _ in range(10_000):
        assert list(reader.feed(encode_frame(bytes(100)))) == [bytes(100)]
    assert len(reader._buffer) == 0


def test_message_id_golden_value() -> None:
    # printf 'topic\0data' | sha256sum
    assert message_id("topic", b"data").hex() == "244bac8362b1fa5f88772674eed579c3"
    assert message_id("topicd", b"ata") != message_id("topic", b"data")


def test_seen_ids_are_forgotten_with_time_and_beyond_a_number() -> None:
    now = [0.0]
    seen = SeenMessages(lambda: now[0])
    seen.add(b"first")
    now[0] = SEEN_S / 2
    seen.add(b"first")  # does not live longer by being sent again
    seen.add(b"second")
    now[0] = SEEN_S + 1
    seen.add(b"third")
    assert [seen.has(name) for name in (b"first", b"second", b"third")] == [False, True, True]
    for number in range(MAX_SEEN + 10):
        seen.add(number.to_bytes(4, "big"))
    assert len(seen) == MAX_SEEN
    assert not seen.has(b"third") and seen.has((MAX_SEEN).to_bytes(4, "big"))


def test_a_message_can_be_asked_for_longer_than_it_is_told_of() -> None:
    recent = RecentMessages()
    recent.put("t", b"id", "message")
    recent.put("other", b"id 2", "message 2")
    for heartbeat in range(HISTORY_HEARTBEATS + 1):
        assert recent.window("t") == ([b"id"] if heartbeat < WINDOW_HEARTBEATS else [])
        assert recent.get(b"id") == ("message" if heartbeat < HISTORY_HEARTBEATS else None)
        recent.shift()
    assert len(recent) == 0


def test_an_id_is_announced_at_one_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    router = BoundedGossipSub()
    monkeypatch.setattr(GossipSub, "gossip_heartbeat", lambda self: {ID(b"peer"): {"t": self.recent.window("t")}})
    announced: Counter[bytes] = Counter()
    for heartbeat in range(4 * WINDOW_HEARTBEATS):
        router.recent.put("t", bytes([heartbeat]), "message")
        for topics in router.gossip_heartbeat().values():
            announced.update(topics["t"])
        router.recent.shift()
    assert announced == Counter(bytes([heartbeat]) for heartbeat in range(4 * WINDOW_HEARTBEATS))


def test_recent_messages_are_bounded_and_nobody_replaces_one() -> None:
    recent = RecentMessages()
    for number in range(MAX_RECENT + 100):
        recent.put("t", number.to_bytes(4, "big"), number)
    recent.put("t", bytes(4), "forged")
    assert len(recent) == MAX_RECENT and recent.get(bytes(4)) == 0
    assert len(recent.window("t")) == MAX_WINDOW_IDS
    for _ in range(HISTORY_HEARTBEATS):
        recent.shift()
    assert len(recent) == 0 and len(recent._history) == HISTORY_HEARTBEATS


def test_who_has_a_message_is_remembered_as_long_as_the_message() -> None:
    recent, peer, other = RecentMessages(), ID(b"peer"), ID(b"other")
    recent.put("t", b"id", "message")
    for name in (b"id", b"never put"):
        recent.note_holder(name, peer)
    assert recent.is_held_by(b"id", peer) and not recent.is_held_by(b"id", other)
    assert not recent.is_held_by(b"never put", peer)
    for _ in range(HISTORY_HEARTBEATS):
        recent.shift()
    assert not recent._holders


def test_a_peer_that_asks_for_a_message_again_and_again_is_given_it_a_few_times() -> None:
    async def main() -> None:
        router, sent, peers = BoundedGossipSub(), list[tuple[ID, int]](), [ID(b"peer"), ID(b"other")]
        router.pubsub = SimpleNamespace(seen_messages=SimpleNamespace(has=lambda message_id: True))  # type: ignore[assignment]
        router.send_rpc = lambda to, call, **options: sent.append((to, len(call.publish)))  # type: ignore[method-assign]
        router.recent.put("t", b"id", rpc_pb2.Message(data=b"message"))
        ask = rpc_pb2.RPC(control=rpc_pb2.ControlMessage(iwant=[rpc_pb2.ControlIWant(messageIDs=[b"id"] * 500)]))
        for _ in range(8):
            await router.handle_rpc(ask, peers[0])
        await router.handle_rpc(ask, peers[1])
        assert sent == [(peers[0], 1)] * MAX_GIVEN + [(peers[1], 1)]
        for _ in range(HISTORY_HEARTBEATS):
            router.recent.shift()
        assert not router.recent._num_given

    trio.run(main)


class _Stream:
    """The writing end of a gossip stream: what was written, and when."""

    def __init__(self) -> None:
        self.written: list[tuple[float, list[bytes]]] = []
        self._frames = FrameReader(1 << 16)

    async def write(self, data: bytes) -> None:
        calls = [rpc_pb2.RPC.FromString(frame) for frame in self._frames.feed(data)]
        self.written.append((trio.current_time(), [message.data for call in calls for message in call.publish]))


def test_messages_of_one_moment_are_written_together_and_not_to_who_has_them() -> None:
    key_pair = create_new_key_pair(b"h" * 32)
    host = new_host(key_pair=key_pair, listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")])  # never started
    peer, stream, queue = ID(b"peer"), _Stream(), RpcQueue()

    def call(data: bytes) -> Any:
        return rpc_pb2.RPC(publish=[rpc_pb2.Message(data=data, topicIDs=["t"])])

    async def main() -> float:
        pubsub = GuardedPubsub(host, BoundedGossipSub(), ForwarderGuard(trio.current_time), {}, TrafficCounter())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pubsub.handle_sending_messages, peer, stream, queue)
            queue.push(call(b"first"))
            await trio.testing.wait_all_tasks_blocked()
            for data in (b"held", b"second", b"third"):
                queue.push(call(data))
                await trio.testing.wait_all_tasks_blocked()
            held = message_id("t", b"held")
            pubsub.router.recent.put("t", held, "message")
            pubsub.router.recent.note_holder(held, peer)
            await trio.sleep(1)
            queue.push(call(b"alone"))
            now = trio.current_time()
            await trio.sleep(1)
            queue.close()
        return now

    alone_at = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))
    (first_at, first), (second_at, second), alone = stream.written
    assert first == [b"first"] and second == [b"second", b"third"]
    assert second_at == pytest.approx(first_at + 0.02)
    assert alone == (alone_at, [b"alone"])

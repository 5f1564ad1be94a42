"""py-libp2p's GossipSub behind our guard: a stranger's stream as a function of bytes."""

import time
from types import SimpleNamespace

from swarm.network.gossip import ForwarderGuard
from swarm.network.libp2p.parts import (
    ID,
    IHost,
    Multiaddr,
    background_trio_service,
    create_new_key_pair,
    new_host,
    trio,
)
from swarm.network.libp2p.pubsub import MAX_TOPICS_PER_PEER, FrameReader, GuardedPubsub, OversizeFrame, encode_frame
from swarm.network.libp2p.router import BoundedGossipSub
from swarm.network.transport import MAX_GOSSIP_BYTES, TrafficCounter, ValidationResult
from swarm.records.identity import Identity

TOPIC = "topic"
_MAX_FRAME_BYTES = 1024
SENDER = ID.from_base58(Identity(b"s" * 32).peer_id)


def gossip_frames(data: bytes) -> bool:
    """The same frames come out however the bytes are cut, and no more is kept than one frame."""
    whole, is_sound = _frames(data, len(data) or 1)
    assert _frames(data, 1) == _frames(data, 7) == (whole, is_sound)
    assert all(len(frame) <= _MAX_FRAME_BYTES for frame in whole)
    if is_sound:  # lengths may have been written longer than need be, but never shorter
        assert sum(len(encode_frame(frame)) for frame in whole) <= len(data)
    return is_sound and bool(whole)


def gossip_stream(data: bytes) -> bool:
    """Through pubsub: nothing is raised, and a handler sees no more than a message's bound."""
    accepted, _ = trio.run(converse, data)
    return bool(accepted)


def _frames(data: bytes, piece_bytes: int) -> tuple[list[bytes], bool]:
    reader, frames = FrameReader(_MAX_FRAME_BYTES), []
    try:
        for start in range(0, len(data), piece_bytes):
            frames.extend(reader.feed(data[start : start + piece_bytes]))
            assert len(reader._buffer) <= _MAX_FRAME_BYTES + 5
    except OversizeFrame:
        return frames, False
    return frames, True


class _Stream:
    """What pubsub uses of a libp2p stream."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.muxed_conn = SimpleNamespace(peer_id=SENDER)
        self.is_reset = False

    async def read(self, num_bytes: int) -> bytes:
        piece, self._data = self._data[:num_bytes], self._data[num_bytes:]
        return piece

    async def reset(self) -> None:
        self.is_reset = True


def _host() -> IHost:
    """One that is never started."""
    return new_host(key_pair=create_new_key_pair(b"h" * 32), listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")])


async def converse(data: bytes) -> tuple[list[bytes], ForwarderGuard]:
    """The messages that a handler of TOPIC got from one stream of SENDER, and the guard afterwards. In trio."""
    accepted: list[bytes] = []

    def take(forwarder: str, message: bytes) -> ValidationResult:
        assert len(message) <= MAX_GOSSIP_BYTES
        accepted.append(message)
        return ValidationResult.ACCEPT

    guard, stream = ForwarderGuard(time.monotonic), _Stream(data)
    pubsub = GuardedPubsub(_host(), BoundedGossipSub(), guard, {TOPIC: take}, TrafficCounter())
    async with background_trio_service(pubsub):
        pubsub.router.mesh[TOPIC] = set()
        await pubsub.stream_handler(stream)  # type: ignore[arg-type]
        assert stream.is_reset
        assert len(pubsub.peer_topics) <= MAX_TOPICS_PER_PEER
    return accepted, guard

"""A message of the in-memory gossip, and what it weighs on the way."""

import hashlib
from dataclasses import dataclass

ID_BYTES = 20
FRAME_BYTES = 8
"""Around every message and control message, about as in libp2p's protobuf."""


@dataclass(frozen=True, slots=True, eq=False)
class GossipMessage:
    topic: str
    data: bytes
    id: bytes
    """Hash of topic and data."""

    @classmethod
    def of(cls, topic: str, data: bytes) -> "GossipMessage":
        return cls(topic, data, hashlib.sha256(topic.encode() + b"\x00" + data).digest()[:ID_BYTES])

    @property
    def num_bytes(self) -> int:
        return FRAME_BYTES + len(self.topic) + len(self.data)

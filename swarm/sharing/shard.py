"""Which part of a swarm a node shares its experience with, so that a node's cost does not grow with the swarm.

A shard is a prefix of `level` bits of a hash over peer id and epoch: at level 0 everybody is in one shard, each level
halves it. A shard splits when it has more than SPLIT_ABOVE members and joins its twin again below MERGE_BELOW. Every
EPOCH_S all shards are drawn anew, so that experience mixes through the whole swarm, and nobody can choose a victim's
shard for longer than that. Anyone can compute the shard of anyone: a header in a wrong one is turned away.
"""

import hashlib
import re
from dataclasses import dataclass

from swarm.records.presence import MAX_SHARD_LEVEL

EPOCH_S = 600.0
SPLIT_ABOVE = 128
MERGE_BELOW = 16
MAX_LEVEL = MAX_SHARD_LEVEL
_NAME = re.compile(r"(0|[1-9][0-9]?)\.(0|[1-9a-f][0-9a-f]{0,3})")


@dataclass(frozen=True, slots=True)
class Shard:
    """`level` bits of the hash: 2**level shards, this one being number `number`."""

    level: int
    number: int

    @property
    def name(self) -> str:
        """As in index keys and topics: `3.5` is number 5 of the 8 shards of level 3."""
        return f"{self.level}.{self.number:x}"

    @classmethod
    def parse(cls, name: str) -> "Shard | None":
        """None for a text that is the name of no shard."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        level, number = int(match[1]), int(match[2], 16)
        return cls(level, number) if level <= MAX_LEVEL and number < 1 << level else None


def shard_of(swarm_id: str, peer_id: str, level: int, now: float) -> Shard:
    """The shard that a peer belongs to at swarm time `now`, if shards have this level."""
    return Shard(level, _hash(f"shard:{swarm_id}:{peer_id}:{int(now // EPOCH_S)}") >> (256 - level))


def thinning_depth(swarm_id: str, peer_id: str) -> int:
    """k with probability 2**-(k+1): a peer lists itself in the directory k levels above its shard, too."""
    return 256 - _hash(f"depth:{swarm_id}:{peer_id}").bit_length()


def next_level(level: int, num_members: int, num_authors: int) -> int:
    """The level that a node should be at, from the members that its shard's directory lists and the authors heard.

    To split takes both: listing oneself costs a stranger nothing, and made-up members must not scatter the real ones.
    """
    if num_members > SPLIT_ABOVE and num_authors > SPLIT_ABOVE // 2:
        return min(level + 1, MAX_LEVEL)
    return level - 1 if level and num_members < MERGE_BELOW else level


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")

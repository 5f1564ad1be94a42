"""Seeds of one node, one for every purpose and round."""

import hashlib

from swarm.config import Config


def round_seed(config: Config, author: str, purpose: str, round_number: int = 0) -> int:
    """31 bits from author, node seed, purpose and round: no two nodes alike, and what a resumed run draws again."""
    text = f"{author}/{config.node.seed}/{purpose}/{round_number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

"""Uniform random numbers that depend on a key alone: not on call order, global state, batch size, device or machine.

Philox is a counter-based generator (Salmon et al., SC 2011) whose raw bit stream NumPy guarantees across versions, so the
same key gives the same numbers everywhere. It initializes the adapter's A factors, which must be equal on all nodes of a
lineage, and it samples every rollout, which must not depend on the rest of the batch.
"""

import hashlib

import numpy as np


def uniform(size: int, *key: str | int) -> np.ndarray:
    """Return `size` float32 numbers in [0, 1 - 2**-23] of the stream that `key` names.

    The largest value leaves a gap to 1, so that `u * total < total` holds in float32 for every positive total.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(size)
    return (raw >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def derive_seed(*key: str | int) -> int:
    """Return the seed in [0, 2**63) that `key` names."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1

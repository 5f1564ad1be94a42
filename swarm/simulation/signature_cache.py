"""Checks each signature once for all nodes of a process, instead of once in each of a thousand nodes.

An Ed25519 check costs 70 µs and dominates large simulations. Its result depends only on the bytes and the swarm, so sharing it
changes no behaviour, only the processor time.
"""

from collections import OrderedDict
from typing import TypeVar

from swarm.network.index_entry import IndexValidator, Validity
from swarm.records.identity import verify

K = TypeVar("K")
V = TypeVar("V")

_MAX_VERDICTS = 100_000


class SignatureCache:
    """Newest verdicts on signatures and on entries of the index."""

    def __init__(self, max_verdicts: int = _MAX_VERDICTS) -> None:
        """At most `max_verdicts` of each kind."""
        self._max_verdicts = max_verdicts
        self._signatures: OrderedDict[tuple[str, bytes, bytes], bool] = OrderedDict()
        self._entries: OrderedDict[tuple[str, str, bytes], Validity | None] = OrderedDict()

    def __len__(self) -> int:
        """Verdicts on signatures that are remembered."""
        return len(self._signatures)

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        """As `identity.verify`, whose place it takes within `signing.verified_by`."""
        key = peer_id, data, signature
        verdict = self._signatures.get(key)
        if verdict is None:
            verdict = self._keep(self._signatures, key, verify(*key))
        return verdict

    def validator(self, validate: IndexValidator) -> IndexValidator:
        """`validate`, asked once per entry by all validators of this cache together."""

        def cached(key: str, subkey: str, value: bytes) -> Validity | None:
            entry = key, subkey, value
            if entry in self._entries:
                return self._entries[entry]
            return self._keep(self._entries, entry, validate(*entry))

        return cached

    def _keep(self, verdicts: OrderedDict[K, V], key: K, verdict: V) -> V:
        verdicts[key] = verdict
        if len(verdicts) > self._max_verdicts:
            verdicts.popitem(last=False)
        return verdict

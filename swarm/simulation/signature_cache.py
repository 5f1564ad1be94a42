"""One verdict per signed record for all nodes of a process, where a thousand nodes would check the same signature.

Checking Ed25519 costs 70 µs and is most of what a large simulation does. The verdict depends on nothing but the record's
bytes and the swarm, so nodes that share it behave as before; only the processor time is not that of real nodes.
"""

from collections import OrderedDict

from swarm.network.transport import IndexValidator
from swarm.records.identity import verify

_MAX_VERDICTS = 100_000


class SignatureCache:
    """Newest verdicts on signatures and on entries of the index, at most 100,000 of each."""

    def __init__(self) -> None:
        self._signatures: OrderedDict[tuple[str, bytes, bytes], bool] = OrderedDict()
        self._entries: OrderedDict[tuple[str, str, bytes], bool] = OrderedDict()

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        """As `identity.verify`, whose place it takes within `signing.verified_by`."""
        key = peer_id, data, signature
        verdict = self._signatures.get(key)
        if verdict is None:
            verdict = self._signatures[key] = verify(*key)
            if len(self._signatures) > _MAX_VERDICTS:
                self._signatures.popitem(last=False)
        return verdict

    def validator(self, validate: IndexValidator) -> IndexValidator:
        """`validate`, asked once per entry."""

        def cached(key: str, subkey: str, value: bytes) -> bool:
            entry = (key, subkey, value)
            verdict = self._entries.get(entry)
            if verdict is None:
                verdict = self._entries[entry] = validate(key, subkey, value)
                if len(self._entries) > _MAX_VERDICTS:
                    self._entries.popitem(last=False)
            return verdict

        return cached

"""Where headers lie in the index, and which entries a node stores or believes.

Key `<swarm id>/experience/<shard>/<window>`, subkey `<peer id>/<slot>`. An author has SLOTS_PER_WINDOW entries per window,
so that no key outgrows what a reader can fetch: 64 authors of a shard times 8 slots times 1 KiB is half a MiB.
"""

import re
from collections import Counter

from swarm.records.codec import decode_record
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import signature_is_valid

WINDOW_S = 30.0
SLOTS_PER_WINDOW = 8
_SUBKEY = re.compile(rf"([1-9A-HJ-NP-Za-km-z]{{40,64}})/([0-{SLOTS_PER_WINDOW - 1}])")


def experience_key(swarm_id: str, shard: int, now: float) -> str:
    return f"{swarm_id}/experience/{shard}/{int(now // WINDOW_S)}"


def current_keys(swarm_id: str, shard: int, now: float) -> tuple[str, str]:
    """Keys of this window and the one before: what a reader polls."""
    return experience_key(swarm_id, shard, now), experience_key(swarm_id, shard, now - WINDOW_S)


def subkey(peer_id: str, sequence: int) -> str:
    return f"{peer_id}/{sequence % SLOTS_PER_WINDOW}"


class EntryValidator:
    """An entry is stored here, or believed when read, only if the owner of its subkey signed it for this swarm."""

    def __init__(self, swarm_id: str) -> None:
        self._swarm_id = swarm_id
        self.rejected: Counter[str] = Counter()
        """Entries turned away, by reason."""

    def __call__(self, key: str, subkey: str, value: bytes) -> bool:
        try:
            self._check(key, subkey, value)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            return False
        return True

    def _check(self, key: str, subkey: str, value: bytes) -> None:
        if not key.startswith(f"{self._swarm_id}/"):
            raise InvalidRecord(Rejection.FOREIGN_SWARM)
        match = _SUBKEY.fullmatch(subkey)
        record = decode_record(value)
        if match is None or record.author != match[1]:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        if not signature_is_valid(record, self._swarm_id):
            raise InvalidRecord(Rejection.BAD_SIGNATURE)

"""Judges a record once, whichever way it comes, and says of a gossiped one whether it is passed on.

Nodes and carriers use the same: what a carrier passes on, no node holds against it.
"""

from collections import Counter
from collections.abc import Callable

from swarm.admission.admission import MAX_CLOCK_SKEW_S, HeaderAdmission
from swarm.limits.bounded_maps import ExpiringKeys
from swarm.network.transport import ValidationResult
from swarm.records.codec import body_hash
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.index import Shard, shard_of
from swarm.types import Header

_MAX_REMEMBERED_RECORDS = 16_384
_NOBODYS_FAULT = frozenset(
    {
        Rejection.VERSION,  # during an upgrade
        Rejection.OWN_RECORD,
        Rejection.EXPIRED,
        Rejection.CLOCK_SKEW,  # the clock that is wrong may be the own one
        Rejection.REPLAY,
        Rejection.RATE,
        Rejection.UNKNOWN_TASK,
    }
)
"""What an honest peer may pass on in good faith."""


class HeaderValidator:
    """Of one node or carrier. Runs on its loop."""

    def __init__(
        self, swarm_id: str, admission: HeaderAdmission, remember_s: float, clock: Callable[[], float]
    ) -> None:
        """`remember_s`: how long a record may come again, by another way."""
        self._swarm_id = swarm_id
        self._admission = admission
        self._remember_s = remember_s + MAX_CLOCK_SKEW_S
        self._clock = clock
        self._judged: ExpiringKeys[bytes] = ExpiringKeys(clock, _MAX_REMEMBERED_RECORDS)
        self.rejected: Counter[str] = Counter()
        """Headers turned away, by reason."""

    def validate_gossip(self, shard: Shard, record: bytes) -> tuple[ValidationResult, Header | None]:
        """What was gossiped in the topic of `shard`, before it is passed on; the header where it is accepted."""
        if self._is_judged(record):
            return ValidationResult.IGNORE, None
        try:
            header = self._admission.admit_header(record)
            if shard_of(self._swarm_id, header.author, shard.level, header.created_at) != shard:
                raise InvalidRecord(Rejection.WRONG_SLOT)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            return ValidationResult.IGNORE if error.reason in _NOBODYS_FAULT else ValidationResult.REJECT, None
        return ValidationResult.ACCEPT, header

    def judge_entry(self, subkey: str, record: bytes) -> Header | None:
        """An entry of the index; None where it is invalid, or was judged before."""
        if self._is_judged(record):
            return None
        try:
            header = self._admission.admit_header(record)
            if not subkey.startswith(f"{header.author}/"):
                raise InvalidRecord(Rejection.WRONG_SLOT)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            return None
        return header

    def _is_judged(self, record: bytes) -> bool:
        fingerprint = body_hash(record)
        if fingerprint in self._judged:
            return True
        self._judged.add(fingerprint, self._clock() + self._remember_s)
        return False

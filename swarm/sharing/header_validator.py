"""Validates each record once, whichever way it comes, and decides whether a gossiped one is passed on.

Nodes and header relays use the same checks, so no node holds against a relay what it passed on.
"""

from collections import Counter

from swarm.admission.admission import MAX_CLOCK_SKEW_S, HeaderAdmission
from swarm.limits.bounded_maps import ExpiringKeys
from swarm.network.transport import ValidationResult
from swarm.records.codec import body_hash
from swarm.records.context import SwarmContext
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
    """The header checks of one node or header relay. It runs on its loop."""

    def __init__(
        self,
        context: SwarmContext,
        admission: HeaderAdmission,
        remember_s: float,
        *,
        rejected: Counter[str],
        by_shard: bool = False,
    ) -> None:
        """`remember_s`: how long a record may come again, by another way. `rejected`: counts rejected headers by reason.

        `by_shard`: a record that came in the topic of one shard is new in that of another. A relay is in the topics of several
        levels, and whoever sends it a header in a wide one first must not keep it from the own shard of its author.
        """
        self._swarm_id = context.swarm_id
        self._clock = context.clock
        self._admission = admission
        self._remember_s = remember_s + MAX_CLOCK_SKEW_S
        self._by_shard = by_shard
        self._seen: ExpiringKeys[tuple[str, bytes]] = ExpiringKeys(context.clock, _MAX_REMEMBERED_RECORDS)
        """(place, hash of the record)"""
        self._rejected = rejected

    def validate_gossip(self, shard: Shard, record: bytes) -> tuple[ValidationResult, Header | None]:
        """Validate what was gossiped in the topic of `shard`, before it is passed on. The header is None unless accepted."""
        place = shard.name if self._by_shard else ""
        if self._is_repeated(record, place):
            return ValidationResult.IGNORE, None
        try:
            header = self._admission.admit_header(record, place)
            if shard_of(self._swarm_id, header.author, shard.level, header.created_at) != shard:
                raise InvalidRecord(Rejection.WRONG_SLOT)
        except InvalidRecord as error:
            self._rejected[error.reason.value] += 1
            return ValidationResult.IGNORE if error.reason in _NOBODYS_FAULT else ValidationResult.REJECT, None
        return ValidationResult.ACCEPT, header

    def validate_entry(self, subkey: str, record: bytes) -> Header | None:
        """The header in an entry of the index; None where it is invalid, or was seen before."""
        if self._is_repeated(record):
            return None
        try:
            header = self._admission.admit_header(record)
            if not subkey.startswith(f"{header.author}/"):
                raise InvalidRecord(Rejection.WRONG_SLOT)
        except InvalidRecord as error:
            self._rejected[error.reason.value] += 1
            return None
        return header

    def _is_repeated(self, record: bytes, place: str = "") -> bool:
        name = place, body_hash(record)
        if name in self._seen:
            return True
        self._seen.add(name, self._clock() + self._remember_s)
        return False

"""Checks of a header that need neither tasks nor a model: who only passes headers on makes these and no more."""

from collections import OrderedDict
from collections.abc import Callable

from swarm.config import SharingSection
from swarm.records.codec import decode_header, decode_record
from swarm.records.expiring_keys import ExpiringKeys
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import signature_is_valid
from swarm.types import Header, TaskRef

MAX_CLOCK_SKEW_S = 10.0
"""A header from further in the future than this is refused; hivemind asks for clocks within 3 s anyway."""
MAX_TIME_TO_LIVE_S = 3600.0
_MAX_REMEMBERED_BODIES = 65_536
_MAX_REMEMBERED_PEERS = 4_096


class HeaderAdmission:
    """Header checks of one peer, cheap ones first, each with a reason of its own. Raises nothing but InvalidRecord."""

    def __init__(
        self,
        config: SharingSection,
        swarm_id: str,
        own_peer_id: str,
        check_task: Callable[[TaskRef], None],
        clock: Callable[[], float],
    ) -> None:
        """`check_task` raises InvalidRecord with UNKNOWN_TASK or HELD_OUT_TASK."""
        self._config = config
        self._swarm_id = swarm_id
        self._own_peer_id = own_peer_id
        self._check_task = check_task
        self._clock = clock
        self._announced: ExpiringKeys[tuple[str, bytes]] = ExpiringKeys(clock, _MAX_REMEMBERED_BODIES)
        """(author, body hash)"""
        self._allowance: OrderedDict[str, tuple[float, float]] = OrderedDict()  # author -> (headers left, since)

    def admit_header(self, data: bytes) -> Header:
        """A header that is authentic, fresh, new, within its author's rate and about tasks that `check_task` takes."""
        record = decode_record(data)
        header = decode_header(record.payload, record.author)
        if header.swarm_id != self._swarm_id:
            raise InvalidRecord(Rejection.FOREIGN_SWARM)
        if not signature_is_valid(record, self._swarm_id):
            raise InvalidRecord(Rejection.BAD_SIGNATURE, record.author)
        if header.author == self._own_peer_id:
            raise InvalidRecord(Rejection.OWN_RECORD)
        self._check_time(header)
        self._check_new(header)
        self._check_rate(header.author)
        for group in header.groups:
            self._check_task(group.task)
        return header

    def _check_time(self, header: Header) -> None:
        now = self._clock()
        if header.expires_at <= now:
            raise InvalidRecord(Rejection.EXPIRED, f"{now - header.expires_at:.0f} s ago")
        if header.created_at > now + MAX_CLOCK_SKEW_S:
            raise InvalidRecord(Rejection.CLOCK_SKEW, f"created {header.created_at - now:.0f} s in the future")
        if header.expires_at - header.created_at > MAX_TIME_TO_LIVE_S:
            raise InvalidRecord(Rejection.CLOCK_SKEW, f"lives longer than {MAX_TIME_TO_LIVE_S:.0f} s")

    def _check_new(self, header: Header) -> None:
        """Remembered by author, so that announcing another's body first does not shut its author out.

        An expired one need not be remembered: it would be turned away for that.
        """
        key = (header.author, header.body_hash)
        if key in self._announced:
            raise InvalidRecord(Rejection.REPLAY)
        self._announced.add(key, header.expires_at)

    def _check_rate(self, author: str) -> None:
        """Token bucket: one minute's allowance at once, refilled evenly."""
        per_minute, now = float(self._config.max_records_per_peer_per_minute), self._clock()
        left, since = self._allowance.pop(author, (per_minute, now))
        left = min(per_minute, left + max(0.0, now - since) * per_minute / 60.0)
        self._allowance[author] = (max(0.0, left - 1.0), now)
        while len(self._allowance) > _MAX_REMEMBERED_PEERS:
            self._allowance.popitem(last=False)
        if left < 1.0:
            raise InvalidRecord(Rejection.RATE, f"more than {per_minute:.0f} headers per minute")

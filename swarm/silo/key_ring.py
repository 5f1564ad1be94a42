"""The group's keys that a node holds: the newest one, to seal with, and the one before, to open what is on its way."""

from collections.abc import Callable

from swarm.errors import SiloError
from swarm.silo.sealing import EpochKey, epoch_of

GRACE_S = 120.0
"""What was sealed under the key before still opens for so long: as long as presence lives."""


class KeyRing:
    """Of one node, in memory alone: at a start the roll on disk is opened anew, with the identity."""

    def __init__(self, clock: Callable[[], float], grace_s: float = GRACE_S) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._grace_s = grace_s
        self._current: EpochKey | None = None
        self._before: EpochKey | None = None
        self._before_until = 0.0

    @property
    def current(self) -> EpochKey:
        """Raises SiloError where there is none."""
        if self._current is None:
            raise SiloError("a member must have the group's key, got none yet", "missing")
        return self._current

    @property
    def epoch(self) -> int:
        """0 without a key."""
        return 0 if self._current is None else self._current.epoch

    def take(self, key: EpochKey) -> bool:
        """A key of a later epoch becomes the current one; whether this one is."""
        if key.epoch <= self.epoch:
            return False
        self._before, self._before_until = self._current, self._clock() + self._grace_s
        self._current = key
        return True

    def accepted(self) -> tuple[EpochKey, ...]:
        """The keys that open something at this moment, newest first."""
        if self._before is not None and self._clock() >= self._before_until:
            self._before = None
        return tuple(key for key in (self._current, self._before) if key is not None)

    def key_for(self, sealed: bytes) -> EpochKey:
        """The key of the epoch that a message names. Raises SiloError, `unknown_epoch` where it is none of these."""
        epoch = epoch_of(sealed)
        for key in self.accepted():
            if key.epoch == epoch:
                return key
        raise SiloError(f"a message must be of epoch {self.epoch}, got {epoch}", "unknown_epoch")

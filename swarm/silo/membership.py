"""The members of a silo as one node knows them, and the group's keys that it has as a member.

    silo.roll, other members ─ accept_roll ─┐                     ┌─ is_member(peer)
    token, newcomers ──────── accept_grant ─┼─→ Membership ───────┼─ box_key_of(peer)
    clock (memberships end) ────────────────┘                     └─ KeyRing

A node holds two keys of the group: the newest one, to seal with, and the previous one, to open what is still on its
way.
"""

import logging
from collections.abc import Callable, Collection

from swarm.errors import SiloError
from swarm.limits.bounded_maps import BoundedMap
from swarm.records.identity import Identity, peer_name
from swarm.silo.grant import Grant, decode_grant
from swarm.silo.roll import Member, Roll, decode_roll, wrap_context
from swarm.silo.sealing import EpochKey, box_key, epoch_of, open_epoch_key
from swarm.silo.silo_files import SeenRolls

logger = logging.getLogger(__name__)


GRACE_S = 120.0
"""How long messages sealed under the previous key can be opened: as long as a presence lives."""


class KeyRing:
    """The group's keys of one node, in memory only. At a start the roll on disk is opened again with the identity."""

    def __init__(self, clock: Callable[[], float], grace_s: float = GRACE_S) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._grace_s = grace_s
        self._current: EpochKey | None = None
        self._before: EpochKey | None = None
        self._before_until = 0.0

    @property
    def current(self) -> EpochKey:
        """The newest key. Raises SiloError where there is none."""
        if self._current is None:
            raise SiloError("a member must have the group's key, got none yet", "missing")
        return self._current

    @property
    def epoch(self) -> int:
        """Epoch of the newest key; 0 without a key."""
        return 0 if self._current is None else self._current.epoch

    def accept(self, key: EpochKey) -> bool:
        """Make a key of a later epoch the newest one. Returns whether it was."""
        if key.epoch <= self.epoch:
            return False
        self._before, self._before_until = self._current, self._clock() + self._grace_s
        self._current = key
        return True

    def accepted(self) -> tuple[EpochKey, ...]:
        """Return the keys that are valid now, newest first."""
        if self._clock() >= self._before_until:
            self._before = None
        return tuple(key for key in (self._current, self._before) if key is not None)

    def key_for(self, sealed: bytes) -> EpochKey:
        """Return the key of the epoch that a message names. Raises SiloError, `unknown_epoch` where this node has no
        such key.
        """
        epoch = epoch_of(sealed)
        for key in self.accepted():
            if key.epoch == epoch:
                return key
        raise SiloError(f"a message must be of epoch {self.epoch}, got {epoch}", "unknown_epoch")


_MAX_NAMED = 8
"""Members named in one line of the log."""
MAX_GRANTS = 64
"""Grants of newcomers that are on no roll yet. Members that fetch a roll fetch these as well."""


class Membership:
    """The members of one silo as one node knows them. It runs on the node's event loop."""

    def __init__(
        self,
        swarm_id: str,
        owner: str,
        identity: Identity,
        clock: Callable[[], float],
        seen: SeenRolls,
        grace_s: float = GRACE_S,
    ) -> None:
        """`owner` is the peer id that signs rolls and grants. `clock` gives seconds since the epoch.

        `seen` is the newest roll that this identity has seen, in earlier runs too.
        """
        self.swarm_id = swarm_id
        self.owner = owner
        self.keys = KeyRing(clock, grace_s)
        self.roll: Roll | None = None
        self.roll_data = b""
        """The roll as it was signed, which is sent to others."""
        self.own_grant: Grant | None = None
        """The grant in the token of this node, until a roll of a later epoch decides."""
        self.seen = seen
        self._watchers: list[Callable[[], None]] = []
        self._identity = identity
        self._box_key = box_key(identity)
        self._clock = clock
        self._members: dict[str, Member] = {}  # of the roll
        self._grants: BoundedMap[str, Grant] = BoundedMap(MAX_GRANTS)  # by peer id, of the roll's epoch

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after each newer roll."""
        self._watchers.append(watcher)

    @property
    def version(self) -> int:
        """Version of the roll; 0 without one."""
        return 0 if self.roll is None else self.roll.version

    @property
    def grants(self) -> tuple[Grant, ...]:
        """Grants of members that the roll does not list."""
        return tuple(self._grants.values())

    def is_member(self, peer_id: str) -> bool:
        """Return whether the roll or a grant makes the peer a member now. Without a roll only this node is."""
        return self.box_key_of(peer_id) is not None

    def box_key_of(self, peer_id: str) -> bytes | None:
        """Return the key with which something is boxed for one member; None for others."""
        own = self.own_grant if peer_id == self._identity.peer_id else None
        for entry in (self._members.get(peer_id), self._grants.get(peer_id), own):
            if entry is not None and self._now() < entry.until:
                return entry.box_key
        return None

    def _now(self) -> float:
        """Return seconds since the epoch, at least the time at which the owner signed the roll, if the clock is behind."""
        return max(self._clock(), 0.0 if self.roll is None else self.roll.issued_at)

    def accept_roll(self, data: bytes) -> bool:
        """Accept a roll, and return whether it was newer. Raises SiloError for one that the owner has not signed.

        A roll of an epoch before that of the own grant is refused, since somebody may have been removed in between. So
        is one that is older than what this identity has seen, and a second one of the same version or epoch.
        """
        roll = decode_roll(data, self.owner, self.swarm_id)
        if roll.epoch < self.keys.epoch:
            raise SiloError(f"a silo's roll must be of epoch >= {self.keys.epoch}, got {roll.epoch}", "old")
        if roll.version < self.version:
            return False
        self.seen.check(roll, data)
        if roll.version == self.version:
            return False
        key = self._key_in(roll)
        if self.roll is not None:
            logger.info("a newer roll of the silo: %s", _what_changed(self.roll, roll))
        self.roll, self.roll_data = roll, data
        self._members = {member.peer_id: member for member in roll.members}
        # Grants of an earlier epoch are over: members removed since are not on this roll.
        for grant in [one for one in self._grants.values() if not self._counts(one)]:
            del self._grants[grant.peer_id]
        if self.own_grant is not None and self.own_grant.epoch < roll.epoch:
            self.own_grant = None
        self.seen.note(roll, data)
        if key is not None:
            self.keys.accept(key)
        elif self.keys.epoch < roll.epoch:
            logger.warning("this node is no longer a member of its silo; ask its owner")
        for watcher in self._watchers:
            watcher()
        return True

    def accept_grant(self, data: bytes) -> Grant:
        """Accept a newcomer's grant, which counts until a roll of a later epoch is known. Raises SiloError."""
        grant = decode_grant(data, self.owner, self.swarm_id)
        if self._now() >= grant.until:
            raise SiloError("a silo's grant must not be expired; ask its owner for another", "old")
        if self.roll is not None and grant.epoch < self.roll.epoch:
            raise SiloError(f"a silo's grant must be of epoch {self.roll.epoch}, got {grant.epoch}", "old")
        if self._counts(grant):
            self._grants[grant.peer_id] = grant
        return grant

    def accept_own_grant(self, data: bytes, wrapped: bytes) -> None:
        """Accept the grant and key in the token of this node, before any roll.

        Raises SiloError for another's, or a key that does not open.
        """
        grant = decode_grant(data, self.owner, self.swarm_id)
        own = self._box_key.public_key().public_bytes_raw()
        if grant.peer_id != self._identity.peer_id or grant.box_key != own:
            raise SiloError(
                f"a token must be for this node, {self._identity.peer_id}, got one for {grant.peer_id}; "
                "give the owner the request of this node",
                "stranger",
            )
        self.keys.accept(open_epoch_key(self._box_key, grant.epoch, wrapped, context=self._context()))
        self.own_grant = grant

    def _counts(self, grant: Grant) -> bool:
        """Return whether a grant adds anything to the roll."""
        if self.roll is None or grant.epoch != self.roll.epoch:
            return False
        listed = self._members.get(grant.peer_id)
        return listed is None or listed.until < grant.until

    def _key_in(self, roll: Roll) -> EpochKey | None:
        """Return the key that a roll has for this node; None where the roll does not list this node.

        Raises SiloError where it does not open, and for a second key of one epoch.
        """
        own = roll.member(self._identity.peer_id)
        if own is None:
            return None
        key = open_epoch_key(self._box_key, roll.epoch, own.wrapped, context=self._context())
        if key.epoch == self.keys.epoch and not key.has_same_secret(self.keys.current):
            raise SiloError(
                f"a silo must have one key of epoch {key.epoch}, got a second one on roll {roll.version}; its owner must "
                "rotate from the folder with the right roll",
                "two_rolls",
            )
        return key

    def _context(self) -> bytes:
        return wrap_context(self.swarm_id, self._identity.peer_id)


def _what_changed(old: Roll, new: Roll) -> str:
    before, after = ([member.peer_id for member in roll.members] for roll in (old, new))
    epoch = f"epoch {new.epoch}" if new.epoch == old.epoch else f"epoch {new.epoch} after {old.epoch}"
    removed, added = _names(set(before) - set(after)), _names(set(after) - set(before))
    return f"{epoch}; removed: {removed}; added: {added}; {len(after)} members"


def _names(peer_ids: Collection[str]) -> str:
    names = sorted(f"{peer_name(peer_id)} ({peer_id})" for peer_id in peer_ids)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (", ".join(names[:_MAX_NAMED]) or "nobody") + more

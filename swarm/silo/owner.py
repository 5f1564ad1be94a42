"""What the owner of a silo can do: invite, revoke and rotate. Each makes the next roll.

The group's key is new in each epoch. It is stored only in rolls, wrapped for each member and for the owner.
"""

import os
from collections.abc import Iterable
from dataclasses import replace

from swarm.errors import SiloError
from swarm.records.identity import Identity
from swarm.silo.grant import MembershipRequest, encode_grant, encode_token
from swarm.silo.roll import MAX_MEMBERS, MAX_TIME_S, Member, Roll, encode_roll, wrap_context
from swarm.silo.sealing import KEY_BYTES, EpochKey, box_key, open_epoch_key


class Owner:
    """The owner's key and the newest roll."""

    def __init__(self, identity: Identity, roll: Roll) -> None:
        self._identity = identity
        self.roll = roll

    @classmethod
    def found(cls, identity: Identity, swarm_id: str, now: float) -> "Owner":
        """Found a new silo without members. `now` is in seconds since the epoch."""
        owner = cls(identity, Roll(swarm_id, version=0, epoch=0, issued_at=now, owner_wrapped=b"", members=()))
        owner._begin_epoch((), now)
        return owner

    @property
    def data(self) -> bytes:
        """The signed roll."""
        return encode_roll(self.roll, self._identity)

    def invite(self, request: MembershipRequest, until: float, now: float, manifest_text: str) -> str:
        """Make a peer a member, or renew its membership. Returns its token. Raises SiloError where the silo is full.

        A membership is never shortened within an epoch, since an earlier grant would outlive the change. `until` is the
        end of the membership; it and `now` are in seconds since the epoch.
        """
        others = [one for one in self.roll.members if one.peer_id != request.peer_id]
        if not now < until <= MAX_TIME_S:
            raise SiloError(
                f"a membership must end after now, {now:.0f}, and not after {MAX_TIME_S:.0f}, got {until}; set another --days"
            )
        if len(others) >= MAX_MEMBERS:
            raise SiloError(f"a silo must have <= {MAX_MEMBERS} members, got one more; revoke others")
        known = self.roll.member(request.peer_id)
        if known is not None and until < known.until:
            raise SiloError(
                f"a membership must not end before {known.until:.0f}, as it did, got {until:.0f}; revoke it, then invite anew"
            )
        wrapped = self._wrapped(self._key(), request.peer_id, request.box_key)
        members = (*others, Member(request.peer_id, request.box_key, until=until, wrapped=wrapped))
        self.roll = replace(self.roll, version=self.roll.version + 1, issued_at=now, members=members)
        grant = encode_grant(self._identity, self.roll.swarm_id, request, until=until, epoch=self.roll.epoch)
        return encode_token(grant, wrapped, manifest_text)

    def revoke(self, peer_id: str, now: float) -> None:
        """Remove a member, and give the others a new key. Raises SiloError for a peer that is no member."""
        if self.roll.member(peer_id) is None:
            raise SiloError(f"a member must be revoked, got {peer_id}, who is none; see `swarm silo members`")
        self._begin_epoch((one for one in self.roll.members if one.peer_id != peer_id), now)

    def rotate(self, now: float) -> None:
        """Give a new key to all whose membership has not ended."""
        self._begin_epoch(self.roll.members, now)

    def _begin_epoch(self, members: Iterable[Member], now: float) -> None:
        key = EpochKey(os.urandom(KEY_BYTES), self.roll.epoch + 1)
        own_box_key = box_key(self._identity).public_key().public_bytes_raw()
        self.roll = Roll(
            swarm_id=self.roll.swarm_id,
            version=self.roll.version + 1,
            epoch=key.epoch,
            issued_at=now,
            owner_wrapped=self._wrapped(key, self._identity.peer_id, own_box_key),
            members=tuple(
                replace(one, wrapped=self._wrapped(key, one.peer_id, one.box_key)) for one in members if one.until > now
            ),
        )

    def _wrapped(self, key: EpochKey, peer_id: str, public_key: bytes) -> bytes:
        return key.boxed_for(public_key, wrap_context(self.roll.swarm_id, peer_id))

    def _key(self) -> EpochKey:
        context = wrap_context(self.roll.swarm_id, self._identity.peer_id)
        return open_epoch_key(box_key(self._identity), self.roll.epoch, self.roll.owner_wrapped, context=context)

"""Keeps the members' rolls up to date: a member with an older roll fetches the newer one.

    request  = msgpack [1, version of the own roll, own grant or empty]
    response = a box for the asker: msgpack [1, roll where it is newer, else empty, [grant, …]]

The request is not sealed with the group's key, since the two sides may be in different epochs; the connection is
encrypted all the same. A node asks each member that has just connected, now and then a random member or entrance, and
all connected members when its own roll changes. A member that is asked by one with a newer roll, or by a stranger with
a grant of a later epoch, asks back. So a new roll is everywhere within a few round trips. The first questions after a
change name the previous version, so that rolls of the same version are compared: an owner whose key is used in two
places signs two rolls of one version, and is warned.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Sequence

from swarm.errors import RequestError, SiloError
from swarm.limits.bounded_maps import BoundedMap
from swarm.network.transport import RequestRefused, Transport
from swarm.observability.repeat import repeat
from swarm.records.identity import Identity
from swarm.records.signing import check_array, check_bytes, check_int, check_list, pack
from swarm.silo.grant import MAX_GRANT_BYTES
from swarm.silo.membership import MAX_GRANTS, Membership
from swarm.silo.roll import FORMAT, MAX_MEMBERS, MAX_ROLL_BYTES, MAX_VERSION, one_error, unpacked
from swarm.silo.sealing import box, box_key, open_box
from swarm.silo.silo_files import SiloFiles

logger = logging.getLogger(__name__)

BULLETIN_PROTOCOL = "swarm/silo/1"
MAX_BULLETIN_REQUEST_BYTES = MAX_GRANT_BYTES + 32
MAX_BULLETIN_BYTES = MAX_ROLL_BYTES + MAX_GRANTS * MAX_GRANT_BYTES + 1024
"""The last kilobyte is for the box and the lengths of its parts."""
LOOK_INTERVAL_S = 1.0
"""Time between two checks of the roll on disk and of the peers to ask."""
ASK_INTERVAL_S = 10.0
"""Time between two questions to a random member."""
_DEADLINE_S = 10.0
_MAX_ASKED_AT_ONCE = 32
_NUM_COMPARED = 8
"""Members whose roll of the same version is compared after a change."""
_CONTEXT = b"bulletin"
_NO_MEMBER = "not a member"
_MIN_REFUSALS = 2
"""Refusals in a row before a warning. One may come from a member whose roll does not list this node yet, and all of one member
count only where no other one is connected: it may lie."""

_REFUSED = (
    "members of the silo answer that this node is no longer a member: its owner has removed it, or its membership has ended; it "
    "continues alone; ask the owner for a new invitation"
)


def encode_question(version: int, grant: bytes) -> bytes:
    return pack([FORMAT, version, grant])


@one_error("a question for a silo's roll")
def decode_question(request: bytes) -> tuple[int, bytes]:
    """Return (version, grant or empty). Raises SiloError."""
    format_number, version, grant = check_array(unpacked(request, 3), 3)
    check_int(format_number, FORMAT, FORMAT)
    return check_int(version, 0, MAX_VERSION), check_bytes(grant)


def encode_bulletin(roll: bytes, grants: Sequence[bytes]) -> bytes:
    return pack([FORMAT, roll, list(grants)])


@one_error("a silo's bulletin")
def decode_bulletin(text: bytes) -> tuple[bytes, list[bytes]]:
    """Return (roll or empty, grants), neither checked. Raises SiloError."""
    format_number, roll, grants = check_array(unpacked(text, MAX_GRANTS), 3)
    check_int(format_number, FORMAT, FORMAT)
    return check_bytes(roll), [check_bytes(grant) for grant in check_list(grants, 0, MAX_GRANTS)]


class Bulletin:
    """Exchanges rolls and grants for one node. It runs on the node's event loop, over the transport beneath the silo's."""

    def __init__(
        self,
        transport: Transport,
        membership: Membership,
        identity: Identity,
        files: SiloFiles,
        entrances: Sequence[str],
        rng: random.Random,
    ) -> None:
        """`entrances` are peer ids to ask as well, and alone while no member is connected, such as the manifest's."""
        self._transport = transport
        self._membership = membership
        self._box_key = box_key(identity)
        self._peer_id = identity.peer_id
        self._files = files
        self._entrances = [peer_id for peer_id in dict.fromkeys(entrances) if peer_id != identity.peer_id]
        self._rng = rng
        self._urgent: BoundedMap[str, None] = BoundedMap(_MAX_ASKED_AT_ONCE)
        self._next_ask_at = 0.0
        self._asked_version = membership.version
        self._num_compared = 0
        self._asked_members: set[str] = set()  # connected members that were asked since they connected
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._asked_at: BoundedMap[str, float] = BoundedMap(MAX_MEMBERS)
        self.faults: Counter[str] = Counter()
        """What was wrong with rolls that members sent."""
        self._wake = asyncio.Event()
        self._refusals: Counter[str] = Counter()
        """By peer id: refusals of this node as a stranger, since a member last answered."""
        transport.serve(BULLETIN_PROTOCOL, self.answer, max_request_bytes=MAX_BULLETIN_REQUEST_BYTES)

    async def work(self) -> None:
        """Work from the transport's start to its stop. Ends only when cancelled."""
        try:
            await repeat(self._turn, "compare the silo's roll with members", on_failure=lambda: None)
        finally:
            for task in self._asking.values():
                task.cancel()

    def ask_soon(self, peer_id: str) -> None:
        """Ask this peer soon, at most once a second: it may know a newer roll."""
        since_s = self._transport.now() - self._asked_at.get(peer_id, -math.inf)
        if since_s >= LOOK_INTERVAL_S:
            self._urgent[peer_id] = None
            self._wake.set()

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """Answer a request. Raises RequestRefused for a caller that is no member.

        A member that joined in an earlier epoch shows a grant that is over until it has the roll that it asks for here.
        """
        fault = ""
        try:
            version, grant = decode_question(request)
        except SiloError as error:
            raise RequestRefused(f"{_NO_MEMBER}: {error.fault}") from None
        try:
            if grant:
                self._shown(peer_id, grant)
        except SiloError as error:
            fault = f": {error.fault}"
        key = self._membership.box_key_of(peer_id)
        if key is None:
            raise RequestRefused(f"{_NO_MEMBER}{fault}")
        if version > self._membership.version:
            self.ask_soon(peer_id)
        roll = self._membership.roll_data if version < self._membership.version else b""
        return box(key, encode_bulletin(roll, [one.data for one in self._membership.grants]), _CONTEXT)

    def _shown(self, peer_id: str, data: bytes) -> None:
        """Accept a caller's own grant. One of a later epoch proves that there is a newer roll, and who has it."""
        grant = self._membership.accept_grant(data)
        if grant.peer_id != peer_id:
            raise RequestRefused("the grant of another")
        roll = self._membership.roll
        if roll is not None and grant.epoch > roll.epoch:
            self.ask_soon(peer_id)

    async def ask(self, peer_id: str) -> None:
        """Fetch what a peer knows and this node does not. Raises nothing."""
        compares = self._num_compared < _NUM_COMPARED and self._membership.version > 0
        self._num_compared += compares
        try:
            boxed = await self._transport.request(
                peer_id,
                BULLETIN_PROTOCOL,
                encode_question(self._membership.version - compares, self._own_grant()),
                max_response_bytes=MAX_BULLETIN_BYTES,
                deadline_s=_DEADLINE_S,
            )
            self._refusals.clear()
            roll, grants = decode_bulletin(open_box(self._box_key, boxed, _CONTEXT))
            if roll and self._membership.accept_roll(roll):
                self._files.write_roll(roll)
                self._membership.seen.save()
            for grant in grants:
                with contextlib.suppress(SiloError):  # of an epoch that one of the two does not know
                    self._membership.accept_grant(grant)
        except RequestError as error:
            logger.debug("asked %s for the silo's roll: %s", peer_id, error)
            if error.reason == "refused" and _NO_MEMBER in str(error):
                self._count_refusal(peer_id)
        except SiloError as error:
            self._count_fault(f"the roll of {peer_id}", error)

    def _count_fault(self, what: str, error: SiloError) -> None:
        """Count a faulty roll. Two rolls of one version, which only the owner can fix, are logged as a warning once."""
        self.faults[error.fault] += 1
        is_new = error.fault == "two_rolls" and self.faults["two_rolls"] == 1
        logger.log(logging.WARNING if is_new else logging.DEBUG, "%s is ignored: %s", what, error)

    def _count_refusal(self, peer_id: str) -> None:
        """Warn after several refusals. A removed member gets no roll that says so; refusals are all that it receives."""
        was_known = bool(self.advice())
        self._refusals[peer_id] += 1
        for line in () if was_known else self.advice():
            logger.warning(line)

    def advice(self) -> tuple[str, ...]:
        """Return what is wrong with this node's membership, and what to do about it."""
        is_one_of_several = len(self._refusals) == 1 and len(self._asked_members) > 1
        return (_REFUSED,) if self._refusals.total() >= _MIN_REFUSALS and not is_one_of_several else ()

    def read_file(self) -> None:
        """Accept the roll on disk where it is newer. A damaged one is logged as a warning."""
        try:
            if self._files.roll_has_changed() and (data := self._files.read_roll()) is not None:
                self._membership.accept_roll(data)
                self._membership.seen.save()
        except SiloError as error:
            self.faults[error.fault] += 1
            logger.warning("the roll in this node's folder is ignored: %s", error)

    async def _turn(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_INTERVAL_S):
                await self._wake.wait()
        self._wake.clear()
        self.read_file()
        for peer_id in await self._due():
            self._begin_asking(peer_id)

    def _begin_asking(self, peer_id: str) -> None:
        """Ask a peer, one question at a time. A slow peer does not delay the others."""
        if peer_id in self._asking or len(self._asking) >= _MAX_ASKED_AT_ONCE:
            return
        self._asked_members.add(peer_id)
        self._asked_at[peer_id] = self._transport.now()
        task = self._asking[peer_id] = asyncio.create_task(self.ask(peer_id), name="silo-ask")
        task.add_done_callback(lambda _: self._asking.pop(peer_id, None))

    async def _due(self) -> list[str]:
        """Return the peers to ask now: urgent ones, new ones, all when the roll has changed, else one from time to
        time.
        """
        urgent = list(self._urgent)
        self._urgent.clear()
        has_changed, now = self._asked_version != self._membership.version, self._transport.now()
        if not has_changed and now < self._next_ask_at:
            return urgent
        here = [one for one in await self._transport.connected_peers() if self._membership.is_member(one)]
        others, new = here or self._entrances, [one for one in here if one not in self._asked_members]
        if has_changed:
            self._num_compared = 0
        elif others:
            # also entrances that the own roll does not list: the roll may be old, and the connected members removed
            # since
            others = [*new, self._rng.choice(list(dict.fromkeys((*others, *self._entrances))))]
        self._asked_members &= set(here)
        self._asked_version = self._membership.version
        self._next_ask_at = now + (ASK_INTERVAL_S if here else LOOK_INTERVAL_S)
        self._rng.shuffle(others := list(others))
        return list(dict.fromkeys((*urgent, *others)))

    def _own_grant(self) -> bytes:
        """Return the grant to show while others may not have the roll that lists this node."""
        grant = self._membership.own_grant
        return b"" if grant is None else grant.data

"""Gives this node's adapter to newcomers, a few at a time and not too often.

keep(snapshot) ─ sign ─ listed under `<swarm id>/donors/<lineage>/<shard>`, anew every 20 minutes
a newcomer asks for a piece ─ has it a place? is one free for its address group? ─ piece, or "busy"

A place is bound to a peer and an address group, so holding all places takes addresses in as many networks.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from swarm.merging.exchange.ready_list import ReadyList
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.network.context import NodeContext
from swarm.network.requests.blob_protocol import (
    BLOB_REQUEST_BYTES,
    PIECE_BYTES,
    BlobRequest,
    serve_blobs,
    sha256,
)
from swarm.network.transport import RequestRefused
from swarm.records.adapter_offer import MAX_LIFETIME_S, AdapterOffer, sign_offer
from swarm.types import Snapshot

STARTER_PROTOCOL = "swarm/starter/1"
"""Serves pieces of a donor's adapter, as in `requests.blob_protocol`."""
RELIST_S = 1200.0
PAUSE_S = 300.0
"""Shortest time between two newcomers in the same place, which bounds the bandwidth that strangers cost."""
PLACES = 4
_PLACES_WITHOUT_GROUP = PLACES // 2
"""Places for newcomers whose address group is unknown or private; every other group has one place."""

GroupOf = Callable[[str], str | None]
"""Peer id -> its address group; None where that is not known."""


@dataclass(slots=True)
class _Guest:
    group: str | None
    until: float
    """When its time to fetch ends."""
    free_from: float
    """When its place is free again."""
    bytes_left: int


class AdapterDonor:
    """The donor side of one node. `keep` may be called from any thread; all else runs on the node's loop."""

    def __init__(
        self,
        timeouts: MergeTimeouts,
        context: NodeContext,
        *,
        rng: random.Random,
        max_level: Callable[[], int] = lambda: 0,
        group_of: GroupOf = lambda peer_id: None,
    ) -> None:
        """Serves its protocol at once, so it must be made before the transport starts. `max_level`: level of the node's shard
        in the directory. `group_of`: the address group of a peer.
        """
        self._timeouts = timeouts
        self._context = context
        self._group_of = group_of
        self._lists = ReadyList(context, rng, max_level=max_level, kind="donors")
        self._newest: Snapshot | None = None
        self._given: tuple[bytes, bytes] | None = None  # SHA-256, adapter
        self._guests: dict[str, _Guest] = {}  # by peer, PLACES at most
        self._kept = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serve = serve_blobs(self._find)
        self.num_guests = 0
        context.transport.serve(STARTER_PROTOCOL, self._answer, max_request_bytes=BLOB_REQUEST_BYTES)

    def keep(self, snapshot: Snapshot) -> None:
        """Give this adapter from now on: the node's state after a merge. Nothing happens while `step` does not run."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node ends
                loop.call_soon_threadsafe(self._take, snapshot)

    async def step(self) -> None:
        """List the newest adapter, and list it again while there is no newer one. To be repeated for ever."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELIST_S if self._newest else None):
                await self._kept.wait()
        # Newcomers that are being served get all of one adapter; nobody else is admitted in the meantime.
        await asyncio.sleep(max((guest.until for guest in self._guests.values()), default=0.0) - self._now())
        self._kept.clear()
        if self._newest is not None:
            await self._list(self._newest)

    def _take(self, snapshot: Snapshot) -> None:
        self._newest = snapshot
        self._kept.set()

    async def _list(self, snapshot: Snapshot) -> None:
        digest, level, now = (
            await sha256(snapshot.payload),
            await self._lists.level(snapshot.lineage),
            self._context.clock(),
        )
        offer = AdapterOffer.of(
            snapshot,
            peer_id=self._context.peer_id,
            sha256=digest,
            level=level,
            created_at=now,
            expires_at=now + MAX_LIFETIME_S,
        )
        self._given = digest, snapshot.payload
        record = sign_offer(self._context.identity, self._context.swarm_id, offer, "donors")
        await self._lists.enlist(offer, record, offer.expires_at)
        await self._lists.others(offer)  # how many there are

    async def _answer(self, peer_id: str, request: bytes) -> bytes:
        """A request handler. Raises RequestRefused."""
        wanted = BlobRequest.decode(request)
        if self._given is None or wanted.digest != self._given[0]:
            raise RequestRefused("unknown adapter")
        guest = self._admit(peer_id, len(self._given[1]))
        num_bytes = wanted.answer_bytes(len(self._given[1]))
        if num_bytes > guest.bytes_left:
            raise RequestRefused("enough")
        guest.bytes_left -= num_bytes
        return await self._serve(peer_id, request)

    def _admit(self, peer_id: str, num_bytes: int) -> _Guest:
        """Give a newcomer its place. Raises RequestRefused where none is free, or it had one recently."""
        now = self._now()
        self._guests = {peer: guest for peer, guest in self._guests.items() if now < guest.free_from}
        if peer_id in self._guests and now < self._guests[peer_id].until:
            return self._guests[peer_id]
        group = self._group_of(peer_id)
        num_of_group = sum(guest.group == group for guest in self._guests.values())
        allowed = _PLACES_WITHOUT_GROUP if group is None else 1
        is_full = len(self._guests) >= PLACES or num_of_group >= allowed
        if is_full or peer_id in self._guests or self._kept.is_set():  # a newer adapter is about to be listed
            raise RequestRefused("busy")
        until = now + self._timeouts.transfer_s(num_bytes)
        guest = _Guest(group, until, max(until, now + PAUSE_S), 2 * (num_bytes + PIECE_BYTES))
        self._guests[peer_id] = guest
        self.num_guests += 1
        return guest

    def _find(self, digest: bytes) -> bytes | None:
        return self._given[1] if self._given is not None and self._given[0] == digest else None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

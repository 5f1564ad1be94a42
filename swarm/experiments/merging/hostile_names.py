"""Hostile peers on the in-memory network, which are always ready and answer first with a hostile adapter.

HostilePartner    listed as ready all the time, proposes to whoever is listed, takes every proposal
HostileDonor      listed as a donor, and asks honest donors for their places before any newcomer does

They follow the protocol: all that they send is well formed, and their adapters have the hash that they signed.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable

from swarm.errors import NetworkError
from swarm.merging.exchange.adapter_donor import STARTER_PROTOCOL
from swarm.merging.exchange.proposal import ADAPTER_PROTOCOL, MAX_MESSAGE_BYTES, MERGE_PROTOCOL, Accepted, Proposal
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.requests.blob_protocol import BLOB_REQUEST_BYTES, PIECE_BYTES, BlobRequest, serve_blobs
from swarm.records.adapter_offer import AdapterOffer, sign_offer, verify_offer
from swarm.records.identity import Identity
from swarm.sharing.index import AdapterList, Shard, adapter_key
from swarm.types import Snapshot

_COURT_INTERVAL_S = 1.0
_LIFETIME_S = 300.0


class HostilePartner:
    """One hostile name among nodes that merge while they train."""

    def __init__(self, network: MemoryNetwork, swarm_id: str, identity: Identity) -> None:
        self.identity = identity
        self.transport = MemoryTransport(network, identity.peer_id)
        self.snapshot: Snapshot | None = None
        """What it offers; nothing is offered before it is set."""
        self._swarm_id = swarm_id
        self._given: dict[bytes, bytes] = {}
        serve = serve_blobs(self._given.get)
        self.transport.serve(MERGE_PROTOCOL, self._take, max_request_bytes=MAX_MESSAGE_BYTES)
        self.transport.serve(ADAPTER_PROTOCOL, serve, max_request_bytes=BLOB_REQUEST_BYTES)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    async def court(self) -> None:
        """List itself and propose to all that are listed, again and again. Ends only when cancelled."""
        while True:
            if self.snapshot is not None:
                key, record = _key(self._swarm_id, "merge", self.snapshot.lineage), self._record(self.snapshot)
                await self.transport.store(key, self.peer_id, record, self.transport.now() + _LIFETIME_S)
                for peer_id in await self.transport.load(key):
                    with contextlib.suppress(NetworkError):
                        await self.transport.request(
                            peer_id,
                            MERGE_PROTOCOL,
                            Proposal(record).encode(),
                            max_response_bytes=MAX_MESSAGE_BYTES,
                            deadline_s=_COURT_INTERVAL_S,
                        )
            await asyncio.sleep(_COURT_INTERVAL_S)

    async def _take(self, peer_id: str, request: bytes) -> bytes:
        return Accepted(b"" if self.snapshot is None else self._record(self.snapshot)).encode()

    def _record(self, snapshot: Snapshot) -> bytes:
        offer = _offer(self.identity, snapshot, self.transport.now())
        self._given[offer.sha256] = snapshot.payload
        return sign_offer(self.identity, self._swarm_id, offer)


class HostileDonor:
    """One hostile name in the list of donors."""

    def __init__(self, network: MemoryNetwork, swarm_id: str, identity: Identity, snapshot: Snapshot) -> None:
        self.identity = identity
        self.transport = MemoryTransport(network, identity.peer_id)
        self._swarm_id = swarm_id
        self._snapshot = snapshot
        digest = hashlib.sha256(snapshot.payload).digest()
        serve = serve_blobs({digest: snapshot.payload}.get)
        self.transport.serve(STARTER_PROTOCOL, serve, max_request_bytes=BLOB_REQUEST_BYTES)

    async def enlist(self) -> None:
        """In the list that newcomers read."""
        key, now = _key(self._swarm_id, "donors", self._snapshot.lineage), self.transport.now()
        record = sign_offer(self.identity, self._swarm_id, _offer(self.identity, self._snapshot, now), "donors")
        await self.transport.store(key, self.identity.peer_id, record, now + _LIFETIME_S)

    async def take_places(self, hostile: Iterable[str]) -> None:
        """Ask every donor that is none of `hostile` for its adapter, so that its place is taken."""
        key = _key(self._swarm_id, "donors", self._snapshot.lineage)
        for peer_id, record in (await self.transport.load(key)).items():
            if peer_id in hostile:
                continue
            offer = verify_offer(record, self._swarm_id, "donors")
            wanted = BlobRequest(offer.sha256, 0, min(offer.num_bytes, PIECE_BYTES)).encode()
            with contextlib.suppress(NetworkError):
                await self.transport.request(
                    peer_id, STARTER_PROTOCOL, wanted, max_response_bytes=PIECE_BYTES, deadline_s=30.0
                )


def _offer(identity: Identity, snapshot: Snapshot, now: float) -> AdapterOffer:
    return AdapterOffer.of(
        snapshot,
        peer_id=identity.peer_id,
        sha256=hashlib.sha256(snapshot.payload).digest(),
        level=0,
        created_at=now,
        expires_at=now + _LIFETIME_S,
    )


def _key(swarm_id: str, kind: AdapterList, lineage: str) -> str:
    return adapter_key(swarm_id, kind, lineage, Shard(0, 0))

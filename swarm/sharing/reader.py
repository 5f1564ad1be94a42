"""Index → header admission → pull the body → body admission → pool.

    poll:  load keys ─ new entries ─ admit_header ─ candidates
    pull:  while the pool holds fewer fresh groups than wanted: pick a candidate ─ fetch ─ admit_body ─ pool.add

A node pulls what it is going to train on, not all that is offered: cost per node stays flat as the swarm grows.
"""

import asyncio
import logging
import random
from collections import Counter, OrderedDict

from swarm.config import NetworkSection, SharingSection
from swarm.errors import RequestError
from swarm.network.transport import RequestRefused, Transport
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.admission import Admission
from swarm.records.codec import body_hash
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.body_store import BodyStore
from swarm.sharing.index import current_keys
from swarm.types import Header

logger = logging.getLogger(__name__)

BODY_PROTOCOL = "swarm/body/1"
_READ_AHEAD_BATCHES = 3
_MAX_CANDIDATES = 1024
_MAX_REMEMBERED_ENTRIES = 16_384
_MAX_OTHER_HOLDERS = 2
_ABSENT_AUTHOR_PAUSE_S = 20.0


class Reader:
    """Keeps the pool supplied with fresh groups of other nodes."""

    def __init__(
        self,
        sharing: SharingSection,
        network: NetworkSection,
        swarm_id: str,
        transport: Transport,
        admission: Admission,
        pool: ExperiencePool,
        bodies: BodyStore,
        rng: random.Random,
    ) -> None:
        self._sharing = sharing
        self._network = network
        self._swarm_id = swarm_id
        self._transport = transport
        self._admission = admission
        self._pool = pool
        self._bodies = bodies
        self._rng = rng
        self._seen_entries: OrderedDict[bytes, None] = OrderedDict()
        self._candidates: list[Header] = []
        self._absent_until: dict[str, float] = {}  # authors that did not answer
        self.rejected: Counter[str] = Counter()
        """Records, bodies and groups turned away, by reason."""
        self.num_records_admitted = 0
        self.num_groups_admitted = 0

    async def poll(self) -> None:
        """One reading of the index and as many pulls as the pool is short of."""
        for key in current_keys(self._swarm_id, 0, self._transport.now()):
            for subkey, value in (await self._transport.load(key)).items():
                self._consider(subkey, value)
        await self._pull_missing()

    async def serve_body(self, peer_id: str, request: bytes) -> bytes:
        """Request handler of BODY_PROTOCOL: a 32-byte hash asks for that body."""
        body = self._bodies.get(request) if len(request) == 32 else None
        if body is None:
            raise RequestRefused("unknown body")
        return body

    def _consider(self, subkey: str, value: bytes) -> None:
        """An entry read again on every poll is judged once; another node's copy of it is a replay."""
        fingerprint = body_hash(subkey.encode() + b"\x00" + value)
        if fingerprint in self._seen_entries or subkey.startswith(f"{self._transport.peer_id}/"):
            return
        self._seen_entries[fingerprint] = None
        while len(self._seen_entries) > _MAX_REMEMBERED_ENTRIES:
            self._seen_entries.popitem(last=False)
        try:
            header = self._admission.admit_header(value)
            if not subkey.startswith(f"{header.author}/"):
                raise InvalidRecord(Rejection.WRONG_SLOT)
            if self._pool.knows_body(header.body_hash):
                raise InvalidRecord(Rejection.REPLAY)
        except InvalidRecord as error:
            self._reject(error, "a header")
            return
        self._candidates.append(header)
        del self._candidates[:-_MAX_CANDIDATES]

    async def _pull_missing(self) -> None:
        wanted = _READ_AHEAD_BATCHES * self._sharing.swarm_groups
        missing = wanted - self._pool.num_fresh()
        while missing > 0 and (header := self._pick()):
            missing -= await self._pull(header)

    def _pick(self) -> Header | None:
        """Uniform over the authors that answer, so that a prolific one gets no larger share; then the newest."""
        now = self._transport.now()
        oldest = now - self._sharing.max_age_s
        self._candidates = [h for h in self._candidates if h.expires_at > now and h.created_at > oldest]
        self._absent_until = {author: until for author, until in self._absent_until.items() if until > now}
        authors = sorted({header.author for header in self._candidates} - self._absent_until.keys())
        if not authors:
            return None
        author = self._rng.choice(authors)
        header = max((h for h in self._candidates if h.author == author), key=lambda h: (h.created_at, h.sequence))
        self._candidates.remove(header)
        return header

    async def _pull(self, header: Header) -> int:
        """Fetch and admit one body. Returns the number of groups that entered the pool."""
        try:
            body = await self._fetch(header)
            groups = await asyncio.to_thread(self._admission.admit_body, header, body)
        except InvalidRecord as error:
            self._reject(error, f"a body of {header.author}")
            if error.reason is Rejection.UNAVAILABLE:
                self._absent_until[header.author] = self._transport.now() + _ABSENT_AUTHOR_PAUSE_S
            return 0
        self.num_records_admitted += 1
        useful = [group for group in groups if group.has_signal]
        if len(useful) < len(groups):
            self.rejected[Rejection.NO_SIGNAL.value] += len(groups) - len(useful)
        self._bodies.put(header.body_hash, body, header.expires_at)
        added = self._pool.add(header.body_hash, header.expires_at, header.created_at, useful)
        self.num_groups_admitted += added
        return added

    async def _fetch(self, header: Header) -> bytes:
        """The body from its author, else from a few other peers, who may have read it."""
        others = [
            p for p in await self._transport.connected_peers() if p not in (header.author, self._transport.peer_id)
        ]
        holders = [header.author, *self._rng.sample(others, min(len(others), _MAX_OTHER_HOLDERS))]
        for holder in holders:
            try:
                body = await self._transport.request(
                    holder,
                    BODY_PROTOCOL,
                    header.body_hash,
                    max_response_bytes=header.body_bytes,
                    deadline_s=self._network.request_timeout_s,
                )
            except RequestError as error:
                logger.debug("no body from %s: %s", holder, error)
                continue
            if holder == header.author or body_hash(body) == header.body_hash:
                return body
        raise InvalidRecord(Rejection.UNAVAILABLE, f"asked {len(holders)} peers")

    def _reject(self, error: InvalidRecord, what: str) -> None:
        self.rejected[error.reason.value] += 1
        logger.debug("rejected %s: %s", what, error)

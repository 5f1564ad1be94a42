"""All that a node shares with others, wired over one transport.

groups of a round ─ outbox (bounded, newest win) ─ Publisher ─→ gossip, index
gossip, index ─→ Reader ─ Admission ─→ ExperiencePool
Directory: own presence, whom to meet, which shard to share in
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarm.admission.admission import Admission
from swarm.config import NetworkSection, SharingSection
from swarm.network.transport import Transport
from swarm.observability.repeat import repeat
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity
from swarm.sharing.body_store import BodyStore
from swarm.sharing.contribution import Contribution, PeerStanding, SharingPause, contribution, peer_standings
from swarm.sharing.directory import Directory
from swarm.sharing.index import Shard
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.publisher import HEAD_START_S, Publisher
from swarm.sharing.reader import Reader
from swarm.types import RolloutGroup

_OUTBOX_ROUNDS = 8


class Exchange:
    """One node's share in the swarm's experience. Runs on the node's loop; `work` does the work."""

    def __init__(
        self,
        sharing: SharingSection,
        network: NetworkSection,
        swarm_id: str,
        identity: Identity,
        transport: Transport,
        admission: Admission,
        pool: ExperiencePool,
        bodies: BodyStore,
        next_sequence: Callable[[], int],
        rng: random.Random,
        authors: PeerTracker,
    ) -> None:
        """`next_sequence`: numbers of own headers, never the same twice. `authors`: told of all that is seen of others."""
        self._wants_groups = sharing.swarm_groups > 0
        self._outbox: asyncio.Queue[Sequence[RolloutGroup]] = asyncio.Queue(_OUTBOX_ROUNDS)
        self._bodies = bodies
        self._now = transport.now
        self.authors = authors
        self.directory = Directory(
            swarm_id,
            identity,
            transport,
            lambda: self.reader.num_authors_heard(),
            on_presence=authors.present,
            num_bodies_admitted=(lambda: self.reader.num_records_admitted) if self._wants_groups else None,
            num_published=(lambda: self.publisher.num_published) if sharing.publish else None,
        )
        head_start_s = 0.0 if network.gossip == "off" else HEAD_START_S
        self.publisher = Publisher(
            sharing,
            swarm_id,
            identity,
            transport,
            bodies,
            next_sequence,
            self._shard,
            authors.beacons,
            head_start_s=head_start_s,
        )
        self.reader = Reader(sharing, network, swarm_id, transport, admission, pool, bodies, rng, self._shard, authors)
        self._pause = SharingPause()
        self.num_rounds_not_published = 0

    def hand_out(self, groups: Sequence[RolloutGroup]) -> None:
        """Publish the groups of a round when there is time; where the network lags behind, the oldest round is dropped."""
        if self._pause.is_paused:
            return
        self.authors.acquaintances.shared(groups)
        if self._outbox.full():
            self._outbox.get_nowait()
            self.num_rounds_not_published += 1
        self._outbox.put_nowait(groups)

    @property
    def num_bodies_taken(self) -> int:
        """How often another node fetched an own body."""
        return self._bodies.num_taken

    def contribution(self) -> Contribution:
        return contribution(self._bodies, self.authors.acquaintances, self._now())

    def peers(self) -> list[PeerStanding]:
        """Who is known here, last seen first."""
        return peer_standings(self.authors.acquaintances, self.authors.reputation)

    def set_paused(self, is_paused: bool) -> None:
        """While it is paused nothing is published and nothing pulled; headers are passed on, bodies given to who asks.

        Rounds that wait to be published are forgotten: when sharing goes on they would be old.
        """
        if not is_paused:
            self._pause.resume()
            return
        self._pause.pause()
        while not self._outbox.empty():
            self._outbox.get_nowait()

    def work(self, on_failure: Callable[[], None]) -> list[Coroutine[Any, Any, None]]:
        """What runs from the transport's start to its stop. Each ends only when cancelled, or raises what is a bug."""
        steps = [
            self._pause.held(self._publish_next),
            self._pause.held(self.publisher.enter_next),
            self._turn_directory,
            *([self._pause.held(self.reader.poll)] if self._wants_groups else []),
        ]
        return [repeat(step, on_failure=on_failure) for step in steps]

    async def _publish_next(self) -> None:
        await self.publisher.publish(await self._outbox.get())

    async def _turn_directory(self) -> None:
        await asyncio.sleep(await self.directory.turn())

    def _shard(self) -> Shard:
        return self.directory.shard

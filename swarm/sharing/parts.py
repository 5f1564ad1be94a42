"""The parts of a node's sharing that exist before its policy is loaded.

NodeContext ─▶ BodyStore, PeerTracker, SharingTotals, SharingPause, Directory ─▶ SharingParts ─┬▶ Exchange
                                                                                            ├▶ NodeMerging
                                                                                            └▶ NodeReport
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from swarm.config import SharingSection
from swarm.network.context import NodeContext
from swarm.records.codec import max_body_bytes, readable_answer_tokens
from swarm.records.identity import peer_name
from swarm.records.rejection import InvalidRecord
from swarm.sharing.body_store import NUM_LARGEST_BODIES, BodyStore
from swarm.sharing.directory import Directory
from swarm.sharing.peer_tracker import MAX_PEERS, PeerHistory, PeerStats, PeerTracker
from swarm.sharing.reputation import Reputation
from swarm.sharing.totals import SharingPause, SharingTotals
from swarm.types import Header, RolloutGroup

_LEAST_RANKED_GROUPS = 4
"""Fewest groups whose mean reward is ranked."""


@dataclass(frozen=True, slots=True)
class PeerStanding:
    """What this node knows about one peer."""

    peer_id: str
    name: str
    lineage: str
    """32 hex digits: policy lineage of its newest header; empty before the first one."""
    weight: float
    """Expected share of good bodies, as far as this node knows; 0.5 for a stranger."""
    banned_until: float
    """Swarm time; 0 where it is not banned."""
    groups_admitted: int
    """During this process, like the fields below."""
    bodies_taken: int
    """Bodies of this node that it fetched from this node; others may have given it more."""
    records_rejected: int
    last_seen_at: float
    """Seconds since the epoch."""
    reward_mean: float | None
    """Mean reward of its groups of the last half hour, recomputed here; None where there are none."""
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class Contribution:
    """What other nodes took from this one."""

    last_taken_at: float | None
    """When another node last fetched a body of this one (seconds since the epoch), ..."""
    last_taken_by: str | None
    """... and its peer id."""
    bodies_taken: int
    """How often one was fetched, since this process began."""
    reward_rank: int | None
    """1 for the highest mean reward of shared groups in the last half hour; None where one side has too few."""
    reward_rank_of: int
    """How many are ranked, this node included."""


def peer_standings(
    stats: PeerStats, reputation: Reputation, taken_by: Mapping[str, tuple[int, float]] = MappingProxyType({})
) -> list[PeerStanding]:
    """All peers that were seen, also by an earlier process; the one seen last first, at most MAX_PEERS.

    `taken_by`: {peer id: (own bodies that it fetched, when last)}; who only fetches is among them.
    """
    last_seen = reputation.last_evidence()
    seen = dict(stats.last_seen_first())
    last_seen |= {peer_id: peer.last_seen_at for peer_id, peer in seen.items()}
    last_seen |= {peer_id: max(at, last_seen.get(peer_id, 0.0)) for peer_id, (_, at) in taken_by.items()}
    newest = sorted(last_seen, key=lambda peer_id: -last_seen[peer_id])[:MAX_PEERS]
    return [
        _standing(peer_id, seen.get(peer_id), last_seen[peer_id], taken_by.get(peer_id, (0, 0.0))[0], reputation)
        for peer_id in newest
    ]


def contribution(bodies: BodyStore, stats: PeerStats, now: float) -> Contribution:
    """`now`: swarm time."""
    own, num_own = stats.own_rewards.mean(now)
    means = [peer.rewards.mean(now) for _, peer in stats.last_seen_first()]
    others = [mean for mean, count in means if mean is not None and count >= _LEAST_RANKED_GROUPS]
    rank = None
    if own is not None and num_own >= _LEAST_RANKED_GROUPS and others:
        rank = 1 + sum(mean > own for mean in others)
    return Contribution(
        last_taken_at=bodies.last_taken_at,
        last_taken_by=bodies.last_taken_by,
        bodies_taken=bodies.num_taken,
        reward_rank=rank,
        reward_rank_of=len(others) + 1 if rank else 0,
    )


def _standing(
    peer_id: str, peer: PeerHistory | None, last_seen_at: float, bodies_taken: int, reputation: Reputation
) -> PeerStanding:
    peer = peer or PeerHistory()
    mean, _ = peer.rewards.mean(reputation.now())
    return PeerStanding(
        peer_id=peer_id,
        name=peer_name(peer_id),
        lineage=peer.lineage,
        weight=round(reputation.weight(peer_id), 3),
        banned_until=reputation.banned_until(peer_id),
        groups_admitted=peer.groups_admitted,
        bodies_taken=bodies_taken,
        records_rejected=peer.records_rejected,
        last_seen_at=round(last_seen_at, 1),
        reward_mean=None if mean is None else round(mean, 4),
        policy_version=peer.policy_version,
    )


class GroupObserver(Protocol):
    """Is shown the groups that a node samples and receives, as for its page. Nothing depends on what it does."""

    def own(self, groups: Sequence[RolloutGroup]) -> None:
        """All groups of a round of this node, shared or not. Called on the compute thread."""
        ...

    def admitted(self, groups: Sequence[RolloutGroup]) -> None:
        """All groups of a body that was admitted. Called on the node's loop."""
        ...

    def refused(self, header: Header, error: InvalidRecord, body: bytes | None) -> None:
        """A body that was turned away; None where none came. Called in a thread of its own."""
        ...


class NoObserver:
    """The `GroupObserver` of a node that nobody watches."""

    def own(self, groups: Sequence[RolloutGroup]) -> None: ...

    def admitted(self, groups: Sequence[RolloutGroup]) -> None: ...

    def refused(self, header: Header, error: InvalidRecord, body: bytes | None) -> None: ...


@dataclass(frozen=True)
class SharingParts:
    """What one node shares with, besides admission and pool."""

    context: NodeContext
    bodies: BodyStore
    tracker: PeerTracker
    totals: SharingTotals
    pause: SharingPause
    directory: Directory
    observer: GroupObserver

    def contribution(self) -> Contribution:
        """What other nodes took from this one."""
        return contribution(self.bodies, self.tracker.stats, self.context.clock())

    def peers(self) -> list[PeerStanding]:
        """The peers that this node knows, the one seen last first."""
        return peer_standings(self.tracker.stats, self.tracker.reputation, self.bodies.taken_by)


def make_sharing_parts(
    config: SharingSection, context: NodeContext, tracker: PeerTracker, *, pause: SharingPause, observer: GroupObserver
) -> SharingParts:
    """Make the other parts around `tracker`, and serve bodies. To be called before the transport starts."""
    largest_body_bytes = max_body_bytes(readable_answer_tokens(config.max_answer_tokens))
    bodies = BodyStore(context.clock, NUM_LARGEST_BODIES * largest_body_bytes)
    bodies.serve_on(context.transport)
    totals = SharingTotals(context.clock, publishes=config.publish, reads=config.swarm_groups > 0)
    directory = Directory(context, totals, on_presence=tracker.present)
    return SharingParts(context, bodies, tracker, totals, pause, directory, observer)

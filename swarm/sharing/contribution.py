"""What a node can say for a fact of its part in the swarm, and of its peers.

BodyStore ──── who fetched a body of ours, and when ──┐
Acquaintances ─ what was admitted, recomputed here ───┼─▶ Contribution, PeerStanding ─▶ status.json
Reputation ─── weight, bans ──────────────────────────┘

Nobody tells what became of a body that was handed out, so it counts as taken, never as admitted.

Sharing that a person has paused: steps of an exchange that are under way are broken off, and none begins.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarm.records.identity import peer_name
from swarm.sharing.body_store import BodyStore
from swarm.sharing.peer_tracker import MAX_PEERS, PeerRecord, PeerStats
from swarm.sharing.reputation import Reputation


class SharingPause:
    """Of one exchange; on its loop."""

    def __init__(self) -> None:
        self._is_on = asyncio.Event()
        self._is_paused = asyncio.Event()
        self._is_on.set()

    @property
    def is_paused(self) -> bool:
        return self._is_paused.is_set()

    def pause(self) -> None:
        self._is_on.clear()
        self._is_paused.set()

    def resume(self) -> None:
        self._is_paused.clear()
        self._is_on.set()

    def held(self, step: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """`step`, which waits while sharing is paused, and is cancelled when that begins."""

        @functools.wraps(step)
        async def run() -> None:
            await self._is_on.wait()
            working = asyncio.ensure_future(step())
            pausing = asyncio.ensure_future(self._is_paused.wait())
            try:
                await asyncio.wait({working, pausing}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                for task in (working, pausing):
                    task.cancel()
                await asyncio.gather(working, pausing, return_exceptions=True)

        return run


_LEAST_RANKED_GROUPS = 4
"""Of which a mean reward says anything."""


@dataclass(frozen=True, slots=True)
class PeerStanding:
    """One peer, as this node knows it."""

    peer_id: str
    name: str
    lineage: str
    """32 hex digits of the policy of its newest header; empty where none came."""
    weight: float
    """Share of its bodies that are good, as far as known here: 0.5 of a stranger."""
    banned_until: float
    """Swarm time; 0 where it is not banned."""
    groups_admitted: int
    """By this process, as the rest below."""
    records_rejected: int
    last_seen_at: float
    """Seconds since the epoch."""
    reward_mean: float | None
    """Of its groups of the last half hour, recomputed here; None where there are none."""
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class Contribution:
    """This node's part."""

    last_taken_at: float | None
    """When another node last fetched a body of ours (seconds since the epoch), ..."""
    last_taken_by: str | None
    """... and its peer id."""
    bodies_taken: int
    """How often one was fetched, since this process began."""
    reward_rank: int | None
    """1 for the highest mean reward of shared groups in the last half hour; None where one side has too few."""
    reward_rank_of: int
    """How many are ranked, this node included."""


def peer_standings(acquaintances: PeerStats, reputation: Reputation) -> list[PeerStanding]:
    """All that were seen, and those whom only an earlier process met; last seen first, at most MAX_PEERS."""
    last_seen = reputation.last_evidence()
    seen = dict(acquaintances.last_seen_first())
    last_seen |= {peer_id: peer.last_seen_at for peer_id, peer in seen.items()}
    newest = sorted(last_seen, key=lambda peer_id: -last_seen[peer_id])[:MAX_PEERS]
    now = reputation.now()
    return [_standing(peer_id, seen.get(peer_id), last_seen[peer_id], reputation, now) for peer_id in newest]


def contribution(bodies: BodyStore, acquaintances: PeerStats, now: float) -> Contribution:
    """`now`: swarm time."""
    own, num_own = acquaintances.own_rewards.mean(now)
    means = [peer.rewards.mean(now) for _, peer in acquaintances.last_seen_first()]
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
    peer_id: str, peer: PeerRecord | None, last_seen_at: float, reputation: Reputation, now: float
) -> PeerStanding:
    peer = peer or PeerRecord()
    mean, _ = peer.rewards.mean(now)
    return PeerStanding(
        peer_id=peer_id,
        name=peer_name(peer_id),
        lineage=peer.lineage,
        weight=round(reputation.weight(peer_id), 3),
        banned_until=reputation.banned_until(peer_id),
        groups_admitted=peer.groups_admitted,
        records_rejected=peer.records_rejected,
        last_seen_at=round(last_seen_at, 1),
        reward_mean=None if mean is None else round(mean, 4),
        policy_version=peer.policy_version,
    )

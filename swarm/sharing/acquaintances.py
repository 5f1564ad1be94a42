"""What this node has seen of each peer itself: when last, of which policy, what was admitted of it and what was not.

For people to look at: nothing here decides about anybody, which is the Reputation's part.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.types import Header, RolloutGroup

MAX_PEERS = 256
REWARD_WINDOW_S = 1800.0
"""How long a group counts as recent, ..."""
_MAX_RECENT_GROUPS = 64
"""... of at most so many per author: with rewards of 0 or 1 their mean is right to about ±0.06."""


class RecentRewards:
    """Mean reward of the groups of one author in the last half hour, the newest 64 of them."""

    def __init__(self) -> None:
        self._rewards: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT_GROUPS)  # (when, mean of a group)

    def add(self, groups: Sequence[RolloutGroup], now: float) -> None:
        self._rewards.extend((now, group.mean_reward) for group in groups)

    def mean(self, now: float) -> tuple[float | None, int]:
        """And of how many groups; None where there are none."""
        while self._rewards and self._rewards[0][0] < now - REWARD_WINDOW_S:
            self._rewards.popleft()
        count = len(self._rewards)
        return (sum(reward for _, reward in self._rewards) / count if count else None), count


@dataclass(slots=True)
class Acquaintance:
    """One peer, as seen from here since this process began."""

    last_seen_at: float = 0.0
    """Swarm time of its last presence, header or body."""
    lineage: str = ""
    """Of the policy of its newest header; empty before the first one."""
    policy_version: int | None = None
    groups_admitted: int = 0
    records_rejected: int = 0
    rewards: RecentRewards = field(default_factory=RecentRewards)
    """As recomputed here."""


class Acquaintances:
    """Of at most so many peers: where there are more, those of whom nothing was admitted are forgotten first, as names cost
    nothing. Runs on the node's loop."""

    def __init__(self, clock: Callable[[], float], max_peers: int = MAX_PEERS) -> None:
        """`max_peers`: 0 where nobody will look."""
        self._clock = clock
        self._max_peers = max_peers
        self._peers: OrderedDict[str, Acquaintance] = OrderedDict()
        self.own_rewards = RecentRewards()
        """Of what this node shared, to compare with what others shared."""

    def seen(self, peer_id: str) -> None:
        """It has listed itself."""
        self._note(peer_id)

    def heard(self, header: Header) -> None:
        """A header of it is valid."""
        peer = self._note(header.author)
        peer.lineage, peer.policy_version = header.lineage.policy, header.policy_version

    def admitted(self, header: Header, groups: Sequence[RolloutGroup], num_new: int) -> None:
        """`groups`: those of a body that carry signal, which are all that an honest node shares; `num_new` were not known."""
        peer = self._note(header.author)
        peer.groups_admitted += num_new
        peer.rewards.add(groups if num_new else (), self._clock())

    def rejected(self, author: str) -> None:
        """A body that it announced was turned away, or could not be had."""
        self._note(author).records_rejected += 1

    def shared(self, groups: Sequence[RolloutGroup]) -> None:
        """This node offers `groups`."""
        self.own_rewards.add([group for group in groups if group.has_signal], self._clock())

    def last_seen_first(self) -> list[tuple[str, Acquaintance]]:
        return sorted(self._peers.items(), key=lambda item: -item[1].last_seen_at)

    def _note(self, peer_id: str) -> Acquaintance:
        peer = self._peers.pop(peer_id, None) or Acquaintance()
        peer.last_seen_at = self._clock()
        self._peers[peer_id] = peer
        if len(self._peers) > self._max_peers:
            others = (name for name, one in self._peers.items() if not one.groups_admitted and name != peer_id)
            del self._peers[next(others, next(iter(self._peers)))]
        return peer

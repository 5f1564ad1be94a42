"""Decides which peers have to wait before they are a partner again, and how long an exchange may take.

Nodes that need the same time for their inner steps come back at the same moments, so each would meet the same neighbour
again and again, and adapters would not mix. A peer that asks everybody first would be everybody's partner. A peer that took this
node's time and gave no adapter waits longer each time.

Names cost nothing, so turns by name alone would give most merges to whoever has most names and always offers. All strangers
together, and those of one address group together, therefore have the same share of merges as of experience (`AuthorShares`): a
quarter while known peers are ready, and a group counts as two strangers.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm.limits.bounded_maps import BoundedMap
from swarm.sharing.reputation import AuthorShares

SHORTEST_SEARCH_S, LONGEST_SEARCH_S = 30.0, 3000.0
_SEARCH_SHARE = 0.9
"""Of the time between two offers."""


@dataclass(frozen=True, slots=True)
class MergeTimeouts:
    """How long finding a partner and exchanging adapters may take."""

    search_s: float = 0.0
    """Of the search for a partner. 0: see `search_after`."""
    request_timeout_s: float = 10.0
    """Of one small request; a piece of an adapter gets more, by its size."""
    min_bytes_per_s: float = 131_072.0
    """A partner whose adapter comes in more slowly than this (one megabit per second) is given up."""

    def search_after(self, interval_s: float) -> float:
        """Longest search for an offer that begins `interval_s` after the one before; 0 where there was none.

        Nodes meet only while both search, so it lasts nearly as long as an outer round. It ends before the next offer is due:
        that one would have to wait, and with each wait the search would grow.
        """
        return self.search_s or min(max(SHORTEST_SEARCH_S, _SEARCH_SHARE * interval_s), LONGEST_SEARCH_S)

    def transfer_s(self, num_bytes: int) -> float:
        """Longest time that fetching an adapter takes."""
        return self.request_timeout_s + num_bytes / self.min_bytes_per_s

    def total_s(self, num_bytes: int, search_s: float) -> float:
        """Longest time from an offer to its outcome, where the index answers in time."""
        # A proposal that is under way when the search ends may take two tries.
        return search_s + 2 * self.request_timeout_s + self.transfer_s(num_bytes)


MAX_REMEMBERED = 8
"""How many partners, and how many lists of ready peers, are remembered."""

FIRST_WAIT_OFFERS, MAX_WAIT_OFFERS = 8, 64
_MAX_FAILED = 1024


class RecentPartners:
    """The last partners of one node. Of n peers that were ready recently, the last (n - 1) / 2 partners have to wait.

    Peers that failed wait for FIRST_WAIT_OFFERS, twice as long the next time, up to MAX_WAIT_OFFERS, unless no other peer was
    ready recently. A failure is forgotten MAX_WAIT_OFFERS after the end of the wait, and not because a transfer went well: the
    adapter may still prove to be unusable.
    """

    def __init__(self, shares: AuthorShares | None = None) -> None:
        """Without `shares` all peers are treated alike."""
        self._shares = shares
        self._partners: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._ready: deque[set[str]] = deque([set()], maxlen=MAX_REMEMBERED)
        self._num_offers = 0
        self._failed: BoundedMap[str, tuple[int, int]] = BoundedMap(
            _MAX_FAILED
        )  # times, number of the offer from which it may be asked

    def begin_offer(self) -> None:
        self._num_offers += 1
        self._ready.append(set())

    def see(self, ready: Iterable[str]) -> None:
        """Note the peers that are ready to merge with this node."""
        self._ready[-1].update(ready)

    def add(self, peer_id: str) -> None:
        """Note a new partner."""
        self._partners.append(peer_id)

    def standing(self, peer_ids: Collection[str]) -> dict[str, float]:
        """{peer: weight > 0} for a draw among them."""
        return self._shares.standing(peer_ids) if self._shares else dict.fromkeys(sorted(peer_ids), 1.0)

    def is_known(self, peer_id: str) -> bool:
        return self._shares is not None and self._shares.reputation.is_known(peer_id)

    def is_banned(self, peer_id: str) -> bool:
        """Whether a peer is banned for false claims about its experience."""
        return self._shares is not None and self._shares.reputation.is_banned(peer_id)

    def may_have_it(self, peer_id: str, takes_strangers: bool) -> bool:
        """Whether a merge with this peer is within its share.

        `takes_strangers`: whether strangers are accepted at this moment.
        """
        return (
            self._shares is None or self.is_known(peer_id) or (takes_strangers and not self._has_had_its_share(peer_id))
        )

    def _has_had_its_share(self, peer_id: str) -> bool:
        """Whether merging with this stranger would give strangers, or several names of one address group, more than their share
        of the last MAX_REMEMBERED merges. Shares are over the peers that were ready or partners recently, and in whole merges, at
        least one.
        """
        assert self._shares is not None
        ready = {peer_id, *self._all_ready(), *self._partners}
        standing = self._shares.standing(ready)
        for crowd in (self._shares.bound_on_strangers(ready)[0], self._shares.neighbours(peer_id, ready)):
            share = sum(standing[one] for one in crowd) / sum(standing.values())
            num_had = sum(partner in crowd for partner in list(self._partners)[1 - MAX_REMEMBERED :])
            if len(crowd) > 1 and num_had + 1 > max(1, round(share * MAX_REMEMBERED)):
                return True
        return False

    def failed(self, peer_id: str) -> None:
        """Note that a partner gave no adapter, or an unusable one."""
        times, until = self._failed.get(peer_id) or (0, 0)
        times = 1 if self._num_offers > until + MAX_WAIT_OFFERS else times + 1
        wait = min(FIRST_WAIT_OFFERS * 2 ** min(times - 1, 8), MAX_WAIT_OFFERS)
        self._failed[peer_id] = (times, self._num_offers + 1 + wait)

    def has_failed(self, peer_id: str) -> bool:
        """Whether a peer still waits because of a failure."""
        return self._waits(peer_id) and any(not self._waits(other) for other in self._all_ready())

    def __contains__(self, peer_id: str) -> bool:
        num_waiting = (len(self._all_ready()) - 1) // 2
        return num_waiting > 0 and peer_id in list(self._partners)[-num_waiting:]

    def _waits(self, peer_id: str) -> bool:
        return self._num_offers < (self._failed.get(peer_id) or (0, 0))[1]

    def _all_ready(self) -> set[str]:
        return set().union(*self._ready)

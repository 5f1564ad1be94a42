"""Which part of what is pulled each author gets: by its standing here, and strangers within bounds.

    known authors   by what speaks against them (`Reputation.trust`), all alike where nothing does
    strangers       the same, times what strangers have been worth of late (`Reputation.promise`) and how far they have come on
                    probation; those of one address group together as two of them, and all together at most
                    `max_share_of_strangers`, in a draw and over time

A draw only weighs what is on offer at that moment. Known authors publish once per round and strangers at any time, so a draw
alone would leave the moments between to strangers. Therefore groups are also counted over time: those of known authors earn
strangers their part, and strangers wait while they have none left. The count ends where no known author is heard any more.

Names cost nothing, so what is bounded for one name is bounded for a group and for all of them, too. Whoever sends most is known
first. So that it does not crowd out those who will be known next, the first known authors get a quarter each and no more.
"""

import functools
import ipaddress
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from swarm.sharing.reputation import Reputation
from swarm.types import Header

_ENOUGH_KNOWN = 3
_FIRST_KNOWN_SHARE = 0.25
"""Of each known author, while there are fewer than enough: their number times that is kept from strangers."""
KNOWN_ARE_HEARD_FOR_S = 300.0
"""After the last header of a known author; then strangers need not wait for known authors."""
BURST_GROUPS = 12.0
"""Of strangers, beyond what was earned: one body of the largest number of groups."""
_AUTHORS_PER_GROUP = 2.0
_UNKNOWN = frozenset({"unknown"})

SeenAt = Callable[[str], Iterable[str]]
"""peer id -> multiaddresses at which this node has seen it on connections; see `Transport.seen_at`."""


class AddressGroups:
    """The /24 (IPv6: /48) or relay behind which this node has seen a peer on a connection.

    What peers claim about their own addresses plays no part, since a claim costs nothing. A peer that was seen in several
    groups counts in the most crowded one, and all peers that were never connected are one group.
    """

    def __init__(self, seen_at: SeenAt) -> None:
        self._seen_at = seen_at

    def of(self, peer_id: str) -> frozenset[str]:
        return frozenset(map(_group, self._seen_at(peer_id))) or _UNKNOWN


class AuthorShares:
    """Of one node. Runs on its loop."""

    def __init__(self, reputation: Reputation, max_share_of_strangers: float, addresses: AddressGroups) -> None:
        self.reputation = reputation
        self._max_share_of_strangers = max_share_of_strangers
        self._addresses = addresses
        self._known_heard_at = -math.inf
        self._earned_groups = BURST_GROUPS  # of strangers; below 0 after a body with more groups than were left

    def heard(self, author: str) -> None:
        """A valid header of `author` came in."""
        if self.reputation.is_known(author):
            self._known_heard_at = self.reputation.now()

    def within_share(self, offered: Sequence[Header]) -> Sequence[Header]:
        """All of `offered`, or only the headers of known authors while strangers have had their part."""
        is_alone = self.reputation.now() - self._known_heard_at > KNOWN_ARE_HEARD_FOR_S
        if is_alone or self._earned_groups > 0:
            return offered
        return [header for header in offered if self.reputation.is_known(header.author)]

    def pulled(self, header: Header) -> None:
        """The body of `header` is going to be pulled."""
        self._count(header, len(header.groups))

    def put_back(self, header: Header) -> None:
        """The body of `header`, which was counted as pulled, is left for later."""
        self._count(header, -len(header.groups))

    def standing(self, authors: Collection[str]) -> dict[str, float]:
        """{author: weight > 0}, for a draw among them."""
        factors = self.factors(authors)
        return {author: factor * self.reputation.trust(author) for author, factor in factors.items()}

    def bound_on_strangers(self, authors: Collection[str]) -> tuple[frozenset[str], float]:
        """The strangers among `authors`, and the largest share that all of them together get; 1 where nobody is known."""
        strangers = frozenset(author for author in authors if not self.reputation.is_known(author))
        return strangers, self._share_of_strangers(len(set(authors)) - len(strangers))

    def neighbours(self, author: str, authors: Collection[str]) -> frozenset[str]:
        """Strangers among `authors` that have an address group in common with the stranger `author`, itself included."""
        groups = self._addresses.of(author)
        return frozenset(
            one for one in {author, *authors} if groups & self._addresses.of(one) and not self.reputation.is_known(one)
        )

    def public_group(self, author: str) -> str | None:
        """The address group of one peer, the first by name where it has several.

        None where no address of it is known, and for private networks: machines that share one trust each other, and nobody
        outside has such an address.
        """
        groups = self._addresses.of(author) - _UNKNOWN
        return None if any(map(_is_private, groups)) else min(groups, default=None)

    def factors(self, authors: Collection[str]) -> dict[str, float]:
        """{author: what probation and its neighbours leave of its weight}; 1 for known authors."""
        known = {author for author in authors if self.reputation.is_known(author)}
        factors = dict.fromkeys(sorted(authors), 1.0)
        strangers = [author for author in factors if author not in known]
        is_known_enough = len(known) >= _ENOUGH_KNOWN
        for author in strangers:
            factors[author] = self.reputation.promise(author)
            factors[author] *= self.reputation.maturity(author) if is_known_enough else 1.0
        self._bound_groups(factors, strangers)
        self._bound_strangers(factors, known, strangers)
        return factors

    def _count(self, header: Header, num_groups: int) -> None:
        share = self._share_of_strangers(self.reputation.num_known())
        if share >= 1:
            return
        earned = num_groups * share / (1 - share) if self.reputation.is_known(header.author) else -num_groups
        self._earned_groups = max(-BURST_GROUPS, min(BURST_GROUPS, self._earned_groups + earned))

    def _share_of_strangers(self, num_known: int) -> float:
        return max(self._max_share_of_strangers, 1 - _FIRST_KNOWN_SHARE * num_known)

    def _bound_groups(self, factors: dict[str, float], strangers: Collection[str]) -> None:
        groups = {author: self._addresses.of(author) for author in strangers}
        crowds = Counter(group for author in strangers for group in groups[author])
        members: dict[str, list[str]] = {}
        for author in strangers:
            fullest = max(sorted(groups[author]), key=crowds.__getitem__)
            members.setdefault(fullest, []).append(author)
        for crowd in members.values():
            allowed = _AUTHORS_PER_GROUP * max(factors[author] for author in crowd)
            scale = min(1.0, allowed / sum(factors[author] for author in crowd))
            for author in crowd:
                factors[author] *= scale

    def _bound_strangers(self, factors: dict[str, float], known: Collection[str], strangers: Collection[str]) -> None:
        if not known or not strangers:
            return
        trust = self.reputation.trust
        total_known = sum(trust(author) for author in known)
        total_strangers = sum(factors[author] * trust(author) for author in strangers)
        share = self._share_of_strangers(len(known))
        allowed = total_known * share / (1 - share) if share < 1 else total_strangers
        scale = max(min(1.0, allowed / total_strangers), 1e-9)  # even with a share of 0 a lone stranger is read
        for author in strangers:
            factors[author] *= scale


def _is_private(group: str) -> bool:
    try:
        return ipaddress.ip_network(group).is_private
    except ValueError:  # a relay or a host name
        return False


@functools.lru_cache(maxsize=4096)
def _group(address: str) -> str:
    """The group of a multiaddress."""
    parts = address.split("/")
    if "p2p-circuit" in parts and "p2p" in parts:
        return f"relay {parts[parts.index('p2p') + 1]}"
    kind, host = (parts[1], parts[2]) if len(parts) > 2 else ("", "")
    try:
        if kind == "ip4":
            return str(ipaddress.IPv4Network(f"{host}/24", strict=False))
        if kind == "ip6":
            return str(ipaddress.IPv6Network(f"{host}/48", strict=False))
    except ValueError:
        return "unknown"
    return f"host {host[:64].lower()}" if host else "unknown"

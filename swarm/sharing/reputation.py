"""The reputation of authors, from what this node recomputed, pulled and timed itself, and never from what others say.

    body admitted ─────── good ─┐
    claim proven false ── bad ──┼─▶ Beta(1 + good, 1 + bad), fading with time ─▶ weight of the author
    late, withheld ─ a quarter ─┘        known after PROBATION_BODIES, else on probation
                                         a false claim that leaves little of it: banned, for longer each time

A false claim is no accident: it counts several times and halves what was earned, so that a good name cannot be used for lies. The
first bodies of recent strangers are the prior of the next stranger: where new names send false bodies one after the other, an
author with one true body is worth many unknown ones.

`AuthorShares` decides which part of what is pulled each author gets:

    known authors   by what speaks against them (`Reputation.trust`), all alike where nothing does
    strangers       the same, times what strangers have recently been worth (`Reputation.promise`) and how far they have come on
                    probation; those of one address group together as two of them, and all together at most
                    `max_share_of_strangers`, in a draw and over time

A draw only weighs what is on offer at that moment. Known authors publish once per round and strangers at any time, so a draw
alone would leave the moments between to strangers. Therefore groups are also counted over time: each group of a known author
earns strangers their part, and strangers wait while none is left. The count ends when no known author is active any more.

Names cost nothing, so what is bounded for one name is also bounded for an address group and for all strangers. Whoever sends most
becomes known first. So that it does not crowd out those who become known next, the first known authors get at most a quarter
each.
"""

import functools
import ipaddress
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from swarm.machine.safe_files import read_json, replace_file
from swarm.records.rejection import Rejection
from swarm.types import Header

logger = logging.getLogger(__name__)


PROBATION_BODIES = 4.0
"""Good bodies, older ones counting less, after which an author is known."""
FIRST_BAN_S = 600.0
MAX_BAN_S = 6 * 3600.0
BAN_BELOW = 0.2
MAX_AUTHORS = 1024
_MAX_FILE_BYTES = 4 << 20
_MAX_NUMBER = 1e12
_MAX_EVIDENCE = 100.0
"""Largest amount of evidence that counts for one author; older evidence counts less."""
_NEWCOMERS_HALF_LIFE_S = 900.0
"""The quality of newcomers can change within minutes, when an attack begins."""
_UNTRIED_BELOW = 0.1
_SHARPNESS = 3
"""Exponent of an author's trust: an author of whose bodies half are bad gets an eighth of a share, not a half."""
_FALSE_CLAIM = 4.0
_UNLIKELY_GROUP = 2.0
"""Weight of a group of unlikely answers. A body has several groups: where half of their answers are such, it counts as bad."""
_PROVEN = frozenset(
    {
        Rejection.OVERSIZE,
        Rejection.MALFORMED,
        Rejection.HEADER_MISMATCH,
        Rejection.TOKENS,
        Rejection.LOGPROBS,
        Rejection.FORGED_EPISODE,
        Rejection.REWARD_MISMATCH,
        Rejection.COPIED,
    }
)
"""Reasons that prove a false claim which the author signed."""
_HINTS = {
    Rejection.WRONG_HASH: 1.0,  # two bodies for one header, or a line that spoils bytes
    Rejection.UNAVAILABLE: 0.25,
    Rejection.TOO_SLOW: 0.25,
    Rejection.NO_SIGNAL: 0.25,
    Rejection.REPLAY: 0.25,  # a node that was killed samples its last rounds again
}
"""Reasons that may also happen to an honest author: they lower the weight and ban nobody. Other reasons count nothing."""


@dataclass(frozen=True, slots=True)
class _Standing:
    good: float = 0.0
    bad: float = 0.0
    at: float = 0.0
    """When `good` and `bad` were counted; they halve with every half-life since."""
    banned_until: float = 0.0
    num_bans: int = 0


class Reputation:
    """The reputation of at most MAX_AUTHORS authors; known ones are forgotten last. Safe from any thread."""

    def __init__(self, half_life_s: float, clock: Callable[[], float], path: Path | None = None) -> None:
        """`clock`: swarm time. `path`: the file that `save` writes and an earlier process left."""
        self._half_life_s = half_life_s
        self._clock = clock
        self._path = path
        self._lock = threading.Lock()
        self._standings = _load(path) if path is not None else {}
        self._newcomers = _Standing()

    def __len__(self) -> int:
        return len(self._standings)

    def admitted(self, author: str) -> None:
        """Note that a body of this author held what its header promised."""
        self._count(author, good=1.0)

    def refused(self, author: str, reason: Rejection) -> bool:
        """Note that a body of this author was rejected. Returns whether the author is banned for it."""
        if reason in _HINTS:
            self._count(author, bad=_HINTS[reason])
        return reason in _PROVEN and self._prove(author)

    def hint(self, author: str, bad: float) -> None:
        """Note weak evidence against an author, such as tasks of another's stream. `bad` = 1 counts as much as a good body."""
        self._count(author, bad=bad)

    def unlikely(self, author: str, part: float) -> None:
        """Note a group of this author with more answers that are too unlikely here than honest groups have. `part` in (0, 1]."""
        self._count(author, bad=_UNLIKELY_GROUP * part)

    def weight(self, author: str) -> float:
        """Posterior mean of the share of its bodies that are good, from Beta(1, 1): ½ for a stranger, within (0, 1)."""
        return _mean(self._now(author))

    def trust(self, author: str) -> float:
        """The weight of an author in shares: from Beta(1, 0) to the third power, so 1 where nothing speaks against it.

        It does not grow with evidence, or whoever sends most would be read most; newcomers are bounded by their probation.
        """
        standing = self._now(author)
        return ((1 + standing.good) / (1 + standing.good + standing.bad)) ** _SHARPNESS

    def promise(self, author: str) -> float:
        """How good the author's next bodies are likely to be, by the first bodies of other recent strangers.

        It is 1 where these were good, and comes nearer to 1 with every good body of its own.
        """
        with self._lock:
            good, newcomers = self._faded(author).good, self._newcomers_now()
        prior = (1 + newcomers.good) / (1 + newcomers.good + newcomers.bad)
        return (prior + good) / (1 + good)

    def is_untried(self, author: str) -> bool:
        """Whether nothing is known of this author."""
        standing = self._now(author)
        return standing.good + standing.bad < _UNTRIED_BELOW

    def maturity(self, author: str) -> float:
        """How far the author has come through its probation, from 1 / (1 + PROBATION_BODIES) to 1."""
        return min(1.0, (1 + self._now(author).good) / (1 + PROBATION_BODIES))

    def is_known(self, author: str) -> bool:
        """Whether the author's probation is over."""
        with self._lock:
            standing = self._standings.get(author)
        if standing is None or standing.good < PROBATION_BODIES:  # it only fades
            return False
        standing = self._now(author)
        return standing.good >= PROBATION_BODIES and _mean(standing) >= 0.5

    def is_banned(self, author: str) -> bool:
        return self.banned_until(author) > 0

    def banned_until(self, author: str) -> float:
        """The end of the author's ban in swarm time; 0 where it is not banned."""
        with self._lock:
            standing = self._standings.get(author)
        return standing.banned_until if standing is not None and standing.banned_until > self._clock() else 0.0

    def last_evidence(self) -> dict[str, float]:
        """{author: swarm time of the last evidence for or against it}."""
        with self._lock:
            return {author: standing.at for author, standing in self._standings.items()}

    def now(self) -> float:
        """Swarm time."""
        return self._clock()

    def has_known(self) -> bool:
        """Whether anybody's probation is over."""
        return any(map(self.is_known, self._once_known()))

    def num_known(self) -> int:
        return sum(map(self.is_known, self._once_known()))

    def _once_known(self) -> list[str]:
        """Authors that had enough good bodies when the last one was counted: the others cannot be known now."""
        with self._lock:
            return [author for author, standing in self._standings.items() if standing.good >= PROBATION_BODIES]

    def save(self) -> None:
        """Write the table to its file, all of it or nothing. Raises OSError. Does nothing without a path."""
        if self._path is None:
            return
        with self._lock:
            stored = {author: asdict(standing) for author, standing in self._standings.items()}
        replace_file(self._path, json.dumps(stored), is_durable=True)

    def _now(self, author: str) -> _Standing:
        with self._lock:
            return self._faded(author)

    def _faded(self, author: str) -> _Standing:
        standing = self._standings.get(author)
        return _Standing(at=self._clock()) if standing is None else _fade(standing, self._clock(), self._half_life_s)

    def _newcomers_now(self) -> _Standing:
        return _fade(self._newcomers, self._clock(), min(self._half_life_s, _NEWCOMERS_HALF_LIFE_S))

    def _learn_of_newcomers(self, author: _Standing, good: float, bad: float) -> None:
        """Note evidence about newcomers in general. Each author counts as one bad body at most."""
        if author.good < 1:
            before, bad = self._newcomers_now(), min(bad, max(0.0, 1.0 - author.bad))
            self._newcomers = _bounded(replace(before, good=before.good + good, bad=before.bad + bad))

    def _count(self, author: str, good: float = 0.0, bad: float = 0.0) -> None:
        with self._lock:
            before = self._faded(author)
            self._learn_of_newcomers(before, good, bad)
            self._keep(author, replace(before, good=before.good + good, bad=before.bad + bad))

    def _prove(self, author: str) -> bool:
        with self._lock:
            before, now = self._faded(author), self._clock()
            self._learn_of_newcomers(before, 0.0, 1.0)
            after = replace(before, good=before.good / 2, bad=before.bad + _FALSE_CLAIM)
            is_banned = before.banned_until <= now and _mean(after) < BAN_BELOW
            if is_banned:
                is_long_ago = now - before.banned_until > 2 * MAX_BAN_S
                num_bans = 1 if is_long_ago else before.num_bans + 1
                ban_s = min(MAX_BAN_S, FIRST_BAN_S * 2.0 ** min(num_bans - 1, 16))
                after = replace(after, banned_until=now + ban_s, num_bans=num_bans)
            self._keep(author, after)
            return is_banned

    def _keep(self, author: str, standing: _Standing) -> None:
        self._standings[author] = _bounded(standing)
        if len(self._standings) > MAX_AUTHORS:
            # The author of this evidence has just been read: of the others the least known goes, and of equals the oldest.
            others = (name for name in self._standings if name != author)
            del self._standings[min(others, key=self._worth)]

    def _worth(self, author: str) -> tuple[bool, float]:
        standing = self._standings[author]
        return standing.good >= PROBATION_BODIES, standing.at


def _fade(standing: _Standing, now: float, half_life_s: float) -> _Standing:
    left = 0.5 ** (max(0.0, now - standing.at) / half_life_s)
    at = max(now, standing.at)
    return _Standing(left * standing.good, left * standing.bad, at, standing.banned_until, standing.num_bans)


def _bounded(standing: _Standing) -> _Standing:
    scale = min(1.0, _MAX_EVIDENCE / max(standing.good + standing.bad, 1.0))
    return replace(standing, good=scale * standing.good, bad=scale * standing.bad)


def _mean(standing: _Standing) -> float:
    return (1 + standing.good) / (2 + standing.good + standing.bad)


def _load(path: Path) -> dict[str, _Standing]:
    """Load what an earlier process saved. A missing or damaged file gives an empty table, since authors can earn it again."""
    try:
        stored = read_json(path, _MAX_FILE_BYTES)
        return {str(author): _standing(fields) for author, fields in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("the reputation of others in %s is damaged (%s); starting without", path, error)
        return {}


def _standing(fields: dict[str, Any]) -> _Standing:
    """Raise ValueError or TypeError for an entry that no process has written, as it would fail later."""
    standing = _Standing(**fields)
    numbers = astuple(standing)
    if not all(type(number) in (int, float) and 0 <= number <= _MAX_NUMBER for number in numbers):
        raise ValueError(f"expected numbers from 0 to {_MAX_NUMBER:g}, got {str(fields)[:80]!r}")
    return _bounded(replace(standing, banned_until=min(standing.banned_until, standing.at + MAX_BAN_S)))


_ENOUGH_KNOWN = 3
_FIRST_KNOWN_SHARE = 0.25
"""Share kept for each known author: while there are few, their number times this is kept from strangers."""
KNOWN_ARE_HEARD_FOR_S = 300.0
"""Time after the last header of a known author from which strangers need not wait for known authors."""
BURST_GROUPS = 12.0
"""Groups that strangers may have in advance: one body with the largest number of groups."""
_AUTHORS_PER_GROUP = 2.0
_UNKNOWN = frozenset({"unknown"})

SeenAt = Callable[[str], Iterable[str]]
"""peer id -> multiaddresses at which this node has seen it on connections; see `Transport.seen_at`."""


class AddressGroups:
    """Tells the /24 (IPv6: /48) or relay behind which this node has seen a peer on a connection.

    What peers claim about their own addresses plays no part, since a claim costs nothing. A peer that was seen in several
    groups counts in the most crowded one, and all peers that were never connected are one group.
    """

    def __init__(self, seen_at: SeenAt) -> None:
        self._seen_at = seen_at

    def of(self, peer_id: str) -> frozenset[str]:
        return frozenset(map(_group, self._seen_at(peer_id))) or _UNKNOWN


class AuthorShares:
    """The shares of authors at one node. It runs on the node's loop."""

    def __init__(self, reputation: Reputation, max_share_of_strangers: float, addresses: AddressGroups) -> None:
        self.reputation = reputation
        self._max_share_of_strangers = max_share_of_strangers
        self.addresses = addresses
        self._known_heard_at = -math.inf
        self._earned_groups = BURST_GROUPS  # of strangers; below 0 after a body with more groups than were left

    def heard(self, author: str) -> None:
        """Note a valid header of `author`."""
        if self.reputation.is_known(author):
            self._known_heard_at = self.reputation.now()

    def within_share(self, offered: Sequence[Header]) -> Sequence[Header]:
        """All of `offered`, or only the headers of known authors while strangers have used up their part."""
        is_alone = self.reputation.now() - self._known_heard_at > KNOWN_ARE_HEARD_FOR_S
        if is_alone or self._earned_groups > 0:
            return offered
        return [header for header in offered if self.reputation.is_known(header.author)]

    def pulled(self, header: Header) -> None:
        """Count the body of `header`, which is going to be pulled."""
        self._count(header, len(header.groups))

    def put_back(self, header: Header) -> None:
        """Take back the count of `pulled`: the body is tried again later."""
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
        groups = self.addresses.of(author)
        return frozenset(
            one for one in {author, *authors} if groups & self.addresses.of(one) and not self.reputation.is_known(one)
        )

    def public_group(self, author: str) -> str | None:
        """The address group of one peer, the first by name where it has several.

        None where no address of it is known, and for private networks: machines that share one trust each other, and nobody
        outside has such an address.
        """
        groups = self.addresses.of(author) - _UNKNOWN
        return None if any(map(_is_private, groups)) else min(groups, default=None)

    def factors(self, authors: Collection[str]) -> dict[str, float]:
        """{author: the part of its weight that probation and its address group leave it}; 1 for known authors."""
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
        groups = {author: self.addresses.of(author) for author in strangers}
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
        if not strangers:
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

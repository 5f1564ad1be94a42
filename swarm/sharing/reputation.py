"""How far an author's word has held here: what this node recomputed, pulled and timed itself, and nobody's word about others.

    body admitted ─────── good ─┐
    claim proven false ── bad ──┼─▶ Beta(1 + good, 1 + bad), fading with time ─▶ weight of the author
    late, withheld ─ a quarter ─┘        known after PROBATION_BODIES, else on probation
                                         a false claim that leaves little of it: banned, for longer each time

A false claim is no accident: it counts several times and halves what was earned, so that a good name cannot be spent on lies.
"""

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from swarm.records.rejection import Rejection

logger = logging.getLogger(__name__)

PROBATION_BODIES = 4.0
"""Good bodies, as far as they have not faded, after which an author is no stranger any more."""
FIRST_BAN_S = 600.0
MAX_BAN_S = 6 * 3600.0
BAN_BELOW = 0.2
MAX_AUTHORS = 1024
_MAX_EVIDENCE = 100.0
"""That counts of one author: what was long ago fades, for the better and for the worse."""
_FALSE_CLAIM = 4.0
_UNLIKELY_GROUP = 2.0
"""A body has several groups: where half of their answers are such, it is worth less than nothing."""
_PROVEN = frozenset(
    {
        Rejection.OVERSIZE,
        Rejection.MALFORMED,
        Rejection.HEADER_MISMATCH,
        Rejection.TOKENS,
        Rejection.LOGPROBS,
        Rejection.REWARD_MISMATCH,
        Rejection.COPIED,
    }
)
"""What the author signed for, and is not so."""
_HINTS = {
    Rejection.WRONG_HASH: 1.0,  # two bodies for one header, or a line that spoils bytes
    Rejection.UNAVAILABLE: 0.25,
    Rejection.TOO_SLOW: 0.25,
    Rejection.NO_SIGNAL: 0.25,
    Rejection.REPLAY: 0.25,  # a node that was killed samples its last rounds again
}
"""What may have befallen an honest author too: it lowers the weight and bans nobody. Other reasons say nothing."""


@dataclass(frozen=True, slots=True)
class _Standing:
    good: float = 0.0
    bad: float = 0.0
    at: float = 0.0
    """When the two were true; they halve with every half-life since."""
    banned_until: float = 0.0
    num_bans: int = 0


class Reputation:
    """Of at most MAX_AUTHORS authors, known ones last to be forgotten. Safe from any thread."""

    def __init__(self, half_life_s: float, clock: Callable[[], float], path: Path | None = None) -> None:
        """`clock`: swarm time. `path`: where `save` puts it, and where an earlier process left it."""
        self._half_life_s = half_life_s
        self._clock = clock
        self._path = path
        self._lock = threading.Lock()
        self._standings = _load(path) if path is not None else {}

    def __len__(self) -> int:
        return len(self._standings)

    def admitted(self, author: str) -> None:
        """A body of it held what its header promised."""
        self._count(author, good=1.0)

    def refused(self, author: str, reason: Rejection) -> bool:
        """A body of it was turned away. Returns whether its author is banned now, for that."""
        if reason in _HINTS:
            self._count(author, bad=_HINTS[reason])
        return reason in _PROVEN and self._prove(author)

    def hint(self, author: str, bad: float) -> None:
        """Something about it that is no proof, such as tasks of another's stream; `bad` of 1 is as much as a good body."""
        self._count(author, bad=bad)

    def unlikely(self, author: str, part: float) -> None:
        """A group of it holds answers that nobody here would write, beyond what honest ones have; `part` of them in (0, 1]."""
        self._count(author, bad=_UNLIKELY_GROUP * part)

    def weight(self, author: str) -> float:
        """Posterior mean of the share of its bodies that are good, from Beta(1, 1): ½ for a stranger, within (0, 1)."""
        return _mean(self._now(author))

    def trust(self, author: str) -> float:
        """The same from Beta(1, 0): 1 where nothing speaks against it, however little is known. For shares, which probation
        bounds for newcomers: with a weight that grows with evidence, whoever sends most would be read most."""
        standing = self._now(author)
        return (1 + standing.good) / (1 + standing.good + standing.bad)

    def maturity(self, author: str) -> float:
        """How far it has come through its probation, from 1 / (1 + PROBATION_BODIES) to 1."""
        return min(1.0, (1 + self._now(author).good) / (1 + PROBATION_BODIES))

    def is_known(self, author: str) -> bool:
        """Whether its probation is over."""
        standing = self._now(author)
        return standing.good >= PROBATION_BODIES and _mean(standing) >= 0.5

    def is_banned(self, author: str) -> bool:
        return self._now(author).banned_until > self._clock()

    def num_banned(self) -> int:
        now = self._clock()
        with self._lock:
            return sum(standing.banned_until > now for standing in self._standings.values())

    def num_known(self) -> int:
        with self._lock:
            authors = list(self._standings)
        return sum(map(self.is_known, authors))

    def save(self) -> None:
        """All of it or nothing. Raises OSError; nothing to do without a path."""
        if self._path is None:
            return
        with self._lock:
            stored = {author: asdict(standing) for author, standing in self._standings.items()}
        fresh = self._path.with_suffix(".tmp")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(json.dumps(stored))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)

    def _now(self, author: str) -> _Standing:
        with self._lock:
            return self._faded(author)

    def _faded(self, author: str) -> _Standing:
        now, standing = self._clock(), self._standings.get(author)
        if standing is None:
            return _Standing(at=now)
        left = 0.5 ** (max(0.0, now - standing.at) / self._half_life_s)
        return replace(standing, good=left * standing.good, bad=left * standing.bad, at=max(now, standing.at))

    def _count(self, author: str, good: float = 0.0, bad: float = 0.0) -> None:
        with self._lock:
            before = self._faded(author)
            self._keep(author, replace(before, good=before.good + good, bad=before.bad + bad))

    def _prove(self, author: str) -> bool:
        with self._lock:
            before, now = self._faded(author), self._clock()
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
        scale = min(1.0, _MAX_EVIDENCE / max(standing.good + standing.bad, 1.0))
        self._standings[author] = replace(standing, good=scale * standing.good, bad=scale * standing.bad)
        if len(self._standings) > MAX_AUTHORS:
            # The author of this evidence has just been read: of the others the least known goes, and of equals the oldest.
            others = (name for name in self._standings if name != author)
            del self._standings[min(others, key=self._worth)]

    def _worth(self, author: str) -> tuple[bool, float]:
        standing = self._standings[author]
        return standing.good >= PROBATION_BODIES, standing.at


def _mean(standing: _Standing) -> float:
    return (1 + standing.good) / (2 + standing.good + standing.bad)


def _load(path: Path) -> dict[str, _Standing]:
    """What an earlier process knew; nothing where it left no file or a damaged one: strangers can earn it again."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {str(author): _Standing(**fields) for author, fields in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("the reputation of others in %s is damaged (%s); starting without", path, error)
        return {}

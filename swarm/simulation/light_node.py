"""A node without a policy. It produces random rollouts at a steady rate; everything else is the code of a real node.

light_group ─→ Exchange (Publisher, Transport, Reader, Admission, Directory) ─→ ExperiencePool ─ draw

The rollouts are random answers in the real formats, to tasks whose reward follows from the answer.
"""

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from swarm.admission.admission import Admission, Vocabulary
from swarm.config import NetworkSection, SharingSection
from swarm.network.context import NodeContext
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.exchange import Exchange
from swarm.sharing.parts import NoObserver, make_sharing_parts
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.totals import SharingPause
from swarm.tasks.task_source import FIRST_TRAINING_SEED
from swarm.types import Header, Lineage, Rollout, RolloutGroup, TaskRef

SOURCE, CONFIG_DIGEST, PROMPT_DIGEST = "light", "11" * 8, "22" * 8
LINEAGE = Lineage("33" * 16, "44" * 16)
EOS_TOKEN = 1
_FIRST_LETTER = 10
_ANSWER_LETTERS = 8
VOCABULARY = Vocabulary(
    LINEAGE,
    size=64,
    eos_token_ids=frozenset({EOS_TOKEN}),
    decode=lambda ids: "".join(chr(token - _FIRST_LETTER + ord("a")) for token in ids if token != EOS_TOKEN),
)


class LightVerifier:
    """The `TaskVerifier` of a light node: an answer is right if it begins with `a`."""

    def check_known(self, ref: TaskRef) -> None:
        if (ref.source, ref.config_digest) != (SOURCE, CONFIG_DIGEST):
            raise InvalidRecord(Rejection.UNKNOWN_TASK, f"{ref.source[:40]!r}")
        if ref.seed < FIRST_TRAINING_SEED:
            raise InvalidRecord(Rejection.HELD_OUT_TASK, f"stream {ref.seed}")

    def rewards(self, group: RolloutGroup) -> tuple[float, ...]:
        self.check_known(group.task)
        if group.prompt_digest != PROMPT_DIGEST:
            raise InvalidRecord(Rejection.TASK_MISMATCH, group.task.source)
        return tuple(_reward(rollout.text) for rollout in group.rollouts)


def light_group(author: str, index: int, group_size: int, rng: random.Random) -> RolloutGroup:
    """Make a group of `group_size` answers, of which the first is right and the second wrong, so that it has signal."""
    letters = ["a", "b", *rng.choices("ab", k=group_size - 2)]
    rollouts = tuple(_rollout(first + "".join(rng.choices("cdefgh", k=_ANSWER_LETTERS - 1))) for first in letters)
    task = TaskRef(SOURCE, CONFIG_DIGEST, FIRST_TRAINING_SEED, index % 2**20)
    return RolloutGroup(task, PROMPT_DIGEST, rollouts, author, LINEAGE, policy_version=index)


def _rollout(text: str) -> Rollout:
    ids = (*(_FIRST_LETTER + ord(letter) - ord("a") for letter in text), EOS_TOKEN)
    return Rollout(text, ids, (-1.0,) * len(ids), finished=True, reward=_reward(text))


def _reward(text: str) -> float:
    return float(text.startswith("a"))


OnHeader = Callable[["LightNode", Header], None]
"""Called with (reader, header) when the reader admitted a header."""


@dataclass(frozen=True, slots=True)
class LightRounds:
    """The pace and the size of every light node's rounds."""

    round_s: float = 20.0
    """Mean time of a round; each one takes 0.75 to 1.25 of it."""
    groups_per_round: int = 2
    group_size: int = 4
    swarm_groups: int = 2
    """Groups of others in a training batch."""


class LightNode:
    """One light node. `start` starts its transport, `stop` ends it. It runs on one loop."""

    def __init__(
        self,
        rounds: LightRounds,
        context: NodeContext,
        *,
        sharing: SharingSection,
        network: NetworkSection,
        rng: random.Random,
        on_header: OnHeader | None = None,
    ) -> None:
        self.transport = context.transport
        self.num_groups_trained = 0
        self.trained_authors: Counter[str] = Counter()
        """Groups trained on, by author."""
        self.num_failed_steps = 0
        self._rounds = rounds
        self._rng = rng
        self._round = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.pool = ExperiencePool(":memory:", sharing, context.clock)
        tracker = PeerTracker(sharing, context, max_shown=0, seen_at=context.transport.seen_at)
        parts = make_sharing_parts(sharing, context, tracker, pause=SharingPause(), observer=NoObserver())
        self.bodies, self.directory, self.totals = parts.bodies, parts.directory, parts.totals
        self.usefulness = tracker.usefulness
        """It has no beliefs unless a test gives it some: a light node learns nothing."""
        self.admission = WatchedAdmission(
            sharing, context, on_header=functools.partial(on_header, self) if on_header else None
        )
        self._exchange = Exchange(sharing, network, parts, admission=self.admission, pool=self.pool, rng=rng)
        self.reader = self._exchange.reader

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    @property
    def rejected(self) -> Counter[str]:
        return self.totals.rejected

    async def start(self) -> None:
        await self.transport.start()
        self.work()

    def work(self) -> None:
        """Begin the node's work, where the transport has been started already."""
        self._tasks = [
            asyncio.create_task(one) for one in (self._learn(), *self._exchange.work(self._count_failed_step))
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self.transport.stop()
        self.pool.close()

    def raise_failure(self) -> None:
        """Raises what ended one of the node's tasks, if anything did."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def run_round(self) -> None:
        """Roll out, publish, and train on what others published."""
        rounds = self._rounds
        first = self._round * rounds.groups_per_round
        groups = [self._group(first + number) for number in range(rounds.groups_per_round)]
        self._round += 1
        self._exchange.hand_out(groups)
        weigh = self.usefulness.of_group if self.usefulness else None
        drawn = self.pool.draw(rounds.swarm_groups, self._rng, weigh)
        self.num_groups_trained += len(drawn)
        self.trained_authors.update(group.author for group in drawn)

    def _group(self, index: int) -> RolloutGroup:
        return light_group(self.peer_id, index, self._rounds.group_size, self._rng)

    async def _learn(self) -> None:
        await asyncio.sleep(self._rng.random() * self._rounds.round_s)
        while True:
            self.run_round()
            await asyncio.sleep(self._rng.uniform(0.75, 1.25) * self._rounds.round_s)

    def _count_failed_step(self) -> None:
        self.num_failed_steps += 1


class WatchedAdmission(Admission):
    """The admission of a light node, which reports every header that it admits."""

    def __init__(
        self, config: SharingSection, context: NodeContext, *, on_header: Callable[[Header], None] | None
    ) -> None:
        super().__init__(config, context, verifier=LightVerifier(), vocabulary=VOCABULARY)
        self._on_header = on_header

    def admit_header(self, data: bytes, place: str = "") -> Header:
        header = super().admit_header(data, place)
        if self._on_header is not None:
            self._on_header(header)
        return header

"""A swarm of real learners in one process. They take turns, and each has its own adapter and pool.

    every round, in an order drawn anew: pull from others ─ roll out ─ publish ─ train ─ offer the adapter, where it merges

Partners that offer in the same round are paired after it, and merge in their next one. All share one copy of the base's weights.
Time is virtual, a second a turn, so that a seed gives the same numbers anywhere.
"""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from swarm.admission.admission import Admission, Vocabulary
from swarm.admission.reward_verifier import RewardVerifier
from swarm.config import Config, PolicySection
from swarm.experiments.memory_exchange import MemoryExchange, MemoryReader
from swarm.experiments.merging.memory_pairing import MemoryPairing, Terms, send_as_it_is
from swarm.merging.policy_merging import MergePorts
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend, vocabulary_of
from swarm.policy.policy import Policy, load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.context import SwarmContext
from swarm.records.identity import Identity
from swarm.sharing.usefulness import READ_AHEAD_BATCHES, Usefulness, make_choice
from swarm.tasks.task_mixture import CommonStreams, TaskMixture
from swarm.tasks.task_source import MAX_SEED
from swarm.types import RolloutGroup

_FIRST_S = 1_000_000.0
_TURN_S = 1.0
_MERGE_TERMS = Terms(drop_rate=0.0, delay=0, patience=2, are_known=True)
"""In rounds."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """The results of one round of all nodes together, but for those that rest."""

    rewards: tuple[float, ...]
    """Mean reward of each node's sampled answers, in the order of nodes."""
    answers_sampled: int
    answers_trained_on: int
    """Own answers and those of others, as drawn for the batches; replays and epochs do not count again."""
    groups_with_signal: int
    """Sampled groups with signal."""
    swarm_groups: int
    """Groups of others trained on."""
    tokens_sampled: tuple[int, ...] = ()
    """By each node; 0 for one that rests."""
    processor_s: tuple[float, ...] = ()
    """Processor time of each node: sampling, checks of what others sent, and training."""
    tokens_trained: tuple[float, ...] = ()
    """By each node, once for every pass over them: answers of the batch, old ones that are replayed too, times epochs, times the
    mean length of the answers that the node sampled."""


class GroupReader(Protocol):
    """Fills the pool of one node from the exchange."""

    @property
    def rejected(self) -> Counter[str]: ...

    def pull(self, num_groups: int) -> None: ...

    def report_peer(self, author: str, part: float) -> None:
        """Note that `part` of the answers of a group of this author are too unlikely."""
        ...


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """What the reader of one node is made of."""

    config: Config
    context: SwarmContext
    exchange: MemoryExchange
    pool: ExperiencePool
    mixture: TaskMixture
    vocabulary: Vocabulary
    rng: random.Random


MakeReader = Callable[[ReaderParts], GroupReader]


@dataclass(slots=True)
class _Node:
    learner: Learner
    reader: GroupReader
    config: Config


class LearnerSwarm:
    """One learner per config. With `sharing.swarm_groups` = 0 a node reads nothing."""

    def __init__(self, configs: Sequence[Config], seed: int, make_reader: MakeReader | None = None) -> None:
        """`make_reader`: makes the reader of every node; by default one that relies on admission alone."""
        self.last_rows: list[Mapping[str, Any]] = []
        """What the nodes wrote as metrics of the last round, in their order."""
        self._make_reader = make_reader or _plain_reader
        self._seed = seed
        self._answers_below_floor = 0
        self._now_s = _FIRST_S
        self._rng = random.Random(seed)
        self._num_rounds = 0
        self._pairing = MemoryPairing(_MERGE_TERMS, random.Random(f"{seed}/merging"), send_as_it_is)
        self.exchange = MemoryExchange(configs[0].swarm_id, configs[0].sharing, self._clock)
        self._bases: dict[PolicySection, Policy] = {}
        self._mixtures: dict[str, TaskMixture] = {}
        self._nodes = [self._node(number, config, seed) for number, config in enumerate(configs)]

    def run_round(self, resting: Collection[int] = ()) -> RoundRow:
        """One round of all nodes but those whose numbers are in `resting`, in an order drawn anew."""
        rows: dict[int, Mapping[str, Any]] = {}
        seconds = [0.0] * len(self._nodes)
        for number in self._rng.sample(range(len(self._nodes)), len(self._nodes)):
            if number in resting:
                continue
            node, started_s = self._nodes[number], time.process_time()
            if node.config.sharing.swarm_groups:
                node.reader.pull(READ_AHEAD_BATCHES * node.config.sharing.swarm_groups)
            rows[number] = node.learner.run_round()
            seconds[number] = time.process_time() - started_s
            self._now_s += _TURN_S
        self._num_rounds += 1
        self._pairing.advance(self._num_rounds)
        self.last_rows = ordered = [row for _, row in sorted(rows.items())]
        trained, tokens_trained = [0] * len(self._nodes), [0.0] * len(self._nodes)
        for number, row in rows.items():
            config = self._nodes[number].config
            new_groups = row["train/own_groups"] + row["train/swarm_groups"]
            trained[number] = new_groups * config.rollouts.group_size
            passes = (new_groups + row["train/replayed_groups"]) * config.training.inner_epochs
            mean_length = row["rollout/tokens"] / max(row["rollout/answers"], 1)
            tokens_trained[number] = passes * config.rollouts.group_size * mean_length
        self._answers_below_floor = sum(row["train/answers_below_floor_total"] for row in rows.values())
        return RoundRow(
            rewards=tuple(row["rollout/reward_mean"] for row in ordered),
            answers_sampled=sum(row["rollout/answers"] for row in ordered),
            answers_trained_on=sum(trained),
            groups_with_signal=sum(row["rollout/groups_with_signal"] for row in ordered),
            swarm_groups=sum(row["train/swarm_groups"] for row in ordered),
            tokens_sampled=tuple(
                rows[number]["rollout/tokens"] if number in rows else 0 for number in range(len(self._nodes))
            ),
            processor_s=tuple(seconds),
            tokens_trained=tuple(tokens_trained),
        )

    def evaluate(self, phase: str, num_nodes: int | None = None, draw: int = 0) -> list[dict[str, float]]:
        """Reward of sampled answers to held-out tasks by source, for the first `num_nodes` or all.

        Each `draw` samples other answers to the same tasks.
        """
        return [dict(node.learner.evaluate(phase, draw)["accuracy"]) for node in self._nodes[:num_nodes]]

    @property
    def num_answers_below_floor(self) -> int:
        """Answers below the likelihood floor of all nodes, since the start."""
        return self._answers_below_floor

    @property
    def learners(self) -> list[Learner]:
        """One per node, in the order of nodes."""
        return [node.learner for node in self._nodes]

    @property
    def readers(self) -> list[GroupReader]:
        """One per node, in the order of nodes."""
        return [node.reader for node in self._nodes]

    @property
    def identities(self) -> list[Identity]:
        """One per node, in the order of nodes."""
        return [node_identity(self._seed, number) for number in range(len(self._nodes))]

    @property
    def rejected(self) -> Counter[str]:
        """Records and bodies that any node rejected, by reason."""
        return sum((node.reader.rejected for node in self._nodes), Counter[str]())

    def _node(self, number: int, config: Config, seed: int) -> _Node:
        identity = node_identity(seed, number)
        context = SwarmContext(identity, config.swarm_id, self._clock)
        policy = load_policy(config.policy, device="cpu")
        _share_base(self._bases.setdefault(config.policy, policy), policy)
        mixture = self._mixture(config)
        pool = ExperiencePool(":memory:", config.sharing, self._clock)
        vocabulary = vocabulary_of(policy, mixture)
        is_informative = config.sharing.choice == "informative"
        # no author has a reputation here, so the weight of all is 1
        usefulness = Usefulness(config.sharing.max_age_s, self._clock, lambda author: 1.0) if is_informative else None
        rng = random.Random(f"{seed}/{number}")
        parts = ReaderParts(config, context, self.exchange, pool, mixture, vocabulary, rng)
        reader = self._make_reader(parts) if usefulness is None else _plain_reader(parts, usefulness)

        def publish(groups: Sequence[RolloutGroup]) -> None:
            self.exchange.publish(identity, groups)

        backend = local_backend(config, policy, identity.peer_id)
        gate_seed = random.Random(f"{seed}/{number}/gate").randrange(MAX_SEED)
        merging = MergePorts(self._pairing.pairer(number), None, self._clock, gate_seed)
        ports = SwarmPorts(
            publish=publish,
            usefulness=usefulness,
            merge_ports=merging,
            report_peer=reader.report_peer,
            common=CommonStreams.of(config.sharing, config.swarm_id, self._clock),
        )
        learner = Learner(config, backend, mixture=mixture, pool=pool, peer_id=identity.peer_id, ports=ports)
        return _Node(learner, reader, config)

    def _mixture(self, config: Config) -> TaskMixture:
        """One mixture for all nodes with the same tasks: it keeps no state of a node, and takes a second to build."""
        key = config.tasks.model_dump_json()
        if key not in self._mixtures:
            self._mixtures[key] = TaskMixture(config.tasks)
        return self._mixtures[key]

    def _clock(self) -> float:
        return self._now_s

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._now_s


def _plain_reader(parts: ReaderParts, usefulness: Usefulness | None = None) -> MemoryReader:
    verifier = RewardVerifier(parts.mixture, sandboxed=None)
    admission = Admission(parts.config.sharing, parts.context, verifier=verifier, vocabulary=parts.vocabulary)
    choice = make_choice(parts.config.sharing, parts.pool, usefulness, parts.rng)
    return MemoryReader(parts.exchange, parts.context.peer_id, admission=admission, pool=parts.pool, choice=choice)


def node_identity(seed: int, number: int) -> Identity:
    """The identity of one node. It is the same in every arm, hence with the same stream of tasks."""
    return Identity(hashlib.sha256(f"experiment/{seed}/{number}".encode()).digest())


def mean_by_source(accuracy: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """{source: mean over nodes}"""
    sources = sorted({source for node in accuracy for source in node})
    return {source: fmean(node[source] for node in accuracy if source in node) for source in sources}


def _share_base(first: Policy, policy: Policy) -> None:
    """Let `policy` use the frozen weights of `first`, so that memory holds one copy for all nodes."""
    if first is policy:
        return
    frozen = {name: p for name, p in first.model.named_parameters() if not p.requires_grad}
    for name, parameter in policy.model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = frozen[name].data

"""One round after another, on the compute thread, which never waits for the network.

    run_round:  tasks ─▶ rollouts ─▶ records (published) ─▶ own groups ─┐
                               pool ─▶ hints ─▶ rollouts (private) ─────┤
                               pool ─▶ groups of others, replay store ──┴▶ batch ─▶ step ─▶ merge ─▶ canary
    TrainingRun (`training_loop.py`): run_round ─▶ metrics ─▶ checkpoint

Everything random comes from the node's seed and the round's number. A run that was killed and resumed therefore computes bit
for bit what an uninterrupted one computes, as long as nothing comes in from other nodes.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.adapters.checkpoint import CheckpointStore, CheckpointWriter
from swarm.config import Config
from swarm.engine.canary import Canary
from swarm.errors import CheckpointError, TaskError
from swarm.limits.weighted_sample import round_seed
from swarm.merging.policy_merging import MergePorts, PolicyMerging
from swarm.node.batch_builder import BatchBuilder
from swarm.node.policy_backend import PolicyBackend
from swarm.node.round_metrics import (
    MetricsRow,
    RoundTimer,
    count_batch,
    evaluation_row,
    hinted_row,
    pruning_row,
    rollout_row,
)
from swarm.node.run_state import check_run_state
from swarm.observability.plain_text import counted
from swarm.observability.tracing import traced
from swarm.policy.lineage import hash_weights
from swarm.pool.experience_pool import ExperiencePool
from swarm.rollouts.hints import HintChooser
from swarm.rollouts.rollout_round import RolloutRound
from swarm.rollouts.rollouts_ahead import RolloutsAhead
from swarm.rollouts.worker import RolloutBatch, RolloutWorker
from swarm.sharing.parts import GroupObserver, NoObserver
from swarm.sharing.usefulness import Usefulness
from swarm.tasks.held_out import repeated
from swarm.tasks.task_cursor import DifficultyTable, TaskCursor, restore_rng, rng_state
from swarm.tasks.task_mixture import CommonStreams, TaskMixture, no_common_streams, training_seed
from swarm.training.experience import RolloutConverter, TrainingGroup
from swarm.training.health import HealthWatch
from swarm.training.policy_optimizer import AdapterTensors
from swarm.training.step_report import StepReport
from swarm.training.trainer import Trainer
from swarm.types import RolloutGroup
from swarm.warm_start.start_digest import adapter_folder
from swarm.warm_start.supervised_steps import WarmStart, begin_from

logger = logging.getLogger(__name__)

Publish = Callable[[Sequence[RolloutGroup]], None]
_ROUND_FACTS = ("round", "policy_version", "rollout/reward_mean", "train/own_groups", "train/swarm_groups")
_MAX_UNSCORED_ROUNDS = 10
"""A run ends after so many rounds in a row in which no answer could be scored."""


def publish_nothing(groups: Sequence[RolloutGroup]) -> None:
    """For a node without a network."""


def _report_nobody(author: str, part: float) -> None: ...


def _no_beacon() -> bytes:
    return b""


@dataclass(frozen=True)
class SwarmPorts:
    """What a learner exchanges with the rest of its node. By default there is no swarm: it learns from its own rollouts.

    All of it is called on the compute thread, and none of it blocks.
    """

    publish: Publish = publish_nothing
    """Takes the groups of each round, where `sharing.publish` is on."""
    usefulness: Usefulness | None = None
    """Says how useful a group of others is; `_share_difficulty` updates it. None draws uniformly."""
    merge_ports: MergePorts | None = None
    """To merging partners. None takes every outer step alone."""
    report_peer: Callable[[str, float], None] = _report_nobody
    """Reports an author and the fraction of a group's answers, in (0, 1], that this node finds too unlikely."""
    beacon: Callable[[], bytes] = _no_beacon
    """Bytes that seed the choice of the next tasks, so that nobody can solve them ahead of time (`sharing/beacons.py`).
    They are empty until a header of another node arrives."""
    common: CommonStreams = field(default_factory=no_common_streams)
    """The streams of tasks that all nodes of the swarm draw from, for the share `sharing.common_tasks` of the tasks."""
    observer: GroupObserver = field(default_factory=NoObserver)
    """Is shown the groups of every round, shared or not."""


class Learner:
    """Policy, engine, trainer and task cursor of one node, and what a checkpoint needs to continue them.

    It belongs to the compute thread: made, resumed and run there.
    """

    def __init__(
        self,
        config: Config,
        backend: PolicyBackend,
        *,
        mixture: TaskMixture,
        pool: ExperiencePool,
        peer_id: str,
        ports: SwarmPorts,
    ) -> None:
        """`peer_id`: of this node, from which its stream of tasks and all seeds follow."""
        self._config = config
        self._peer_id = peer_id
        self._mixture = mixture
        self._pool = pool
        self._ports = ports
        self._backend = backend
        self.policy = backend.policy
        self.probe_memory = backend.probe_memory
        # tasks → rollouts
        self._cursor = TaskCursor(
            mixture,
            training_seed(peer_id, config.node.seed),
            random.Random(self._seed("tasks")),
            common_share=config.sharing.common_tasks,
        )
        self._difficulty = DifficultyTable(
            mixture.sources,
            memory=config.rollouts.difficulty_memory,
            default_tokens=config.rollouts.max_new_tokens,
        )
        self._pruning = backend.pruning
        self._worker = RolloutWorker(
            config.rollouts, self.policy, backend.engine, author=peer_id, pruning=backend.pruning
        )
        self._sampling_policy, worker = self.policy, self._worker
        if backend.ahead is not None:
            self._sampling_policy = self.policy.for_another_thread()
            worker = RolloutWorker(config.rollouts, self._sampling_policy, backend.ahead, author=peer_id)
        self._rollouts = RolloutRound(config.rollouts, cursor=self._cursor, worker=worker, difficulty=self._difficulty)
        self._ahead = RolloutsAhead(self._rollouts, backend.ahead) if backend.ahead is not None else None
        self._before_ahead: dict[str, Any] | None = None
        """What a checkpoint holds of sampling while a round is sampled ahead: a resumed run samples that round again."""
        self._hints = HintChooser(config.rollouts, self.policy, self._success_rate)
        # pool → batch
        self._converter = RolloutConverter(
            self.policy,
            config.sharing.likelihood_floor_quantile,
            config.rollouts.max_new_tokens,
            report_unlikely=ports.report_peer,
        )
        weigh = ports.usefulness.of_group if ports.usefulness else None
        self._batches = BatchBuilder(
            config,
            mixture=mixture,
            pool=pool,
            converter=self._converter,
            weigh=weigh,
            expected_reward=self._success_rate,
            is_common=ports.common.holds,
        )
        self._rng = random.Random(self._seed("batches"))
        # step → merge → canary
        self._trainer = Trainer(
            config.training,
            self.policy,
            backend.optimizer,
            temperature=config.rollouts.temperature,
            max_new_tokens=config.rollouts.max_new_tokens,
            stop=config.rollouts.stop,
        )
        self.merging = (
            PolicyMerging(config, backend, worker=self._worker, mixture=mixture, ports=ports.merge_ports)
            if config.merging.enabled
            else None
        )
        self._canary = Canary(self.policy, backend.engine, config.training.canary_tolerance)
        # metrics
        self._health = HealthWatch()
        self._totals: Counter[str] = Counter()
        self._num_unscored_rounds = 0
        """Since the last one of which something was scored."""
        self.round = 0
        """Rounds completed over the whole run."""

    @traced("round", lambda row, *_: {name: row[name] for name in _ROUND_FACTS if name in row})
    def run_round(self) -> MetricsRow:
        """Run one round and return its metrics, with which `TrainingRun` writes the checkpoint."""
        timer = RoundTimer()
        rollouts = self._sample()
        self._check_scored(rollouts)
        self._publish(rollouts)
        self._learn_what_to_expect(rollouts)
        self._sample_ahead()
        hinted = self._follow_hints()
        timer.rolled_out()
        own = self._batches.own_groups(rollouts, self.policy.version)
        others = self._batches.draw_from_pool(own, self._rng)
        of_hints = self._batches.hinted_groups(hinted)
        batch = self._batches.compose(own, others, self.policy.version, self._rng, of_hints)
        report = self._trainer.step(batch) if batch else None
        self._merge()
        if report is not None and not report.skipped:
            self._canary.check()
        self.round += 1
        return self._metrics(rollouts, hinted, batch, report, timer)

    def _sample(self) -> RolloutBatch:
        """The rollouts of this round, which with `rollouts.overlap` were begun in the round before."""
        if self._ahead is None:
            self._follow_beacon()
            return self._rollouts.run(self._seed("rollouts", self.round))
        if not self._ahead.is_begun:
            self._begin_sampling(self.round)
        rollouts = self._ahead.take()
        self._before_ahead = None
        return rollouts

    def _sample_ahead(self) -> None:
        """Begin the rollouts of the next round with the present weights, while this one is trained on."""
        max_rounds = self._config.node.max_rounds
        if self._ahead is not None and (max_rounds is None or self.round + 1 < max_rounds):
            self._begin_sampling(self.round + 1)

    def _begin_sampling(self, round_number: int) -> None:
        assert self._ahead is not None
        self._follow_beacon()
        self._before_ahead = self._sampling_state()
        self._sampling_policy.version = self.policy.version
        self._ahead.begin(self._seed("rollouts", round_number), self._backend.optimizer.read())

    def _follow_beacon(self) -> None:
        self._cursor.follow(self._peer_id, self._ports.beacon(), self._ports.common.current())

    def _sampling_state(self) -> dict[str, Any]:
        """What sampling changes, for JSON."""
        return {
            "cursor": self._cursor.state(),
            "difficulty": self._difficulty.state(),
            "open_groups": self._rollouts.state(),
        }

    def _success_rate(self, source: str) -> float:
        """Posterior mean, without the answers of a round that is sampled ahead: these come at any time."""
        if self._before_ahead is None:
            return self._difficulty.success_rate(source)
        successes, failures, _ = self._before_ahead["difficulty"][source]
        return successes / (successes + failures)

    def close(self) -> None:
        """End what samples ahead. A round under way is lost, and sampled again after a restart."""
        if self._ahead is not None:
            self._ahead.close()

    def _check_scored(self, rollouts: RolloutBatch) -> None:
        """Raise TaskError where nothing can be scored: in the first round of a run at once, later after several in a row, since
        a judge or an environment may be away for a while."""
        if rollouts.groups:
            self._num_unscored_rounds = 0
        elif rollouts.failures:
            self._num_unscored_rounds += 1
            if not self.round or self._num_unscored_rounds >= _MAX_UNSCORED_ROUNDS:
                sources = ", ".join(sorted(rollouts.failures))
                raise TaskError(
                    f"the answers to some task of a round must be scored, got failures alone, of {sources}; the warnings "
                    "above say why: fix the reward function, verifier or environment, and start again"
                )

    def _publish(self, rollouts: RolloutBatch) -> None:
        """Hand the groups to the network loop, where they become signed records, and to whoever watches."""
        if self._config.sharing.publish:
            self._ports.publish(rollouts.groups)
        self._ports.observer.own(rollouts.groups)

    def _learn_what_to_expect(self, rollouts: RolloutBatch) -> None:
        """Update the likelihood floor and the difficulty table from own answers."""
        self._converter.observe_own(rollouts.likelihoods)
        self._share_difficulty()

    def _follow_hints(self) -> RolloutBatch:
        """Sample the groups that begin with a part of a peer's right answer.

        They are this node's own business: nobody else sees them, and neither difficulty nor the likelihood floor counts them,
        as they say little of what the node can do alone.
        """
        seed = self._seed("hints", self.round)
        rng = random.Random(seed)
        return self._worker.follow(self._hints.choose(self._batches.right_answers(rng), rng), seed)

    def _merge(self) -> None:
        """An outer step, where one is due or a partner has answered."""
        if self.merging is not None:
            max_rounds = self._config.node.max_rounds
            self.merging.after_step((self.round + 1) / max_rounds if max_rounds else None)

    def _metrics(
        self,
        rollouts: RolloutBatch,
        hinted: RolloutBatch,
        batch: Sequence[TrainingGroup],
        report: StepReport | None,
        timer: RoundTimer,
    ) -> MetricsRow:
        times = timer.row()
        row: MetricsRow = {
            "kind": "round",
            **self._position(),
            **rollout_row(rollouts, self._ahead.duration_s if self._ahead else timer.rollout_s, hinted),
            **(hinted_row(hinted) if self._config.rollouts.hints else {}),
            "rollout/open_groups": self._rollouts.num_open,
            "rollout/unbuildable_tasks_total": sum(self._cursor.failures.values()),
            **(pruning_row(rollouts, self._pruning) if self._pruning else {}),  # its mean reward is the better estimate
            **count_batch(self._totals, batch),
            "train/answers_below_floor_total": self._converter.num_answers_below_floor,
            "train/answers_text_mismatch_total": self._converter.num_answers_text_mismatch,
            "train/dropped_groups": dict(self._batches.dropped),
            "pool/groups": self._pool.num_fresh(),
            **(report.row(is_filtered=self._config.rollouts.is_filtered) if report is not None else {}),
            **(self.merging.row() if self.merging else {}),
            **times,
        }
        warnings = self._health.observe(row)
        return {**row, "health/warnings": warnings, "health/num_warnings": len(warnings)}

    def warm_start(self, should_stop: Callable[[], bool]) -> None:
        """Begin from `warm_start`, unless a step has been taken. Raises PolicyError and TaskError."""
        start, steps = self._config.warm_start, self._backend.optimizer
        if self.policy.version:
            return
        if (folder := adapter_folder(self._config)) is not None:
            lora = self._config.policy.lora
            begin_from(folder, steps, lora.alpha / lora.rank, lambda: hash_weights(self.policy.base_folder))
        if start.steps:
            WarmStart(self._config, self.policy, steps, self._mixture).run(should_stop)
            steps.write(steps.read(), turned=steps.read())  # RL begins with moments of its own

    def evaluate(self, phase: str, draw: int = 0) -> MetricsRow:
        """Measure the mean reward of answers to held-out tasks, which are the same on every node and at every time.

        A task has one answer, and more where its source has few tasks and answers are sampled: others for each `draw`.
        """
        config = self._config.evaluation
        tasks = self._mixture.held_out(config.tasks_per_source)
        asked = repeated(tasks, config.tasks_per_source) if config.temperature else tasks
        logger.info(
            "evaluating %s to %s, at most %d of a source (evaluation.tasks_per_source)",
            counted(len(asked), "answer"), counted(len(tasks), "held-out task"), config.tasks_per_source,
        )  # fmt: skip
        scores = self._worker.evaluate(asked, temperature=config.temperature, seed=self._seed("evaluation", draw))
        found = evaluation_row(tasks, config.temperature, scores)
        logger.info(
            "held-out reward %.3f, mean of %s", found["accuracy_mean"], counted(len(found["accuracy"]), "source")
        )
        row = {"kind": "evaluation", "phase": phase, **found, **self._position()}
        self._health.evaluated(row, scores)
        return row

    def save(self, store: CheckpointStore | CheckpointWriter) -> None:
        """Write `state`, or begin to. Raises CheckpointError."""
        store.save(self.round, *self.state())

    def state(self) -> tuple[AdapterTensors, dict[str, Any]]:
        """(tensors on the CPU, the rest for JSON): everything that the next round depends on. The next rounds change none of it.

        Raises CheckpointError where stages of a pipeline do not give theirs.
        """
        tensors, trainer_state = self._trainer.state()
        state = {
            "round": self.round,
            "policy_version": self.policy.version,
            "lineage": {"policy": self.policy.lineage.policy, "tokenizer": self.policy.lineage.tokenizer},
            "trainer": trainer_state,
            **(self._before_ahead or self._sampling_state()),
            "replay": self._batches.state(),
            "common_groups": self._batches.common.state(),
            "own_successes": self._batches.successes.state(),
            "rng": rng_state(self._rng),
            "own_likelihoods": self._converter.state(),
            "health": self._health.state(),
            "totals": dict(self._totals),
        }
        if self._pruning is not None:
            tensors["pruning"], state["pruning"] = self._pruning.state()
        if self.merging is not None:
            merging_tensors, state["merging"] = self.merging.state()
            tensors |= merging_tensors
        return tensors, state

    def resume(self, store: CheckpointStore) -> bool:
        """Continue from the newest intact checkpoint; False where there is none.

        Raises CheckpointError if it is of another lineage, or holds what no learner writes.
        """
        checkpoint = store.load_newest()
        if checkpoint is None:
            return False
        check_run_state(checkpoint, self.policy.vocab_size)
        state = checkpoint.state
        if not self.policy.lineage.has_name(state["lineage"]["policy"]):
            raise CheckpointError(
                "a checkpoint must come from the same base and adapter shape, got another lineage in "
                f"{checkpoint.path}; restore policy settings, use another node.dir, or start with --fresh"
            )
        self._trainer.restore(checkpoint.tensors, state["trainer"])
        self.policy.version = state["policy_version"]
        self.round = state["round"]
        self._cursor.restore(state["cursor"])
        self._difficulty.restore(state.get("difficulty", {}))
        self._rollouts.restore(state.get("open_groups", []), self._mixture.rebuild)
        if self._pruning is not None:
            self._pruning.restore(checkpoint.tensors.get("pruning", {}), state.get("pruning", {}))
        self._batches.restore(state.get("replay", []))
        self._batches.common.restore(state.get("common_groups", {}))
        self._batches.successes.restore(state.get("own_successes", {}))
        restore_rng(self._rng, state["rng"])
        self._converter.restore(state["own_likelihoods"])
        if self.merging is not None:
            self.merging.restore(checkpoint.tensors, state.get("merging"))
        if "health" in state:  # absent in checkpoints of older versions
            self._health.restore(state["health"])
        self._totals = Counter(state["totals"])
        self._share_difficulty()
        return True

    def _share_difficulty(self) -> None:
        """Give a copy of the difficulty table to the network loop, which chooses among the headers of others by it."""
        if self._ports.usefulness is not None:
            beliefs = {name: (belief[0], belief[1]) for name, belief in self._difficulty.state().items()}
            self._ports.usefulness.learn(beliefs)

    def _position(self) -> MetricsRow:
        return {"round": self.round, "policy_version": self.policy.version}

    def _seed(self, purpose: str, round_number: int = 0) -> int:
        return round_seed(self._config, self._peer_id, purpose, round_number)

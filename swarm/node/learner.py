"""The compute side of a node: one round after another, on one thread, never waiting for the network.

    RolloutRound.run ─┬─ publish (to the network loop)
                      └─ own groups ─┐
    pool, replay store ──────────────┴─ BatchBuilder ─ trainer.step ─ merging ─ canary ─ checkpoint

Everything random comes from the node's seed and the round's number, so a run that was killed and resumed computes bit for bit
what an uninterrupted one computes, as long as nothing of others comes in.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config
from swarm.engine.canary import Canary
from swarm.errors import CheckpointError
from swarm.limits.weighted_sample import round_seed
from swarm.merging.policy_merging import MergePorts, PolicyMerging
from swarm.node.batch_builder import BatchBuilder
from swarm.node.policy_backend import PolicyBackend
from swarm.node.run_state import check_run_state
from swarm.observability.tracing import traced
from swarm.pool.experience_pool import ExperiencePool
from swarm.rollouts.rollout_round import RolloutRound, mean_reward_signals
from swarm.rollouts.worker import RolloutBatch, RolloutWorker
from swarm.sharing.usefulness import Usefulness
from swarm.tasks.task_cursor import DifficultyTable, TaskCursor
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.training.experience import RolloutConverter, TrainingGroup
from swarm.training.health import HealthWatch
from swarm.training.step_report import StepReport
from swarm.training.trainer import Trainer
from swarm.types import RolloutGroup

logger = logging.getLogger(__name__)

Publish = Callable[[Sequence[RolloutGroup]], None]
MetricsRow = dict[str, Any]
"""One line of metrics.jsonl."""
_ROUND_FACTS = ("round", "policy_version", "rollout/reward_mean", "train/own_groups", "train/swarm_groups")


class Learner:
    """Policy, engine, trainer and task cursor of one node, with what a checkpoint needs to continue them."""

    def __init__(
        self,
        config: Config,
        means: PolicyBackend,
        mixture: TaskMixture,
        pool: ExperiencePool,
        author: str,
        publish: Publish,
        usefulness: Usefulness | None = None,
        links: MergePorts | None = None,
        hint: Callable[[str, float], None] = lambda author, bad: None,
        beacon: Callable[[], bytes] = lambda: b"",
    ) -> None:
        """`usefulness`: by which groups of others are drawn, and which is told of the own difficulty table; else uniform.

        `links`: to partners, where `merging.enabled`. `hint`: as of the RolloutConverter.
        `beacon`: what the next tasks follow from, see `sharing.beacons`.
        """
        self._config = config
        self._mixture = mixture
        self._pool = pool
        self._publish = publish
        self._beacon = beacon
        self._author = author
        self.policy = policy = means.policy
        self._pruning = means.pruning
        self.probe_memory = means.probe_memory
        self._worker = RolloutWorker(config.rollouts, policy, means.engine, author, means.pruning)
        self._trainer = Trainer(
            config.training,
            policy,
            means.steps,
            temperature=config.rollouts.temperature,
            max_new_tokens=config.rollouts.max_new_tokens,
            stop=config.rollouts.stop,
        )
        self.merging = (
            PolicyMerging(config, policy, means.steps, self._worker, mixture, links) if config.merging.enabled else None
        )
        self._canary = Canary(policy, means.engine, config.training.canary_tolerance)
        self._translator = RolloutConverter(
            policy,
            config.sharing.likelihood_floor_quantile,
            config.rollouts.max_new_tokens,
            hint,
            micro_batch_sequences=config.training.micro_batch_sequences,
        )
        self._usefulness = usefulness
        weigh = usefulness.of_group if usefulness else None
        self._batches = BatchBuilder(config, mixture, pool, self._translator, weigh)
        self._health = HealthWatch()
        stream = training_seed(author, config.node.seed)
        self._cursor = TaskCursor(mixture, stream, random.Random(self._seed("tasks")))
        self._difficulty = DifficultyTable(
            mixture.sources,
            memory=config.rollouts.difficulty_memory,
            default_tokens=config.rollouts.max_new_tokens,
        )
        self._rollouts = RolloutRound(config.rollouts, self._cursor, self._worker, self._difficulty)
        self._rng = random.Random(self._seed("batches"))
        self.round = 0
        """Rounds completed over the whole run."""
        self.on_groups: Publish = lambda groups: None
        """Shown the groups of every round, shared or not."""
        self._totals: Counter[str] = Counter()

    @traced("round", lambda row, *_: {name: row[name] for name in _ROUND_FACTS if name in row})
    def run_round(self) -> MetricsRow:
        """One rollout–share–train cycle; returns its metrics."""
        started = time.monotonic()
        self._cursor.follow(self._author, self._beacon())
        rollouts = self._rollouts.run(self._seed("rollouts", self.round))
        rolled_out = time.monotonic()
        self.on_groups(rollouts.groups)
        if self._config.sharing.publish:
            self._publish(rollouts.groups)
        self._translator.observe_own(rollouts.likelihoods)
        self._tell_beliefs()
        batch = self._batches.batch(rollouts, self.policy.version, self._rng)
        report = self._trainer.step(batch) if batch else None
        if self.merging is not None:
            max_rounds = self._config.node.max_rounds
            self.merging.after_step((self.round + 1) / max_rounds if max_rounds else None)
        if report is not None and not report.skipped:
            self._canary.check()
        self.round += 1
        self._totals["own_groups"] += sum(group.is_own and not group.is_replay for group in batch)
        self._totals["swarm_groups"] += sum(not group.is_own for group in batch)
        finished = time.monotonic()
        row: MetricsRow = {
            **self._rollout_row(rollouts, rolled_out - started),
            **self._prune_row(rollouts),  # after the one before: its reward is the better one
            **self._train_row(batch, report),
            **(self.merging.row() if self.merging else {}),
            "time/rollout_s": rolled_out - started,
            "time/train_s": finished - rolled_out,
            "time/round_s": finished - started,
        }
        warnings = self._health.observe(row)
        return {**row, "health/warnings": warnings, "health/num_warnings": len(warnings)}

    def evaluate(self, phase: str) -> MetricsRow:
        """Mean reward of one answer per held-out task; the same tasks on every node and at every time."""
        config = self._config.evaluation
        tasks = self._mixture.held_out(config.tasks_per_source)
        scores = self._worker.evaluate(tasks, temperature=config.temperature, seed=self._seed("evaluation"))
        accuracy = {source: sum(values) / len(values) for source, values in sorted(scores.items()) if values}
        mean = sum(accuracy.values()) / len(accuracy) if accuracy else 0.0
        row = {"kind": "evaluation", "phase": phase, "accuracy_mean": mean, "accuracy": accuracy}
        return {**row, **self._position()}

    @traced("checkpoint", lambda _, learner, *__: {"round": learner.round})
    def save(self, store: CheckpointStore) -> None:
        tensors, trainer_state = self._trainer.state()
        state = {
            "round": self.round,
            "policy_version": self.policy.version,
            "lineage": {"policy": self.policy.lineage.policy, "tokenizer": self.policy.lineage.tokenizer},
            "trainer": trainer_state,
            "cursor": self._cursor.state(),
            "difficulty": self._difficulty.state(),
            "open_groups": self._rollouts.state(),
            "replay": self._batches.state(),
            "own_successes": self._batches.successes.state(),
            "rng": _rng_state(self._rng),
            "own_likelihoods": self._translator.state(),
            "health": self._health.state(),
            "totals": dict(self._totals),
        }
        if self._pruning is not None:
            tensors["pruning"], state["pruning"] = self._pruning.state()
        if self.merging is not None:
            merging_tensors, state["merging"] = self.merging.state()
            tensors |= merging_tensors
        store.save(self.round, tensors, state)

    def resume(self, store: CheckpointStore) -> bool:
        """Continue from the newest intact checkpoint; False where there is none.

        Raises CheckpointError if it is another's, or holds what no learner has written.
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
        self._batches.successes.restore(state.get("own_successes", {}))
        self._rng.setstate(_rng_from(state["rng"]))
        self._translator.restore(state["own_likelihoods"])
        if self.merging is not None:
            self.merging.restore(checkpoint.tensors, state.get("merging"))
        if "health" in state:  # absent in checkpoints of older versions
            self._health.restore(state["health"])
        self._totals = Counter(state["totals"])
        self._tell_beliefs()
        return True

    def _tell_beliefs(self) -> None:
        """Hand a copy of the difficulty table to whoever chooses among the headers of others, on the network loop."""
        if self._usefulness is not None:
            self._usefulness.learn({name: (belief[0], belief[1]) for name, belief in self._difficulty.state().items()})

    def _rollout_row(self, rollouts: RolloutBatch, duration_s: float) -> MetricsRow:
        groups = rollouts.groups
        return {
            "kind": "round",
            **self._position(),
            "rollout/reward_mean": sum(g.mean_reward for g in groups) / len(groups) if groups else 0.0,
            "rollout/tokens": rollouts.num_tokens,
            "rollout/tokens_per_s": rollouts.num_tokens / max(duration_s, 1e-9),
            "rollout/groups": len(groups),
            "rollout/open_groups": self._rollouts.num_open,
            "rollout/stale_tokens": rollouts.num_stale_tokens,
            "rollout/answers": sum(len(group.rollouts) for group in groups),
            "rollout/groups_with_signal": sum(group.has_reward_variance for group in groups),
            "rollout/failed_tasks": sum(rollouts.failures.values()),
            "rollout/too_long_prompts": sum(rollouts.too_long.values()),
            "rollout/unbuildable_tasks_total": sum(self._cursor.failures.values()),
            **mean_reward_signals(groups),
        }

    def _prune_row(self, rollouts: RolloutBatch) -> MetricsRow:
        """With pruning the reward is an estimate for all answers that were begun: what is left is rather half right."""
        if self._pruning is None:
            return {}
        rewards = [rollout.reward for group in rollouts.groups for rollout in group.rollouts]
        return {
            "rollout/reward_mean": rollouts.pruned.reward_mean,
            "rollout/surviving_reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
            "rollout/pruned_answers": rollouts.pruned.num_pruned,
            "rollout/saved_tokens": rollouts.pruned.saved_tokens,
            "rollout/prune_calibration_error": self._pruning.reliability.calibration_error,
            "rollout/prune_skill": self._pruning.reliability.skill,
        }

    def _train_row(self, batch: Sequence[TrainingGroup], report: StepReport | None) -> MetricsRow:
        row: MetricsRow = {
            "train/own_groups": sum(group.is_own and not group.is_replay for group in batch),
            "train/swarm_groups": sum(not group.is_own for group in batch),
            "train/own_groups_total": self._totals["own_groups"],
            "train/swarm_groups_total": self._totals["swarm_groups"],
            "train/replayed_groups": sum(group.is_replay for group in batch),
            "train/answers_below_floor_total": self._translator.num_answers_below_floor,
            "train/answers_text_mismatch_total": self._translator.num_answers_text_mismatch,
            "train/dropped_groups": dict(self._batches.dropped),
            "pool/groups": self._pool.num_fresh(),
        }
        if report is not None:
            row |= report.row()
        return row

    def _position(self) -> MetricsRow:
        return {"round": self.round, "policy_version": self.policy.version}

    def _seed(self, purpose: str, round_number: int = 0) -> int:
        return round_seed(self._config, self._author, purpose, round_number)


def _rng_state(rng: random.Random) -> list[Any]:
    version, internal, gauss = rng.getstate()
    return [version, list(internal), gauss]


def _rng_from(state: Sequence[Any]) -> tuple[Any, ...]:
    version, internal, gauss = state
    return version, tuple(internal), gauss

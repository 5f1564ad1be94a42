"""The compute side of a node: one round after another, on one thread, never waiting for the network.

    RolloutRound.run ─────────────┬─ publish (to the network loop)
                                  └─ own groups with signal ─┐
    pool.draw ─ foreign groups ─ translate by lineage ───────┴─ trainer.step ─ canary ─ checkpoint

Everything random comes from the node's seed and the round's number, so a run that was killed and resumed computes bit for bit
what an uninterrupted one computes, as long as no foreign groups come in.
"""

import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config
from swarm.engine.canary import Canary
from swarm.engine.make_engine import make_engine
from swarm.errors import CheckpointError
from swarm.policy.memory_probe import probe_memory
from swarm.policy.policy import Policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.rollouts.rollout_round import RolloutRound
from swarm.rollouts.worker import RolloutBatch, RolloutWorker
from swarm.tasks.difficulty import DifficultyTable
from swarm.tasks.task_cursor import TaskCursor
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.tasks.task_source import TaskFailure, UnknownTask
from swarm.training.experience import ExperienceTranslator
from swarm.training.health import HealthWatch
from swarm.training.step_report import StepReport
from swarm.training.trainer import Trainer
from swarm.training.training_group import TrainingGroup
from swarm.types import RolloutGroup

logger = logging.getLogger(__name__)

Publish = Callable[[Sequence[RolloutGroup]], None]
Row = dict[str, Any]
"""One line of metrics.jsonl."""


class Learner:
    """Policy, engine, trainer and task cursor of one node, with what a checkpoint needs to continue them."""

    def __init__(
        self, config: Config, policy: Policy, mixture: TaskMixture, pool: ExperiencePool, author: str, publish: Publish
    ) -> None:
        self._config = config
        self._mixture = mixture
        self._pool = pool
        self._publish = publish
        self.policy = policy
        self._engine = make_engine(policy, config.rollouts)
        self._worker = RolloutWorker(config.rollouts, policy, self._engine, author)
        self._trainer = Trainer(
            config.training,
            policy,
            temperature=config.rollouts.temperature,
            max_new_tokens=config.rollouts.max_new_tokens,
            stop=config.rollouts.stop,
        )
        self._canary = Canary(policy, self._engine, config.training.canary_tolerance)
        self._translator = ExperienceTranslator(policy, config.sharing.likelihood_floor_quantile)
        self._health = HealthWatch()
        stream = training_seed(author, config.node.seed)
        self._author = author
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
        self._totals: Counter[str] = Counter()

    def run_round(self) -> Row:
        """One rollout–share–train cycle; returns its metrics."""
        started = time.monotonic()
        rollouts = self._rollouts.run(self._seed("rollouts", self.round))
        rolled_out = time.monotonic()
        if self._config.sharing.publish:
            self._publish(rollouts.groups)
        self._translator.observe_own(rollouts.likelihoods)
        batch = self._batch(rollouts)
        report = self._trainer.step(batch) if batch else None
        if report is not None and not report.skipped:
            self._canary.check()
        self.round += 1
        self._totals["own_groups"] += sum(group.is_own for group in batch)
        self._totals["swarm_groups"] += sum(not group.is_own for group in batch)
        finished = time.monotonic()
        row: Row = {
            **self._rollout_row(rollouts, rolled_out - started),
            **self._train_row(batch, report),
            "time/rollout_s": rolled_out - started,
            "time/train_s": finished - rolled_out,
            "time/round_s": finished - started,
        }
        warnings = self._health.observe(row)
        return {**row, "health/warnings": warnings, "health/num_warnings": len(warnings)}

    def evaluate(self, phase: str) -> Row:
        """Mean reward of one answer per held-out task; the same tasks on every node and at every time."""
        config = self._config.evaluation
        tasks = self._mixture.held_out(config.tasks_per_source)
        scores = self._worker.evaluate(tasks, temperature=config.temperature, seed=self._seed("evaluation"))
        accuracy = {source: sum(values) / len(values) for source, values in sorted(scores.items()) if values}
        mean = sum(accuracy.values()) / len(accuracy) if accuracy else 0.0
        row = {"kind": "evaluation", "phase": phase, "accuracy_mean": mean, "accuracy": accuracy}
        return {**row, **self._position()}

    def probe_memory(self) -> None:
        """Raises MemoryBudgetError before the first round where the longest batch would not fit."""
        config = self._config
        probe_memory(
            self.policy,
            config.rollouts,
            config.training,
            config.max_batch_groups,
            answer_bytes=self._engine.answer_bytes(config.policy.max_prompt_tokens + config.rollouts.max_new_tokens),
            held_bytes=self._engine.held_bytes,
        )

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
            "rng": _rng_state(self._rng),
            "own_likelihoods": self._translator.state(),
            "health": self._health.state(),
            "totals": dict(self._totals),
        }
        store.save(self.round, tensors, state)

    def resume(self, store: CheckpointStore) -> bool:
        """Continue from the newest intact checkpoint; False where there is none. Raises CheckpointError if it is another's."""
        checkpoint = store.load_newest()
        if checkpoint is None:
            return False
        state = checkpoint.state
        if state["lineage"]["policy"] != self.policy.lineage.policy:
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
        self._rng.setstate(_rng_from(state["rng"]))
        self._translator.restore(state["own_likelihoods"])
        if "health" in state:  # absent in checkpoints of older versions
            self._health.restore(state["health"])
        self._totals = Counter(state["totals"])
        return True

    def _batch(self, rollouts: RolloutBatch) -> list[TrainingGroup]:
        """I own and J foreign groups with signal; where one kind is short, the other fills up to I + J."""
        sharing = self._config.sharing
        prompts = {task.ref: task.prompt for task in rollouts.tasks}
        kept = [g for g in rollouts.groups if g.has_signal or not self._config.training.filter_groups]
        own = [self._translator.own(prompts[g.task], g) for g in kept]
        total = self._config.max_batch_groups
        num_own = min(len(own), total - sharing.swarm_groups)
        wanted = total - num_own if sharing.swarm_groups else 0
        foreign = [group for drawn in self._pool.draw(wanted, self._rng) if (group := self._foreign(drawn))]
        chosen = self._rng.sample(own, min(len(own), total - len(foreign)))
        return chosen + foreign

    def _foreign(self, group: RolloutGroup) -> TrainingGroup | None:
        try:
            task = self._mixture.rebuild(group.task)
        except (UnknownTask, TaskFailure):  # the pool outlived a change of the task list
            return None
        return self._translator.foreign(task.prompt, group)

    def _rollout_row(self, rollouts: RolloutBatch, duration_s: float) -> Row:
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
            "rollout/groups_with_signal": sum(group.has_signal for group in groups),
            "rollout/failed_tasks": sum(rollouts.failures.values()),
            "rollout/too_long_prompts": sum(rollouts.too_long.values()),
            "rollout/unbuildable_tasks_total": sum(self._cursor.failures.values()),
        }

    def _train_row(self, batch: Sequence[TrainingGroup], report: StepReport | None) -> Row:
        row: Row = {
            "train/own_groups": sum(group.is_own for group in batch),
            "train/swarm_groups": sum(not group.is_own for group in batch),
            "train/own_groups_total": self._totals["own_groups"],
            "train/swarm_groups_total": self._totals["swarm_groups"],
            "train/answers_below_floor_total": self._translator.num_answers_below_floor,
            "pool/groups": self._pool.num_fresh(),
        }
        if report is not None:
            row |= report.row()
        return row

    def _position(self) -> Row:
        return {"round": self.round, "policy_version": self.policy.version}

    def _seed(self, purpose: str, round_number: int = 0) -> int:
        """31 bits from author, node seed, purpose and round: no two nodes alike, and what a resumed run draws again."""
        text = f"{self._author}/{self._config.node.seed}/{purpose}/{round_number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _rng_state(rng: random.Random) -> list[Any]:
    version, internal, gauss = rng.getstate()
    return [version, list(internal), gauss]


def _rng_from(state: Sequence[Any]) -> tuple[Any, ...]:
    version, internal, gauss = state
    return version, tuple(internal), gauss

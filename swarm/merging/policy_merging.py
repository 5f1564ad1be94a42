"""Writes outer steps into a node's policy, and tries merges on private tasks first.

    trainer.step ─▶ Merger.after ─▶ OuterStep ─▶ weights into the policy, moments of factors with a new basis reset ─▶ canary
                        └─ gate: each candidate into the policy ─▶ answers to private tasks ─▶ mean reward

A merge happens between a training step and the next rollouts, and only after a step that was applied: so each policy version
samples from one set of weights, and a merge needs no version of its own. All of it runs on the compute thread.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swarm.config import Config
from swarm.errors import TrainingError
from swarm.merging.final_merge import FinalMerge, Wire
from swarm.merging.merger import Merger, MergeSchedule
from swarm.merging.outer_optimizer import Adapter, AdapterOrigin
from swarm.merging.pairer import BoundOnStrangers, Donate, FinalPairer, Pairer
from swarm.merging.robust import Scores
from swarm.node.policy_backend import PolicyBackend
from swarm.rollouts.worker import RolloutWorker
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import INDEX_SPAN, TaskFailure
from swarm.types import Partner, Task


@dataclass(frozen=True, slots=True)
class MergePorts:
    """What merging needs from the code that connects replicas."""

    pairer: Pairer
    donate: Donate | None
    """Takes the adapter that newcomers are given, after each outer step."""
    clock: Callable[[], float]
    """Swarm time in seconds."""
    gate_seed: int
    """Stream of the tasks that merges are tried on. No partner may know it, or it could prepare for them."""
    final: FinalPairer | None = None
    """Meets the other nodes of a final merge; None where there is none."""
    bound: BoundOnStrangers = lambda peer_ids: (peer_ids, 1.0)
    """Says which nodes of a final merge are strangers, and what part all of them together may have.

    By default nobody is known.
    """


class PolicyMerging:
    """The merging of one learner. It runs on the compute thread."""

    def __init__(
        self,
        config: Config,
        backend: PolicyBackend,
        *,
        worker: RolloutWorker,
        mixture: TaskMixture,
        ports: MergePorts | None,
    ) -> None:
        """To be made before anything is trained or restored. Without `ports` every outer step is taken alone."""
        self._config = config
        self._policy = policy = backend.policy
        self._optimizer = backend.optimizer
        self._worker = worker
        self._mixture = mixture
        self._ports = ports
        scaling = config.policy.lora.alpha / config.policy.lora.rank
        self._merger = Merger(
            config.merging,
            AdapterOrigin(policy.lineage.policy, scaling, backend.optimizer.read()),
            MergeSchedule(config.merging, int(config.swarm_id[:8], 16)),  # the same seed in all of the swarm
            pairer=ports.pairer if ports else None,
            score=self._gate,
            tries=self._is_tried,
            donate=ports.donate if ports else None,
        )
        self._rounds_since_merge = 0
        self._final_version = -1  # policy version that the last final merge ended with
        self._seen_version = policy.version
        self._seen_position = self._aligned(0)
        self._gate_tasks: tuple[int, list[Task]] = (-1, [])
        self._last_s = 0.0

    @property
    def lineage(self) -> str:
        """32 hex digits: `Lineage.policy`."""
        return self._policy.lineage.policy

    @property
    def num_bytes(self) -> int:
        """Length in bytes of every adapter that is sent or received."""
        return self._merger.num_bytes

    def after_step(self, progress: float | None = None) -> None:
        """Take an outer step where one is due or a partner has answered. To be called after each training step, before sampling.

        `progress` in [0, 1]: how much of all training is done; None where the end is unknown.
        """
        if self._policy.version == self._seen_version:
            return
        self._seen_version, position = self._policy.version, self._position()
        num_steps, self._seen_position = position - self._seen_position, position
        self._rounds_since_merge += 1
        started = time.monotonic()
        step = self._merger.after(num_steps, self._optimizer.read, self._policy.version, progress)
        if step is not None:
            self._optimizer.write(step.weights, step.reset_names)
            self._last_s = time.monotonic() - started

    def join(self, found: Sequence[Partner]) -> bool:
        """Let an untrained policy begin with the adapters of donors. Returns whether they were used."""
        has_joined = self._merger.join(found)
        self._optimizer.write(self._merger.slow)
        return has_joined

    def finish(self) -> dict[str, Any] | None:
        """Do the final merge and return its metrics; None where there is none to do, or it was done with these weights. Blocks.

        The result becomes the slow weights, without momentum, in case training goes on from there.
        """
        ports, merger = self._ports, self._merger
        if ports is None or ports.final is None or self._final_version == self._policy.version:
            return None
        wire = Wire(merger.snapshot, merger.opened)
        one = FinalMerge(
            self._config.merging, wire, merger.origin, pairer=ports.final, score=self._gate, bound=ports.bound
        )
        own = self._optimizer.read()
        result = one.run(own, self._policy.version)
        self._optimizer.write(result.weights, sorted(result.reset_names) if result.is_merged else ())
        if result.is_merged:
            merger.begin(result.weights)
        if result.num_places > 1:
            self._final_version = self._policy.version
        return result.row

    def row(self) -> dict[str, Any]:
        """Metrics of a round."""
        return {**self._merger.row(), "merge/last_step_s": self._last_s}

    def state(self) -> tuple[dict[str, Adapter], dict[str, Any]]:
        """(tensors, JSON-able rest) for a checkpoint."""
        tensors, rest = self._merger.state()
        return tensors, {**rest, "final_version": self._final_version}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any] | None) -> None:
        """Continue with a restored policy.

        With `state` None nothing was merged before: the policy's weights are the slow weights.
        """
        if state is None:
            self._merger.begin(self._optimizer.read())
        else:
            self._merger.restore(tensors, state)
            self._final_version = int(state.get("final_version", -1))
        self._seen_version = self._policy.version
        self._seen_position = self._aligned(self._merger.inner_steps)

    def _position(self) -> int:
        """The number that the merger counts: inner steps, or with `interval_s` swarm time in units of interval / H."""
        merging = self._config.merging
        if self._ports is None or not merging.interval_s:
            return self._policy.version
        return int(self._ports.clock() * merging.inner_steps / merging.interval_s)

    def _aligned(self, num_counted: int) -> int:
        """The position to count from, so that outer steps fall on multiples of the interval in swarm time."""
        position = self._position()
        if self._ports is None or not self._config.merging.interval_s:
            return position
        return position - (position - num_counted) % self._config.merging.inner_steps

    @property
    def _gate(self) -> Callable[[Adapter], Scores] | None:
        return self._score if self._ports and self._config.merging.gate_tasks else None

    def _is_tried(self) -> bool:
        """Whether this merge is tried on private tasks."""
        probability = try_probability(self._config, self._rounds_since_merge)
        self._rounds_since_merge = 0
        assert self._ports is not None
        return random.Random(f"{self._ports.gate_seed}/try/{self._policy.version}").random() < probability

    def _score(self, weights: Adapter) -> Scores:
        """The reward of one answer per private task, with the same tasks and the same seed for all candidates of a merge.

        It is −∞ for weights that give no finite probabilities: a partner's numbers may be finite while their results are not.
        """
        self._optimizer.write(weights)
        assert self._ports is not None
        temperature = self._config.evaluation.temperature
        try:
            rewards = self._worker.evaluate(self._tasks(), temperature=temperature, seed=self._ports.gate_seed)
        except TrainingError:
            return [-math.inf]
        return [reward for source in sorted(rewards) for reward in rewards[source]]

    def _tasks(self) -> list[Task]:
        """The private tasks of this policy version, hence of this merge; all sources in turn."""
        version = self._policy.version
        if self._gate_tasks[0] == version:
            return self._gate_tasks[1]
        assert self._ports is not None
        names, count = sorted(self._mixture.sources), self._config.merging.gate_tasks
        tasks: list[Task] = []
        for number in range(version * count, (version + 1) * count):
            source = self._mixture.sources[names[number % len(names)]]
            try:
                tasks.append(source.task(self._ports.gate_seed, number // len(names) % INDEX_SPAN))
            except TaskFailure:
                continue  # one task fewer to try on
        self._gate_tasks = version, tasks
        return tasks


def try_probability(config: Config, num_rounds: int) -> float:
    """How likely a merge is to be tried that comes `num_rounds` after the one before.

    Trying then takes `merging.gate_share` of the answers of rounds on average: two for each private task, one with the partner
    and one without.
    """
    merging, rollouts = config.merging, config.rollouts
    if merging.gate_share == 1 or not merging.gate_tasks:
        return 1.0
    sampled = num_rounds * rollouts.groups_per_round * rollouts.group_size
    return merging.gate_share * sampled / (2 * merging.gate_tasks)

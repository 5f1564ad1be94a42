"""Tasks in, scored rollout groups out.

task ─▶ prompt ─▶ token ids ─▶ engine ─▶ text ─▶ verifier ─▶ RolloutGroup
     too long: counted                   raises: group dropped, counted
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.config import RolloutsSection
from swarm.engine.engine import Completion, Engine
from swarm.policy.policy import Policy
from swarm.tasks.task_mixture import score
from swarm.tasks.task_source import TaskFailure, prompt_digest
from swarm.types import Rollout, RolloutGroup, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Groups of one call, in the order of their tasks."""

    groups: list[RolloutGroup]
    failures: dict[str, int]
    """Groups dropped because a verifier failed, by source."""
    too_long: dict[str, int]
    """Tasks skipped because of their prompt's length, by source."""
    num_tokens: int
    """Tokens sampled, those of dropped groups included."""


class RolloutWorker:
    """Samples and scores one group per task with the node's own policy."""

    def __init__(self, config: RolloutsSection, policy: Policy, engine: Engine, author: str) -> None:
        self._config = config
        self._policy = policy
        self._engine = engine
        self._author = author
        if config.group_size < 4:
            logger.warning("rollouts.group_size is %d; below 4 the advantage is noisy", config.group_size)

    def rollout(self, tasks: Sequence[Task], seed: int) -> RolloutBatch:
        """One group per task. The same seed, tasks and weights give the same groups."""
        encoded = [(task, self._policy.encode_prompt(task.prompt)) for task in tasks]
        kept = [(task, prompt) for task, prompt in encoded if self._fits(prompt)]
        too_long = Counter(task.ref.source for task, prompt in encoded if not self._fits(prompt))
        answers = self._engine.generate(
            [prompt for _, prompt in kept],
            self._config.group_size,
            max_new_tokens=self._config.max_new_tokens,
            temperature=self._config.temperature,
            seed=seed,
        )
        groups: list[RolloutGroup] = []
        failures: Counter[str] = Counter()
        for (task, _), completions in zip(kept, answers, strict=True):
            try:
                groups.append(self._group(task, completions))
            except TaskFailure as failure:
                failures[task.ref.source] += 1
                logger.debug("dropped a group of %s: %s", task.ref.source, failure)
        num_tokens = sum(len(completion.token_ids) for completions in answers for completion in completions)
        return RolloutBatch(groups, dict(failures), dict(too_long), num_tokens)

    def evaluate(self, tasks: Sequence[Task], *, temperature: float, seed: int) -> dict[str, list[float]]:
        """Reward of one answer per task, by source; tasks with too long a prompt or a failing verifier are left out."""
        rewards: dict[str, list[float]] = {}
        kept = [(task, prompt) for task in tasks if self._fits(prompt := self._policy.encode_prompt(task.prompt))]
        answers = self._engine.generate(
            [prompt for _, prompt in kept],
            1,
            max_new_tokens=self._config.max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
        for (task, _), (completion,) in zip(kept, answers, strict=True):
            try:
                reward = score(task, self._policy.decode(completion.token_ids))
            except TaskFailure as failure:
                logger.debug("left a task of %s out of the evaluation: %s", task.ref.source, failure)
                continue
            rewards.setdefault(task.ref.source, []).append(reward)
        return rewards

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) <= self._policy.config.max_prompt_tokens

    def _group(self, task: Task, completions: Sequence[Completion]) -> RolloutGroup:
        rollouts: list[Rollout] = []
        for completion in completions:
            text = self._policy.decode(completion.token_ids)
            reward = score(task, text)
            rollouts.append(Rollout(text, completion.token_ids, completion.logprobs, completion.finished, reward))
        return RolloutGroup(
            task=task.ref,
            prompt_digest=prompt_digest(task.prompt),
            rollouts=tuple(rollouts),
            author=self._author,
            lineage=self._policy.lineage,
            policy_version=self._policy.version,
        )

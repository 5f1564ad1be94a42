"""Samples and scores one group of answers per task.

task ─▶ prompt ─▶ token ids ─▶ engine ─▶ text ─▶ verifier ─▶ RolloutGroup
     too long: counted            ▲  │         raises: group dropped, counted
                            replies  answers   of tasks with an environment
                                  │  ▼
                             `EpisodeRunner`
"""

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.config import RolloutsSection
from swarm.engine.engine import (
    NOT_BEGUN,
    AnswerRequest,
    Completion,
    Engine,
    PruningEngine,
    ResumingEngine,
    converse,
    joined,
    with_reply,
)
from swarm.engine.pruning import AnswerKey, PruneCall, Pruning
from swarm.engine.sampling import Sampling
from swarm.policy.policy import TextPolicy
from swarm.rollouts.episode_runner import EpisodeRunner
from swarm.rollouts.hints import Hint
from swarm.rollouts.open_group import OpenGroup, Segment
from swarm.tasks.task_source import TaskFailure, assess, prompt_digest
from swarm.types import Rollout, RolloutGroup, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What pruning did, as sums over answers, so that reports of several calls add up."""

    num_pruned: int = 0
    saved_tokens: float = 0.0
    """Estimate of the tokens not sampled: the mean rest of answers that got as far."""
    reward_sum: float = 0.0
    """Sum of the rewards of scored answers, each times the number of answers it stands for."""
    weight_sum: float = 0.0

    @property
    def reward_mean(self) -> float:
        """Estimate of what the mean reward would be without pruning; 0 where nothing was scored."""
        return self.reward_sum / self.weight_sum if self.weight_sum else 0.0

    def and_also(self, other: "PruneReport") -> "PruneReport":
        return PruneReport(
            self.num_pruned + other.num_pruned,
            self.saved_tokens + other.saved_tokens,
            self.reward_sum + other.reward_sum,
            self.weight_sum + other.weight_sum,
        )


NOTHING_PRUNED = PruneReport()


def prune_report(
    answers: Sequence[Sequence[Completion]], call: PruneCall, rewards: Mapping[AnswerKey, float]
) -> PruneReport:
    """`answers` are all that the engine gave, pruned ones included; `rewards` those of the answers that were scored."""
    lengths = {
        (prompt, sample): (len(answer.token_ids), answer.end == "pruned")
        for prompt, siblings in enumerate(answers)
        for sample, answer in enumerate(siblings)
    }
    ended = {key: length for key, (length, is_pruned) in lengths.items() if not is_pruned}
    pruned = [length for length, is_pruned in lengths.values() if is_pruned]
    to_come = {length: _mean_rest(ended, call, length) for length in set(pruned)}
    return PruneReport(
        num_pruned=len(pruned),
        saved_tokens=sum(to_come[length] for length in pruned),
        reward_sum=sum(call.weight(key) * reward for key, reward in rewards.items()),
        weight_sum=sum(call.weight(key) for key in rewards),
    )


def _mean_rest(ended: Mapping[AnswerKey, int], call: PruneCall, length: int) -> float:
    rests = [(call.weight(key), total - length) for key, total in ended.items() if total > length]
    return sum(weight * rest for weight, rest in rests) / sum(weight for weight, _ in rests) if rests else 0.0


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The groups of one call, in the order of their tasks."""

    tasks: list[Task]
    """The tasks that were drawn for it, each once."""
    groups: list[RolloutGroup]
    failures: dict[str, int]
    """Groups dropped because a verifier failed, by source."""
    too_long: dict[str, int]
    """Tasks skipped because of their prompt's length, by source."""
    likelihoods: list[tuple[float, ...]]
    """Log-probs of the tokens of each answer of the groups, under the plain policy: temperature 1, no filter."""
    num_tokens: int
    """Number of tokens sampled, including those of dropped and of open groups."""
    num_stale_tokens: int = 0
    """Number of tokens of the groups that earlier policy versions sampled."""
    pruned: PruneReport = NOTHING_PRUNED
    """The answers that were dropped from the groups. Of the other fields only num_tokens counts them."""

    def and_also(self, other: "RolloutBatch") -> "RolloutBatch":
        """Both batches, one after the other."""
        return RolloutBatch(
            tasks=self.tasks + other.tasks,
            groups=self.groups + other.groups,
            failures=dict(Counter(self.failures) + Counter(other.failures)),
            too_long=dict(Counter(self.too_long) + Counter(other.too_long)),
            likelihoods=self.likelihoods + other.likelihoods,
            num_tokens=self.num_tokens + other.num_tokens,
            num_stale_tokens=self.num_stale_tokens + other.num_stale_tokens,
            pruned=self.pruned.and_also(other.pruned),
        )


class RolloutWorker:
    """Samples and scores one group per task with the node's own policy. It belongs to the compute thread."""

    def __init__(
        self, config: RolloutsSection, policy: TextPolicy, engine: Engine, author: str, pruning: Pruning | None = None
    ) -> None:
        """With `pruning`, which needs a PruningEngine, rollouts are pruned, and it learns from their rewards."""
        self._config = config
        self._policy = policy
        self._engine = engine
        self._author = author
        self._pruning = pruning
        self._sampling = Sampling(config.temperature, config.top_k, config.top_p, config.min_p)
        self._num_failures = Counter[str]()
        """Tasks whose verifier failed, by source, since the process began."""
        if config.group_size < 4:
            logger.warning("rollouts.group_size is %d; below 4 the advantage is noisy", config.group_size)

    def rollout(self, tasks: Sequence[Task], seed: int, sizes: Sequence[int] | None = None) -> RolloutBatch:
        """One group per task, of group_size answers or the number in `sizes`.

        The same seed, tasks, sizes and weights give the same groups.
        """
        encoded = [(task, self._policy.encode_prompt(task.prompt, task.context)) for task in tasks]
        kept = [(task, prompt) for task, prompt in encoded if self._fits(prompt)]
        sizes = sizes or [self._config.group_size] * len(tasks)
        kept_sizes = [size for (_, prompt), size in zip(encoded, sizes, strict=True) if self._fits(prompt)]
        too_long = Counter(task.ref.source for task, prompt in encoded if not self._fits(prompt))
        requests = [self._request(prompt, size) for (_, prompt), size in zip(kept, kept_sizes, strict=True)]
        call = None if self._pruning is None else self._pruning.begin(kept_sizes, seed)
        with self._runner([task for task, _ in kept], requests) as runner:
            answers = self._generate(requests, self._sampling, seed, call, runner)
            answered = [
                _Answered(task, [c for c in completions if c.end != "pruned"], self._policy.version, request)
                for request, ((task, _), completions) in enumerate(zip(kept, answers, strict=True))
            ]
            num_tokens = sum(len(completion.token_ids) for completions in answers for completion in completions)
            batch = self._batch(tasks, answered, too_long, num_tokens - runner.num_reply_tokens, runner)
        if self._pruning is None or call is None:
            return batch
        rewards = _rewards([task for task, _ in kept], answers, batch.groups)
        self._pruning.learn(call, rewards)
        return replace(batch, pruned=prune_report(answers, call, rewards))

    def resume(self, begun: Sequence[OpenGroup], enough: int, seed: int) -> tuple[RolloutBatch, list[OpenGroup]]:
        """Continue groups until `enough` are complete. Returns these, and the open groups as far as they got.

        Earlier groups go first. Those whose prompt is too long are counted and are in neither. Needs a ResumingEngine.
        """
        assert isinstance(self._engine, ResumingEngine), "checked by make_engine"
        encoded = [(group, self._policy.encode_prompt(group.task.prompt, group.task.context)) for group in begun]
        too_long = Counter(group.task.ref.source for group, prompt in encoded if not self._fits(prompt))
        kept = [(group, prompt) for group, prompt in encoded if self._fits(prompt)]
        answers = self._engine.resume(
            [self._request(prompt, len(group.answers), group.answers) for group, prompt in kept],
            self._sampling,
            enough=enough,
            seed=seed,
            stop=self._config.stop,
        )
        version = self._policy.version
        now = [group.continued(a, version) for (group, _), a in zip(kept, answers, strict=True)]
        complete = [group for group in now if group.is_complete]
        num_tokens = sum(num for group in now for known in group.segments for v, num in known[-1:] if v == version)
        answered = [_Answered(group.task, group.answers, group.oldest_version) for group in complete]
        batch = self._batch([group.task for group in complete], answered, too_long, num_tokens)
        num_stale = sum(group.num_tokens_before(version) for group in complete)
        segments = {group.task.ref: group.segments for group in complete}
        groups = [_with_segments(group, segments[group.task]) for group in batch.groups]
        return replace(batch, groups=groups, num_stale_tokens=num_stale), [
            group for group in now if not group.is_complete
        ]

    def follow(self, hints: Sequence[Hint], seed: int) -> RolloutBatch:
        """One group of group_size answers per hint, all of which begin with it. Rewards are those of the whole answers.

        For the engine a hint is the end of the prompt, so that it is computed once for its group and any engine can do this.
        """
        encoded = [(hint, self._policy.encode_prompt(hint.task.prompt, hint.task.context)) for hint in hints]
        kept = [(hint, prompt) for hint, prompt in encoded if self._fits(prompt)]
        too_long = Counter(hint.task.ref.source for hint, prompt in encoded if not self._fits(prompt))
        size, longest = self._config.group_size, self._config.max_new_tokens
        requests = [AnswerRequest([*prompt, *h.token_ids], size, longest - len(h.token_ids)) for h, prompt in kept]
        sampled = self._engine.generate(requests, self._sampling, seed=seed, stop=self._config.stop) if requests else []
        answered = [
            _Answered(
                hint.task,
                [joined(with_reply(NOT_BEGUN, hint.token_ids), one) for one in completions],
                self._policy.version,
                num_given=len(hint.token_ids),
            )
            for (hint, _), completions in zip(kept, sampled, strict=True)
        ]
        num_tokens = sum(len(completion.token_ids) for completions in sampled for completion in completions)
        return self._batch([hint.task for hint in hints], answered, too_long, num_tokens)

    def evaluate(self, tasks: Sequence[Task], *, temperature: float, seed: int) -> dict[str, list[float]]:
        """Reward of one answer per task, by source; tasks with too long a prompt or a failing verifier are left out."""
        each = self.evaluate_each(tasks, 1, temperature=temperature, seed=seed)
        return {source: [reward for (reward,) in of_tasks] for source, of_tasks in each.items()}

    def evaluate_each(
        self, tasks: Sequence[Task], num_answers: int, *, temperature: float, seed: int
    ) -> dict[str, list[list[float]]]:
        """Rewards of `num_answers` answers to each task, by source. It leaves out the same tasks as `evaluate`."""
        rewards: dict[str, list[list[float]]] = {}
        encoded = [(task, self._policy.encode_prompt(task.prompt, task.context)) for task in tasks]
        kept = [(task, prompt) for task, prompt in encoded if self._fits(prompt)]
        requests = [self._request(prompt, num_answers) for _, prompt in kept]
        with self._runner([task for task, _ in kept], requests) as runner:
            answers = self._generate(requests, Sampling(temperature=temperature), seed, None, runner)
            for request, ((task, _), completions) in enumerate(zip(kept, answers, strict=True)):
                try:
                    rollouts = self._rollouts(_Answered(task, completions, self._policy.version, request), runner)
                except TaskFailure as failure:
                    self._tell(task.ref.source, failure)
                    continue
                rewards.setdefault(task.ref.source, []).append([rollout.reward for rollout in rollouts])
        return rewards

    def _runner(self, tasks: Sequence[Task], requests: Sequence[AnswerRequest]) -> EpisodeRunner:
        return EpisodeRunner(self._policy, tasks, requests, self._config.environment_threads)

    def _generate(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        seed: int,
        call: PruneCall | None,
        runner: EpisodeRunner,
    ) -> list[list[Completion]]:
        stop = self._config.stop
        if call is not None:
            assert isinstance(self._engine, PruningEngine), "checked by make_engine"
            return self._engine.generate_and_prune(requests, sampling, call, seed=seed, stop=stop)
        if runner.has_episodes:
            return converse(self._engine, requests, sampling, runner, seed=seed, stop=stop)
        return self._engine.generate(requests, sampling, seed=seed, stop=stop)

    def _batch(
        self,
        tasks: Sequence[Task],
        answered: Sequence["_Answered"],
        too_long: Counter[str],
        num_tokens: int,
        runner: EpisodeRunner | None = None,
    ) -> RolloutBatch:
        """Score the answers to each task, sampled by this policy version and later ones."""
        groups: list[RolloutGroup] = []
        likelihoods: list[tuple[float, ...]] = []
        failures: Counter[str] = Counter()
        for one in answered:
            source = one.task.ref.source
            try:
                rollouts = self._rollouts(one, runner)
            except TaskFailure as failure:
                failures[source] += 1
                self._tell(source, failure)
                continue
            groups.append(self._group(one, rollouts))
            likelihoods += [
                tuple(itertools.compress(completion.policy_logprobs, rollout.written))
                for rollout, completion in zip(rollouts, one.completions, strict=True)
            ]
        return RolloutBatch(list(tasks), groups, dict(failures), dict(too_long), likelihoods, num_tokens)

    def _tell(self, source: str, failure: TaskFailure) -> None:
        """Count a task whose answers could not be scored, and log the 1st, 10th, 100th, … of a source."""
        self._num_failures[source] += 1
        count = self._num_failures[source]
        is_round = count == 10 ** (len(str(count)) - 1)
        logger.log(
            logging.WARNING if is_round else logging.DEBUG,
            "left out a task whose answers could not be scored, number %d of source %s: %s", count, source, failure,
        )  # fmt: skip

    def _request(self, prompt: Sequence[int], num_answers: int, begun: tuple[Completion, ...] = ()) -> AnswerRequest:
        return AnswerRequest(prompt, num_answers, self._config.max_new_tokens, begun)

    def _fits(self, prompt: Sequence[int]) -> bool:
        return 0 < len(prompt) <= self._policy.config.max_prompt_tokens

    def _rollouts(self, answered: "_Answered", runner: EpisodeRunner | None) -> list[Rollout]:
        """Score the answers to a task. Raises TaskFailure."""
        task = answered.task
        if task.begin is not None and runner is not None:
            return runner.rollouts(answered.request, answered.completions)
        rollouts: list[Rollout] = []
        for completion in answered.completions:
            text = self._policy.decode(completion.token_ids)
            worth = assess(task, text, len(completion.token_ids))
            rollout = Rollout(text, completion.token_ids, completion.logprobs, completion.finished, worth.reward)
            rollouts.append(replace(rollout, signals=worth.signals, num_given=answered.num_given))
        return rollouts

    def _group(self, answered: "_Answered", rollouts: Sequence[Rollout]) -> RolloutGroup:
        return RolloutGroup(
            task=answered.task.ref,
            prompt_digest=prompt_digest(answered.task.prompt),
            rollouts=tuple(rollouts),
            author=self._author,
            lineage=self._policy.lineage,
            policy_version=answered.policy_version,
        )


@dataclass(frozen=True, slots=True)
class _Answered:
    """The answers to one task."""

    task: Task
    completions: Sequence[Completion]
    policy_version: int
    request: int = 0
    """Index of its request, where the task has an environment."""
    num_given: int = 0
    """Tokens of the hint that every answer begins with."""


def _rewards(
    tasks: Sequence[Task], answers: Sequence[Sequence[Completion]], groups: Sequence[RolloutGroup]
) -> dict[AnswerKey, float]:
    """The reward of every answer of `groups`, by its place in `answers`, which pruned answers take, too."""
    scored = {group.task: group for group in groups}
    rewards: dict[AnswerKey, float] = {}
    for prompt, (task, completions) in enumerate(zip(tasks, answers, strict=True)):
        if task.ref in scored:
            survivors = [sample for sample, completion in enumerate(completions) if completion.end != "pruned"]
            for sample, rollout in zip(survivors, scored[task.ref].rollouts, strict=True):
                rewards[prompt, sample] = rollout.reward
    return rewards


def _with_segments(group: RolloutGroup, segments: Sequence[tuple[Segment, ...]]) -> RolloutGroup:
    """The group with segments for answers that other versions than the group's, which is the oldest, sampled."""
    rollouts = [
        replace(rollout, segments=known) if any(version != group.policy_version for version, _ in known) else rollout
        for rollout, known in zip(group.rollouts, segments, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))

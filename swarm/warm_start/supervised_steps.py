"""The beginning of a policy before RL: an existing adapter, or supervised steps on examples, or both.

    adapter folder ─▶ factors ─┐
    examples: task ─▶ right answers, played through its environment ─▶ token ids ─▶ −log π of own tokens ─▶ AdamW

Every node of a swarm that has the same settings takes the same examples in the same order. What began the policy is part of its
lineage: nodes that began otherwise cannot merge adapters, and use each other's rollouts as those of another policy.
"""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.adapters.adapter_folder import AdapterFolder, read_adapter_folder
from swarm.config import Config
from swarm.errors import CheckpointError, MergeError, PolicyError, TaskError
from swarm.policy.logprobs import TokenLogprobs
from swarm.policy.micro_batch_size import TokenSequence, cut
from swarm.policy.policy import TextPolicy
from swarm.tasks.environments.episodes import Play
from swarm.tasks.final_answers import FinalAnswerRule, answer_rule, written_by
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import INDEX_SPAN, SUPERVISED_SEED, TaskFailure, TaskSource
from swarm.training.policy_optimizer import PolicyOptimizer
from swarm.types import Task
from swarm.warm_start.start_digest import examples_of

logger = logging.getLogger(__name__)

_FULL_REWARD = 1 - 1e-6
_MOST_FAILURES = 200
_REPORT_EVERY = 25


def begin_from(
    folder: Path, steps: PolicyOptimizer, alpha_over_rank: float, base_hash: Callable[[], str] | None = None
) -> None:
    """Replace the factors of the policy by those of an exported adapter. Raises PolicyError where it does not fit.

    `base_hash`: `lineage.hash_weights` of the policy's base, asked for where the adapter says which base it is of.
    """
    try:
        adapter = read_adapter_folder(folder)
        _check_fit(adapter, steps.read(), base_hash)
        ratio = adapter.low_rank.scaling / alpha_over_rank
        steps.write({name: one * ratio if name.endswith(".lora_B") else one for name, one in adapter.tensors.items()})
    except (MergeError, CheckpointError) as error:
        raise PolicyError(f"warm_start.adapter must fit policy.base and policy.lora: {error}") from None


def _check_fit(adapter: AdapterFolder, own: Mapping[str, Tensor], base_hash: Callable[[], str] | None) -> None:
    """Raises MergeError for another base, other layers or another rank, with the setting that would fit."""
    if adapter.base_hash and base_hash is not None and adapter.base_hash != base_hash():
        raise MergeError(f"it was trained on another base, {adapter.base_name[:200]}; set policy.base to that")
    if different := sorted(set(own).symmetric_difference(adapter.tensors)):
        leaves = sorted({name.split(".")[-2] for name in adapter.tensors})
        raise MergeError(
            f"it has other layers, got a difference at {different[0]}; set policy.lora.targets = {leaves}, if that is its base"
        )
    rank = next(len(tensor) for name, tensor in own.items() if name.endswith(".lora_A"))
    if adapter.rank != rank:
        raise MergeError(f"it has rank {adapter.rank}, got {rank}; set policy.lora.rank = {adapter.rank}")


@dataclass(frozen=True, slots=True)
class Example:
    """An episode of right answers, in tokens."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    written: tuple[bool, ...]
    """Whether the policy is to write the token; the others are replies of the environment."""


class WarmStart:
    """Supervised steps on examples of the task sources. It belongs to the compute thread."""

    def __init__(self, config: Config, policy: TextPolicy, steps: PolicyOptimizer, tasks: TaskMixture) -> None:
        """`tasks`: what RL will train on. What it holds out is no example."""
        self._tasks = tasks
        self._start = config.warm_start
        self._longest = config.rollouts.max_new_tokens
        self._config = config
        self._policy = policy
        self._steps = steps
        self.left_out: Counter[str] = Counter()
        """Examples that were not used, by source: their verifier refuses them, or they are too long."""

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> float:
        """Take the steps and return the last loss, in nats per token. Raises TaskError for a source without examples."""
        mixture = examples_of(self._config)
        rules = {
            section.source_name: answer_rule(section) for section in self._start.sources or self._config.tasks.sources
        }
        streams = {name: self._examples(source, rules[name]) for name, source in mixture.sources.items()}
        order = _round_robin(mixture.weights)
        loss = 0.0
        try:
            for step in range(self._start.steps):
                if should_stop():
                    break
                batch = [next(streams[next(order)]) for _ in range(self._start.batch_size)]
                loss = self._step(batch, self._start.lr * min(1.0, (step + 1) / 10) * (1 - step / self._start.steps))
                if (step + 1) % _REPORT_EVERY == 0 or step + 1 == self._start.steps:
                    logger.info("warm start: step %d of %d, loss %.3f", step + 1, self._start.steps, loss)
        finally:
            mixture.close()
        for name, count in self.left_out.items():
            logger.warning("warm start: %d examples of %s were left out", count, name)
        return loss

    def _step(self, batch: Sequence[Example], lr: float) -> float:
        pairs: list[TokenSequence] = [(example.prompt_ids, example.token_ids) for example in batch]
        num_tokens = sum(sum(example.written) for example in batch)
        parts = list(
            cut(
                pairs,
                max_sequences=len(pairs),
                max_tokens=self._policy.micro_batch_tokens,
                max_separate_tokens=self._policy.max_separate_tokens,
            )
        )
        total = 0.0

        def loss_of(index: int, result: TokenLogprobs) -> Tensor:
            nonlocal total
            mask = torch.zeros_like(result.logprobs)
            for row, place in enumerate(parts[index]):
                written = batch[place].written
                mask[row, : len(written)] = torch.tensor(written, dtype=mask.dtype)
            loss = -(result.logprobs * mask).sum() / num_tokens
            total += loss.item()
            return loss

        norm = self._steps.accumulate([[pairs[place] for place in part] for part in parts], loss_of, 1.0)
        if math.isfinite(norm):
            self._steps.apply(lr)
        else:
            logger.warning("a step of the warm start is left out: its loss or gradient is not finite")
        self._steps.drop()
        return total

    def _examples(self, source: TaskSource, rule: FinalAnswerRule) -> Iterator[Example]:
        failures = 0
        for index in itertools.cycle(range(INDEX_SPAN)):
            try:
                task = source.task(SUPERVISED_SEED, index)
                if self._tasks.is_held_out(task):
                    continue
                example = self._example(task, _answers(source, index, rule))
            except TaskFailure as failure:
                logger.debug("left an example out: %s", failure)
                example = None
            if example is not None:
                failures = 0
                yield example
                continue
            self.left_out[source.name] += 1
            failures += 1
            if failures == _MOST_FAILURES:
                raise TaskError(
                    f"warm_start needs right answers that fit into rollouts.max_new_tokens, got {failures} others in a row of "
                    f"{source.name!r}; set warm_start.sources to a data set of examples, or remove that source"
                )

    def _example(self, task: Task, answers: Sequence[str]) -> Example | None:
        """The answers as tokens, with the replies between them; None where they earn less than the full reward."""
        policy, play = self._policy, Play.of(task)
        prompt = tuple(policy.encode_prompt(task.prompt, task.context))
        token_ids: list[int] = []
        written: list[bool] = []
        for answer in answers:
            ids = [*policy.encode_answer(answer), policy.end_token_id]
            token_ids += ids
            written += [True] * len(ids)
            step = play.step(answer, len(ids))
            if not play.may_go_on:
                break
            reply = policy.encode_reply(step.reply, step.role, task.context, after_eos=True)
            token_ids += reply
            written += [False] * len(reply)
        fits = 0 < len(prompt) <= policy.config.max_prompt_tokens and len(token_ids) <= self._longest
        return Example(prompt, tuple(token_ids), tuple(written)) if fits and play.reward >= _FULL_REWARD else None


def _answers(source: TaskSource, index: int, rule: FinalAnswerRule) -> Sequence[str]:
    demonstrate = getattr(source, "demonstrate", None)
    if demonstrate is not None:
        return demonstrate(SUPERVISED_SEED, index)
    return [written_by(rule, source.answer(SUPERVISED_SEED, index))]


def _round_robin(weights: dict[str, float]) -> Iterator[str]:
    """Sources in proportion to their weights, in an order that is the same everywhere."""
    given = dict.fromkeys(weights, 0)
    while True:
        name = min(weights, key=lambda one: ((given[one] + 1) / weights[one], one))
        given[name] += 1
        yield name

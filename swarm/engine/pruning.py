"""Dropping answers early whose end is foreseeable, so that what is left of a group is rather half right, half wrong.

    prompt computed ─▶ chance of the group π ─▶ how many of it are safe: G · min(π, 1 − π) / max(π, 1 − π), or more
    every `prune_after` tokens of an answer ─▶ its own chance p ─▶ sure to end like most of its group? doomed
    doomed and not safe ─▶ dropped                        doomed and safe ─▶ goes on, standing for those dropped

After ARRoL (2603.24840), but with no look at siblings: a decision depends on prompt, own tokens, seed and head alone, so it
is the same whatever else is in the slots and in whatever order. Who is safe is drawn by lot before anything is sampled,
therefore every answer has a known chance to survive: 1, or once doomed (safe ones) / G. Its inverse is the answer's weight.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.config import RolloutsSection
from swarm.engine.reliability import Reliability
from swarm.engine.success_head import SuccessHead
from swarm.policy.counter_noise import uniform

AnswerKey = tuple[int, int]
"""(prompt, sample)."""

SUCCESS_REWARD = 0.5
"""An answer with this reward or more is a success."""
_SAFE_SHARE = 0.1
"""At least this part of a group is safe."""
_MAX_LOOKS = 16
_MAX_LEARNED = 256
"""Looks at one answer, and answers of one call that are learned from, at most: their hidden states are kept so long."""
_MIN_ANSWERS = 256
_MAX_CALIBRATION_ERROR = 0.1
_MIN_SKILL = 0.1
"""Nothing is dropped before the head has seen so many answers, nor while it is further off or knows less than this."""


@dataclass(slots=True)
class _Looks:
    """What was seen of one answer after its prompt: hidden states [D] and the chances they were given."""

    states: list[Tensor]
    chances: list[float]


class PruneCall:
    """Which answers of one call of an engine to drop. The engine tells what it computes, and asks."""

    def __init__(
        self, head: SuccessHead, config: RolloutsSection, sizes: Sequence[int], seed: int, *, drops: bool
    ) -> None:
        """`sizes`: answers per prompt. Without `drops` it only looks."""
        self._head = head
        self._config = config
        self._drops = drops
        self._places = [np.argsort(np.argsort(uniform(size, "prune", seed, i))) for i, size in enumerate(sizes)]
        self._stride = max(1, math.ceil(sum(sizes) / _MAX_LEARNED))
        self._prompts: dict[int, _Looks] = {}
        self._answers: dict[AnswerKey, _Looks] = {}
        self._doomed: set[AnswerKey] = set()

    def is_due(self, num_tokens: int) -> bool:
        """Whether to look at an answer of so many tokens."""
        after = self._config.prune_after
        return num_tokens % after == 0 and num_tokens <= _MAX_LOOKS * after

    def saw_prompts(self, prompts: Sequence[int], states: Tensor) -> None:
        """Hidden states [N, D] of the last tokens of prompts; the first sight of a prompt counts."""
        for prompt, state, chance in zip(prompts, states, self._head.chances(states).tolist(), strict=True):
            self._prompts.setdefault(prompt, _Looks([state.clone()], [chance]))

    def dropped(self, answers: Sequence[AnswerKey], states: Tensor) -> list[bool]:
        """Whether to drop each of the answers that are due; hidden states [N, D] of their last tokens."""
        decisions: list[bool] = []
        for key, state, chance in zip(answers, states, self._head.chances(states).tolist(), strict=True):
            if self._drops and self._ends_like_most(key[0], chance):
                self._doomed.add(key)
            is_dropped = key in self._doomed and not self._is_safe(key)
            decisions.append(is_dropped)
            if is_dropped:
                self._answers.pop(key, None)
            elif self.is_learned_from(key):
                looks = self._answers.setdefault(key, _Looks([], []))
                looks.states.append(state.clone())  # else it would keep those of all slots
                looks.chances.append(chance)
        return decisions

    def is_learned_from(self, key: AnswerKey) -> bool:
        """All answers of a call of usual size; of larger ones an even part."""
        return sum(key) % self._stride == 0

    def weight(self, key: AnswerKey) -> float:
        """1 / the chance that an answer that was not dropped had to survive."""
        prompt, _ = key
        return len(self._places[prompt]) / self._num_safe(prompt) if key in self._doomed else 1.0

    def looks(self, key: AnswerKey) -> tuple[list[Tensor], list[float]]:
        """Hidden states and chances of one answer that is learned from, its prompt's first."""
        prompt, own = self._prompts[key[0]], self._answers.get(key, _Looks([], []))
        return prompt.states + own.states, prompt.chances + own.chances

    def _ends_like_most(self, prompt: int, chance: float) -> bool:
        if self._prompts[prompt].chances[0] < 0.5:
            return 1 - chance >= self._config.prune_certainty
        return chance >= self._config.prune_certainty

    def _is_safe(self, key: AnswerKey) -> bool:
        prompt, sample = key
        return bool(self._places[prompt][sample] < self._num_safe(prompt))

    def _num_safe(self, prompt: int) -> int:
        size, chance = len(self._places[prompt]), self._prompts[prompt].chances[0]
        fewest = max(2, math.ceil(self._config.smallest_group / 2), math.ceil(_SAFE_SHARE * size))
        # as many of the majority as the minority has: half and half, if the head is right
        return min(size, max(fewest, math.ceil(size * min(chance, 1 - chance) / max(chance, 1 - chance))))


class Pruning:
    """The head of this node, what it has learned, and how far it can be trusted."""

    def __init__(self, config: RolloutsSection, hidden_size: int, seed: int) -> None:
        self._config = config
        self._head = SuccessHead(hidden_size, seed)
        self.reliability = Reliability()
        self._num_answers = 0

    @property
    def drops(self) -> bool:
        """Whether the head has seen enough, says what it knows, and knows something: the mean rate alone is calibrated."""
        return (
            self._num_answers >= _MIN_ANSWERS
            and self.reliability.calibration_error <= _MAX_CALIBRATION_ERROR
            and self.reliability.skill >= _MIN_SKILL
        )

    def begin(self, sizes: Sequence[int], seed: int) -> PruneCall:
        """For one call of an engine with so many answers per prompt; of one seed it gives the same."""
        return PruneCall(self._head, self._config, sizes, seed, drops=self.drops)

    def learn(self, call: PruneCall, rewards: Mapping[AnswerKey, float]) -> None:
        """From the answers that ended, each as heavy as those it stands for; so what was dropped leaves no gap."""
        states: list[Tensor] = []
        rows: list[tuple[float, float, float]] = []  # chance, success, weight
        for key in sorted(filter(call.is_learned_from, rewards)):  # in an order that no slot has a say in
            success, weight = float(rewards[key] >= SUCCESS_REWARD), call.weight(key)
            seen, chances = call.looks(key)
            states += seen
            rows += [(chance, success, weight) for chance in chances]
        if not rows:
            return
        chances, successes, weights = zip(*rows, strict=True)
        self.reliability.observe(chances, successes, weights)
        self._head.learn(torch.stack(states), torch.tensor(successes), torch.tensor(weights))
        self._num_answers += sum(map(call.is_learned_from, rewards))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON-able rest) for a checkpoint."""
        return self._head.state(), {"num_answers": self._num_answers, "reliability": self.reliability.state()}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave; start anew where there is none, or for a policy of another size."""
        if state and self._head.restore(tensors):
            self._num_answers = state["num_answers"]
            self.reliability.restore(state["reliability"])

"""Early pruning: drops answers whose outcome is predictable, so that a group keeps about as many right as wrong ones.

    prompt computed ─▶ the group's chance of success π ─▶ how many answers are safe: G · min(π, 1 − π) / max(π, 1 − π) or more
    every `prune_interval_tokens` tokens of an answer ─▶ its own chance p ─▶ will it end like most of its group? doomed
    doomed and not safe ─▶ dropped                        doomed and safe ─▶ continues, and stands for the dropped ones

After ARRoL (2603.24840), but without comparing siblings: a decision depends on prompt, own tokens, seed and head alone, so it
is the same in any batch and order. The safe answers are drawn at random before sampling. Every answer therefore has a known
chance to survive, 1 or, once doomed, (safe answers) / G; the inverse is its weight.

`Reliability` compares predicted chances with outcomes, which were not known at the time of prediction.

`SuccessHead` predicts from the policy's last hidden state whether an unfinished answer will succeed; it learns as answers end.

    hidden state [D] ─▶ divided by its root mean square ─▶ tanh layer [16] ─▶ logit ─▶ chance of success

The head belongs to this node: it is never shared, and it is part of its checkpoint. It is float32 on the CPU in every case.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from swarm.adapters.adapter_state import check_adapter, moments_of, placed
from swarm.config import RolloutsSection
from swarm.errors import CheckpointError
from swarm.policy.counter_noise import uniform

_NUM_BINS = 10
_MEMORY = 0.9
"""Weight of the old sums after one round (exponential decay)."""


class Reliability:
    """Decaying sums over predictions, in ten bins by the predicted chance."""

    def __init__(self) -> None:
        self._bins = [[0.0, 0.0, 0.0] for _ in range(_NUM_BINS)]  # weight, weighted chances, weighted successes
        self._squares = 0.0

    def observe(self, chances: Sequence[float], successes: Sequence[float], weights: Sequence[float]) -> None:
        """Add the predictions of one round."""
        self._bins = [[_MEMORY * value for value in sums] for sums in self._bins]
        self._squares *= _MEMORY
        for chance, success, weight in zip(chances, successes, weights, strict=True):
            sums = self._bins[min(int(chance * _NUM_BINS), _NUM_BINS - 1)]
            sums[0] += weight
            sums[1] += weight * chance
            sums[2] += weight * success
            self._squares += weight * (chance - success) ** 2

    @property
    def calibration_error(self) -> float:
        """Mean distance of predicted and observed rate over the bins (expected calibration error); 1 without data."""
        if not self._weight:
            return 1.0
        return sum(abs(chances - successes) for _, chances, successes in self._bins) / self._weight

    @property
    def brier(self) -> float:
        """Mean squared error of the chances (Brier score); 1 without data."""
        return self._squares / self._weight if self._weight else 1.0

    @property
    def skill(self) -> float:
        """1 − Brier score / Brier score of always predicting the mean rate: 0 knows nothing, 1 everything."""
        if not self._weight:
            return 0.0
        rate = sum(successes for _, _, successes in self._bins) / self._weight
        spread = rate * (1 - rate)
        return 1 - self.brier / spread if spread > 0 else 0.0

    def state(self) -> dict[str, Any]:
        return {"bins": [list(sums) for sums in self._bins], "squares": self._squares}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._bins = [list(sums) for sums in state["bins"]]
        self._squares = state["squares"]

    @property
    def _weight(self) -> float:
        return sum(weight for weight, _, _ in self._bins)


_WIDTH = 16
_LR = 1e-2
_WEIGHT_DECAY = 1e-2
_PASSES = 4
"""Gradient steps on the states of one round, which are used once and then dropped."""
_ROWS_PER_STEP = 1024


class SuccessHead:
    """Predicts P(success) from hidden states; it predicts 0.5 until it has learned."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        noise = torch.from_numpy(uniform(_WIDTH * hidden_size, "success head", seed)).view(_WIDTH, hidden_size)
        self._parameters = {
            "inner.weight": (2 * noise - 1) / hidden_size**0.5,
            "inner.bias": torch.zeros(_WIDTH),
            "outer.weight": torch.zeros(1, _WIDTH),
            "outer.bias": torch.zeros(1),
        }
        for parameter in self._parameters.values():
            parameter.requires_grad_()
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=_LR, weight_decay=_WEIGHT_DECAY)

    @torch.no_grad()
    def chances(self, states: Tensor) -> Tensor:
        """Chances [N] in (0, 1) of hidden states [N, D]."""
        return self._logits(states).sigmoid()

    def learn(self, states: Tensor, successes: Tensor, weights: Tensor) -> None:
        """Take a few steps of weighted cross entropy on states [N, D] of ended answers; successes [N] are 0 or 1."""
        for _ in range(_PASSES):
            for start in range(0, len(states), _ROWS_PER_STEP):
                part = slice(start, start + _ROWS_PER_STEP)
                loss = functional.binary_cross_entropy_with_logits(
                    self._logits(states[part]), successes[part], weights[part], reduction="sum"
                )
                self._optimizer.zero_grad(set_to_none=True)
                (loss / weights[part].sum()).backward()
                self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return weights and optimizer moments."""
        tensors = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}:{name}"] = value.detach().clone()
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Continue from a `state`. Returns False, and does nothing, where it does not fit this size of hidden state."""
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        moments = {key: value for key, value in tensors.items() if key not in shapes}
        try:
            check_adapter({name: tensors[name] for name in shapes if name in tensors}, shapes)
            placed_moments = moments_of(moments, shapes)
        except (CheckpointError, ValueError):
            return False
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])
            if name in placed_moments:
                self._optimizer.state[parameter] = placed(placed_moments[name], parameter)
        return True

    def _logits(self, states: Tensor) -> Tensor:
        own = self._parameters
        scaled = functional.rms_norm(states, states.shape[-1:])
        inner = functional.linear(scaled, own["inner.weight"], own["inner.bias"]).tanh()
        return functional.linear(inner, own["outer.weight"], own["outer.bias"])[:, 0]


AnswerKey = tuple[int, int]
"""(prompt, sample)."""

SUCCESS_REWARD = 0.5
"""An answer with this reward or more is a success."""
_SAFE_SHARE = 0.1
"""Smallest fraction of a group that is safe."""
_MAX_LOOKS = 16
_MAX_LEARNED = 256
"""Most checks of one answer, and most answers of one call, whose hidden states are stored for learning."""
_MIN_ANSWERS = 256
_MAX_CALIBRATION_ERROR = 0.1
_MIN_SKILL = 0.1
"""Nothing is dropped before the head has seen so many answers, nor while its error is above or its skill below these."""


@dataclass(slots=True)
class _Looks:
    """The hidden states [D] of one answer at each check, its prompt's first, and the chances predicted from them."""

    states: list[Tensor]
    chances: list[float]


class PruneCall:
    """Decides which answers of one engine call to drop. The engine reports hidden states and asks."""

    def __init__(
        self, head: SuccessHead, config: RolloutsSection, sizes: Sequence[int], seed: int, *, drops: bool
    ) -> None:
        """`sizes`: answers per prompt. Without `drops` it observes but drops nothing."""
        self._head = head
        self._config = config
        self._drops = drops
        self._places = [np.argsort(np.argsort(uniform(size, "prune", seed, i))) for i, size in enumerate(sizes)]
        self._stride = max(1, math.ceil(sum(sizes) / _MAX_LEARNED))
        self._prompts: dict[int, _Looks] = {}
        self._answers: dict[AnswerKey, _Looks] = {}
        self._doomed: set[AnswerKey] = set()

    def is_due(self, num_tokens: int) -> bool:
        """Whether to check an answer of so many tokens."""
        after = self._config.prune_interval_tokens
        return num_tokens % after == 0 and num_tokens <= _MAX_LOOKS * after

    def saw_prompts(self, prompts: Sequence[int], states: Tensor) -> None:
        """Record hidden states [N, D] of the last tokens of prompts. The first record of a prompt counts."""
        for prompt, state, chance in zip(prompts, states, self._head.chances(states).tolist(), strict=True):
            self._prompts.setdefault(prompt, _Looks([state.clone()], [chance]))

    def dropped(self, answers: Sequence[AnswerKey], states: Tensor) -> list[bool]:
        """Return whether to drop each of the due answers, from hidden states [N, D] of their last tokens."""
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
                looks.states.append(state.clone())  # a view would keep the states of all slots alive
                looks.chances.append(chance)
        return decisions

    def is_learned_from(self, key: AnswerKey) -> bool:
        """Whether to learn from this answer: all answers of a call of usual size, an even part of larger calls."""
        return sum(key) % self._stride == 0

    def weight(self, key: AnswerKey) -> float:
        """1 / the chance of survival of an answer that was not dropped."""
        prompt, _ = key
        return len(self._places[prompt]) / self._num_safe(prompt) if key in self._doomed else 1.0

    def looks(self, key: AnswerKey) -> tuple[list[Tensor], list[float]]:
        """Return hidden states and chances of one answer that is learned from, its prompt's first."""
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
        # as many of the majority as the minority has: half and half if the head is right
        return min(size, max(fewest, math.ceil(size * min(chance, 1 - chance) / max(chance, 1 - chance))))


class Pruning:
    """The pruning state of a node: its head, and how reliable the head is."""

    def __init__(self, config: RolloutsSection, hidden_size: int, seed: int) -> None:
        self._config = config
        self._head = SuccessHead(hidden_size, seed)
        self.reliability = Reliability()
        self._num_answers = 0

    @property
    def drops(self) -> bool:
        """Whether answers are dropped: the head has seen enough, is calibrated, and knows more than the mean rate."""
        return (
            self._num_answers >= _MIN_ANSWERS
            and self.reliability.calibration_error <= _MAX_CALIBRATION_ERROR
            and self.reliability.skill >= _MIN_SKILL
        )

    def begin(self, sizes: Sequence[int], seed: int) -> PruneCall:
        """Begin one engine call with so many answers per prompt. The same seed gives the same decisions."""
        return PruneCall(self._head, self._config, sizes, seed=seed, drops=self.drops)

    def learn(self, call: PruneCall, rewards: Mapping[AnswerKey, float]) -> None:
        """Learn from ended answers. Each has the weight of those it stands for, which compensates for dropped ones."""
        states: list[Tensor] = []
        rows: list[tuple[float, float, float]] = []  # chance, success, weight
        for key in sorted(filter(call.is_learned_from, rewards)):  # in an order that does not depend on slots
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
        """Return (tensors, values for JSON) for a checkpoint."""
        return self._head.state(), {"num_answers": self._num_answers, "reliability": self.reliability.state()}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue from a `state`; start from nothing without one, or for a policy of another size."""
        if state and self._head.restore(tensors):
            self._num_answers = state["num_answers"]
            self.reliability.restore(state["reliability"])

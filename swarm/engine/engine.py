"""The contract between rollouts and whatever samples them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.engine.sampling import Sampling
from swarm.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    token_ids: tuple[int, ...]
    """[T] at least one token; the last one is EOS if `finished`."""
    logprobs: tuple[float, ...]
    """[T] log-probability of each token under the distribution it was drawn from; if greedy, under the plain policy."""
    policy_logprobs: tuple[float, ...]
    """[T] the same under the plain policy, at temperature 1 and unfiltered."""
    finished: bool
    """Whether EOS was sampled; False means cut at the token limit."""


class Engine(Protocol):
    """Samples answers from the policy's weights as they are at the moment of the call."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling,
        seed: int,
    ) -> list[list[Completion]]:
        """`group_size` answers to each prompt, at most `max_new_tokens` long: one limit, or one for each prompt.

        Equal seed and weights give equal answers, however they are batched. Raises TrainingError when the policy gives no
        finite probabilities.
        """
        ...

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Log-probs [T] of a given answer at temperature 1, computed as `generate` does, token by token."""
        ...


def limits_of(prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]) -> list[int]:
    """One limit per prompt."""
    return [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)


def refuse_nan(completions: Iterable[Completion]) -> None:
    """Raises TrainingError if a log-prob is not finite."""
    if not all(math.isfinite(logprob) for completion in completions for logprob in completion.logprobs):
        raise TrainingError(
            "the policy must give finite probabilities, got NaN or infinity while sampling; "
            "lower training.lr, or set policy.dtype = float32, and resume from an earlier checkpoint"
        )

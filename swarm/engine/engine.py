"""The contract between rollouts and whatever samples them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    token_ids: tuple[int, ...]
    """[T] at least one token; the last one is EOS if `finished`."""
    logprobs: tuple[float, ...]
    """[T] log-probability of each token under the distribution it was drawn from; if greedy, under the plain policy."""
    finished: bool
    """Whether EOS was sampled; False means cut at the token limit."""


class Engine(Protocol):
    """Samples answers from the policy's weights as they are at the moment of the call."""

    def generate(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        """`group_size` answers to each prompt. Equal seed and weights give equal answers, however they are batched.

        Temperature 0 decodes greedily. Raises TrainingError when the policy gives no finite probabilities.
        """
        ...

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Log-probs [T] of a given answer at temperature 1, computed as `generate` does, token by token."""
        ...

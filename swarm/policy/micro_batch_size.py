"""Which sequences go through the model together: as many as a budget of tokens allows, with little padding.

Training, the likelihood floor and the memory probe count alike: a forward and backward pass takes memory in proportion to the
tokens that it computes, padding included.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

TokenSequence = tuple[Sequence[int], Sequence[int]]
"""(prompt ids, answer ids), both at least one token long."""
DEFAULT_TOKENS = 4096
"""Where no memory probe has chosen. More tokens at once are no faster on a CPU."""
_MIN_SAVED = 0.2
"""Part of the tokens that sharing prompts must save. Answers that continue a cache need an attention mask, which takes more
memory per token, the more the longer they are."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How many prompts and answers go through the model together, and how long the longest of each are."""

    num_prompts: int
    num_answers: int
    prompt_tokens: int
    answer_tokens: int

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> "Extent":
        prompts = {tuple(prompt) for prompt, _ in sequences}
        longest_answer = max(len(answer) for _, answer in sequences)
        return cls(len(prompts), len(sequences), max(map(len, prompts)), longest_answer)

    @property
    def separate_tokens(self) -> int:
        return self.num_answers * (self.prompt_tokens + self.answer_tokens)

    @property
    def shared_tokens(self) -> int:
        return self.num_prompts * self.prompt_tokens + self.num_answers * self.answer_tokens

    @property
    def shares_prompts(self) -> bool:
        """Whether it is worth computing equal prompts once."""
        return self.shared_tokens <= (1 - _MIN_SAVED) * self.separate_tokens

    @property
    def tokens(self) -> int:
        """Computed tokens by which memory grows: those that share prompts count 1.25 times, at most as much as separate ones."""
        return min(self.separate_tokens, int(self.shared_tokens / (1 - _MIN_SAVED)))


def cut(
    sequences: Sequence[TokenSequence], *, max_sequences: int, max_tokens: int, max_separate_tokens: int | None = None
) -> list[list[int]]:
    """Cut `sequences` into parts that fit into memory, and return the indices of each part.

    A part has at most `max_sequences` sequences and `max_tokens` computed tokens; a longer sequence is a part of its own.
    Either siblings stay together, which saves prompts, or sequences of like length, which saves padding: whichever computes
    fewer tokens. `max_separate_tokens` bounds a part's tokens with a prompt for each answer, and so the copies of its keys.
    """
    most = max_separate_tokens or math.inf

    def length(index: int) -> int:
        return sum(map(len, sequences[index]))

    in_order = range(len(sequences))
    orders: list[Iterable[int]] = [in_order, sorted(in_order, key=length)]
    cuts = [
        _cut_in_order(
            sequences,
            order,
            fits=lambda extent: (
                extent.num_answers <= max_sequences and extent.tokens <= max_tokens and extent.separate_tokens <= most
            ),
        )
        for order in orders
    ]
    return min(cuts, key=lambda parts: sum(Extent.of([sequences[index] for index in part]).tokens for part in parts))


def _cut_in_order(
    sequences: Sequence[TokenSequence], order: Iterable[int], fits: Callable[[Extent], bool]
) -> list[list[int]]:
    parts: list[list[int]] = []
    prompts = set[tuple[int, ...]]()
    longest_prompt = longest_answer = 0
    for index in order:
        prompt, answer = sequences[index]
        prompts.add(tuple(prompt))
        longest_prompt, longest_answer = max(longest_prompt, len(prompt)), max(longest_answer, len(answer))
        num_answers = len(parts[-1]) + 1 if parts else 1
        if not parts or not fits(Extent(len(prompts), num_answers, longest_prompt, longest_answer)):
            parts.append([])
            prompts, longest_prompt, longest_answer = {tuple(prompt)}, len(prompt), len(answer)
        parts[-1].append(index)
    return parts

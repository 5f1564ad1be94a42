"""The contract between rollouts and whatever samples them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from swarm.engine.pruning import PruneCall
from swarm.engine.sampling import Sampling
from swarm.errors import TrainingError

End = Literal["eos", "stop", "limit", "open", "pruned"]
"""Why an answer ended: EOS was sampled, a stop string came up, it was cut at its token limit or dropped. open: it has not."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    token_ids: tuple[int, ...]
    """[T] exactly as sampled, at least one unless open; the last one is EOS if `finished`, or completes the stop string."""
    logprobs: tuple[float, ...]
    """[T] log μ: log-probability under the distribution it was drawn from; if greedy, under the plain policy."""
    policy_logprobs: tuple[float, ...]
    """[T] the same under the plain policy, at temperature 1 and unfiltered."""
    end: End

    @property
    def finished(self) -> bool:
        """Whether EOS was sampled: what records mean by finished."""
        return self.end == "eos"


class Engine(Protocol):
    """Samples answers from the policy's weights as they are at the moment of the call."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int | Sequence[int],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """`group_size` answers to each prompt, at most `max_new_tokens` long; one number for all prompts, or one for each.

        An answer also ends once its text contains a string of `stop`. Equal seed and weights give equal answers, however
        they are batched. Raises TrainingError when the policy gives no finite probabilities, MemoryBudgetError when
        the keys and values of a single answer do not fit.
        """
        ...

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Log-probs [T] of a given answer at temperature 1, computed as `generate` does, token by token."""
        ...

    def answer_bytes(self, num_tokens: int) -> int:
        """Memory that one answer in the making takes, `num_tokens` long with its prompt."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that sampling takes besides answers, whatever their number."""
        ...


@runtime_checkable
class ResumingEngine(Engine, Protocol):
    """An engine that stops in the middle of answers and goes on with them later, at other weights if need be."""

    def resume(
        self,
        prompts: Sequence[Sequence[int]],
        begun: Sequence[Sequence[Completion]],
        *,
        enough: int,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """Answers as in `generate`, one for each of `begun`, until `enough` prompts have all of theirs.

        Of `begun` those that are open are continued (without a token: started), the others come back as they are; earlier
        prompts go first. What is still open in the end keeps its tokens, each with the log-probs it was drawn at.
        """
        ...


@runtime_checkable
class PruningEngine(Engine, Protocol):
    """An engine that drops answers in the middle, and uses their place for others."""

    def generate_and_prune(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int | Sequence[int],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling,
        seed: int,
        stop: Sequence[str] = (),
        pruning: PruneCall,
    ) -> list[list[Completion]]:
        """Answers as in `generate`; those that `pruning` says to drop end as "pruned", where they were at that time."""
        ...


NOT_BEGUN = Completion((), (), (), "open")


@dataclass(frozen=True, slots=True)
class Row:
    """An answer to be sampled."""

    prompt: int
    """Index of its prompt."""
    sample: int
    """Which of its siblings it is."""
    max_new_tokens: int
    begun: Completion = NOT_BEGUN
    """What there is of it."""

    @property
    def start(self) -> tuple[int, int]:
        """Names the tokens that come before the next one: the same for all siblings that are not begun."""
        return (self.prompt, self.sample if self.begun.token_ids else -1)


def rows_of(
    prompts: Sequence[Sequence[int]], group_size: int | Sequence[int], max_new_tokens: int | Sequence[int]
) -> list[Row]:
    """All answers in the order to start them in, siblings together.

    Those that may take longest come first: what starts last should end soon.
    """
    sizes = [group_size] * len(prompts) if isinstance(group_size, int) else group_size
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    order = sorted(range(len(prompts)), key=lambda i: (-limits[i], -len(prompts[i])))
    return [Row(prompt, sample, limits[prompt]) for prompt in order for sample in range(sizes[prompt])]


def open_rows(begun: Sequence[Sequence[Completion]], max_new_tokens: int) -> list[Row]:
    """Those of `begun` that are to be continued, in their order."""
    return [
        Row(prompt, sample, max_new_tokens, completion)
        for prompt, completions in enumerate(begun)
        for sample, completion in enumerate(completions)
        if completion.end == "open"
    ]


def grouped(
    prompts: Sequence[Sequence[int]], completions: Mapping[tuple[int, int], Completion]
) -> list[list[Completion]]:
    """Answers by (prompt, sample) as one list per prompt."""
    groups: list[list[Completion]] = [[] for _ in prompts]
    for (prompt, _), completion in sorted(completions.items(), key=lambda item: item[0]):
        groups[prompt].append(completion)
    return groups


def capacity_of(prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> int:
    """Tokens of the longest prompt with its answer."""
    return max(len(prompts[row.prompt]) + row.max_new_tokens for row in rows)


def refuse_nan(completions: Iterable[Completion]) -> None:
    """Raises TrainingError if a log-prob is not finite."""
    if not all(math.isfinite(logprob) for completion in completions for logprob in completion.logprobs):
        raise TrainingError(
            "the policy must give finite probabilities, got NaN or infinity while sampling; "
            "lower training.lr, or set policy.dtype = float32, and resume from an earlier checkpoint"
        )

"""The contract between rollouts and whatever samples them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from swarm.engine.pruning import PruneCall
from swarm.engine.sampling import Sampling, StopStrings
from swarm.errors import TrainingError
from swarm.policy.counter_noise import uniform
from swarm.policy.policy import TextPolicy

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


NOT_BEGUN = Completion((), (), (), "open")


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """What to sample for one prompt."""

    prompt: Sequence[int]
    """Token ids."""
    num_answers: int
    max_new_tokens: int
    """Of each answer, from its first token on."""
    begun: tuple[Completion, ...] = ()
    """For a ResumingEngine: the first answers as far as they have come, ended ones too; the others start from nothing."""

    @property
    def answers(self) -> tuple[Completion, ...]:
        """[num_answers] before sampling."""
        return self.begun + (NOT_BEGUN,) * (self.num_answers - len(self.begun))


class Engine(Protocol):
    """Samples answers from the policy's weights as they are at the moment of the call."""

    def generate(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """The answers to each request, in the order of the requests.

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
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        enough: int,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """Answers as in `generate`, until `enough` requests have all of theirs.

        Answers that are open are continued, those that have ended come back as they are; earlier requests go first.
        What is still open in the end keeps its tokens, each with the log-probs it was drawn at.
        """
        ...


@runtime_checkable
class PruningEngine(Engine, Protocol):
    """An engine that drops answers in the middle, and uses their place for others."""

    def generate_and_prune(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        pruning: PruneCall,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """Answers as in `generate`; those that `pruning` says to drop end as "pruned", where they were at that time."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerSlot:
    """An answer to be sampled."""

    prompt: int
    """Index of its request."""
    sample: int
    """Which of its siblings it is."""
    max_new_tokens: int
    begun: Completion = NOT_BEGUN
    """What there is of it."""

    @property
    def start(self) -> tuple[int, int]:
        """Names the tokens that come before the next one: the same for all siblings that are not begun."""
        return (self.prompt, self.sample if self.begun.token_ids else -1)


class SamplingCall:
    """How one call of an engine draws tokens, and what ends an answer. It holds nothing of the answers themselves."""

    def __init__(self, policy: TextPolicy, sampling: Sampling, seed: int, *, stop: Sequence[str]) -> None:
        self.sampling = sampling
        self.stop = StopStrings(policy.decode, stop)
        self.eos_token_ids = frozenset(policy.eos_token_ids)
        self._seed = seed

    def uniforms(self, slot: AnswerSlot) -> np.ndarray:
        """Uniform numbers [max_new_tokens] that draw the tokens of one answer. They do not depend on the batch."""
        return uniform(slot.max_new_tokens, "sample", self._seed, slot.prompt, slot.sample)

    def end(self, token_ids: Sequence[int], max_new_tokens: int) -> End | None:
        """Why an answer ends with its newest token, or None where it goes on."""
        if token_ids[-1] in self.eos_token_ids:
            return "eos"
        if self.stop.are_in(token_ids):
            return "stop"
        return "limit" if len(token_ids) == max_new_tokens else None


def open_rows(requests: Sequence[AnswerRequest]) -> list[AnswerSlot]:
    """Every answer that has not ended, in the order of the requests."""
    return [
        AnswerSlot(index, sample, request.max_new_tokens, answer)
        for index, request in enumerate(requests)
        for sample, answer in enumerate(request.answers)
        if answer.end == "open"
    ]


def longest_first(requests: Sequence[AnswerRequest], rows: Sequence[AnswerSlot]) -> list[AnswerSlot]:
    """Rows in the order to start them in, siblings together: what starts last should end soon."""
    return sorted(rows, key=lambda row: (-row.max_new_tokens, -len(requests[row.prompt].prompt), row.prompt))


def grouped(
    requests: Sequence[AnswerRequest], completions: Mapping[tuple[int, int], Completion]
) -> list[list[Completion]]:
    """The answers to each request: those of `completions`, by (request, sample), and the others as they were."""
    return [
        [completions.get((index, sample), answer) for sample, answer in enumerate(request.answers)]
        for index, request in enumerate(requests)
    ]


def capacity_of(requests: Sequence[AnswerRequest]) -> int:
    """Tokens of the longest prompt with its answer, where there is any to sample."""
    return max(len(request.prompt) + request.max_new_tokens for request in requests if request.num_answers)


def refuse_nan(completions: Iterable[Completion]) -> None:
    """Raises TrainingError if a log-prob is not finite."""
    if not all(math.isfinite(logprob) for completion in completions for logprob in completion.logprobs):
        raise TrainingError(
            "the policy must give finite probabilities, got NaN or infinity while sampling; "
            "lower training.lr, or set policy.dtype = float32, and resume from an earlier checkpoint"
        )

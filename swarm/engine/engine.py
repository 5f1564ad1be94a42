"""The contract between rollouts and the engines that sample answers, and what the engines share."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from swarm.engine.pruning import AnswerKey, PruneCall
from swarm.engine.sampling import Sampling, StopStrings
from swarm.errors import TrainingError
from swarm.policy.counter_noise import derive_seed, uniform
from swarm.policy.policy import TextPolicy

End = Literal["eos", "stop", "limit", "open", "pruned"]
"""Why an answer ended: EOS, a stop string, its token limit, or pruning. An "open" answer has not ended."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    token_ids: tuple[int, ...]
    """[T] exactly as sampled, at least one unless open; the last one is EOS if `finished`, or completes the stop string."""
    logprobs: tuple[float, ...]
    """[T] log μ: log-probability under the distribution it was drawn from; if greedy, under the plain policy."""
    policy_logprobs: tuple[float, ...]
    """[T] log-probability under the plain policy, at temperature 1 and unfiltered."""
    end: End

    @property
    def finished(self) -> bool:
        """Whether EOS was sampled, as records define it."""
        return self.end == "eos"


NOT_BEGUN = Completion((), (), (), end="open")


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A prompt and how many answers to sample for it."""

    prompt: Sequence[int]
    """Token ids."""
    num_answers: int
    max_new_tokens: int
    """Most tokens of each answer, counted from its first token."""
    begun: tuple[Completion, ...] = ()
    """For a ResumingEngine: the first answers as far as they got, ended ones included; the others start from nothing."""

    @property
    def answers(self) -> tuple[Completion, ...]:
        """All answers [num_answers] before sampling."""
        return self.begun + (NOT_BEGUN,) * (self.num_answers - len(self.begun))


class Turns(Protocol):
    """The environments of a call's answers: what continues them. An engine calls it from its own thread."""

    def ended(self, key: AnswerKey, completion: Completion) -> bool:
        """Report an answer as far as it got, replies included. Returns whether `replies` will have its key."""
        ...

    def replies(self, *, wait: bool) -> list[tuple[AnswerKey, Sequence[int]]]:
        """Return the answers whose environments have replied since, with the token ids that follow; none end the answer.

        With `wait` at least one is returned.
        """
        ...


class Engine(Protocol):
    """Samples answers from the policy's weights at the moment of the call."""

    def generate(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """Return the answers to each request, in the order of the requests.

        An answer also ends once its text contains a string of `stop`. Equal seed and weights give equal answers in any
        batching. Raises TrainingError where the policy gives no finite probabilities, MemoryBudgetError where the keys and
        values of a single answer do not fit.
        """
        ...

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Return log-probs [T] of a given answer at temperature 1, computed token by token as in `generate`."""
        ...

    def answer_bytes(self, num_tokens: int) -> int:
        """Memory of one answer that is being sampled, `num_tokens` long with its prompt."""
        ...

    @property
    def answers_wait(self) -> bool:
        """Whether answers wait where memory is short, so that only one of full length must fit at a time."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that sampling takes besides the answers."""
        ...


@runtime_checkable
class ResumingEngine(Engine, Protocol):
    """An engine that can stop in the middle of answers and continue them later, also with other weights."""

    def resume(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        enough: int,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """Sample as in `generate`, until `enough` requests have all their answers.

        Open answers are continued, ended ones returned as they are; earlier requests go first. Answers that are still open
        at the end have their tokens so far, each with the log-probs it was drawn at.
        """
        ...


@runtime_checkable
class PruningEngine(Engine, Protocol):
    """An engine that can drop answers in the middle and use their slots for others."""

    def generate_and_prune(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        pruning: PruneCall,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """Sample as in `generate`; answers that `pruning` drops end as "pruned" at that point."""
        ...


@runtime_checkable
class ConversingEngine(Engine, Protocol):
    """An engine in which answers that wait for their environments hold up no others."""

    def converse(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        turns: Turns,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """Sample as in `generate`, and continue each answer as `turns` says, while others are sampled.

        Token ids of replies are part of the answers, with log-probs of 0, and count against `max_new_tokens`.
        """
        ...


@dataclass(frozen=True, slots=True)
class AnswerSlot:
    """One answer of a request that is to be sampled or continued. An engine gives it a row of its batch."""

    prompt: int
    """Index of its request."""
    sample: int
    """Number of the answer among its siblings."""
    max_new_tokens: int
    begun: Completion = NOT_BEGUN
    """The part that was sampled before."""
    turn_start: int = 0
    """Index of the first token of the present turn. Stop strings before it count no more."""

    @property
    def start(self) -> tuple[int, int]:
        """Key of the tokens before the next one: (prompt, sample), or (prompt, -1) of siblings that have not begun, which share a
        computed prompt."""
        return (self.prompt, self.sample if self.begun.token_ids else -1)


class SamplingCall:
    """How one call of an engine draws tokens and ends answers. It holds no state of the answers."""

    def __init__(self, policy: TextPolicy, sampling: Sampling, seed: int, *, stop: Sequence[str]) -> None:
        self.sampling = sampling
        self.stop = StopStrings(policy.decode, stop)
        self.eos_token_ids = frozenset(policy.eos_token_ids)
        self._seed = seed

    def uniforms(self, slot: AnswerSlot) -> np.ndarray:
        """Return the uniform numbers [max_new_tokens] of one answer's tokens. They do not depend on the batch."""
        return uniform(slot.max_new_tokens, "sample", self._seed, slot.prompt, slot.sample)

    def end(self, token_ids: Sequence[int], max_new_tokens: int) -> End | None:
        """Return why an answer ends with its newest token, or None where it continues."""
        if token_ids[-1] in self.eos_token_ids:
            return "eos"
        if self.stop.are_in(token_ids):
            return "stop"
        return "limit" if len(token_ids) == max_new_tokens else None


def open_rows(requests: Sequence[AnswerRequest]) -> list[AnswerSlot]:
    """Return every answer that has not ended, in the order of the requests."""
    return [
        AnswerSlot(index, sample, request.max_new_tokens, begun=answer)
        for index, request in enumerate(requests)
        for sample, answer in enumerate(request.answers)
        if answer.end == "open"
    ]


def longest_first(requests: Sequence[AnswerRequest], rows: Sequence[AnswerSlot]) -> list[AnswerSlot]:
    """Sort rows by when to start them, siblings together: those that start last should end soon."""
    return sorted(rows, key=lambda row: (-row.max_new_tokens, -len(requests[row.prompt].prompt), row.prompt))


def grouped(
    requests: Sequence[AnswerRequest], completions: Mapping[tuple[int, int], Completion]
) -> list[list[Completion]]:
    """Return the answers to each request: those of `completions` by (request, sample), otherwise the begun ones."""
    return [
        [completions.get((index, sample), answer) for sample, answer in enumerate(request.answers)]
        for index, request in enumerate(requests)
    ]


def with_reply(answer: Completion, token_ids: Sequence[int]) -> Completion:
    """Return the answer, to be continued after the tokens of a reply."""
    none = (0.0,) * len(token_ids)
    return Completion(
        (*answer.token_ids, *token_ids), (*answer.logprobs, *none), (*answer.policy_logprobs, *none), end="open"
    )


def joined(before: Completion, after: Completion) -> Completion:
    """Return an answer that was sampled in two parts as one."""
    return Completion(
        before.token_ids + after.token_ids,
        before.logprobs + after.logprobs,
        before.policy_logprobs + after.policy_logprobs,
        after.end,
    )


def converse(
    engine: Engine,
    requests: Sequence[AnswerRequest],
    sampling: Sampling,
    turns: Turns,
    *,
    seed: int,
    stop: Sequence[str] = (),
) -> list[list[Completion]]:
    """Do as `ConversingEngine.converse` with any engine.

    With one that cannot continue answers, all of them take a turn, then all environments do: a slow one holds up the others.
    What came before is computed again in each turn, as a prompt.
    """
    if isinstance(engine, ConversingEngine):
        return engine.converse(requests, sampling, turns, seed=seed, stop=stop)
    open_answers = {(row.prompt, row.sample): row.begun for row in open_rows(requests)}
    ended: dict[AnswerKey, Completion] = {}
    for number in itertools.count():
        asked = [
            AnswerRequest(
                [*requests[key[0]].prompt, *begun.token_ids],
                1,
                requests[key[0]].max_new_tokens - len(begun.token_ids),
            )
            for key, begun in open_answers.items()
        ]
        turn_seed = derive_seed("turn", seed, number)
        answers = engine.generate(asked, sampling, seed=turn_seed, stop=stop)
        ended |= {key: joined(begun, one) for (key, begun), (one,) in zip(open_answers.items(), answers, strict=True)}
        waiting = [key for key in open_answers if turns.ended(key, ended[key])]
        replied: dict[AnswerKey, Sequence[int]] = {}
        while len(replied) < len(waiting):
            replied |= dict(turns.replies(wait=True))
        open_answers = {key: with_reply(ended[key], replied[key]) for key in waiting if replied[key]}
        if not open_answers:
            break
    return grouped(requests, ended)


def generate_in_chunks(
    requests: Sequence[AnswerRequest], size: int, sample: Callable[[Sequence[AnswerSlot]], Sequence[Completion]]
) -> list[list[Completion]]:
    """Sample every open answer, at most `size` at a time; returns the answers to each request.

    `sample` returns one answer for each row it gets. Raises TrainingError as `refuse_nan`.
    """
    rows = longest_first(requests, open_rows(requests))
    answers: dict[tuple[int, int], Completion] = {}
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        answers.update(zip([(row.prompt, row.sample) for row in chunk], sample(chunk), strict=True))
    refuse_nan(answers.values())
    return grouped(requests, answers)


def capacity_of(requests: Sequence[AnswerRequest]) -> int:
    """Tokens of the longest prompt with its answer, over requests that need answers."""
    return max(len(request.prompt) + request.max_new_tokens for request in requests if request.num_answers)


def refuse_nan(completions: Iterable[Completion]) -> None:
    """Raises TrainingError if a log-prob is not finite."""
    if not all(math.isfinite(logprob) for completion in completions for logprob in completion.logprobs):
        raise TrainingError(
            "the policy must give finite probabilities, got NaN or infinity while sampling; "
            "lower training.lr, or set policy.dtype = float32, and resume from an earlier checkpoint"
        )

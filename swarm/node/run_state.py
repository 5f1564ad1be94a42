"""The state that a learner writes beside the tensors of a checkpoint, and the check before it is restored.

The hashes in a checkpoint's manifest prove that its files belong together. They say nothing about the content, which may come
from somebody else or from another version.
"""

import itertools
import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from swarm.adapters.checkpoint import Checkpoint
from swarm.engine.engine import End
from swarm.errors import CheckpointError
from swarm.tasks.task_source import INDEX_SPAN
from swarm.training.policy_loss import BOUNDS
from swarm.types import Role

_TWISTER_WORDS = 624
_SHOWN_CHARS = 60


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _generator(state: list[Any]) -> list[Any]:
    """The result of `random.getstate` as a list. A state of zeros is refused, because it would only produce zeros."""
    version, words, gauss = state if len(state) == 3 else (None, [], None)
    is_state = version == 3 and isinstance(words, list) and len(words) == _TWISTER_WORDS + 1
    if not is_state or not all(type(word) is int and 0 <= word < 2**32 for word in words):
        raise ValueError("must be a state of Python's random numbers")
    if words[-1] > _TWISTER_WORDS or not any(words[1:-1]) or not (gauss is None or _is_number(gauss)):
        raise ValueError("must be a state of Python's random numbers that random numbers follow from")
    return state


def _numbers(row: dict[str, float | str | None]) -> dict[str, float | str | None]:
    if any(isinstance(value, str) and name != "train/skip_reason" for name, value in row.items()):
        raise ValueError("must be numbers beside the reason for a skipped step")
    return row


Count = Annotated[int, Field(ge=0, lt=2**31)]
Index = Annotated[int, Field(ge=0, lt=INDEX_SPAN)]
Reward = Annotated[float, Field(ge=0, le=1 + 1e-6)]
LogProb = Annotated[float, Field(le=1e-3)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Generator = Annotated[list[Any], AfterValidator(_generator)]
# JSON has lists for tuples
Segments = list[Annotated[tuple[Count, Count], Strict(False)]]
Ref = Annotated[tuple[str, str, Count, Index], Strict(False)]
Answer = Annotated[tuple[list[Count], list[LogProb], list[LogProb], End], Strict(False)]
EpisodeTurn = Annotated[tuple[str, str, Role, Count, Count], Strict(False)]
Belief = Annotated[tuple[Positive, Positive, Positive], Strict(False)]
Pair = Annotated[tuple[float, float], Strict(False)]
OwnStretch = Annotated[tuple[Annotated[int, Field(ge=1, lt=2**31)], float], Strict(False)]
Scalars = dict[str, float | str | None]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Lineage(_Part):
    policy: str
    tokenizer: str


class _Trainer(_Part):
    policy_version: Count
    policy_lineage: str
    num_skipped_steps: Count
    adaptive_clip_notch: Annotated[int, Field(ge=0, lt=len(BOUNDS))] = 0


class _CommonCursor(_Part):
    seed: Count | None
    next_index: Index
    due: Annotated[float, Field(ge=0, lt=1)]


class _Cursor(_Part):
    seed: Count
    next_index: dict[str, Index]
    consecutive_failures: dict[str, Count]
    rng: Generator
    beacon: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){0,32}$")] = ""
    common: _CommonCursor = _CommonCursor(seed=None, next_index=0, due=0.0)


class _OpenGroup(_Part):
    task: Ref
    answers: Annotated[list[Answer], Field(min_length=1)]
    segments: list[Segments]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for (ids, *logprobs, end), segments in zip(self.answers, self.segments, strict=True):
            if {len(ids)} != {sum(num for _, num in segments), *map(len, logprobs)} or not (ids or end == "open"):
                raise ValueError("every token of an answer must have its log-probs and a policy version")
        return self


class _Rollout(_Part):
    text: str
    token_ids: Annotated[list[Count], Field(min_length=1)]
    logprobs: list[LogProb]
    finished: bool
    reward: Reward
    signals: list[Annotated[tuple[str, float], Strict(False)]]
    segments: Segments
    turns: list[EpisodeTurn] = []

    @model_validator(mode="after")
    def _fits(self) -> Self:
        places = [place for *_, start, stop in self.turns for place in (start, stop)]
        if any(before >= after for before, after in itertools.pairwise([0, *places, len(self.token_ids)])):
            raise ValueError("the turns of an episode must follow one another")
        num_tokens = sum(num for _, num in self.segments)
        if len(self.token_ids) != len(self.logprobs) or num_tokens not in (0, len(self.token_ids)):
            raise ValueError("every token of an answer must have its log-prob, and a policy version or none")
        return self


class _Group(_Part):
    task: Ref
    prompt_digest: str
    author: str
    lineage: Annotated[tuple[str, str], Strict(False)]
    policy_version: Count
    rollouts: Annotated[list[_Rollout], Field(min_length=1)]


class _CommonTask(_Part):
    task: Ref
    since: Count
    is_own: bool
    rewards: dict[str, list[Reward]]


class _WaitingGroup(_Part):
    group: _Group
    is_own: bool
    since: Count


class _CommonGroups(_Part):
    """Groups on common tasks; none in checkpoints of older versions."""

    round: Count = 0
    tasks: list[_CommonTask] = []
    waiting: list[_WaitingGroup] = []


class _HeldOut(_Part):
    """The newest evaluation and the best one; `best_rewards` and `evaluations` were not in the first states that had it."""

    measured_on: str
    reward: float
    error: Annotated[float, Field(ge=0)]
    best: float
    best_round: Annotated[Count, Field(alias="best round")]
    best_rewards: Annotated[dict[str, list[Reward]], Field(alias="best rewards")] = {}
    evaluations: Annotated[Count, Field(ge=1)] = 1


class _Health(_Part):
    rows: list[Annotated[Scalars, AfterValidator(_numbers)]]
    quiet_rows: dict[str, Count]
    first: dict[str, list[float]] = {}
    held_out: _HeldOut | None = None


class _Reliability(_Part):
    bins: Annotated[list[Annotated[tuple[float, float, float], Strict(False)]], Field(min_length=10, max_length=10)]
    squares: float


class _Pruning(_Part):
    num_answers: Count
    reliability: _Reliability


class _Merging(_Part):
    outer_steps: Count
    inner_steps: Annotated[int, Field(ge=0, lt=2**53)]
    clip: dict[str, list[float]]
    reasons: dict[str, Count]
    last: Scalars
    strangers: dict[str, list[Pair]] = {}
    refusals: Annotated[dict[str, Annotated[int, Field(ge=1, le=8)]], Field(max_length=64)] = {}
    final_version: Count | Literal[-1] = -1


class _RunState(_Part):
    """The state of one run. Parts that earlier versions did not write have a default."""

    round: Count
    policy_version: Count
    lineage: _Lineage
    trainer: _Trainer
    cursor: _Cursor
    rng: Generator
    own_likelihoods: list[float | OwnStretch]
    totals: dict[str, Count]
    difficulty: dict[str, Belief] = {}
    open_groups: list[_OpenGroup] = []
    replay: list[_Group] = []
    common_groups: _CommonGroups = _CommonGroups()
    own_successes: dict[str, Annotated[list[Reward], Field(min_length=1)]] = {}
    health: _Health = _Health(rows=[], quiet_rows={})
    pruning: _Pruning | None = None
    merging: _Merging | None = None


def check_run_state(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Raise CheckpointError, with the file and the wrong entry, for a state that no learner of this policy writes."""
    file = checkpoint.path / "state.json"
    missing = {"adapter", "optimizer"} - checkpoint.tensors.keys()
    if missing:
        raise _refusal(checkpoint.path / f"{min(missing)}.safetensors", "must be part of a checkpoint", "none")
    try:
        state = _RunState.model_validate(checkpoint.state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:_SHOWN_CHARS]
        raise _refusal(file, f"{where or 'state'}: {first['msg']}", repr(first["input"])[:_SHOWN_CHARS]) from None
    ids = [answer[0] for group in state.open_groups for answer in group.answers]
    stored = [*state.replay, *(waiting.group for waiting in state.common_groups.waiting)]
    ids += [rollout.token_ids for group in stored for rollout in group.rollouts]
    largest = max(map(max, filter(None, ids)), default=0)
    if largest >= vocab_size:
        raise _refusal(file, f"token ids of answers must be below {vocab_size}", str(largest))


def _refusal(file: Any, rule: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {rule}, got {got}; remove this checkpoint to go on from the one before it, or start with --fresh"
    )

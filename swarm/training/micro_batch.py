"""Turns groups into the tensors of one forward and backward pass."""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swarm.config import TrainingSection
from swarm.policy.micro_batch_size import cut
from swarm.training.advantages import batch_advantages, turn_advantages
from swarm.training.experience import TrainingGroup
from swarm.training.losses import sequence_scales
from swarm.types import Rollout


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One answer that takes part in the loss."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...] | None
    """[T] log μ; None where it is unknown."""
    is_comparable: bool
    """Whether log μ may weigh the tokens; if not, it only measures how far the answer is from the own policy."""
    advantage: float
    by_turn: tuple[float, ...]
    """The advantages of its turns; empty where all tokens have `advantage`."""
    turn_stops: tuple[int, ...]
    """Index after the last token of the reply that ends each turn but the last."""
    is_trained: tuple[bool, ...]
    """[T] whether the policy wrote the token; hints, replies of environments, and a turn that was cut, are left out of the
    loss."""
    scale: float
    """Weight of the sum over its tokens in the loss of the whole batch."""
    is_replay: bool
    """Whether the answer was trained on before, in an earlier step."""
    segments: tuple[tuple[int, int], ...]
    """(policy version, number of tokens that it sampled) of an own answer; empty for those of others."""
    fresh_from: int
    """Index of the first token that the current policy version sampled; the number of tokens where it sampled none."""


class MicroBatch(NamedTuple):
    """Tensors of B sequences of at most T answer tokens."""

    sequences: list[tuple[tuple[int, ...], tuple[int, ...]]]  # [B] (prompt ids, answer ids)
    advantages: Tensor  # [B, 1], or [B, T] where turns have their own
    scales: Tensor  # [B, 1]
    behaviour: Tensor  # [B, T] log μ, 0 where there is none
    has_behaviour: Tensor  # [B, 1] 1 or 0
    is_comparable: Tensor  # [B, 1] 1 or 0; 0 without behaviour
    is_replay: Tensor  # [B, 1] 1 or 0
    fresh_from: Tensor = torch.tensor(torch.inf)  # [B, 1] see TrainingSequence; by default no token is fresh
    is_trained: Tensor = torch.tensor(1.0)  # [B, T] see TrainingSequence; by default all tokens are


def training_sequences(
    batch: Sequence[TrainingGroup],
    config: TrainingSection,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    *,
    advantages: Sequence[float | None] | None = None,
    by_turn: Sequence[tuple[float, ...]] | None = None,
    policy_version: int | None = None,
) -> list[TrainingSequence]:
    """All answers that take part, with advantage and scale.

    `advantages` and `by_turn`: those of a larger batch that `batch` is a part of; by default `batch` is the whole.
    `policy_version`: of the policy that trains, whose own tokens are fresh; by default none are.

    Left out are answers cut at the token limit, that is without EOS or a string of `stop`, and episodes that were cut (if
    `config.mask_truncated`; where turns have advantages of their own, only the turn that was cut is),
    longer than `max_new_tokens`, without tokens, or the median of their group; their rewards still count. Raises
    TrainingError for a group without reward differences.
    """
    answers = [(group, rollout) for group in batch for rollout in group.group.rollouts]
    values = batch_advantages(batch, config) if advantages is None else advantages
    turns = turn_advantages(batch, config, values) if by_turn is None else by_turn
    trained: list[tuple[bool, ...]] = []
    for (_, rollout), value, own in zip(answers, values, turns, strict=True):
        is_whole = not rollout.is_cut and (rollout.finished or any(string in rollout.text for string in stop))
        is_whole = is_whole or not config.mask_truncated
        takes_part = value is not None and (is_whole or own) and len(rollout.token_ids) <= max_new_tokens
        written = rollout.written if takes_part else ()
        if own and not is_whole and rollout.turns:
            written = written[: rollout.turns[-1].start] + (False,) * (len(written) - rollout.turns[-1].start)
        trained.append(written)
    weights = torch.tensor([group.weight for group, _ in answers])
    kind = (
        "grpo" if config.ratio == "sequence" else config.aggregation
    )  # GSPO: every answer has one term, whatever its length
    scales = sequence_scales(torch.tensor([sum(one) for one in trained]), kind, max_new_tokens, weights)
    return [
        TrainingSequence(
            prompt_ids=group.prompt_ids,
            answer_ids=rollout.token_ids,
            behaviour_logprobs=rollout.logprobs if group.known_logprobs or group.usable_logprobs else None,
            is_comparable=group.usable_logprobs,
            advantage=value,
            by_turn=own,
            turn_stops=tuple(turn.stop for turn in rollout.turns),
            is_trained=is_trained,
            scale=scale.item(),
            is_replay=group.is_replay,
            segments=(segments := _segments(group, rollout)),
            fresh_from=len(rollout.token_ids) - sum(num for version, num in segments if version == policy_version),
        )
        for (group, rollout), value, own, scale, is_trained in zip(answers, values, turns, scales, trained, strict=True)
        if any(is_trained) and value is not None
    ]


def micro_batches(
    sequences: Sequence[TrainingSequence],
    device: torch.device,
    *,
    max_sequences: int,
    max_tokens: int,
    max_separate_tokens: int | None = None,
) -> Iterator[MicroBatch]:
    """Cut `sequences` into tensors that fit into memory (`swarm.policy.micro_batch_size.cut`)."""
    pairs = [(sequence.prompt_ids, sequence.answer_ids) for sequence in sequences]
    for part in cut(pairs, max_sequences=max_sequences, max_tokens=max_tokens, max_separate_tokens=max_separate_tokens):
        yield _collate([sequences[index] for index in part], device)


def _segments(group: TrainingGroup, rollout: Rollout) -> tuple[tuple[int, int], ...]:
    """(policy version, number of tokens) of an own answer. Versions of other nodes are not comparable with own ones."""
    if not group.is_own:
        return ()
    return rollout.segments or ((group.group.policy_version, len(rollout.token_ids) - rollout.num_given),)


def _collate(part: Sequence[TrainingSequence], device: torch.device) -> MicroBatch:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    longest = max(len(sequence.answer_ids) for sequence in part)
    behaviour = [list(sequence.behaviour_logprobs or ()) for sequence in part]
    padded = [row + [0.0] * (longest - len(row)) for row in behaviour]
    trained = [[float(one) for one in sequence.is_trained] for sequence in part]
    advantages = column([sequence.advantage for sequence in part])
    if any(sequence.by_turn for sequence in part):
        rows = [_by_token(sequence, longest) for sequence in part]
        advantages = torch.tensor(rows, dtype=torch.float32, device=device)

    return MicroBatch(
        sequences=[(sequence.prompt_ids, sequence.answer_ids) for sequence in part],
        advantages=advantages,
        scales=column([sequence.scale for sequence in part]),
        behaviour=torch.tensor(padded, dtype=torch.float32, device=device),
        has_behaviour=column([float(sequence.behaviour_logprobs is not None) for sequence in part]),
        is_comparable=column([float(sequence.is_comparable) for sequence in part]),
        is_replay=column([float(sequence.is_replay) for sequence in part]),
        fresh_from=column([float(sequence.fresh_from) for sequence in part]),
        is_trained=torch.tensor([row + [0.0] * (longest - len(row)) for row in trained], device=device),
    )


def _by_token(sequence: TrainingSequence, width: int) -> list[float]:
    """The advantage of each token, filled up to `width`."""
    stops = [*sequence.turn_stops, width]
    values = sequence.by_turn or (sequence.advantage,) * len(stops)
    return [value for start, stop, value in zip([0, *stops], stops, values, strict=False) for _ in range(stop - start)]

"""How many policy versions ago the own tokens of a step were sampled."""

from collections.abc import Sequence
from typing import NamedTuple

from swarm.training.micro_batch import TrainingSequence


class Staleness(NamedTuple):
    """In policy versions; None where a step has no own tokens."""

    mean: float | None
    max: int | None


def token_staleness(sequences: Sequence[TrainingSequence], policy_version: int) -> Staleness:
    """Mean and maximum over the own tokens that take part, at the policy version before the step.

    Exact per token, also in answers that several versions sampled. Others count their own versions, not ours.
    """
    segments = [segment for sequence in sequences for segment in sequence.segments]
    if not segments:
        return Staleness(None, None)
    ages = [(policy_version - version, num_tokens) for version, num_tokens in segments]
    num_tokens = sum(num for _, num in ages)
    return Staleness(sum(age * num for age, num in ages) / num_tokens, max(age for age, _ in ages))

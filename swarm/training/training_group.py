"""A rollout group made ready for the trainer."""

from dataclasses import dataclass

from swarm.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """One group as the trainer takes it."""

    prompt_ids: tuple[int, ...]
    """The prompt as our policy encodes it."""
    group: RolloutGroup
    """Token ids are valid for our tokenizer; a rollout without token ids is left out of the loss."""
    usable_logprobs: bool
    """Whether `logprobs` belong to the token ids and may correct for the policy that sampled them."""
    is_own: bool
    """Whether this node sampled it."""
    known_logprobs: bool = False
    """Whether `logprobs` belong to the token ids, of whatever policy; those of another lineage only tell its distance."""
    signal_weights: tuple[tuple[str, float], ...] = ()
    """(name, weight) of the task's reward signals; empty where its reward is one number."""
    success_level: float = 0.0
    """Answers with a lower reward get no positive advantage; 0 for own groups. See `pool.success_levels`."""
    weight: float = 1.0
    """In (0, 1]: as how many answers each of its answers counts. Below 1 for a group of others that is larger than own ones."""
    is_replay: bool = False
    """Whether it is an own group of an earlier round that is trained on once more."""

"""A group whose answers are not all complete. Its token ids are kept, and a later round continues them (APRIL, 2509.18521).

Its state is part of the checkpoint. Nothing of it is ever encoded from text again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from swarm.engine.engine import NOT_BEGUN, Completion
from swarm.types import Task, TaskRef

Segment = tuple[int, int]
"""(policy version, number of tokens that it sampled)."""


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """The answers to one task, some of which may be open."""

    task: Task
    answers: tuple[Completion, ...]
    """[G]"""
    segments: tuple[tuple[Segment, ...], ...]
    """[G] the policy versions that sampled each answer, in order."""

    @classmethod
    def of(cls, task: Task, size: int) -> Self:
        """A group of `size` answers, none of which has begun."""
        return cls(task, (NOT_BEGUN,) * size, ((),) * size)

    @property
    def is_complete(self) -> bool:
        return all(answer.end != "open" for answer in self.answers)

    def continued(self, answers: Sequence[Completion], policy_version: int) -> Self:
        """The group with the answers as they are now; `policy_version` sampled their new tokens."""
        segments: list[tuple[Segment, ...]] = []
        for before, now, known in zip(self.answers, answers, self.segments, strict=True):
            num_new = len(now.token_ids) - len(before.token_ids)
            segments.append((*known, (policy_version, num_new)) if num_new else known)
        return replace(self, answers=tuple(answers), segments=tuple(segments))

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a complete group."""
        return min(version for segments in self.segments for version, _ in segments)

    def num_tokens_before(self, policy_version: int) -> int:
        """Number of tokens that earlier versions sampled."""
        return sum(num for segments in self.segments for version, num in segments if version < policy_version)

    def state(self) -> dict[str, Any]:
        """The whole group, for JSON."""
        ref = self.task.ref
        return {
            "task": [ref.source, ref.config_digest, ref.seed, ref.index],
            "answers": [[list(a.token_ids), list(a.logprobs), list(a.policy_logprobs), a.end] for a in self.answers],
            "segments": [[list(segment) for segment in segments] for segments in self.segments],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], rebuild: Callable[[TaskRef], Task]) -> Self:
        """The group of a `state`. Raises what `rebuild` raises where its task no longer exists."""
        source, digest, seed, index = state["task"]
        return cls(
            task=rebuild(TaskRef(source, digest, seed, index)),
            answers=tuple(Completion(tuple(t), tuple(d), tuple(p), end) for t, d, p, end in state["answers"]),
            segments=tuple(tuple((v, n) for v, n in segments) for segments in state["segments"]),
        )

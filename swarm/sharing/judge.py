"""Recomputes what a peer claims: the task from its reference, the reward from the answer's text."""

from swarm.records.rejection import InvalidRecord, Rejection
from swarm.tasks.task_mixture import TaskMixture, score
from swarm.tasks.task_source import FIRST_TRAINING_SEED, TaskFailure, UnknownTask, prompt_digest
from swarm.types import RolloutGroup, Task, TaskRef


class MixtureJudge:
    """The TaskJudge of admission, over the node's own task sources."""

    def __init__(self, mixture: TaskMixture) -> None:
        self._mixture = mixture

    def check_known(self, ref: TaskRef) -> None:
        source = self._mixture.sources.get(ref.source)
        if source is None or source.config_digest != ref.config_digest:
            raise InvalidRecord(Rejection.UNKNOWN_TASK, f"{ref.source[:40]!r}")
        if ref.seed < FIRST_TRAINING_SEED:
            raise InvalidRecord(Rejection.HELD_OUT_TASK, f"stream {ref.seed}")

    def rewards(self, group: RolloutGroup) -> tuple[float, ...]:
        task = self._rebuild(group.task)
        if prompt_digest(task.prompt) != group.prompt_digest:
            raise InvalidRecord(Rejection.TASK_MISMATCH, group.task.source)
        try:
            return tuple(score(task, rollout.text) for rollout in group.rollouts)
        except TaskFailure as failure:
            raise InvalidRecord(Rejection.TASK_FAILED, str(failure)) from None

    def _rebuild(self, ref: TaskRef) -> Task:
        self.check_known(ref)
        try:
            return self._mixture.rebuild(ref)
        except UnknownTask:
            raise InvalidRecord(Rejection.UNKNOWN_TASK, ref.source) from None
        except TaskFailure as failure:
            raise InvalidRecord(Rejection.TASK_FAILED, str(failure)) from None

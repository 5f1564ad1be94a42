"""Recomputes what a peer claims: the task from its reference, and the reward from the answer's text.

`VerificationBudget` bounds the time that checking takes, per author and for all strangers together. Most verifiers take
microseconds, but one that runs code takes as long as a stranger likes, up to its limit, for every answer. Names cost nothing, so
strangers share one budget besides their own; when other strangers have used it up, a stranger can only wait.
"""

import time
from collections.abc import Callable

from swarm.limits.token_bucket import PeerBuckets, TokenBucket
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.tasks.environments.episodes import scored
from swarm.tasks.sandboxed_verifier import Overrun, SandboxedVerifier
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import FIRST_TRAINING_SEED, ForgedEpisode, TaskFailure, UnknownTask, prompt_digest
from swarm.types import Rollout, RolloutGroup, Task, TaskRef

BURST_S = 30.0
"""Seconds that one author may take at once: enough for hundreds of honest code answers."""
PER_S = 0.25
"""Seconds per second that one author may take over time."""
STRANGERS_BURST_S = 60.0
STRANGERS_PER_S = 0.5
"""The part of one processor for all authors whose probation is not over."""
_MAX_AUTHORS = 1024


class VerificationBudget:
    """Token buckets of seconds: one per author, for the last 1024 authors, and one for all strangers. It runs on one thread."""

    def __init__(self, clock: Callable[[], float], is_known: Callable[[str], bool] = lambda author: False) -> None:
        """`clock`: seconds of a monotonic clock. `is_known`: whether an author's probation is over."""
        self._clock = clock
        self._is_known = is_known
        self._authors = PeerBuckets(PER_S, BURST_S, _MAX_AUTHORS)
        self._strangers = TokenBucket(STRANGERS_PER_S, STRANGERS_BURST_S, clock())

    def check(self, author: str) -> None:
        """Raises InvalidRecord: TOO_SLOW while the author is over its budget, STRANGERS_BUSY while all strangers are."""
        now = self._clock()
        wait_s = self._authors.wait_s(author, now)
        if wait_s > 0:
            raise InvalidRecord(
                Rejection.TOO_SLOW, f"checking its answers took too long; the next body is accepted in {wait_s:.0f} s"
            )
        wait_s = 0.0 if self._is_known(author) else self._strangers.wait_s(now)
        if wait_s > 0:
            raise InvalidRecord(Rejection.STRANGERS_BUSY, f"again in {wait_s:.0f} s")

    def spend(self, author: str, duration_s: float) -> None:
        now = self._clock()
        self._authors.of(author, now).take(duration_s, now)
        if not self._is_known(author):
            self._strangers.take(duration_s, now)


class RewardVerifier:
    """The `TaskVerifier` of admission, which uses the node's own task sources."""

    def __init__(
        self,
        mixture: TaskMixture,
        clock: Callable[[], float] = time.monotonic,
        is_known: Callable[[str], bool] = lambda author: False,
        *,
        sandboxed: SandboxedVerifier | None,
    ) -> None:
        """`clock`: seconds of a monotonic clock, which times the verifiers. `is_known`: whether an author's probation is over.

        `sandboxed`: scores the sources that it holds, which are all whose verifiers have no bounds of their own. None is for
        experiments whose authors are all in this process: all answers are then scored on the calling thread.
        """
        self._sandboxed = sandboxed
        self._mixture = mixture
        self._clock = clock
        self._budget = VerificationBudget(clock, is_known)

    def check_known(self, ref: TaskRef) -> None:
        source = self._mixture.sources.get(ref.source)
        if source is None or source.config_digest != ref.config_digest:
            raise InvalidRecord(Rejection.UNKNOWN_TASK, f"{ref.source[:40]!r}")
        if ref.seed < FIRST_TRAINING_SEED:
            raise InvalidRecord(Rejection.HELD_OUT_TASK, f"stream {ref.seed}")

    def rewards(self, group: RolloutGroup) -> tuple[float, ...]:
        self.check_known(group.task)
        if self._mixture.holds_out(
            group.task.source, group.prompt_digest
        ):  # which must be that of its prompt, see below
            raise InvalidRecord(Rejection.HELD_OUT_TASK, f"a prompt of {group.task.source}")
        if self._sandboxed is not None and self._sandboxed.holds(group.task.source):
            return self._verify_sandboxed(self._sandboxed, group)
        task = self._rebuild(group.task)
        if prompt_digest(task.prompt) != group.prompt_digest:
            raise InvalidRecord(Rejection.TASK_MISMATCH, group.task.source)
        if task.has_judge:  # in a silo only, whose members believe each other
            return tuple(rollout.reward for rollout in group.rollouts)
        try:
            return tuple(self._score(task, rollout, group.author) for rollout in group.rollouts)
        except ForgedEpisode as error:
            raise InvalidRecord(Rejection.FORGED_EPISODE, str(error)) from None
        except TaskFailure as failure:
            raise InvalidRecord(Rejection.TASK_FAILED, str(failure)) from None

    def _verify_sandboxed(self, sandboxed: SandboxedVerifier, group: RolloutGroup) -> tuple[float, ...]:
        self._budget.check(group.author)
        with sandboxed.reserved(group.task.source):  # authors do not pay for waiting for each other, or for a start
            self._budget.check(group.author)  # the wait may have been for its own answers
            started_at = self._clock()
            try:
                digest, rewards = sandboxed.rewards_of(group.task, group.rollouts)
            except Overrun as error:
                raise InvalidRecord(Rejection.TOO_SLOW, str(error)) from None
            except ForgedEpisode as error:
                raise InvalidRecord(Rejection.FORGED_EPISODE, str(error)) from None
            except UnknownTask:
                raise InvalidRecord(Rejection.UNKNOWN_TASK, group.task.source) from None
            except TaskFailure as failure:
                raise InvalidRecord(Rejection.TASK_FAILED, str(failure)) from None
            finally:
                self._budget.spend(group.author, self._clock() - started_at)
        if digest != group.prompt_digest:
            raise InvalidRecord(Rejection.TASK_MISMATCH, group.task.source)
        return rewards

    def _score(self, task: Task, rollout: Rollout, author: str) -> float:
        paid_until = self._clock()

        def pay() -> None:
            nonlocal paid_until
            now = self._clock()
            self._budget.spend(author, now - paid_until)
            paid_until = now

        def check() -> None:
            pay()
            self._budget.check(author)

        self._budget.check(author)
        try:
            return scored(task, rollout, check).reward
        finally:
            pay()

    def _rebuild(self, ref: TaskRef) -> Task:
        try:
            return self._mixture.rebuild(ref)
        except UnknownTask:
            raise InvalidRecord(Rejection.UNKNOWN_TASK, ref.source) from None
        except TaskFailure as failure:
            raise InvalidRecord(Rejection.TASK_FAILED, str(failure)) from None

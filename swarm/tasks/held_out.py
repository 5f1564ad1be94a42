"""Which prompts nobody trains on, so that held-out figures are of prompts that were never seen.

    endless source   prompts whose digest lies in the first `tasks.held_out_share` of the hash space ─┐
    finite source    prompts of its held-out rows, wherever else they occur ──────────────────────────┴▶ `HeldOut.holds`

Streams of tasks never overlap, but prompts do: of a source with few different prompts, every stream draws all of them. All
nodes with the same tasks hold out the same prompts: none draws them for training, and none admits a record about them. A source
with a single prompt, such as a game whose secret is in its environment, is trained on and evaluated with that.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from swarm.tasks.task_source import EVALUATION_SEED, INDEX_SPAN, TaskFailure, TaskSource, prompt_digest
from swarm.types import Task

logger = logging.getLogger(__name__)

_DIGESTS = 16**16
"""Number of values of `prompt_digest`."""
_MAX_ROWS = 4096
"""Held-out rows of a finite source that are compared with training ones; evaluation begins with them."""
_NUM_COMPARED = 16
"""Tasks whose prompts are compared to find out whether a source has only one."""
_PATIENCE = 16
"""A search for held-out prompts ends once it has drawn this many times as many tasks as a new one takes on average,"""
_MOST_DRAWS = 4
"""and after so many times as many tasks as all of them take on average, unless these are fewer than the patience."""


def repeated(tasks: Sequence[Task], per_source: int) -> list[Task]:
    """The tasks of each source as often as gives at most `per_source`: of few tasks, several answers each say more than one."""
    numbers = Counter(task.ref.source for task in tasks)
    return [task for task in tasks for _ in range(max(1, per_source // numbers[task.ref.source]))]


class HeldOut:
    """The held-out prompts of one source. It is safe from any thread: what two threads find is the same."""

    def __init__(self, source: TaskSource, share: float, on_failure: Callable[[TaskFailure], None]) -> None:
        """`share`: part of the hash space of prompts, in [0, 1/4]; 0 holds out streams and rows, whatever their prompts are.

        `on_failure` is told of evaluation tasks that cannot be built.
        """
        self._source = source
        self._share = share
        self._on_failure = on_failure
        self._found: dict[int, tuple[Task, ...]] = {}

    def holds(self, digest: str) -> bool:
        """Whether nobody may train on the prompt with this `prompt_digest`."""
        if not self._share or (not self._is_finite and not self._is_in_share(digest)):
            return False
        return not self._has_one_prompt and (not self._is_finite or digest in self._row_digests)

    def tasks(self, count: int) -> tuple[Task, ...]:
        """At most `count` tasks of the evaluation stream with different held-out prompts; the same on every node.

        Where all tasks have one prompt, they are the first of the stream: they differ in what happens later, or not at all.
        """
        if count not in self._found:
            if self._share and count and self._has_one_prompt:
                logger.info(
                    "source %s has one prompt for all tasks, so evaluation uses it, too; tasks differ in what follows",
                    self._source.name,
                )
            self._found[count] = tuple(self._search(count) if self._is_searched else self._first(count))
        return self._found[count]

    @property
    def _is_finite(self) -> bool:
        return self._source.num_held_out < INDEX_SPAN

    @property
    def _is_searched(self) -> bool:
        return self._share > 0 and not self._is_finite and not self._has_one_prompt

    def _is_in_share(self, digest: str) -> bool:
        return int(digest, 16) < self._share * _DIGESTS

    @cached_property
    def _row_digests(self) -> frozenset[str]:
        return frozenset(prompt_digest(task.prompt) for task in self._first(_MAX_ROWS))

    @cached_property
    def _has_one_prompt(self) -> bool:
        return len({prompt_digest(task.prompt) for task in self._first(_NUM_COMPARED)}) == 1

    def _first(self, count: int) -> Iterator[Task]:
        for index in range(min(count, self._source.num_held_out)):
            try:
                yield self._source.task(EVALUATION_SEED, index)
            except TaskFailure as failure:
                self._on_failure(failure)

    def _search(self, count: int) -> Iterator[Task]:
        """Tasks with different prompts in the share, until there are enough, or no new one has turned up for a while."""
        patience = int(_PATIENCE / self._share)
        seen = Counter[str]()
        num_found = num_idle = 0
        for task in self._first(max(patience, int(count * _MOST_DRAWS / self._share))):
            digest = prompt_digest(task.prompt)
            seen[digest] += 1
            is_new = seen[digest] == 1 and self._is_in_share(digest)
            num_idle = 0 if is_new else num_idle + 1
            if is_new:
                num_found += 1
                yield task
            if num_found == count or num_idle == patience:
                break
        if num_found < count:
            logger.warning(
                "source %s has %d different prompts in %d tasks, and %s of them held out (tasks.held_out_share): it is %s",
                self._source.name, len(seen), seen.total(), num_found or "none",
                f"evaluated with {num_found} tasks" if num_found else "not evaluated",
            )  # fmt: skip

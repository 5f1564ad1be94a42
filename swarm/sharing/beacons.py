"""Tasks bound to a moment: a node's next tasks follow from its name and from a record of another node that it just received.

    headers received ─ note ─▶ one is the beacon for EPOCH_S ─▶ the cursor goes on at H(own name, beacon, source)
    groups to publish ─ of ─▶ the beacon that they were drawn by, which goes into their header
    a header of another ─ judge ─▶ holds, does not, or says nothing

A record holds sampled answers, so nobody knows it before it exists: tasks that follow from it cannot have been solved ahead
of it, nor picked. That is soft evidence and no proof: whoever makes the record that others use as their beacon can try many.
Therefore only records count whose author this node knows, as long as it knows anybody.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from swarm.limits.bounded_maps import FairMap
from swarm.records.context import SwarmContext
from swarm.tasks.task_cursor import beacon_index
from swarm.tasks.task_source import INDEX_SPAN
from swarm.types import BEACON_BYTES, Header, TaskRef

EPOCH_S = 300.0
"""How long a node draws tasks by one beacon."""
MAX_AGE_S = 1800.0
"""Largest age of a beacon when a header names it: several epochs, for groups that waited."""
_AGE_MARGIN_S = 60.0
"""A reader may have received the beacon before this node did."""
MAX_AHEAD = 4096
"""Tasks of one source that a node may draw by one beacon: an hour of rounds with dozens of tasks."""
_MAX_RECEIVED = 8192
_MAX_USED = 16


class Evidence(Enum):
    """What a header's beacon says about its tasks."""

    HOLDS = "holds"
    MISSING = "missing"
    """The header names no beacon."""
    BROKEN = "broken"
    """Most tasks do not follow from the beacon, or it was too old."""
    UNKNOWN = "unknown"
    """This node has not received the beacon, or all tasks are common ones, which follow from no beacon."""


@dataclass(frozen=True, slots=True)
class _Received:
    author: str
    at: float


class Beacons:
    """The beacons that one node knows. It runs on the node's loop; `current` may be read from any thread."""

    def __init__(
        self,
        context: SwarmContext,
        *,
        is_known: Callable[[str], bool],
        has_known: Callable[[], bool],
        is_common: Callable[[TaskRef], bool] = lambda task: False,
    ) -> None:
        """`is_known`: whether an author's probation is over. `has_known`: whether anybody's is.

        `is_common`: whether a task is one that all nodes draw. Such tasks count neither for nor against an author.
        """
        self._is_common = is_common
        self._own_peer_id = context.peer_id
        self._clock = context.clock
        self._is_known = is_known
        self._has_known = has_known
        self._received: FairMap[bytes, _Received] = FairMap(_MAX_RECEIVED, is_known=is_known)
        self._used: deque[tuple[bytes, float]] = deque(maxlen=_MAX_USED)
        """(beacon, when it was received), the latest first."""
        self._current = b""
        self._since = -math.inf

    def note(self, header: Header) -> None:
        """Note a header that was admitted, or published by this node."""
        beacon, now = beacon_of(header), self._clock()
        if beacon in self._received:  # if it counted as new again, readers would find it too old
            return
        self._received.add(header.author, beacon, _Received(header.author, now))
        is_over = now - self._since > EPOCH_S
        if is_over and header.author != self._own_peer_id and self._counts(header.author):
            self._current, self._since = beacon, now
            self._used.appendleft((beacon, now))

    def current(self) -> bytes:
        """The beacon to draw tasks by; empty before a header was received."""
        return self._current

    def of(self, tasks: Sequence[TaskRef]) -> bytes:
        """The beacon that most of these own tasks were drawn by.

        It is empty where there is none, or where it would be too old to readers: a round may take longer than that, and a slow
        node must not look like one that solves tasks in advance.
        """
        oldest = self._clock() - MAX_AGE_S + _AGE_MARGIN_S
        young = [beacon for beacon, since in self._used if since > oldest]
        bound = self._without_common(tasks)
        return next((beacon for beacon in young if follow(self._own_peer_id, beacon, bound)), b"")

    def judge(self, header: Header) -> Evidence:
        """Check whether the tasks of another node's header follow from its beacon."""
        tasks = self._without_common([group.task for group in header.groups])
        if not tasks:
            return Evidence.UNKNOWN
        if not header.beacon:
            return Evidence.MISSING
        received = self._received.get(header.beacon)
        if received is None or received.author == header.author or not self._counts(received.author):
            return Evidence.UNKNOWN
        is_recent = header.created_at - received.at <= MAX_AGE_S
        return Evidence.HOLDS if is_recent and follow(header.author, header.beacon, tasks) else Evidence.BROKEN

    def _without_common(self, tasks: Sequence[TaskRef]) -> list[TaskRef]:
        return [task for task in tasks if not self._is_common(task)]

    def _counts(self, author: str) -> bool:
        return author == self._own_peer_id or self._is_known(author) or not self._has_known()


def beacon_of(header: Header) -> bytes:
    """The beacon that a header stands for."""
    return header.body_hash[:BEACON_BYTES]


def follow(author: str, beacon: bytes, tasks: Sequence[TaskRef]) -> bool:
    """Whether most of the tasks follow from the beacon; a few may have waited for several rounds."""
    starts = {task.source: beacon_index(author, beacon, task.source) for task in tasks}
    near = sum((task.index - starts[task.source]) % INDEX_SPAN < MAX_AHEAD for task in tasks)
    return 2 * near > len(tasks)

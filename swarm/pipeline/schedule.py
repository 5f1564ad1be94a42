"""Which micro-batch a stage works on next: one forward, one backward (1F1B), as a list made before the batch begins.

    stage 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3        at most s − i micro-batches are in flight at stage i of s,
    stage 1      F0 F1 .. B0 F2 B1 F3 B2 .. B3           where GPipe keeps all of them
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3

A micro-batch visits the stages by its *route*; the i-th station of a route lets s − i micro-batches in. The list is made by
playing the batch through with that rule, backward before forward. It cannot lock up: of the micro-batches in
flight that wait to go forward, the one that is furthest finds its next station empty.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from swarm.errors import PipelineError

Route = tuple[int, ...]
"""Stages in the order a micro-batch visits them."""


class Action(NamedTuple):
    """One thing that a stage does."""

    kind: Literal["forward", "backward"]
    micro_batch: int


class Schedule(NamedTuple):
    """The plan of one batch."""

    routes: tuple[Route, ...]  # by micro-batch
    actions: tuple[tuple[Action, ...], ...]  # by stage, in order
    num_ticks: int
    """Length where every action takes one tick."""

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time that is idle where every action takes one tick."""
        busy = sum(len(actions) for actions in self.actions)
        return 1 - busy / (self.num_ticks * len(self.actions))


def straight_route(num_stages: int) -> Route:
    """First to last."""
    return tuple(range(num_stages))


def swapped_route(num_stages: int) -> Route:
    """The two edge stages changed places with their neighbours (CheckFree+, 2506.15461); needs four stages.

    With three, the middle one would be the twin of both.
    """
    if num_stages < 4:
        raise PipelineError(f"edge stages can swap in a crew of at least 4 stages, got {num_stages}; switch it off")
    return (1, 0, *range(2, num_stages - 2), num_stages - 1, num_stages - 2)


def one_forward_one_backward(num_stages: int, num_micro_batches: int, *, swap_edges: bool = False) -> Schedule:
    """The plan for one batch; with `swap_edges` every other micro-batch takes the swapped route.

    Raises PipelineError for an empty batch or crew.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise PipelineError(
            f"a batch must have a stage and a micro-batch, got {num_stages} and {num_micro_batches}; send more"
        )
    kinds = (straight_route(num_stages), swapped_route(num_stages) if swap_edges else straight_route(num_stages))
    return _played([kinds[micro_batch % 2] for micro_batch in range(num_micro_batches)], num_stages)


def ideal_bubble_fraction(num_stages: int, num_micro_batches: int) -> float:
    """(s − 1) / (m + s − 1): what 1F1B leaves idle where all actions take equally long."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


class _Play:
    """A batch played through in ticks."""

    def __init__(self, routes: Sequence[Route], num_stages: int) -> None:
        self.routes = routes
        self.num_stages = num_stages
        self.forth = [0] * len(routes)  # stations that a micro-batch has passed
        self.back = [0] * len(routes)  # and passed again on its way back
        self.held = [0] * num_stages  # micro-batches in flight at or behind each station

    def tick(self) -> list[Action | None]:
        """What each stage does next; what a tick makes is ready in the one after."""
        before = (list(self.forth), list(self.back))
        return [self._take(stage, *before) for stage in range(self.num_stages)]

    def _take(self, stage: int, forth: list[int], back: list[int]) -> Action | None:
        last = self.num_stages - 1
        for micro_batch, route in enumerate(self.routes):
            station = last - back[micro_batch]
            if forth[micro_batch] > last and station >= 0 and route[station] == stage:
                self.back[micro_batch] += 1
                self.held[station] -= 1
                return Action("backward", micro_batch)
        for micro_batch, route in enumerate(self.routes):
            station = forth[micro_batch]
            has_place = station <= last and self.held[station] < self.num_stages - station
            if has_place and route[station] == stage:
                self.forth[micro_batch] += 1
                self.held[station] += 1
                return Action("forward", micro_batch)
        return None


def _played(routes: Sequence[Route], num_stages: int) -> Schedule:
    play = _Play(routes, num_stages)
    actions: list[list[Action]] = [[] for _ in range(num_stages)]
    num_ticks = 0
    while min(play.back) < num_stages:
        for stage, action in enumerate(play.tick()):
            if action is not None:
                actions[stage].append(action)
        num_ticks += 1
    return Schedule(tuple(routes), tuple(tuple(one) for one in actions), num_ticks)

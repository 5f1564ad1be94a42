"""1F1B: every action once, in a possible order, with few micro-batches in flight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import PipelineError
from swarm.pipeline.driver.schedule import (
    Action,
    Schedule,
    one_forward_one_backward,
    straight_route,
    swapped_route,
)

STAGES, PARTS = st.integers(1, 7), st.integers(1, 20)


def spelt(schedule: Schedule) -> list[str]:
    return [" ".join(f"{a.kind[0].upper()}{a.micro_batch}" for a in actions) for actions in schedule.actions]


def most_in_flight(actions: tuple[Action, ...]) -> int:
    most = held = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most


def check_possible(schedule: Schedule) -> None:
    """Run all lists, each stage in its order and as far as its inputs are ready; all lists must end."""
    rest = [list(actions) for actions in schedule.actions]
    done: set[tuple[Action, int]] = set()
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, actions in enumerate(rest):
            while actions and needs(schedule, actions[0], stage) <= done:
                done.add((actions.pop(0), stage))
                is_moving = True
    assert not any(rest)


def needs(schedule: Schedule, action: Action, stage: int) -> set[tuple[Action, int]]:
    route = schedule.routes[action.micro_batch]
    station = route.index(stage)
    if action.kind == "forward":
        return {(action, route[station - 1])} if station else set()
    forward = (Action("forward", action.micro_batch), stage)
    return {forward} | ({(action, route[station + 1])} if station + 1 < len(route) else set())


def test_three_stages_and_four_micro_batches() -> None:
    assert spelt(one_forward_one_backward(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@given(STAGES, PARTS)
def test_straight_schedules_are_the_textbook_ones(num_stages: int, num_parts: int) -> None:
    """Warm up with s − i − 1 forwards, alternate, cool down."""
    schedule = one_forward_one_backward(num_stages, num_parts)
    for stage, actions in enumerate(schedule.actions):
        warm_up = min(num_stages - stage - 1, num_parts)
        kinds = ["forward"] * warm_up + ["forward", "backward"] * (num_parts - warm_up) + ["backward"] * warm_up
        assert [action.kind for action in actions] == kinds
        for kind in ("forward", "backward"):
            assert [a.micro_batch for a in actions if a.kind == kind] == list(range(num_parts))


@given(STAGES, PARTS, st.booleans())
def test_every_schedule_is_complete_possible_and_bounded(num_stages: int, num_parts: int, swap_edges: bool) -> None:
    swap_edges = swap_edges and num_stages >= 4
    schedule = one_forward_one_backward(num_stages, num_parts, swap_edges=swap_edges)
    everything = {Action(kind, part) for kind in ("forward", "backward") for part in range(num_parts)}
    for stage, actions in enumerate(schedule.actions):
        assert len(actions) == len(everything)
        assert set(actions) == everything
        earliest = min(route.index(stage) for route in schedule.routes)
        assert most_in_flight(actions) <= num_stages - earliest
    check_possible(schedule)


def test_every_other_micro_batch_swaps_its_edges() -> None:
    schedule = one_forward_one_backward(5, 3, swap_edges=True)
    assert schedule.routes == ((0, 1, 2, 3, 4), (1, 0, 2, 4, 3), (0, 1, 2, 3, 4))
    assert swapped_route(4) == (1, 0, 3, 2)
    assert straight_route(2) == (0, 1)


def test_what_cannot_be_scheduled_is_refused() -> None:
    with pytest.raises(PipelineError, match="at least 4 stages, got 3"):
        one_forward_one_backward(3, 2, swap_edges=True)
    with pytest.raises(PipelineError, match="a stage and a micro-batch, got 2 and 0"):
        one_forward_one_backward(2, 0)

"""The plan of a final merge, walked through with replicas that are vectors: row i is what place i has of whom."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.merging.final_merge import MAX_PLACES, Meeting, core_size, meetings_of, num_windows, parts_of

Failed = set[tuple[int, int, int]]
"""(window, giver, taker) of adapters that did not come through."""


def walked(num_places: int, failed: Failed) -> np.ndarray:
    """[places, places]: share of each start in what each place ends with."""
    states, weights = np.eye(num_places), [1] * num_places
    for window in range(num_windows(num_places)):
        before, heavy = states.copy(), list(weights)
        for place in range(num_places):
            for meeting in meetings_of(place, num_places):
                other = meeting.place
                if meeting.window != window:
                    continue
                if meeting.takes and (window, other, place) not in failed:
                    assert 1 <= heavy[other] <= meeting.max_weight
                    parts = parts_of(heavy[place], heavy[other])
                    states[place] = parts.own * before[place] + parts.other * before[other]
                    weights[place] = parts.weight
    return states


@pytest.mark.parametrize("num_places", [1, 2, 4, 8, 16, 32, MAX_PLACES])
def test_a_power_of_two_gives_everybody_the_exact_mean(num_places: int) -> None:
    np.testing.assert_allclose(walked(num_places, set()), np.full((num_places, num_places), 1 / num_places), atol=1e-12)


@given(st.integers(1, MAX_PLACES))
def test_with_passengers_everybody_has_something_of_all_and_no_less_than_half_of_the_mean(num_places: int) -> None:
    states = walked(num_places, set())
    assert (states > 0).all() and states.max() <= 0.5 + 1 / core_size(num_places)
    np.testing.assert_allclose(states.sum(axis=1), 1.0, atol=1e-12)


@given(st.integers(1, MAX_PLACES), st.integers(1, MAX_PLACES), st.floats(0, 1))
def test_no_claim_gets_more_than_half(own_weight: int, claimed: int, max_other: float) -> None:
    parts = parts_of(own_weight, claimed, max_other)
    assert 0 <= parts.other <= min(0.5, max_other) and parts.own == 1 - parts.other
    assert parts.other <= claimed / (own_weight + claimed)


def test_silent_until_the_last_window_is_worth_half_at_most() -> None:
    """Of 64 places those of five windows are silent, and the last one says that 32 replicas are in its adapter."""
    last = meetings_of(0, MAX_PLACES)[-1]
    assert last.max_weight == 32
    assert parts_of(1, last.max_weight).other == 0.5


@settings(max_examples=60, deadline=None)
@given(st.integers(2, MAX_PLACES), st.randoms(use_true_random=False), st.floats(0, 1))
def test_whatever_fails_everybody_has_a_convex_combination(num_places: int, rng, part: float) -> None:  # type: ignore[no-untyped-def]
    failed = {
        (meeting.window, place, meeting.place)
        for place in range(num_places)
        for meeting in meetings_of(place, num_places)
        if rng.random() < part
    }
    states = walked(num_places, failed)
    assert (states >= 0).all()
    np.testing.assert_allclose(states.sum(axis=1), 1.0, atol=1e-12)


@given(st.integers(2, MAX_PLACES), st.data())
def test_one_silent_place_costs_its_own_meetings_alone(num_places: int, data: st.DataObject) -> None:
    """In the core it also silences its passenger."""
    silent = data.draw(st.integers(0, core_size(num_places) - 1))
    failed = {
        pair
        for meeting in meetings_of(silent, num_places)
        for pair in ((meeting.window, silent, meeting.place), (meeting.window, meeting.place, silent))
    }
    states = walked(num_places, failed)
    assert states[silent][silent] == 1.0
    assert all(states[place][silent] == 0.0 for place in range(num_places) if place != silent)
    if num_places >= 4:  # every other place of the core still meets one at least
        assert all(states[place][place] <= 0.75 for place in range(core_size(num_places)) if place != silent)


@given(st.integers(1, MAX_PLACES))
def test_both_sides_of_a_meeting_agree_and_nobody_is_at_two_at_once(num_places: int) -> None:
    all_meetings = {place: meetings_of(place, num_places) for place in range(num_places)}
    for place, meetings in all_meetings.items():
        windows = [meeting.window for meeting in meetings]
        assert windows == sorted(set(windows)) and all(0 <= one < num_windows(num_places) for one in windows)
        for meeting in meetings:
            (mirrored,) = [one for one in all_meetings[meeting.place] if one.window == meeting.window]
            assert (mirrored.place, mirrored.gives, mirrored.takes) == (place, meeting.takes, meeting.gives)


def test_five_places_by_hand() -> None:
    assert meetings_of(0, 5) == [
        Meeting(0, 4, False, True, 1),
        Meeting(1, 1, True, True, 1),
        Meeting(2, 2, True, True, 2),
        Meeting(3, 4, True, False, 1),
    ]
    assert meetings_of(3, 5) == [Meeting(1, 2, True, True, 1), Meeting(2, 1, True, True, 3)]
    assert meetings_of(4, 5) == [Meeting(0, 0, True, False, 1), Meeting(3, 0, False, True, 5)]


@pytest.mark.parametrize(("place", "num_places"), [(2, 2), (-1, 2), (0, 0), (0, MAX_PLACES + 1)])
def test_place_that_there_is_not_is_a_mistake_of_the_caller(place: int, num_places: int) -> None:
    with pytest.raises(ValueError, match="place"):
        meetings_of(place, num_places)

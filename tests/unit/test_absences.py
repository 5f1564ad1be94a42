"""Authors that do not answer are left alone, longer each time."""

import random

import pytest

from swarm.limits.peer_backoff import BUSY_PAUSE_S, MAX_PAUSE_S, SILENCE_PAUSE_S, PeerBackoff
from tests.unit.experience_factory import Clock


def make(seed: int = 0) -> tuple[PeerBackoff, Clock]:
    clock = Clock()
    return PeerBackoff(clock, random.Random(seed)), clock


def pause_s(absences: PeerBackoff, clock: Clock, author: str = "a") -> float:
    """Seconds until `author` is asked again; the clock is there afterwards."""
    start = clock.now
    while author in absences:
        clock.now += 0.01
    return clock.now - start


def test_the_pause_doubles_with_each_failure_up_to_a_bound_and_is_spread() -> None:
    first = []
    for seed in range(8):
        absences, clock = make(seed)
        pauses = []
        for _ in range(8):
            absences.failed("a")
            absences.answered("b")
            pauses.append(pause_s(absences, clock))
        longest = [min(SILENCE_PAUSE_S * 2**number, MAX_PAUSE_S) for number in range(8)]
        assert all(most / 2 <= pause <= most + 0.1 for pause, most in zip(pauses, longest, strict=True))
        first.append(pauses[0])
    assert max(first) - min(first) > 2


def test_an_answer_forgives_all() -> None:
    absences, clock = make()
    for _ in range(4):
        absences.failed("a")
        absences.answered("b")
        pause_s(absences, clock)
    absences.answered("a")
    assert "a" not in absences
    absences.failed("a")
    assert pause_s(absences, clock) <= SILENCE_PAUSE_S + 0.1


def test_pauses_do_not_grow_while_nobody_answers() -> None:
    absences, clock = make()
    for _ in range(6):
        for author in "abc":
            absences.failed(author)
        assert max(pause_s(absences, clock, author) for author in "abc") <= SILENCE_PAUSE_S + 0.1
    absences.answered("c")
    absences.failed("a")
    absences.answered("c")
    pause_s(absences, clock)
    absences.failed("a")
    assert pause_s(absences, clock) > SILENCE_PAUSE_S  # the third in a row at half of 80 s, at least


def test_requests_that_were_under_way_together_count_as_one_failure() -> None:
    absences, clock = make()
    for _ in range(4):
        absences.failed("a")
    assert pause_s(absences, clock) <= SILENCE_PAUSE_S + 0.1


def test_a_busy_author_is_asked_again_soon_and_others_meanwhile() -> None:
    absences, clock = make()
    absences.failed("a", BUSY_PAUSE_S)
    assert "a" in absences and "b" not in absences
    assert pause_s(absences, clock) == pytest.approx(0.75, abs=0.26)


def pauses_s(num: int, seed: int = 0, longest_s: float = SILENCE_PAUSE_S) -> list[float]:
    """The spread pauses that `make(seed)` draws one after the other, out of at most `longest_s`."""
    rng = random.Random(seed)
    return [longest_s * rng.uniform(0.5, 1.0) for _ in range(num)]


def test_a_failure_at_the_moment_the_pause_ends_counts_and_the_next_one_only_after_somebody_answered() -> None:
    absences, clock = make()
    draws = pauses_s(3)
    absences.failed("a")
    absences.answered("b")
    clock.now += draws[0]
    assert "a" not in absences and absences.has_failed("a") and not absences.has_failed("b")
    absences.failed("a")
    clock.now += 2 * draws[1]
    assert "a" not in absences
    absences.failed("a")  # nobody has answered since
    clock.now += 2 * draws[2] - 1e-3
    assert "a" in absences
    clock.now += 2e-3
    assert "a" not in absences


def test_a_failure_is_remembered_for_the_longest_pause_after_its_own() -> None:
    absences, clock = make()
    absences.failed("a")
    clock.now += pauses_s(1)[0] + MAX_PAUSE_S
    absences.failed("b")
    assert len(absences) == 2
    clock.now += 1e-3
    absences.failed("c")
    assert not absences.has_failed("a")


def test_what_is_remembered_is_bounded_and_forgotten() -> None:
    absences, clock = make()
    for number in range(2_000):
        absences.failed(str(number))
    assert len(absences) == 1024 and "1999" in absences and "0" not in absences
    clock.now += 2 * MAX_PAUSE_S
    absences.failed("new")
    assert len(absences) == 1

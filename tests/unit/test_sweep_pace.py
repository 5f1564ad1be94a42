"""The index is read as seldom as gossip allows, and at once again when gossip fails."""

from swarm.sharing.index import WINDOW_S
from swarm.sharing.reader import GOSSIP_IS_ALIVE_FOR_S, MAX_LONELY_PAUSE_S, SweepPace
from tests.unit.experience_factory import Clock

POLL_S = 1.0


def make() -> tuple[SweepPace, Clock]:
    clock = Clock()
    return SweepPace(POLL_S, clock), clock


def intervals(pace: SweepPace, clock: Clock, news: list[int]) -> list[float]:
    """Seconds until the next sweep after each of the sweeps that find so much, while gossip goes on."""
    found = []
    for num_new in news:
        pace.heard()
        pace.swept(clock.now, num_new)
        found.append(pace.interval_s)
        for _ in range(int(pace.interval_s / 10)):
            clock.now += 10
            pace.heard()
    return found


def test_sweeps_become_rare_while_they_find_what_gossip_brought() -> None:
    pace, clock = make()
    assert intervals(pace, clock, [0] * 6) == [WINDOW_S * factor for factor in (1, 2, 4, 8, 8, 8)]


def test_news_in_the_index_shorten_them_at_once() -> None:
    pace, clock = make()
    assert intervals(pace, clock, [0, 0, 0, 2, 0, 0]) == [WINDOW_S * factor for factor in (1, 2, 4, 1, 1, 2)]


def test_silence_of_gossip_makes_a_sweep_due_at_once() -> None:
    pace, clock = make()
    intervals(pace, clock, [0] * 4)
    pace.heard()
    pace.swept(clock.now, 0)
    clock.now += GOSSIP_IS_ALIVE_FOR_S - 1
    assert not pace.is_due
    clock.now += 1
    assert pace.is_due
    pace.swept(clock.now, 0)
    clock.now += MAX_LONELY_PAUSE_S
    assert pace.is_due
    pace.heard()
    pace.swept(clock.now, 0)
    assert pace.interval_s == WINDOW_S  # what was learned before the silence counts no more


def test_without_gossip_every_poll_sweeps_or_a_few_seconds_pass_where_nothing_is_new() -> None:
    pace, clock = make()
    assert pace.is_due
    pauses = []
    for num_new in (3, 0, 0, 0, 0, 1):
        pace.swept(clock.now, num_new)
        pauses.append(pace.interval_s)
    assert pauses == [POLL_S, 2 * POLL_S, 4 * POLL_S, MAX_LONELY_PAUSE_S, MAX_LONELY_PAUSE_S, POLL_S]


def test_another_shard_is_swept_at_once() -> None:
    pace, clock = make()
    intervals(pace, clock, [0] * 4)
    pace.heard()
    pace.swept(clock.now, 0)
    pace.start_anew()
    assert pace.is_due and pace.interval_s == WINDOW_S

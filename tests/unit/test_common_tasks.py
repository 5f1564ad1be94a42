"""Common tasks: all nodes of a swarm draw the same ones, and their answers are compared with each other."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.admission.copies import MIN_SURPRISE_NATS, CopyWatch
from swarm.config import Config, SharingSection, TaskSourceSection, TasksSection, TrainingSection, parse
from swarm.errors import ConfigError, TrainingError
from swarm.manifest import manifest
from swarm.manifest.joining import compose
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.pool.success_levels import SuccessLevel
from swarm.records.codec import PROTOCOL_VERSION
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.rollouts.worker import RolloutBatch
from swarm.sharing.beacons import Evidence
from swarm.sharing.peer_tracker import PeerTracker
from swarm.tasks.task_cursor import TaskCursor
from swarm.tasks.task_mixture import (
    COMMON_EPOCH_S,
    MAX_COMMON_TASKS,
    CommonStreams,
    TaskMixture,
    common_seed,
    no_common_streams,
    owns_stream,
    training_seed,
)
from swarm.tasks.task_source import FIRST_TRAINING_SEED, MAX_SEED, TaskFailure
from swarm.training.advantages import batch_advantages
from swarm.training.common_groups import CommonGroups, spread
from swarm.training.experience import TrainingGroup
from swarm.types import Rollout, RolloutGroup, Task, TaskRef
from tests.unit.experience_factory import ALICE, MALLORY, NOW, READER, SWARM_ID, Clock, context_of, group, header_of
from tests.unit.test_batch_maker import batch_of, config_of
from tests.unit.test_sharing import peers

SUMS = TaskSourceSection(name="chain_sum", weight=3.0)
PRODUCTS = TaskSourceSection(name="products", parameters={"min_digits": 1, "max_digits": 1})
ON = SharingSection(common_tasks=0.25)
EPOCH = int(NOW // COMMON_EPOCH_S)
SEED = common_seed(SWARM_ID, EPOCH)
ALICE_ID, MALLORY_ID, READER_ID = ALICE.peer_id, MALLORY.peer_id, READER.peer_id


@pytest.fixture(scope="module")
def mixture() -> TaskMixture:
    return TaskMixture(TasksSection(sources=(SUMS, PRODUCTS), held_out_share=0.25))


def cursor_of(mixture: TaskMixture, peer_id: str, share: float = 0.25) -> TaskCursor:
    cursor = TaskCursor(mixture, training_seed(peer_id, 0), random.Random(peer_id), common_share=share)
    cursor.follow(peer_id, b"", SEED)
    return cursor


def refs(tasks: Sequence[Task], *, common: bool = True) -> list[TaskRef]:
    return [task.ref for task in tasks if (task.ref.seed == SEED) is common]


def streams(clock: Clock, swarm_id: str = SWARM_ID) -> CommonStreams:
    return CommonStreams.of(ON, swarm_id, clock)


def task_of(epoch: int = EPOCH, swarm_id: str = SWARM_ID, index: int = 0) -> TaskRef:
    return TaskRef("spelling", "cd" * 8, common_seed(swarm_id, epoch), index)


# which tasks


def test_two_nodes_draw_the_same_common_tasks_and_different_own_ones(mixture: TaskMixture) -> None:
    one, other = (cursor_of(mixture, peer_id).draw(80) for peer_id in (ALICE_ID, MALLORY_ID))
    assert refs(one) == refs(other) and len(refs(one)) == 20
    assert not {*refs(one, common=False)} & {*refs(other, common=False)}
    assert {ref.source for ref in refs(one)} == {"chain_sum", "products"}
    assert sum(ref.source == "chain_sum" for ref in refs(one)) > 10, "3 : 1"


def test_the_order_of_sources_and_their_difficulty_here_change_nothing(mixture: TaskMixture) -> None:
    swapped = TaskMixture(TasksSection(sources=(PRODUCTS, SUMS), held_out_share=0.25))
    first = cursor_of(mixture, ALICE_ID).draw(40, lambda weights, rng: "products")
    assert refs(first) == refs(cursor_of(swapped, MALLORY_ID).draw(40))


@pytest.mark.parametrize(
    ("share", "count", "numbers"),
    [(0.25, 8, [2, 2, 2, 2]), (0.25, 3, [0, 1, 1, 1]), (0.0, 8, [0] * 4), (1.0, 3, [3] * 4), (0.1, 1, [0] * 9 + [1])],
)
def test_the_share_is_exact_over_rounds(mixture: TaskMixture, share: float, count: int, numbers: list[int]) -> None:
    cursor = cursor_of(mixture, ALICE_ID, share)
    for _ in range(2):
        drawn = [cursor.draw(count) for _ in numbers]
        assert [len(refs(tasks)) for tasks in drawn] == numbers
        assert all(len(tasks) == count for tasks in drawn)


def test_without_a_swarm_tasks_are_drawn_as_before(mixture: TaskMixture) -> None:
    before = TaskCursor(mixture, training_seed(ALICE_ID, 0), random.Random(ALICE_ID))
    alone = TaskCursor(mixture, training_seed(ALICE_ID, 0), random.Random(ALICE_ID), common_share=0.5)
    alone.follow(ALICE_ID, b"", no_common_streams().current())
    assert [task.ref for task in alone.draw(30)] == [task.ref for task in before.draw(30)]
    unshared = SharingSection(common_tasks=0.5, publish=False, swarm_groups=0)
    assert CommonStreams.of(unshared, SWARM_ID, Clock()).current() is None


def test_held_out_prompts_are_skipped_and_nodes_stay_together(mixture: TaskMixture) -> None:
    drawn = cursor_of(mixture, ALICE_ID, 1.0).draw(60)
    assert not any(mixture.is_held_out(task) for task in drawn)
    indices = [task.ref.index for task in drawn]
    assert indices == sorted(set(indices)) and indices[-1] > 65, "some are left out"


def test_a_source_that_fails_here_does_not_move_the_tasks_of_others(
    mixture: TaskMixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [ref for ref in refs(cursor_of(mixture, ALICE_ID, 1.0).draw(60)) if ref.source == "chain_sum"]

    class Broken:
        def task(self, seed: int, index: int) -> Task:
            raise TaskFailure("products", "broken here")

    monkeypatch.setitem(mixture.sources, "products", Broken())
    cursor = cursor_of(mixture, MALLORY_ID, 1.0)
    drawn = refs(cursor.draw(60))
    assert drawn[: len(expected)] == expected and cursor.failures["products"] > 0


def test_a_resumed_cursor_goes_on_and_a_new_epoch_begins_anew(mixture: TaskMixture) -> None:
    cursor = cursor_of(mixture, ALICE_ID)
    cursor.draw(11)  # 2.75 common ones
    state = json.loads(json.dumps(cursor.state()))
    expected = [task.ref for task in cursor.draw(9)]
    again = TaskCursor(mixture, 1, random.Random(0), common_share=0.25)
    again.restore(state)
    again.follow(ALICE_ID, b"", SEED)
    assert [task.ref for task in again.draw(9)] == expected and len(refs(cursor.draw(4))) == 1
    later = common_seed(SWARM_ID, EPOCH + 1)
    again.follow(ALICE_ID, b"", later)
    first = min(task.ref.index for task in again.draw(20) if task.ref.seed == later)
    assert first < expected[-1].index and later != SEED


def test_a_cursor_of_an_older_version_is_restored(mixture: TaskMixture) -> None:
    state = TaskCursor(mixture, 77, random.Random(0)).state()
    del state["common"]
    cursor = cursor_of(mixture, ALICE_ID)
    cursor.restore(state)
    cursor.follow(ALICE_ID, b"", SEED)
    assert [task.ref.seed for task in cursor.draw(4)].count(SEED) == 1


def test_a_stream_that_is_used_up_gives_way_to_the_own_one(mixture: TaskMixture) -> None:
    cursor = cursor_of(mixture, ALICE_ID, 1.0)
    cursor._next_common = MAX_COMMON_TASKS - 1
    drawn = cursor.draw(5)
    assert len(drawn) == 5 and len(refs(drawn)) <= 1


# which tasks count as common


def test_common_tasks_are_those_of_this_swarm_in_the_last_two_hours() -> None:
    known = streams(Clock())
    assert known.current() == SEED and FIRST_TRAINING_SEED <= SEED <= MAX_SEED
    assert known.holds(task_of()) and known.holds(task_of(EPOCH - 23)) and known.holds(task_of(index=4095))
    assert not known.holds(task_of(EPOCH - 24)), "too long ago"
    assert not known.holds(task_of(EPOCH + 1)) and not known.holds(task_of(EPOCH + 1000)), "prepared for later"
    assert not known.holds(task_of(swarm_id="cd" * 16)), "of another swarm"
    assert not known.holds(task_of(index=MAX_COMMON_TASKS)), "chosen far behind"
    assert not CommonStreams.of(SharingSection(), SWARM_ID, Clock()).holds(task_of())


def test_a_clock_that_is_a_little_ahead_is_no_lie() -> None:
    clock = Clock((EPOCH + 1) * COMMON_EPOCH_S - 5)
    assert streams(clock).holds(task_of(EPOCH + 1))
    clock.now -= 10
    assert not streams(clock).holds(task_of(EPOCH + 1))


def on_common(*rewards: float, author: str = ALICE_ID, index: int = 0) -> RolloutGroup:
    rollouts = tuple(Rollout("a", (i, i + 1), (-0.5, -0.5), True, reward) for i, reward in enumerate(rewards))
    return replace(group(author=author), rollouts=rollouts, task=task_of(index=index))


def test_common_tasks_count_neither_for_nor_against_an_author() -> None:
    flat = on_common(1, 1)
    header = replace(header_of([flat], b"body"), created_at=NOW)
    on, off = (PeerTracker(config, context_of(), max_shown=9) for config in (ON, SharingSection()))
    for tracker in (on, off):
        tracker.admitted(header, [flat])
    assert on.beacons.judge(header) is Evidence.UNKNOWN and off.beacons.judge(header) is Evidence.MISSING
    honest = PeerTracker(ON, context_of())
    honest.reputation.admitted(ALICE_ID)
    assert on.reputation.trust(ALICE_ID) == honest.reputation.trust(ALICE_ID) > off.reputation.trust(ALICE_ID)
    on.admitted(header, [on_common(0, 0)])
    assert on.reputation.trust(ALICE_ID) < trust_after_two_bodies(ALICE_ID), "all wrong teaches nobody"


def trust_after_two_bodies(author: str) -> float:
    tracker = PeerTracker(ON, context_of())
    for _ in range(2):
        tracker.reputation.admitted(author)
    return tracker.reputation.trust(author)


def test_easy_common_tasks_do_not_make_up_for_groups_without_a_success() -> None:
    one, other = (PeerTracker(ON, context_of()) for _ in range(2))
    for _ in range(4):
        one.judged([on_common(0.5, 0)], lambda source: SuccessLevel(1.0, 0.0))
        other.judged([on_common(0.5, 0), on_common(1, 1)], lambda source: SuccessLevel(1.0, 0.0))
    assert one.reputation.trust(ALICE_ID) == other.reputation.trust(ALICE_ID)


def test_a_beacon_is_judged_by_the_other_tasks_alone() -> None:
    tracker = PeerTracker(ON, context_of())
    own = replace(on_common(1, 0), task=replace(task_of(), seed=training_seed(ALICE_ID, 0)))
    header = header_of([on_common(1, 0), on_common(1, 0, index=1), own], b"body")
    assert tracker.beacons.judge(header) is Evidence.MISSING


# copies

ANSWERS = ("right", "wrong", "wring", "wrung")


def answers(author: str, *texts: str, nats: float = 0.5, seed: int = SEED) -> RolloutGroup:
    made = group(*texts, author=author)
    rollouts = tuple(replace(one, logprobs=(-nats,) * len(one.token_ids)) for one in made.rollouts)
    return replace(made, task=replace(made.task, seed=seed), rollouts=rollouts)


def reason_of(watch: CopyWatch, taken: RolloutGroup) -> Rejection | None:
    try:
        watch.take([taken])
    except InvalidRecord as error:
        return error.reason
    return None


def watch_of(blamed: list[tuple[str, Rejection]]) -> CopyWatch:
    common = streams(Clock())
    return CopyWatch(owns_stream, lambda author, reason: blamed.append((author, reason)), is_common=common.holds)


def test_the_same_short_answers_of_two_authors_to_a_common_task_are_no_copy() -> None:
    blamed: list[tuple[str, Rejection]] = []
    watch = watch_of(blamed)
    watch.note([answers(READER_ID, *ANSWERS)])
    assert reason_of(watch, answers(ALICE_ID, *ANSWERS)) is None
    assert reason_of(watch, answers(MALLORY_ID, *ANSWERS)) is None
    assert not blamed
    stranger = common_seed(SWARM_ID, EPOCH + 1)
    assert reason_of(watch, answers(ALICE_ID, *ANSWERS, seed=stranger)) is None
    assert reason_of(watch, answers(MALLORY_ID, *ANSWERS, seed=stranger)) is Rejection.COPIED, "not a common task yet"


def test_what_chance_does_not_repeat_is_a_copy_on_a_common_task_too() -> None:
    watch = watch_of([])
    texts = tuple("".join(random.Random(number).choices("abcdefgh", k=30)) for number in range(4))
    enough = (MIN_SURPRISE_NATS / 4 + 2.7726) / 31 * 1.01  # log(4 · 4) more than elsewhere
    watch.note([answers(READER_ID, *texts, nats=enough)])
    assert reason_of(watch, answers(ALICE_ID, *texts, nats=enough * 0.97)) is None
    assert reason_of(watch, answers(MALLORY_ID, *texts, nats=enough)) is Rejection.COPIED


def test_long_answers_of_another_author_are_a_copy_whatever_their_log_probs_are_claimed_to_be() -> None:
    blamed: list[tuple[str, Rejection]] = []
    watch = watch_of(blamed)
    texts = tuple("".join(random.Random(number).choices("abcdefgh", k=80)) for number in range(4))
    assert reason_of(watch, answers(ALICE_ID, *texts, nats=0.5)) is None
    assert reason_of(watch, answers(MALLORY_ID, *texts, nats=0.0)) is Rejection.REPLAY
    assert not blamed, "who came first is not known"


def test_flat_groups_of_failures_count_against_their_author_on_common_tasks_too() -> None:
    honest, flat = (PeerTracker(ON, context_of()) for _ in range(2))
    for index in range(8):
        honest.judged([on_common(1, 1, index=index)], lambda source: SuccessLevel(1.0, 0.0))
        flat.judged([on_common(0.1, 0.1, index=index)], lambda source: SuccessLevel(1.0, 0.0))
    assert flat.reputation.trust(ALICE_ID) < honest.reputation.trust(ALICE_ID)


def test_many_answers_are_equal_by_chance() -> None:
    """64 answers each, of 148 that are equally likely, which are five nats each."""
    words = [f"{a}{b}" for a in "abcdefghijklm" for b in "abcdefghijklm"][:148]
    watch = watch_of([])
    for number in range(6):
        texts = random.Random(number).choices(words, k=64)
        author = (ALICE_ID, MALLORY_ID, READER_ID, "d", "e", "f")[number]
        assert reason_of(watch, answers(author, *texts, nats=5 / 3)) is None, "two letters and EOS"


def test_who_repeats_itself_on_a_common_task_is_turned_away() -> None:
    watch = watch_of([])
    assert reason_of(watch, answers(ALICE_ID, *ANSWERS)) is None
    assert reason_of(watch, answers(ALICE_ID, *ANSWERS[::-1])) is Rejection.REPLAY


# pooled advantages


def trained(group: RolloutGroup, *siblings: float, is_own: bool = True) -> TrainingGroup:
    return TrainingGroup((1, 2), group, usable_logprobs=True, is_own=is_own, siblings=siblings)


def test_pooled_advantages_by_hand() -> None:
    """Eight own failures, and of eight answers of another one success: mean 1/16, deviation 1/4.

    Σ (R − 1/16)² = 15 · 1/256 + 225/256 = 15/16; divided by 16 − 1 that is 1/16.
    """
    mine, theirs = on_common(*[0.0] * 8), on_common(1.0, *[0.0] * 7, author=MALLORY_ID)
    batch = [trained(mine, 1.0, *[0.0] * 7), trained(theirs, *[0.0] * 8, is_own=False)]
    values = batch_advantages(batch, TrainingSection())
    assert values == pytest.approx([-0.25] * 8 + [3.75] + [-0.25] * 7, abs=1e-4)
    plain = batch_advantages(batch, TrainingSection(advantage="dr_grpo"))
    assert plain == pytest.approx([-0.0625] * 8 + [0.9375] + [-0.0625] * 7)


def test_all_right_beside_the_failures_of_another_is_positive() -> None:
    values = batch_advantages([trained(on_common(1, 1), 0, 0)], TrainingSection())
    assert values == pytest.approx([0.5 / 3**-0.5] * 2, abs=1e-4)  # mean 1/2, deviation √(1/3)


def test_a_group_without_signal_is_refused_where_its_siblings_have_none_either() -> None:
    with pytest.raises(TrainingError, match="differing rewards"):
        batch_advantages([trained(on_common(0, 0), 0, 0)], TrainingSection())


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "median", "gdpo", "gigpo"])
def test_every_form_gives_each_answer_of_the_group_one_number(advantage: str) -> None:
    section = TrainingSection.model_validate({"advantage": advantage})
    values = batch_advantages([trained(on_common(0, 0, 0), 1, 0, 0), trained(on_common(1, 0, 0))], section)
    assert len(values) == 6 and all(value is None or value <= 0 for value in values[:3])
    assert any(value is not None and value > 0 for value in values[3:])


def test_signals_of_others_are_not_known_so_gdpo_compares_within_the_group() -> None:
    signalled = tuple(replace(one, signals=(("correct", one.reward),)) for one in on_common(1, 0).rollouts)
    item = trained(replace(on_common(1, 0), rollouts=signalled), 0, 0, 0)
    section = TrainingSection.model_validate({"advantage": "gdpo"})
    assert batch_advantages([item], section) == batch_advantages([replace(item, siblings=())], section)


def test_the_level_of_success_bounds_what_pooling_makes_positive() -> None:
    """Halves are better than the failures of others, and still no success."""
    item = replace(trained(on_common(0.5, 0.5), 0, 0, is_own=False), success_level=1.0)
    assert batch_advantages([item], TrainingSection()) == [None, None]


# what is remembered


def test_answers_meet_by_task() -> None:
    known = CommonGroups()
    known.begin_round()
    mine, theirs = on_common(0, 0, author=READER_ID), on_common(0, 1)
    known.note(mine, is_own=True)
    known.hold(mine, is_own=True)
    assert known.take_ready(9, is_own=True) == [] and not known.has_signal(mine)
    known.note(on_common(1, 1, index=1), is_own=False)
    assert known.siblings(mine) == (), "another task"
    known.note(theirs, is_own=False)
    assert known.siblings(mine) == (0.0, 1.0) and known.siblings(theirs) == (0.0, 0.0)
    assert known.take_ready(0, is_own=True) == [] == known.take_ready(9, is_own=False)
    assert known.take_ready(9, is_own=True) == [mine] and known.take_ready(9, is_own=True) == []


def test_one_author_cannot_dominate_a_baseline() -> None:
    """63 right answers in one group count as four beside four own ones; a second group, or a third, counts as nothing."""
    known = CommonGroups()
    mine = on_common(0, 0, 0, 1, author=READER_ID)
    known.note(mine, is_own=True)
    known.note(on_common(*[1.0] * 63, 0.0, author=MALLORY_ID), is_own=False)
    known.note(on_common(*[1.0] * 64, author=MALLORY_ID), is_own=False)
    assert known.siblings(mine) == (0.0, 1.0, 1.0, 1.0)
    for number in range(100):
        known.note(on_common(1, 1, author=f"name {number}"), is_own=False)
    assert len(known.siblings(mine)) <= 4 + 2 * 14
    late = on_common(0, 0, author="late")
    known.note(late, is_own=True)
    assert "late" in known._tasks[late.task].rewards, "an own group always counts"


def test_even_distances_keep_the_worst_and_the_best() -> None:
    assert list(spread(3, 8)) == [0, 1, 2] and list(spread(64, 2)) == [0, 63]
    assert list(spread(9, 5)) == [0, 2, 4, 6, 8]


def test_memory_is_bounded_and_invented_tasks_go_first() -> None:
    known = CommonGroups()
    mine = on_common(0, 0, author=READER_ID)
    known.note(mine, is_own=True)
    for index in range(1, 1000):
        known.note(on_common(1, 1, index=index), is_own=False)
        known.hold(on_common(1, 1, index=index), is_own=False)
        known.hold(on_common(0, 0, index=index, author=READER_ID), is_own=True)
        known.hold(on_common(0, 0, index=index, author=READER_ID), is_own=True)  # waits once
    assert len(known._tasks) == 256 and mine.task in known._tasks and len(known._waiting) == 64
    for _ in range(16):
        known.begin_round()
    assert not known._tasks and not known._waiting, "nothing waits for ever"


def test_groups_of_others_that_wait_are_in_no_checkpoint() -> None:
    """Their token ids may be of another tokenizer, and a checkpoint with such ids is refused."""
    known = CommonGroups()
    known.hold(on_common(1, 1, index=1), is_own=False)
    known.hold(on_common(0, 0, index=2, author=READER_ID), is_own=True)
    assert [one["group"]["author"] for one in known.state()["waiting"]] == [READER_ID]


def test_what_nobody_trains_on_is_compared_with_nothing() -> None:
    known = CommonGroups()
    junk, mine = on_common(1, 1), on_common(0, 0, author=READER_ID)
    known.note(mine, is_own=True)
    known.note(junk, is_own=False)
    assert known.has_signal(mine)
    known.forget(junk)
    assert not known.has_signal(mine) and known.siblings(mine) == ()


def test_what_is_remembered_survives_a_checkpoint() -> None:
    known = CommonGroups()
    known.begin_round()
    mine = on_common(0, 0, author=READER_ID)
    known.note(mine, is_own=True)
    known.hold(mine, is_own=True)
    again = CommonGroups()
    again.restore(json.loads(json.dumps(known.state())))
    assert again.state() == known.state()
    again.note(on_common(1, 1), is_own=False)
    assert again.take_ready(9, is_own=True) == [mine]
    again.restore({})
    assert again.state() == CommonGroups().state()


# the batch of a round


def learner_of(config: Config, clock: Clock) -> Learner:
    policy = load_policy(config.policy, device="cpu")
    pool = ExperiencePool(":memory:", config.sharing, clock)
    backend, mixture = local_backend(config, policy, "me"), TaskMixture(config.tasks)
    ports = SwarmPorts(common=CommonStreams.of(config.sharing, SWARM_ID, clock))
    return Learner(config, backend, mixture=mixture, pool=pool, peer_id="me", ports=ports)


def with_rewards(group: RolloutGroup, *rewards: float, author: str = "me") -> RolloutGroup:
    rollouts = zip(group.rollouts, rewards, strict=True)
    return replace(group, author=author, rollouts=tuple(replace(one, reward=reward) for one, reward in rollouts))


def round_of(learner: Learner) -> tuple[RolloutBatch, RolloutGroup]:
    """The rollouts of a round in which everything failed, and its common group."""
    learner._cursor.follow("me", b"", SEED)
    rollouts = learner._rollouts.run(1)
    groups = [with_rewards(one, *[0.0] * 4) for one in rollouts.groups]
    (common,) = (one for one in groups if one.task.seed == SEED)
    return replace(rollouts, groups=groups), common


def settings_of(**sharing: object) -> Config:
    return config_of({"common_tasks": 0.17, "likelihood_floor_quantile": 0.0, **sharing})  # 1 of 6 tasks


def by_author(batch: list[TrainingGroup]) -> dict[str, TrainingGroup]:
    return {one.group.author: one for one in batch}


def test_own_failures_and_the_successes_of_another_meet_in_one_batch() -> None:
    learner = learner_of(settings_of(), Clock())
    rollouts, common = round_of(learner)
    theirs = with_rewards(common, 1, 1, 1, 1, author=ALICE_ID)
    elsewhere = with_rewards(replace(common, task=replace(common.task, seed=SEED + 1)), 1, 1, 1, 1, author=MALLORY_ID)
    learner._pool.add(b"1" * 32, NOW + 600, NOW, [theirs, elsewhere])
    found = by_author(batch_of(learner, rollouts))
    assert found.keys() == {"me", ALICE_ID}, "what is no common task has no signal"
    assert found["me"].siblings == (1.0,) * 4 and found[ALICE_ID].siblings == (0.0,) * 4
    values = batch_advantages([found["me"], found[ALICE_ID]], TrainingSection())
    assert values == pytest.approx([-(7**0.5) / 8**0.5] * 4 + [(7**0.5) / 8**0.5] * 4, rel=0.01)  # deviation √(2/7)


def test_groups_that_come_later_meet_those_that_waited() -> None:
    """First the own one waits, then the answers of another, and neither is trained on twice."""
    learner = learner_of(settings_of(), Clock())
    rollouts, common = round_of(learner)
    empty = replace(rollouts, groups=[])
    assert batch_of(learner, rollouts) == []
    assert batch_of(learner, empty) == []
    learner._pool.add(b"1" * 32, NOW + 600, NOW, [with_rewards(common, 0, 0, 0, 1, author=ALICE_ID)])
    assert by_author(batch_of(learner, empty)).keys() == {"me", ALICE_ID}
    assert batch_of(learner, empty) == []

    other = learner_of(settings_of(), Clock())
    other._pool.add(b"1" * 32, NOW + 600, NOW, [with_rewards(common, 1, 1, 1, 1, author=ALICE_ID)])
    assert batch_of(other, empty) == []
    assert by_author(batch_of(other, rollouts)).keys() == {"me", ALICE_ID}


def test_groups_without_signal_neither_wait_nor_reach_a_batch_where_answers_are_compared_by_signals() -> None:
    settings = settings_of().model_dump() | {"training": {"advantage": "gdpo"}}
    learner = learner_of(parse({name: settings[name] for name in ("rollouts", "sharing", "training")}), Clock())
    rollouts, common = round_of(learner)
    solved, mixed = (
        with_rewards(common, 1, 1, 1, 1, author=ALICE_ID),
        with_rewards(common, 1, 0, 0, 0, author=MALLORY_ID),
    )
    learner._pool.add(b"1" * 32, NOW + 600, NOW, [solved, mixed])
    (alone,) = batch_of(learner, rollouts)
    assert alone.group.author == MALLORY_ID and alone.siblings == ()
    assert learner._batches.common.state()["waiting"] == [] and not learner._batches.common._waiting


def test_nothing_meets_where_it_is_off() -> None:
    learner = learner_of(settings_of(), Clock())
    rollouts, common = round_of(learner)
    off = learner_of(config_of({"likelihood_floor_quantile": 0.0}), Clock())
    off._pool.add(b"1" * 32, NOW + 600, NOW, [with_rewards(common, 1, 0, 0, 0, author=ALICE_ID)])
    (alone,) = batch_of(off, rollouts)
    assert alone.group.author == ALICE_ID and alone.siblings == ()


def test_learners_of_one_swarm_meet_in_memory() -> None:
    from swarm.experiments.learner_swarm import LearnerSwarm
    from tests.unit.test_experiments import sharing_config

    config = sharing_config()
    sharing = config.sharing.model_copy(update={"common_tasks": 1.0})
    swarm = LearnerSwarm([config.model_copy(update={"sharing": sharing})] * 2, seed=0)
    for _ in range(4):
        swarm.run_round()
    for node in swarm._nodes:
        met = [task for task in node.learner._batches.common._tasks.values() if len(task.rewards) == 2]
        assert met and all(task.is_own for task in met)
    assert swarm.rejected == {}


# publishing


async def test_right_answers_without_signal_are_shared_on_common_tasks_alone() -> None:
    right = replace(group("right", "right"), task=task_of())
    wrong = replace(group("wrong", "wrong"), task=task_of(index=1))
    own = group("right", "right")
    for share, indices in ((0.25, [0]), (0.0, [])):
        _, (alice, reader) = await peers(ALICE, READER, common_tasks=share)
        await alice.publish([right, wrong, own])
        await reader.reader.poll()
        assert [one.task.index for one in reader.pool.draw(9, random.Random(0))] == indices
        assert reader.totals.rejected == {} and alice.totals.num_published == len(indices)


async def test_groups_without_a_wrong_answer_are_shared_where_the_setting_says_so() -> None:
    right, wrong = group("right", "right"), replace(group("wrong", "wrong"), task=task_of(index=1))
    for solved_groups, count in ((True, 1), (False, 0)):
        _, (alice, reader) = await peers(ALICE, READER, solved_groups=solved_groups, baseline="reader")
        await alice.publish([right, wrong])
        await reader.reader.poll()
        assert len(reader.pool.draw(9, random.Random(0))) == count == alice.totals.num_published
        assert reader.totals.rejected == {}


def test_the_manifest_says_whether_solved_groups_are_shared() -> None:
    content = {"bases": ["bundled"], "tasks": [{"kind": "reasoning_gym", "name": "chain_sum"}]}
    for solved_groups in (None, True):
        made = manifest.create(ALICE, "friends", PROTOCOL_VERSION, 1.8e9, solved_groups=solved_groups, **content)
        read = manifest.parse(manifest.dump(made, ALICE).encode())
        assert compose(read, {}, {"swarm": {"name": "friends"}}, {}).sharing.solved_groups == bool(solved_groups)


def test_the_manifest_states_the_share_and_nobody_may_have_another() -> None:
    content = {"bases": ["bundled"], "tasks": [{"kind": "reasoning_gym", "name": "chain_sum"}]}
    for share in (None, 0.25):
        made = manifest.parse(
            manifest.dump(
                manifest.create(ALICE, "friends", PROTOCOL_VERSION, 1.8e9, common_tasks=share, **content), ALICE
            ).encode()
        )
        assert compose(made, {}, {"swarm": {"name": "friends"}}, {}).sharing.common_tasks == (share or 0.0)
        with pytest.raises(ConfigError, match=r"sharing\.common_tasks"):
            compose(made, {}, {"swarm": {"name": "friends"}, "sharing": {"common_tasks": 0.5}}, {})

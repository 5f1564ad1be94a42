"""Which tasks a round takes, how many answers they get, and what it asks for again."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from swarm.config import Config, RolloutsSection
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import ConfigError
from swarm.policy.policy import Policy
from swarm.rollouts.rollout_round import RolloutRound
from swarm.rollouts.worker import RolloutBatch, RolloutWorker
from swarm.tasks.task_cursor import DifficultyTable, TaskCursor
from swarm.types import Task, TaskRef

MakePolicy = Callable[..., Policy]
Verify = Callable[[str], float]


def never(text: str) -> float:
    return 0.0


def always(text: str) -> float:
    return 1.0


def fails(text: str) -> float:
    raise ZeroDivisionError(text)


def now_and_then(text: str) -> float:
    return float(sum(map(ord, text)) % 4 == 0)


class Source:
    """Tasks that differ in their number alone."""

    config_digest, num_held_out = "0" * 16, 0

    def __init__(self, name: str, verify: Verify) -> None:
        self.name = name
        self._verify = verify

    def task(self, seed: int, index: int) -> Task:
        return Task(TaskRef(self.name, self.config_digest, seed, index), f"{self.name} {index}", self._verify)

    def answer(self, seed: int, index: int) -> str:
        return ""


class Mixture:
    def __init__(self, **verifiers: Verify) -> None:
        self.sources = {name: Source(name, verify) for name, verify in verifiers.items()}
        self.weights = dict.fromkeys(verifiers, 1.0)

    def is_held_out(self, task: Task) -> bool:
        return False


class Rig:
    def __init__(self, policy: Policy, mixture: Mixture, **settings: object) -> None:
        known = {"groups_per_round": 4, "group_size": 4, "max_new_tokens": 6, **settings}
        config = RolloutsSection.model_validate(known)
        cursor = TaskCursor(mixture, 16, random.Random(0))  # type: ignore[arg-type]
        worker = RolloutWorker(config, policy, SlotEngine(policy, 16), author="me")
        self.table = DifficultyTable(mixture.sources, memory=0.9, default_tokens=6)
        self._round = RolloutRound(config, cursor, worker, self.table)

    def run(self, seed: int = 1, *, all_answered: bool = True) -> RolloutBatch:
        batch = self._round.run(seed)
        assert len({task.ref for task in batch.tasks}) == len(batch.tasks)
        assert not all_answered or [group.task for group in batch.groups] == [task.ref for task in batch.tasks]
        return batch


def sizes(batch: RolloutBatch) -> list[int]:
    return [len(group.rollouts) for group in batch.groups]


def test_plain_round_is_as_many_groups_of_as_many_answers_as_are_set(make_policy: MakePolicy) -> None:
    batch = Rig(make_policy(), Mixture(a=now_and_then, b=never)).run()
    assert sizes(batch) == [4] * 4
    assert batch.num_tokens == sum(len(r.token_ids) for group in batch.groups for r in group.rollouts)


def test_refill_draws_until_enough_groups_have_signal_or_the_draws_are_used_up(make_policy: MakePolicy) -> None:
    policy = make_policy()
    assert len(Rig(policy, Mixture(a=never), refill_draws=2).run().groups) == 4 + 4 + 4
    batch = Rig(policy, Mixture(a=now_and_then), refill_draws=9).run()
    with_signal = [group.has_reward_variance for group in batch.groups]
    assert len(with_signal) > 4
    assert with_signal.count(True) >= 4
    assert with_signal[:4].count(True) < 4  # else there was nothing to draw again


def test_hard_tasks_get_more_answers_up_to_the_largest_group(make_policy: MakePolicy) -> None:
    policy = make_policy()
    rig = Rig(policy, Mixture(hard=never, easy=always), extra_rollouts="hard", largest_group=10, groups_per_round=6)
    batch = rig.run()
    assert {group.task.source: len(group.rollouts) for group in batch.groups} == {"hard": 10, "easy": 4}
    assert rig.table.success_rate("hard") > 1 / (2 + 6 * 10)  # the added ones make no source look harder
    assert batch.num_tokens == sum(len(r.token_ids) for group in batch.groups for r in group.rollouts)
    assert len(batch.likelihoods) == sum(sizes(batch))


def test_more_answers_go_to_their_own_task_where_others_were_dropped(make_policy: MakePolicy) -> None:
    rig = Rig(
        make_policy(), Mixture(broken=fails, hard=never), extra_rollouts="hard", largest_group=10, groups_per_round=8
    )
    batch = rig.run(all_answered=False)
    assert {task.ref.source for task in batch.tasks} == {"broken", "hard"}
    assert {(group.task.source, len(group.rollouts)) for group in batch.groups} == {("hard", 10)}


def test_added_answers_are_others_than_the_first(make_policy: MakePolicy) -> None:
    batch = Rig(make_policy(), Mixture(hard=never), extra_rollouts="hard", largest_group=16).run()
    for group in batch.groups:
        first, added = group.rollouts[:4], group.rollouts[4:]
        assert [r.token_ids for r in first] != [r.token_ids for r in added[:4]]


def test_sizes_follow_what_is_known_of_the_sources(make_policy: MakePolicy) -> None:
    rig = Rig(
        make_policy(), Mixture(open=now_and_then, solved=always), group_sizes="variance", smallest_group=2,
        groups_per_round=8,
    )  # fmt: skip
    for _ in range(20):
        rig.table.observe("open", [1.0, 0.0] * 4, [6] * 8)
        rig.table.observe("solved", [1.0] * 8, [6] * 8)
    by_source = {group.task.source: len(group.rollouts) for group in rig.run().groups}
    assert by_source["solved"] < 4 < by_source["open"]


def test_tasks_come_from_sources_that_can_still_teach(make_policy: MakePolicy) -> None:
    rig = Rig(make_policy(), Mixture(a=now_and_then, b=never, c=always), task_choice="thompson", groups_per_round=16)
    late: Counter[str] = Counter()
    for number in range(8):
        batch = rig.run(seed=number)
        if number >= 2:
            late.update(group.task.source for group in batch.groups)
    assert late["a"] > late["b"] + late["c"]


def test_a_round_is_repeatable(make_policy: MakePolicy) -> None:
    settings = {"task_choice": "thompson", "group_sizes": "variance", "extra_rollouts": "equal", "refill_draws": 2}
    policy, mixture = make_policy(), Mixture(a=now_and_then, b=never)
    one, other = Rig(policy, mixture, **settings), Rig(policy, mixture, **settings)
    assert [one.run(seed) for seed in range(2)] == [other.run(seed) for seed in range(2)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"extra_rollouts": "hard", "group_size": 40}, "largest_group must be at least group_size, got 32 < 40"),
        ({"extra_rollouts": "hard", "largest_group": 65}, "at most sharing.max_group_size, got 65 > 64"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        Config.model_validate({"rollouts": settings})

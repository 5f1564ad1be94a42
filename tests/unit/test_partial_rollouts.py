"""Answers that one round begins and another ends: nothing of them is lost, drawn twice or mistaken for fresh."""

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm.config import RolloutsSection
from swarm.engine.engine import NOT_BEGUN, AnswerRequest, Completion
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.policy.policy import Policy
from swarm.rollouts.open_group import OpenGroup
from swarm.rollouts.rollout_round import RolloutRound
from swarm.rollouts.worker import RolloutWorker
from swarm.tasks.task_cursor import DifficultyTable, TaskCursor
from swarm.tasks.task_source import UnknownTask
from swarm.types import Task, TaskRef
from tests.unit.test_engine_contract import full_pass
from tests.unit.test_rollout_round import Mixture, now_and_then
from tests.unit.tiny_models import ARCHITECTURES, RAGGED_PROMPTS, perturb, requests

MakePolicy = Callable[..., Policy]
SAMPLING = Sampling(temperature=0.9)


def resume(
    policy: Policy, begun: list[list[Completion]], enough: int, seed: int = 1, tokens: int = 16
) -> list[list[Completion]]:
    wanted = [
        AnswerRequest(policy.encode_prompt(prompt), len(answers), tokens, tuple(answers))
        for prompt, answers in zip(RAGGED_PROMPTS, begun, strict=True)
    ]
    return SlotEngine(policy, 5).resume(wanted, SAMPLING, enough=enough, seed=seed)


def fresh(size: int = 3) -> list[list[Completion]]:
    return [[NOT_BEGUN] * size for _ in RAGGED_PROMPTS]


def ends(groups: list[list[Completion]]) -> list[set[str]]:
    return [{completion.end for completion in group} for group in groups]


@pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma2"])
def test_continued_answers_keep_their_tokens_and_have_the_logprobs_of_who_sampled_them(
    make_policy: MakePolicy, name: str
) -> None:
    policy = make_policy(name)
    first = resume(policy, fresh(), enough=1)
    assert sum("open" not in end for end in ends(first)) >= 1
    assert any("open" in end for end in ends(first))
    before = [policy.encode_prompt(prompt) for prompt in RAGGED_PROMPTS]
    for prompt, group in zip(before, first, strict=True):
        for completion in group:
            if completion.token_ids:
                expected = full_pass(policy, prompt, completion.token_ids)
                assert completion.policy_logprobs == pytest.approx(expected, abs=1e-4)
    perturb(policy)
    second = resume(policy, first, enough=len(first), seed=2)
    for prompt, old_group, group in zip(before, first, second, strict=True):
        for old, now in zip(old_group, group, strict=True):
            num_old = len(old.token_ids)
            assert now.end != "open"
            assert (now.token_ids[:num_old], now.logprobs[:num_old]) == (old.token_ids, old.logprobs)
            if old.end != "open":
                assert now == old
                continue
            assert num_old < len(now.token_ids) <= 16
            expected = full_pass(policy, prompt, now.token_ids)
            assert now.policy_logprobs[num_old:] == pytest.approx(expected[num_old:], abs=1e-4)


def test_enough_of_all_is_what_generate_gives(make_policy: MakePolicy) -> None:
    policy = make_policy()
    prompts = [policy.encode_prompt(prompt) for prompt in RAGGED_PROMPTS]
    whole = SlotEngine(policy, 5).generate(requests(prompts, 3, 16), SAMPLING, seed=1)
    resumed = resume(policy, fresh(), enough=len(prompts))
    assert [[c.token_ids for c in group] for group in resumed] == [[c.token_ids for c in group] for group in whole]


def test_groups_that_are_complete_already_count_as_enough(make_policy: MakePolicy) -> None:
    policy = make_policy()
    whole = resume(policy, fresh(), enough=len(RAGGED_PROMPTS))
    begun = [whole[0], *fresh()[1:]]
    assert resume(policy, begun, enough=1) == begun


class Rig:
    """Rounds with over-provision, each followed by a change of the policy."""

    def __init__(self, policy: Policy) -> None:
        config = RolloutsSection(
            groups_per_round=3, group_size=2, max_new_tokens=16, over_provision=2.0, stop=tuple("aeiou")
        )
        self.policy, self.mixture = policy, Mixture(a=now_and_then, b=now_and_then)
        cursor = TaskCursor(self.mixture, 16, random.Random(0))  # type: ignore[arg-type]
        self.cursor = cursor
        worker = RolloutWorker(config, policy, SlotEngine(policy, 4), author="me")
        table = DifficultyTable(self.mixture.sources, memory=0.9, default_tokens=16)
        self.round = RolloutRound(config, cursor, worker, table)

    def rebuild(self, ref: TaskRef) -> Task:
        return self.mixture.sources[ref.source].task(ref.seed, ref.index)


def test_rounds_take_the_first_that_are_complete_and_continue_the_rest(make_policy: MakePolicy) -> None:
    rig = Rig(make_policy())
    seen: set[TaskRef] = set()
    num_stale = 0
    for number in range(5):
        rig.policy.version = number
        batch = rig.round.run(seed=number)
        assert len(batch.groups) >= 3
        assert len(batch.groups) + rig.round.num_open == 6  # what the round began with
        assert not seen & {group.task for group in batch.groups}
        seen |= {group.task for group in batch.groups}
        assert all(len(group.rollouts) == 2 and group.policy_version <= number for group in batch.groups)
        num_stale += batch.num_stale_tokens
        stale = any(group.policy_version < number for group in batch.groups)
        assert stale == (batch.num_stale_tokens > 0)
    assert num_stale > 0


def test_a_restart_continues_open_answers_bit_for_bit(make_policy: MakePolicy) -> None:
    one, other = Rig(make_policy()), Rig(make_policy())
    one.round.run(seed=1)
    saved = json.loads(json.dumps(one.round.state()))
    assert saved
    other.cursor.restore(one.cursor.state())
    other.round.restore(saved, other.rebuild)
    assert one.round.run(seed=2) == other.round.run(seed=2)


def test_open_groups_whose_task_is_gone_or_limit_is_lower_are_dropped(make_policy: MakePolicy) -> None:
    rig = Rig(make_policy())
    task = rig.rebuild(TaskRef("a", "0" * 16, 16, 1))
    long = Completion((5,) * 16, (0.0,) * 16, (0.0,) * 16, "open")
    groups = [OpenGroup.of(task, 2), replace(OpenGroup.of(task, 1), answers=(long,))]

    rig.round.restore([group.state() for group in groups], rig.rebuild)
    assert rig.round.num_open == 1

    def gone(ref: TaskRef) -> Task:
        raise UnknownTask(ref.source)

    rig.round.restore([group.state() for group in groups], gone)
    assert rig.round.num_open == 0

"""What a round trains on, with the real learner and the bundled policy: own, foreign and replayed groups."""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

import pytest
import torch

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config, TrainingSection, parse
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.rollouts.worker import RolloutBatch
from swarm.sharing.usefulness import Usefulness
from swarm.tasks.task_mixture import TaskMixture
from swarm.training.experience import TrainingGroup
from swarm.training.micro_batch import training_sequences
from swarm.types import Rollout, RolloutGroup
from tests.unit.experience_factory import ALICE, NOW, Clock


def config_of(sharing: Mapping[str, object] = {}, **training: object) -> Config:
    torch.set_num_threads(1)
    return parse(
        {
            "rollouts": {"groups_per_round": 6, "group_size": 4, "max_new_tokens": 12, "cache_mib": 64},
            "sharing": {"own_groups": 3, "swarm_groups": 3, **sharing},
            "training": training,
        }
    )


def make_learner(
    config: Config, published: list[RolloutGroup] | None = None, useful: Usefulness | None = None
) -> Learner:
    policy = load_policy(config.policy, device="cpu")
    pool = ExperiencePool(":memory:", config.sharing, Clock())
    publish = (published if published is not None else []).extend
    backend, mixture = local_backend(config, policy, "me"), TaskMixture(config.tasks)
    ports = SwarmPorts(publish=publish, usefulness=useful)
    return Learner(config, backend, mixture=mixture, pool=pool, peer_id="me", ports=ports)


def batch_of(learner: Learner, rollouts: RolloutBatch) -> list[TrainingGroup]:
    """As the first round of a learner composes it."""
    batches, rng = learner._batches, random.Random(0)
    own = batches.own_groups(rollouts, 0)
    return batches.compose(own, batches.draw_from_pool(own, rng), 0, rng)


def with_signal(groups: list[RolloutGroup], version: int = 0) -> list[RolloutGroup]:
    return [replace(g, author=ALICE.peer_id, policy_version=version) for g in groups if g.has_reward_variance]


def test_replayed_groups_join_from_the_second_round_on_and_a_restart_replays_the_same(tmp_path: Path) -> None:
    config = config_of({"swarm_groups": 0}, replay_groups=2, groups_per_step=0)
    whole, store = make_learner(config), CheckpointStore(tmp_path, 2)
    rows = [whole.run_round() for _ in range(3)]
    assert [row["train/replayed_groups"] for row in rows] == [0, 2, 2]
    assert rows[2]["train/own_groups_total"] <= 9 and rows[1]["train/staleness_max"] == 1
    whole.save(store)
    resumed = make_learner(config)
    assert resumed.resume(store)
    for _ in range(2):
        one, other = whole.run_round(), resumed.run_round()
        assert one["train/loss"] == other["train/loss"] and other["train/replayed_groups"] == 2


def test_no_replay_and_no_more_randomness_by_default() -> None:
    row = make_learner(config_of({"swarm_groups": 0})).run_round()
    assert row["train/replayed_groups"] == 0 and row["train/staleness_max"] == 0 == row["train/staleness_mean"]


def test_what_is_dropped_is_told_by_reason() -> None:
    published: list[RolloutGroup] = []
    learner = make_learner(config_of({"max_staleness": 4}), published)
    learner.run_round()
    groups = with_signal(published)
    gone = replace(groups[0], task=replace(groups[0].task, source="gone"))
    cut = tuple(
        replace(rollout, token_ids=(0, *rollout.token_ids), logprobs=(-1.0, *rollout.logprobs))
        for rollout in groups[1].rollouts
    )
    learner._pool.add(b"1" * 32, NOW + 600, NOW, [gone, replace(groups[1], rollouts=cut)])
    row = learner.run_round()
    assert row["train/dropped_groups"] == {"unknown_task": 1, "nothing_usable": 1}
    assert row["train/answers_text_mismatch_total"] == 4
    learner._pool.add(b"2" * 32, NOW + 600, NOW, with_signal(published[:2], 100) + with_signal(published[2:], 3))
    assert learner.run_round()["train/dropped_groups"]["stale_version"] > 0
    learner.policy.version += 100
    assert "own_stale" not in learner.run_round()["train/dropped_groups"]  # fresh ones are of the present version


@pytest.mark.parametrize("aggregation", ["dapo", "grpo", "dr_grpo"])
def test_a_group_of_others_weighs_no_more_than_the_largest_own_one(
    aggregation: Literal["dapo", "grpo", "dr_grpo"],
) -> None:
    """True answers, but sixteen times as many and as long as they may be: shares of groups alone would not bound them."""
    sharing = {"likelihood_floor_quantile": 0.0, "success_quantile": 0.0}
    learner = make_learner(config_of(sharing))
    rollouts = learner._rollouts.run(1)
    one = next(group for group in rollouts.groups if group.has_reward_variance)
    right = next(rollout for rollout in one.rollouts if rollout.reward)
    ids = (*learner.policy.encode_answer("7" * 11), learner.policy.eos_token_ids[0])
    wrong = Rollout("7" * 11, ids, (-0.5,) * 12, True, 0.0)
    large = replace(one, author=ALICE.peer_id, rollouts=(right,) * 2 + (wrong,) * 62)
    learner._pool.add(b"1" * 32, NOW + 600, NOW, [large])
    batch = batch_of(learner, rollouts)
    settings = TrainingSection(aggregation=aggregation, mask_truncated=False)
    sequences = iter(training_sequences(batch, settings, 12))
    parts = [sum(s.scale * len(s.answer_ids) for s in islice(sequences, len(g.group.rollouts))) for g in batch]
    (of_others,) = (part for group, part in zip(batch, parts, strict=True) if not group.is_own)
    most_tokens = max(sum(len(rollout.token_ids) for rollout in group.rollouts) for group in rollouts.groups)
    own = [(group.group, part) for group, part in zip(batch, parts, strict=True) if group.is_own]
    assert own and next(sequences, None) is None
    for group, part in own:
        num_tokens = sum(len(rollout.token_ids) for rollout in group.rollouts)
        assert of_others <= part * (1.0 if aggregation == "grpo" else most_tokens / num_tokens) * (1 + 1e-6)


def test_no_more_answers_of_a_large_group_are_trained_on_than_of_the_largest_own_one_and_its_only_success_is_kept() -> (
    None
):
    """Sixteen times as many would take sixteen times as long to train on."""
    learner = make_learner(config_of({"likelihood_floor_quantile": 0.0}))
    rollouts = learner._rollouts.run(1)
    one = next(group for group in rollouts.groups if group.has_reward_variance)
    best, worst = (choose(one.rollouts, key=lambda rollout: rollout.reward) for choose in (max, min))
    learner._pool.add(b"1" * 32, NOW + 600, NOW, [replace(one, author=ALICE.peer_id, rollouts=(worst,) * 63 + (best,))])
    (taken,) = (group for group in batch_of(learner, rollouts) if not group.is_own)
    rewards = [rollout.reward for rollout in taken.group.rollouts]
    assert len(rewards) == max(len(group.rollouts) for group in rollouts.groups)
    assert rewards.count(best.reward) == 1 and rewards.count(worst.reward) == len(rewards) - 1


def test_own_groups_that_waited_too_long_are_dropped() -> None:
    learner = make_learner(config_of({"swarm_groups": 0, "max_staleness": 4}))
    batch = learner._rollouts.run(1)
    old = replace(batch, groups=[replace(g, policy_version=-5) for g in batch.groups])
    num_signal = sum(group.has_reward_variance for group in batch.groups)
    assert num_signal > 0
    assert batch_of(learner, old) == []
    assert learner._batches.dropped == {"own_stale": num_signal}
    edge = replace(batch, groups=[replace(g, policy_version=-4) for g in batch.groups])
    assert len(batch_of(learner, edge)) == min(3, num_signal)


def test_the_choice_hears_of_the_own_difficulty_table_after_every_round(tmp_path: Path) -> None:
    useful = Usefulness(600.0, Clock(), lambda author: 0.5)
    learner = make_learner(config_of({"choice": "informative"}), useful=useful)
    assert useful._beliefs == {}
    learner.run_round()
    first = dict(useful._beliefs)
    assert set(first) == set(learner._mixture.sources) and all(a > 0 and b > 0 for a, b in first.values())
    assert sum(a + b for a, b in first.values()) == pytest.approx(
        2 * len(first) + 6 * 4, rel=0.2
    )  # answers of six groups
    learner.save(CheckpointStore(tmp_path, 1))
    again = Usefulness(600.0, Clock(), lambda author: 0.5)
    assert make_learner(config_of({"choice": "informative"}), useful=again).resume(CheckpointStore(tmp_path, 1))
    assert again._beliefs == first


def test_groups_of_others_fill_what_own_ones_leave_and_no_more() -> None:
    """Some of those in the pool are of a task that is not known here: what is drawn again is what is still missing."""
    learner = make_learner(config_of({"likelihood_floor_quantile": 0.0, "success_quantile": 0.0}))
    rollouts = learner._rollouts.run(1)
    signalled = with_signal(list(rollouts.groups))
    for number in range(16):
        known = replace(signalled[number % len(signalled)], policy_version=number)
        unknown = replace(known, task=replace(known.task, source="gone", index=number))
        learner._pool.add(bytes([number]) * 32, NOW + 600, NOW, [known, unknown][: 1 + (number % 3 == 0)])
    full = batch_of(learner, rollouts)
    assert [sum(group.is_own == own for group in full) for own in (True, False)] == [3, 3]
    single = replace(rollouts, groups=[next(group for group in rollouts.groups if group.has_reward_variance)])
    filled = batch_of(learner, single)
    assert [sum(group.is_own == own for group in filled) for own in (True, False)] == [1, 5]

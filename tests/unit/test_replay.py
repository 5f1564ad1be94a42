"""Own groups that are trained on once more: which, how long, with which weights, and the same after a restart."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from swarm.config import TrainingSection
from swarm.policy.policy import Policy
from swarm.training.experience import TrainingGroup
from swarm.training.policy_loss import ClipRange, Logprobs, policy_loss
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.replay import ReplayStore
from swarm.training.trainer import Trainer
from swarm.types import RolloutGroup
from tests.unit.experience_factory import group, rollout
from tests.unit.test_policy_loss import batch_of
from tests.unit.tiny_models import perturb, sampled_groups


def store(**settings: object) -> ReplayStore:
    return ReplayStore(TrainingSection.model_validate({"replay_groups": 2, **settings}))


def of_version(version: int, num_right: int = 1, index: int | None = None) -> RolloutGroup:
    """Four answers, so many of them right."""
    texts = ["right"] * num_right + ["wrong"] * (4 - num_right)
    return replace(group(*texts, index=version if index is None else index), policy_version=version)


def test_a_group_is_replayed_once_and_not_when_it_is_too_old() -> None:
    held = store(replay_max_versions=3)
    held.add([of_version(1), of_version(2), of_version(3), of_version(4)])
    drawn = held.draw(5, random.Random(0)) + held.draw(5, random.Random(0))
    assert sorted(one.policy_version for one in drawn) == [2, 3, 4]  # 1 is four versions old
    assert held.draw(5, random.Random(0)) == [] and len(held) == 0


def test_groups_without_signal_are_not_kept_and_the_store_is_bounded() -> None:
    held = store()
    held.add([of_version(0, num_right=0), of_version(0, num_right=4)])
    assert len(held) == 0
    held.add([of_version(7, index=index) for index in range(100)])
    assert len(held) == 32  # 16 batches of 2, the newest
    assert {saved["task"][3] for saved in held.state()} == set(range(68, 100))


def test_nothing_is_kept_or_drawn_where_replay_is_off() -> None:
    held, rng = store(replay_groups=0), random.Random(1)
    held.add([of_version(1)])
    before = rng.getstate()
    assert held.draw(1, rng) == [] and len(held) == 0 and rng.getstate() == before


def test_groups_near_one_half_are_replayed_more_often() -> None:
    """p(1 − p) is .25 against .1875: of two first draws in proportion 4 : 3."""
    first = 0
    for seed in range(2000):
        held = store(replay_groups=1)
        held.add([of_version(1, num_right=2), of_version(1, num_right=1)])
        first += held.draw(1, random.Random(seed))[0].mean_reward == 0.5
    assert abs(first / 2000 - 4 / 7) < 0.04


def test_a_saved_store_goes_on_bit_for_bit() -> None:
    kept = replace(rollout("right"), signals=(("form", 0.5),), segments=((1, 2), (3, 4)), logprobs=(-1 / 3,) * 6)
    odd = replace(of_version(3), rollouts=(kept, rollout("wrong")))
    one, other = store(), store()
    one.add([of_version(2), odd, of_version(3, num_right=2), of_version(4)])
    other.restore(json.loads(json.dumps(one.state())))
    a, b = random.Random(5), random.Random(5)
    assert [one.draw(5, a), one.draw(5, a)] == [other.draw(5, b), other.draw(5, b)]


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ("none", (2.0, 0.5)),
        ("sequence_mask", (2.0, 0.5)),  # mean of log w is within log C
        ("tis", (2.0, 0.5)),  # once, not twice
        ("tis+opsm", (2.0, 0.5)),
        ("icepop", (0.0, 0.5)),  # e > C
    ],
)
def test_a_replayed_answer_is_weighed_by_w_up_to_c(correction: str, weights: tuple[float, float]) -> None:
    old = torch.tensor([[-1.0, -1.0]])
    behaviour = torch.tensor([[-2.0, -1.0 + math.log(2)]])  # w = e, 1/2
    config = TrainingSection.model_validate({"correction": correction, "correction_cap": 2.0})
    part = batch_of(behaviour, torch.ones(1, 1))._replace(is_replay=torch.ones(1, 1))
    terms = policy_loss(part, Logprobs(old, old, None, None, torch.ones(1, 2)), config, ClipRange(0.2, 0.28))
    assert terms.pull.tolist()[0] == pytest.approx(weights)


def test_a_fresh_answer_is_not_weighed_by_it() -> None:
    old, behaviour = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.4, -1.2]])
    part = batch_of(behaviour, torch.ones(1, 1))
    config = TrainingSection(correction="sequence_mask")
    terms = policy_loss(part, Logprobs(old, old, None, None, torch.ones(1, 2)), config, ClipRange(0.2, 0.28))
    assert terms.pull.tolist() == [[1.0, 1.0]]


def test_a_ratio_to_the_sampler_is_not_weighed_again() -> None:
    old, behaviour = torch.tensor([[-1.0]]), torch.tensor([[-1.2]])
    part = batch_of(behaviour, torch.ones(1, 1))._replace(is_replay=torch.ones(1, 1))
    config = TrainingSection(ratio_reference="sampler", correction="sequence_mask+opsm")
    terms = policy_loss(part, Logprobs(old, old, None, None, torch.ones(1, 1)), config, ClipRange(0.2, 0.28))
    assert terms.ratio.item() == pytest.approx(math.exp(0.2)) and terms.pull.item() == 1.0


def test_staleness_per_token_reaches_the_report(make_policy: Callable[..., Policy]) -> None:
    """Three answers of four tokens by hand: fresh, begun five versions ago, and a replayed group of two versions ago."""
    policy = make_policy()
    policy.version = 10
    fresh, waited, old = (one.group for one in sampled_groups(policy, ("Hi", "a", "b"), group_size=2, max_new_tokens=4))
    count = [[len(r.token_ids) for r in one.rollouts] for one in (fresh, waited, old)]
    segments = ((5, 1), (10, count[1][0] - 1))
    waited = replace(
        waited, policy_version=5, rollouts=(replace(waited.rollouts[0], segments=segments), waited.rollouts[1])
    )
    old = replace(old, policy_version=8)
    ids = tuple(policy.encode_prompt("Hi"))
    batch = [TrainingGroup(ids, fresh, True, True), TrainingGroup(ids, waited, True, True)]
    batch += [TrainingGroup(ids, old, True, True, is_replay=True)]
    foreign = TrainingGroup(ids, replace(fresh, policy_version=1), True, False)  # another's count: not comparable
    perturb(policy, 1e-3)
    config = TrainingSection(correction="none")
    report = Trainer(config, policy, LocalOptimizer(config, policy), temperature=1.0, max_new_tokens=8).step(
        [*batch, foreign]
    )
    expected = (5 * 1 + 5 * count[1][1] + 2 * sum(count[2])) / sum(map(sum, count))
    assert report.staleness_mean == pytest.approx(expected) and report.staleness_max == 5
    assert report.row()["train/staleness_max"] == 5
    fresh_only = Trainer(config, policy, LocalOptimizer(config, policy), temperature=1.0, max_new_tokens=8).step(
        [TrainingGroup(ids, replace(fresh, policy_version=policy.version), True, True)]
    )
    assert (fresh_only.staleness_mean, fresh_only.staleness_max) == (0.0, 0)

"""Advantages of a batch of groups: properties of every form, the median rollout, several signals."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import TrainingSection, load
from swarm.errors import ConfigError
from swarm.training.advantages import batch_advantages
from swarm.training.experience import TrainingGroup
from swarm.training.micro_batch import training_sequences
from swarm.types import Rollout
from tests.unit.experience_factory import group
from tests.unit.test_advantages import advantages, gdpo

KINDS = ("grpo", "dr_grpo", "median", "gdpo")
REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]) | st.floats(0, 1), min_size=2, max_size=9).filter(
    lambda rewards: max(rewards) - min(rewards) > 1e-3
)


def training_group(rewards: list[float], signals: list[dict[str, float]] | None = None) -> TrainingGroup:
    """Rollout i has the tokens (i, i + 1)."""
    rollouts = tuple(
        Rollout("a", (i, i + 1), (-0.5, -0.5), True, reward, tuple((signals[i] if signals else {}).items()))
        for i, reward in enumerate(rewards)
    )
    return TrainingGroup((1, 2), replace(group(), rollouts=rollouts), usable_logprobs=True, is_own=True)


def reordered(item: TrainingGroup, order: list[int]) -> TrainingGroup:
    return replace(item, group=replace(item.group, rollouts=tuple(item.group.rollouts[i] for i in order)))


def section(kind: str, **more: object) -> TrainingSection:
    return TrainingSection.model_validate({"advantage": kind, **more})


@given(st.data(), st.sampled_from(KINDS), REWARDS)
@settings(max_examples=150, deadline=None)
def test_order_of_siblings_does_not_matter(data: st.DataObject, kind: str, rewards: list[float]):
    order = data.draw(st.permutations(range(len(rewards))))
    item = training_group(rewards)
    values = batch_advantages([item], section(kind))
    other = batch_advantages([reordered(item, order)], section(kind))
    expected = [math.nan if values[i] is None else values[i] for i in order]
    got = [math.nan if value is None else value for value in other]
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


@given(st.sampled_from(KINDS[:3]), st.floats(0, 1), st.integers(2, 9))
def test_zero_variance_gives_no_advantage(kind: str, reward: float, size: int):
    values = advantages(torch.full((size,), reward, dtype=torch.float64), kind)
    assert values.abs().max().item() < 1e-15


@given(st.floats(-1e3, 1e3), st.integers(2, 9))
def test_a_signal_that_does_not_vary_has_no_word(value: float, size: int):
    flat = torch.full((1, size), value, dtype=torch.float64)
    assert not gdpo(flat, torch.ones(1, dtype=torch.float64)).any()


@given(st.sampled_from(KINDS), REWARDS)
@settings(max_examples=100, deadline=None)
def test_advantages_grow_with_the_reward_and_stay_finite(kind: str, rewards: list[float]):
    values = batch_advantages([training_group(rewards)], section(kind))
    ranked = sorted(zip(rewards, [0.0 if value is None else value for value in values], strict=True))
    assert all(abs(value) < 20 for _, value in ranked)
    assert all(low[1] <= high[1] + 1e-9 for low, high in pairwise(ranked))


def test_gdpo_on_one_reward_is_grpo_up_to_the_scale_of_the_batch():
    item = training_group([1.0, 0.0, 0.0, 0.5])
    one, other = (torch.tensor(batch_advantages([item], section(kind))) for kind in ("gdpo", "grpo"))
    assert torch.allclose(one, other, rtol=1e-5)  # grpo has unit spread already


def test_one_median_rollout_is_left_out():
    item = training_group([0.0, 1.0, 0.0, 0.5, 0.25])
    assert batch_advantages([item], section("median")) == [-0.25, 0.75, -0.25, 0.25, None]
    sequences = training_sequences([item], section("median"), 8)
    assert [sequence.answer_ids[0] for sequence in sequences] == [0, 1, 2, 3]
    assert sequences[0].scale == pytest.approx(1 / 8)  # 4 answers of 2 tokens: the fifth does not dilute them


def test_among_equal_rewards_one_is_left_out_whatever_the_order():
    item = training_group([0.0, 0.0, 1.0])
    assert batch_advantages([item], section("median")) == [None, 0.0, 1.0]
    assert batch_advantages([reordered(item, [2, 1, 0])], section("median")) == [1.0, 0.0, None]


def test_an_even_group_of_a_peer_without_a_median_rollout_is_used_whole():
    assert batch_advantages([training_group([0.0, 1.0])], section("median")) == [-0.5, 0.5]


def test_signals_are_weighted_by_name():
    correct, form = [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]
    signals = [{"correct": c, "form": f} for c, f in zip(correct, form, strict=True)]
    item = training_group([1.0, 0.0, 0.2, 0.2], signals)

    def ranking(**weights: float) -> list[float | None]:
        return batch_advantages([item], section("gdpo", signal_weights=weights))

    by_correct, by_form = ranking(correct=1, form=0), ranking(correct=0, form=1)
    assert by_correct.index(max(by_correct)) == 0 and by_correct[1] == pytest.approx(by_correct[2])  # type: ignore[type-var]
    assert by_form[2] == pytest.approx(by_form[3]) and by_form[2] > 0 > by_form[0]  # type: ignore[operator]
    assert ranking() == pytest.approx(ranking(correct=1, form=1))


def test_gdpo_has_one_scale_for_the_whole_batch():
    batch = [training_group([1.0, 0.0, 0.0, 0.0]), training_group([0.6, 0.5, 0.5, 0.6])]
    values = torch.tensor(batch_advantages(batch, section("gdpo")), dtype=torch.float64)
    assert values.mean().item() == pytest.approx(0, abs=1e-12) and values.std().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"training.advantage": "median"}, r"must be odd .* got 8.*rollouts.group_size = 9"),
        ({"training.ratio": "sequence"}, "set training.inner_epochs = 2"),
        ({"training.adaptive_clip": "true"}, "set training.inner_epochs = 2"),
        (
            {"training.adaptive_clip": "true", "training.ratio": "sequence", "training.inner_epochs": "2"},
            "got training.ratio sequence",
        ),
        ({"training.ratio_reference": "sampler", "training.correction": "tis"}, "must not be weighed twice"),
    ],
)
def test_settings_without_effect_are_refused(settings_: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        load((), settings_)
    load((), {"training.advantage": "median", "rollouts.group_size": "9"})


def test_a_group_that_is_all_right_teaches_who_is_not_yet_there():
    solved = replace(training_group([1.0, 1.0, 1.0]), is_own=False, baseline=0.5)
    usual = training_group([1.0, 0.0])
    values = batch_advantages([solved, usual], section("grpo"))
    assert values[:3] == pytest.approx([1.0, 1.0, 1.0])  # (1 - .5) / .5
    assert values[3:] == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-5), "own groups as ever"
    no_success = replace(training_group([0.4, 0.4]), is_own=False, baseline=0.2, success_level=1.0)
    assert batch_advantages([no_success], section("grpo")) == [None, None]

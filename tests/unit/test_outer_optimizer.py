"""The outer step of merging: golden values, stability, lag, and what overlap carries over."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.config import MergingSection, parse
from swarm.errors import ConfigError, MergeError
from swarm.merging.outer_optimizer import OuterOptimizer, carry_over, partner_weight

NAMES = ("x.lora_A", "x.lora_B")


def adapter(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(3, 5, generator=generator) for name in NAMES}


def test_first_steps_by_hand() -> None:
    outer = OuterOptimizer(0.5, 0.7, {"w": torch.tensor([1.0])})
    new = outer.step({"w": torch.tensor([2.0])}, {"w": torch.tensor([4.0])})
    assert new["w"].item() == pytest.approx(1 + 0.7 * (2 - 1) + 0.5 * (4 - 2))  # 2.7, towards both, not away from them
    new = outer.step({"w": torch.tensor([3.0])}, None)
    assert new["w"].item() == pytest.approx(
        2.7 + 0.5 * 0.7 + 0.7 * (3 - 2.7)
    )  # 3.26: nothing of the partner in the momentum
    new = outer.step(new, {"w": new["w"] + 8}, partner_lag=3)  # weight ½/√4
    assert new["w"].item() == pytest.approx(3.26 + 0.5 * 0.56 + 0.25 * 8)


def test_partner_acts_on_its_own_step_alone() -> None:
    """Two replicas of one training, one of which met a partner once: they differ by that meeting and by nothing later."""
    met, alone = (OuterOptimizer(0.5, 0.7, adapter(0)) for _ in range(2))
    first, second = met.step(adapter(1), adapter(2)), alone.step(adapter(1), None)
    by_partner = {name: first[name] - second[name] for name in NAMES}
    for seed in range(3, 6):
        change = adapter(seed, 0.1)
        first = met.step({name: tensor + change[name] for name, tensor in first.items()}, None)
        second = alone.step({name: tensor + change[name] for name, tensor in second.items()}, None)
        for name in NAMES:
            torch.testing.assert_close(first[name] - second[name], by_partner[name], atol=1e-5, rtol=0)


def test_ten_rounds_agree_with_an_independent_reference() -> None:
    """Written anew in float64: the momentum of the own change, then half of the way to the partner's fast weights."""
    rng = np.random.default_rng(0)
    phi = rng.normal(size=(2, 4))
    delta = np.zeros((2, 4))
    replicas = [OuterOptimizer(0.5, 0.7, {"w": torch.from_numpy(row)}) for row in phi]
    for _ in range(10):
        theta = phi + rng.normal(size=(2, 4)) * 0.1
        delta = 0.5 * delta + 0.7 * (theta - phi)
        phi = phi + delta + 0.5 * (theta[::-1] - theta)
        fast = [{"w": torch.from_numpy(row)} for row in theta]
        got = [replicas[i].step(fast[i], fast[1 - i])["w"].numpy() for i in (0, 1)]
        np.testing.assert_allclose(got, phi, atol=2e-6)
    # golden: a change of the update shows here even if the reference is changed along with it
    np.testing.assert_allclose(phi[0], [-0.38620309, 0.20626341, 1.19239056, 0.82509751], atol=1e-7)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_replicas_that_merge_in_random_pairs_stay_together(alpha: float) -> None:
    """They begin apart and with momenta of their own; without training each meeting halves what lies between two."""
    rng = np.random.default_rng(1)
    replicas = [
        OuterOptimizer(alpha, 0.3, {"w": torch.tensor([value], dtype=torch.float32)}) for value in rng.normal(size=32)
    ]
    fast = [one.step({"w": one.slow["w"] + float(rng.normal())}, None) for one in replicas]
    for _ in range(120):
        order = rng.permutation(32)
        for i, j in zip(order[::2], order[1::2], strict=True):
            fast[i], fast[j] = replicas[i].step(fast[i], fast[j]), replicas[j].step(fast[j], fast[i])
    assert np.var([one["w"].item() for one in fast]) < 1e-6


@given(alpha=st.floats(0, 0.99), beta=st.floats(0.001, 4))
@settings(max_examples=60, deadline=None)
def test_unstable_settings_are_refused_by_config_and_optimizer_alike(alpha: float, beta: float) -> None:
    def refused(build: object) -> str:
        try:
            build()  # type: ignore[operator]
        except ConfigError as error:
            return str(error)
        return ""

    by_optimizer = refused(lambda: OuterOptimizer(alpha, beta, {}))
    by_config = refused(lambda: parse({"merging": {"alpha": alpha, "beta": beta}}))
    unstable = beta >= 2 * (1 - alpha**2)
    assert bool(by_optimizer) == bool(by_config) == unstable
    if unstable:
        assert f"{2 * (1 - alpha**2):.3g}" in by_optimizer and f"{2 * (1 - alpha**2):.3g}" in by_config


def test_defaults_are_stable_and_off() -> None:
    config = MergingSection()
    OuterOptimizer(config.alpha, config.outer_lr, {})
    assert not config.enabled


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_by_default_the_outer_step_leaves_the_length_of_training_as_it_is(alpha: float) -> None:
    outer = OuterOptimizer(alpha, MergingSection(alpha=alpha).outer_lr, {"w": torch.zeros(1)})
    for _ in range(200):
        before = outer.slow["w"].item()
        outer.step({"w": outer.slow["w"] + 1.0}, None)  # each round of training moves it by 1
    assert outer.slow["w"].item() - before == pytest.approx(1.0, abs=1e-4)


def test_lag_lowers_the_weight_and_ends_it() -> None:
    assert [round(partner_weight(lag), 4) for lag in (-3, 0, 1, 3, 4, 5)] == [0.5, 0.5, 0.3536, 0.25, 0.2236, 0.0]
    start = adapter(0)
    alone = OuterOptimizer(0.5, 0.7, start).step(adapter(1), None)
    for late in (adapter(2), {name: torch.full((3, 5), torch.nan) for name in NAMES}):
        stepped = OuterOptimizer(0.5, 0.7, start).step(adapter(1), late, partner_lag=5)
        assert all(torch.equal(stepped[name], alone[name]) for name in NAMES)


def test_share_goes_from_alone_to_merged_in_a_line() -> None:
    outer = OuterOptimizer(0.5, 0.7, adapter(0))
    alone, half, whole = (outer.preview(adapter(1), adapter(2), share=share) for share in (0.0, 0.5, 1.0))
    assert outer.num_steps == 0
    for name in NAMES:
        torch.testing.assert_close(half[name], (alone[name] + whole[name]) / 2)
    stepped = outer.step(adapter(1), adapter(2))
    assert all(torch.equal(stepped[name], whole[name]) for name in NAMES)


def test_restored_optimizer_goes_on_bit_for_bit() -> None:
    outer = OuterOptimizer(0.5, 0.7, adapter(0))
    outer.step(adapter(1), adapter(2))
    again = OuterOptimizer(0.5, 0.7, adapter(9))
    again.restore(*outer.state())
    assert again.num_steps == 1
    first, second = outer.step(adapter(3), adapter(4)), again.step(adapter(3), adapter(4))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_what_comes_out_is_no_alias_of_the_slow_weights() -> None:
    outer = OuterOptimizer(0.5, 0.7, adapter(0))
    new = outer.step(adapter(1), None)
    kept = outer.slow[NAMES[0]].clone()
    new[NAMES[0]].zero_()
    tensors, _ = outer.state()
    tensors["slow_weights"][NAMES[0]].zero_()
    assert torch.equal(outer.slow[NAMES[0]], kept)


def test_misfits_are_refused_before_anything_changes() -> None:
    outer = OuterOptimizer(0.5, 0.7, adapter(0))
    for misfit in ({NAMES[0]: torch.zeros(3, 5)}, {name: torch.zeros(5, 3) for name in NAMES}):
        with pytest.raises(MergeError, match=r"policy\.lora"):
            outer.step(adapter(1), misfit)
    assert outer.num_steps == 0
    assert all(torch.equal(outer.slow[name], adapter(0)[name]) for name in NAMES)


def test_adopted_weights_have_no_momentum() -> None:
    outer = OuterOptimizer(0.5, 0.7, adapter(0))
    outer.step(adapter(1), None)
    outer.adopt({NAMES[0]: torch.ones(3, 5)})
    new = outer.step(outer.slow, None)
    assert torch.equal(new[NAMES[0]], torch.ones(3, 5))
    assert not torch.equal(new[NAMES[1]], outer.state()[0]["slow_weights"][NAMES[1]] - 1)


def test_training_during_the_exchange_is_kept() -> None:
    snapshot, current = adapter(1), adapter(2)
    outer = OuterOptimizer(0.5, 0.7, adapter(0))
    new = outer.step(snapshot, adapter(3))
    carried = carry_over(new, snapshot, current)
    for name in NAMES:
        torch.testing.assert_close(carried[name] - new[name], current[name] - snapshot[name])

"""Every formula against a plain Python loop in float64, and a few values by hand."""

import math

import pytest
import torch

from swarm.training.losses import clipped_loss, kl_to_reference, masked_log_ratio, sequence_scales

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_delta": 4.0}


def loss_of(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """(loss, gradient by log π, whether clipped) of one token."""
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    terms = clipped_loss(logprob.exp(), torch.tensor([[advantage]], dtype=torch.float64), **CLIP)
    terms.loss.sum().backward()
    assert logprob.grad is not None
    return terms.loss.item(), logprob.grad.item(), bool(terms.is_clipped.item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),  # 1.28 · 2
        (0.5, 2.0, -1.0, -1.0, False),  # below the range, but a good answer may come back
        (1.0, -2.0, 2.0, 2.0, False),
        (0.5, -2.0, 1.6, 0.0, True),  # 0.8 · 2: bad and already unlikely
        (3.0, -2.0, 6.0, 6.0, False),  # bad and likelier than before: full gradient
        (9.0, -2.0, 8.0, 0.0, True),  # two-sided clip at 4
    ],
)
def test_clipped_loss_by_hand(ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool):
    got = loss_of(ratio, advantage)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-12)
    assert got[2] is is_clipped


@pytest.mark.parametrize(("ratio", "sign"), [(0.8, -1.0), (1.28, 1.0), (4.0, -1.0), (0.1, 0.0), (9.0, 0.0)])
def test_a_token_at_a_bound_or_without_advantage_is_not_clipped(ratio: float, sign: float):
    ratios, advantages = (torch.tensor([[value]], dtype=torch.float64) for value in (ratio, sign))
    terms = clipped_loss(ratios, advantages, **CLIP)
    assert terms.loss.item() == pytest.approx(-ratio * sign) and not terms.is_clipped.item()


def test_clipped_loss_equals_a_plain_loop():
    generator = torch.Generator().manual_seed(1)
    new = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    old = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    signed = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    got = clipped_loss((new - old).exp(), signed, **CLIP).loss
    for i in range(6):
        a = signed[i, 0].item()
        for t in range(9):
            r = math.exp(new[i, t].item() - old[i, t].item())
            capped = min(r, 4.0) if a < 0 else r
            expected = -min(capped * a, min(max(r, 0.8), 1.28) * a)
            assert got[i, t].item() == pytest.approx(expected, rel=1e-12)


def test_flag_says_exactly_where_the_gradient_is_cut():
    new = torch.linspace(-4, 4, 201, dtype=torch.float64)[None].repeat(2, 1).requires_grad_()
    terms = clipped_loss(new.exp(), torch.tensor([[1.0], [-1.0]]).double(), **CLIP)
    terms.loss.sum().backward()
    assert new.grad is not None
    assert torch.equal(terms.is_clipped, new.grad == 0)


def test_extreme_ratios_stay_finite():
    new = torch.tensor([[0.0, -1e4]], requires_grad=True)
    ratio = masked_log_ratio(new, torch.tensor([[-1e4, 0.0]]), torch.ones(1, 2)).exp()
    terms = clipped_loss(ratio, torch.tensor([[1.0]]), **CLIP)
    terms.loss.sum().backward()
    assert new.grad is not None
    assert torch.isfinite(terms.loss).all() and torch.isfinite(new.grad).all()


def test_kl_by_hand():
    # d = log π_ref - log π = .5 and -1: e^.5 - 1.5 and e^-1
    got = kl_to_reference(
        torch.tensor([-1.0, -1.0], dtype=torch.float64), torch.tensor([-0.5, -2.0], dtype=torch.float64), torch.ones(2)
    )
    assert got.tolist() == pytest.approx([math.exp(0.5) - 1.5, math.exp(-1.0)], rel=1e-14)


def test_kl_is_unbiased_over_the_policy():
    """The mean of k3 over draws from π is the true KL."""
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    estimate = (policy * kl_to_reference(policy.log(), reference.log(), torch.ones(3))).sum()
    truth = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert estimate.item() == pytest.approx(truth, rel=1e-12)


COUNTS = torch.tensor([3, 0, 5, 2])  # the second answer is left out


def aggregated(kind: str) -> float:
    """Sum over sequences of scale · Σ_t (i + 1): every token of sequence i has loss i + 1."""
    scales = sequence_scales(COUNTS, kind, max_new_tokens=10).tolist()
    return sum(scale * n * (i + 1) for i, (scale, n) in enumerate(zip(scales, COUNTS.tolist(), strict=True)))


def test_dapo_is_the_mean_over_all_tokens():
    assert aggregated("dapo") == pytest.approx((3 * 1 + 5 * 3 + 2 * 4) / 10)


def test_grpo_is_the_mean_of_the_means_of_those_that_take_part():
    assert aggregated("grpo") == pytest.approx((1 + 3 + 4) / 3)


def test_dr_grpo_divides_by_a_constant():
    assert aggregated("dr_grpo") == pytest.approx((3 * 1 + 5 * 3 + 2 * 4) / (4 * 10))


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_an_answer_of_weight_one_half_counts_as_half_an_answer(kind: str):
    """Two of them are as one, and all others as if there were only one."""
    once = sequence_scales(COUNTS, kind, 10)
    weights = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0])
    twice = sequence_scales(torch.cat([COUNTS[:1], COUNTS]), kind, 10, weights)
    assert (twice[0] + twice[1]).item() == pytest.approx(once[0].item())
    assert twice[2:].tolist() == pytest.approx(once[1:].tolist())


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_scales_are_finite_when_nothing_takes_part(kind: str):
    assert torch.isfinite(sequence_scales(torch.tensor([0, 0]), kind, 10)).all()

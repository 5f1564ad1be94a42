"""Ratio levels and adaptive clip bounds against plain Python in float64."""

import math
from itertools import pairwise

import pytest
import torch

from swarm.training.losses import clipped_loss, policy_ratio
from swarm.training.policy_loss import BOUNDS, AdaptiveClip, bound_pulls

LOG_R = torch.tensor([[0.3, -0.2, 0.5, -0.4], [0.1, 0.4, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)


def test_token_level_is_the_ratio_itself():
    assert policy_ratio(LOG_R, MASK, "token")[0].tolist() == pytest.approx([math.exp(x) for x in LOG_R[0].tolist()])


def test_sequence_level_is_the_geometric_mean_over_the_tokens_of_the_answer():
    got = policy_ratio(LOG_R, MASK, "sequence")
    assert got[0].tolist() == pytest.approx([math.exp(0.2 / 4)] * 4)
    assert got[1, :2].tolist() == pytest.approx([math.exp(0.5 / 2)] * 2)


def test_minpro_multiplies_by_the_smallest_ratio_before_the_token():
    got = policy_ratio(LOG_R, MASK, "minpro")
    for row, tokens in ((0, 4), (1, 2)):
        ratios = [math.exp(x) for x in LOG_R[row].tolist()]
        expected = [ratios[t] * (min(ratios[:t]) if t else 1.0) for t in range(tokens)]
        assert got[row, :tokens].tolist() == pytest.approx(expected)


def test_minpro_skips_masked_tokens_in_the_prefix():
    mask = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    got = policy_ratio(torch.tensor([[0.4, 0.0, 0.1]], dtype=torch.float64), mask, "minpro")
    assert got[0, 2].item() == pytest.approx(math.exp(0.5))  # not e^.1 · 1


def test_gradient_at_an_unmoved_policy_is_the_same_at_every_level():
    """∇ of the summed loss is -A per token, whatever the level (with one answer per row)."""
    gradients = []
    for level in ("token", "sequence", "minpro"):
        log_r = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
        ratio = policy_ratio(log_r * MASK, MASK, level)
        loss = clipped_loss(ratio, torch.tensor([[2.0], [-1.0]]), clip_low=0.2, clip_high=0.28, clip_delta=4.0).loss
        (loss * MASK).sum().backward()
        gradients.append(log_r.grad)
    assert gradients[0] is not None
    assert gradients[0].tolist() == [[-2.0] * 4, [1.0, 1.0, 0.0, 0.0]]
    assert all(torch.allclose(gradients[0], other, rtol=1e-14) for other in gradients[1:])  # type: ignore[arg-type]


def test_bounds_rise_first_below_then_above():
    assert BOUNDS[0] == (0.6, 1.2) and BOUNDS[4] == (0.8, 1.2) and BOUNDS[5] == (0.8, 1.25) and BOUNDS[-1] == (0.8, 2.0)
    assert all(a < b for a, b in pairwise(BOUNDS))


def test_pulls_equal_the_gradient_of_the_clipped_loss():
    generator = torch.Generator().manual_seed(3)
    new = torch.randn(5, 8, generator=generator, dtype=torch.float64).requires_grad_()
    signed = torch.randn(5, 1, generator=generator, dtype=torch.float64)
    mask = (torch.rand(5, 8, generator=generator) < 0.8).double()
    got = bound_pulls(new.exp(), signed.expand(5, 8), mask, clip_delta=4.0)
    for i, (low, high) in enumerate(BOUNDS):
        loss = clipped_loss(new.exp(), signed, clip_low=1 - low, clip_high=high - 1, clip_delta=4.0).loss
        (gradient,) = torch.autograd.grad((loss * mask).sum(), new)
        assert got[i].tolist() == pytest.approx(
            [gradient.clamp(max=0).abs().sum().item(), gradient.clamp(min=0).sum().item()], rel=1e-12
        )


def test_a_ratio_at_a_bound_still_pulls():
    ratios = torch.tensor([[1.2, 0.6, 4.0]], dtype=torch.float64)
    pulls = torch.tensor([[1.0, -1.0, -1.0]], dtype=torch.float64)
    got = bound_pulls(ratios, pulls, torch.ones(1, 3), clip_delta=4.0)
    assert got[0].tolist() == [1.2, 4.6] and got[1].tolist() == [1.2, 4.0]


def chosen(ratios: list[float], pulls: list[float]) -> tuple[float, float]:
    clip = AdaptiveClip()
    clip.choose(bound_pulls(torch.tensor([ratios]), torch.tensor([pulls]), torch.ones(1, len(ratios)), 4.0))
    return round(1 - clip.clip_low, 6), round(1 + clip.clip_high, 6)


def test_balanced_updates_keep_the_first_bounds():
    assert chosen([1.0, 1.0], [1.0, -1.0]) == (0.6, 1.2)


def test_unlikely_bad_answers_are_left_out_first():
    # .66 · 1 against 1 · .5 and .1: good .5, bad .76; from c_low .7 on bad .1
    assert chosen([1.0, 0.66, 1.0], [0.5, -1.0, -0.1]) == (0.7, 1.2)


def test_half_of_the_update_is_enough_and_an_update_of_nothing_is_balanced():
    assert chosen([1.0, 0.625, 1.0], [1.0, -1.0, -0.375]) == (0.6, 1.2)  # 1 against .625 + .375
    assert chosen([0.66], [-1.0]) == (0.7, 1.2), "nothing is left of it"


def test_then_good_answers_may_grow():
    # good .5 and, once c_high reaches 1.45, 1.45 · 1; bad 1
    assert chosen([1.0, 1.44, 1.0], [0.5, 1.0, -1.0]) == (0.8, 1.45)


def test_bounds_are_not_raised_where_that_changes_nothing():
    assert chosen([1.0, 1.0], [0.2, -1.0]) == (0.6, 1.2)
    assert chosen([1.0], [0.0]) == (0.6, 1.2)

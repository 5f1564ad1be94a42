"""Golden values by plain Python arithmetic."""

import math

import pytest
import torch

from swarm.config import TrainingSection
from swarm.extensions.points import CORRECTIONS
from swarm.training.corrections import OffPolicyTokens, Opsm
from swarm.training.losses import masked_log_ratio

# two answers of 3 and 2 tokens; the last column of the second is padding
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -3.0, 0.0]], dtype=torch.float64)
BEHAVIOUR = torch.tensor([[-1.0, -3.0, -0.4], [-0.1, -0.2, -9.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
LOG_W = masked_log_ratio(OLD, BEHAVIOUR, MASK)


def correction_weights(log_w: torch.Tensor, mask: torch.Tensor, kind: str, cap: float) -> torch.Tensor:
    """Of good answers, which opsm leaves alone."""
    tokens = OffPolicyTokens(log_w, log_w, mask, torch.ones(len(mask), 1))
    weights: torch.Tensor = CORRECTIONS.make(kind, {}, "").factors(tokens, TrainingSection(correction_cap=cap))
    return weights


def opsm(log_ratio: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, limit: float) -> torch.Tensor:
    tokens = OffPolicyTokens(torch.zeros_like(log_ratio), log_ratio, mask, advantages)
    return Opsm().factors(tokens, TrainingSection(opsm_limit_nats=limit))


def test_log_importance_is_old_minus_behaviour_and_zero_at_padding():
    assert LOG_W.flatten().tolist() == pytest.approx([0.0, 1.0, -0.1, -0.9, -2.8, 0.0])


def test_tis_caps_each_token():
    weights = correction_weights(LOG_W, MASK, "tis", 2.0)
    assert weights[0].tolist() == pytest.approx([1.0, 2.0, math.exp(-0.1)])  # e^1 = 2.718 is capped
    assert weights[1, :2].tolist() == pytest.approx([math.exp(-0.9), math.exp(-2.8)])


def test_sequence_mask_drops_the_answer_whose_geometric_mean_is_outside():
    # mean log w: (0 + 1 - .1)/3 = .3 <= log 2 = .693; (-.9 - 2.8)/2 = -1.85 outside
    weights = correction_weights(LOG_W, MASK, "sequence_mask", 2.0)
    assert weights.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_sequence_mask_keeps_both_under_a_wider_cap():
    assert correction_weights(LOG_W, MASK, "sequence_mask", math.exp(1.9)).min().item() == 1.0


def test_icepop_drops_tokens_outside_the_band():
    # w = 1, e, e^-.1 and e^-.9, e^-2.8: inside [1/2, 2] are the first and the third, and none of the second answer
    weights = correction_weights(LOG_W, MASK, "icepop", 2.0)
    assert weights[0].tolist() == pytest.approx([1.0, 0.0, math.exp(-0.1)])
    assert weights[1, :2].tolist() == [0.0, 0.0]


def test_opsm_drops_bad_answers_that_the_policy_would_hardly_write():
    # mean log μ - log π: (0 - 1 + .1)/3 = -.3 and (.9 + 2.8)/2 = 1.85
    def kept(first: float, second: float, limit: float) -> list[float]:
        return opsm(LOG_W, MASK, torch.tensor([[first], [second]]), limit)[:, 0].tolist()

    assert kept(-1, -1, 0.5) == [1.0, 0.0]
    assert kept(-1, 1, 0.5) == [1.0, 1.0]  # good answers stay, however far
    assert kept(-1, -1, 1.9) == [1.0, 1.0]
    assert kept(-1, 0, 0.5) == [1.0, 1.0]


def test_none_leaves_every_token_as_it_is():
    assert correction_weights(LOG_W, MASK, "none", 2.0).unique().tolist() == [1.0]


def test_on_policy_data_is_not_corrected():
    log_w = masked_log_ratio(OLD, OLD, MASK)
    for kind in CORRECTIONS.names:
        assert correction_weights(log_w, MASK, kind, 2.0).unique().tolist() == [1.0]


@pytest.mark.parametrize(("correction", "most"), [("tis", 2.0), ("tis+opsm", 2.0), ("shaped+opsm", 1.1)])
def test_no_claim_of_an_author_gives_its_good_answers_a_larger_weight(correction: str, most: float):
    claimed = torch.tensor([[-1e30, -700.0, -12.0, -1.0, -0.05, 0.0]])
    own = torch.tensor([[-1.0, -1e30, -1.0, -3.0, -3.0, -1e30]])
    weights = correction_weights(masked_log_ratio(own, claimed, torch.ones(1, 6)), torch.ones(1, 6), correction, 2.0)
    assert torch.isfinite(weights).all() and weights.min() >= 0 and weights.max() <= most + 1e-6
    assert weights[0, 0].item() == pytest.approx(most, rel=1e-5), "a claim far too low gets the most there is"


def test_shaped_weights_keep_good_answers_that_the_policy_hardly_writes():
    def factors(advantage: float, half_weight: float = 0.1) -> list[float]:
        tokens = OffPolicyTokens(LOG_W, torch.zeros_like(LOG_W), MASK, torch.full((2, 1), advantage))
        found: torch.Tensor = CORRECTIONS.make("shaped+opsm", {"half_weight": half_weight}, "").factors(
            tokens, TrainingSection()
        )
        return found[MASK > 0].tolist()

    weights = [1.0, math.e, math.exp(-0.1), math.exp(-0.9), math.exp(-2.8)]
    assert factors(1.0) == pytest.approx([1.1 * w / (w + 0.1) for w in weights])
    assert factors(1.0)[-1] > 0.4 > 6 * weights[-1], "of e^-2.8 = .06 tis leaves no more than that"
    assert max(factors(1.0)) < 1.1
    assert factors(-1.0) == pytest.approx([min(w, 2.0) for w in weights])


def test_shaped_weights_drop_bad_answers_far_from_the_policy():
    tokens = OffPolicyTokens(LOG_W, LOG_W, MASK, -torch.ones(2, 1))
    found: torch.Tensor = CORRECTIONS.make("shaped+opsm", {}, "").factors(tokens, TrainingSection())
    assert found[1, :2].tolist() == [0.0, 0.0] and found[0, 0].item() == 1.0

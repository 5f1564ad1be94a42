"""The loss of a micro-batch under every combination: against plain Python, and properties that must always hold."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.config import TrainingSection
from swarm.extensions.points import CORRECTIONS
from swarm.training.experience import TrainingGroup
from swarm.training.micro_batch import MicroBatch, training_sequences
from swarm.training.policy_loss import ClipRange, Logprobs, LossTerms, policy_loss
from swarm.training.step_report import StepSums
from swarm.types import Rollout
from tests.unit.experience_factory import group

RATIOS = ("token", "sequence", "minpro")
CLIP = ClipRange(0.2, 0.28)
COMBINATIONS = [
    (ratio, correction, reference)
    for ratio, correction, reference in product(RATIOS, CORRECTIONS.names, ("start", "sampler"))
    if reference == "start" or correction not in ("tis", "icepop", "tis+opsm", "shaped+opsm")
]


def section(
    ratio: str = "token", correction: str = "none", reference: str = "start", **more: object
) -> TrainingSection:
    values = {"ratio": ratio, "correction": correction, "ratio_reference": reference, "inner_epochs": 2, **more}
    return TrainingSection.model_validate(values)


def batch_of(behaviour: Tensor, advantages: Tensor, comparable: Tensor | None = None) -> MicroBatch:
    ones = torch.ones_like(advantages)
    comparable = ones if comparable is None else comparable
    return MicroBatch([], advantages, ones, behaviour, ones, comparable, is_replay=torch.zeros_like(ones))


def loss_and_gradient(
    new: Tensor, old: Tensor, mask: Tensor, part: MicroBatch, config: TrainingSection, base: Tensor | None = None
) -> tuple[LossTerms, Tensor, Tensor]:
    """(terms, [B] loss summed over tokens, [B, T] gradient by log π)."""
    new = new.clone().requires_grad_()
    terms = policy_loss(part, Logprobs(new, old, base, torch.ones(len(new), 1), mask), config, CLIP)
    sums = (terms.loss * mask).sum(-1)
    (gradient,) = torch.autograd.grad(sums.sum(), new)
    return terms, sums.detach(), gradient


def plain_answer(
    new: list[float], old: list[float], mu: list[float], a: float, ratio: str, correction: str, reference: str
) -> tuple[float, list[float]]:
    """(loss summed over the tokens of one answer, their weights in ESS), C = 2, opsm limit .5."""
    steps = range(len(new))
    start = mu if reference == "sampler" else old
    r = [math.exp(new[t] - start[t]) for t in steps]
    w = [math.exp(old[t] - mu[t]) for t in steps]
    if ratio == "sequence":
        r = [math.prod(r) ** (1 / len(r))] * len(r)
    if ratio == "minpro":
        r = [r[t] * (min(r[:t]) if t else 1.0) for t in steps]
    factor = [1.0 for _ in steps]
    if correction.startswith("tis"):
        factor = [min(x, 2.0) for x in w]
    if correction == "shaped+opsm":
        factor = [1.1 * x / (x + 0.1) if a > 0 else min(x, 2.0) for x in w]
    if correction == "icepop":
        factor = [x if 0.5 <= x <= 2 else 0.0 for x in w]
    if "sequence_mask" in correction and not 0.5 <= math.prod(w) ** (1 / len(w)) <= 2:
        factor = [0.0 for _ in steps]
    if "opsm" in correction and a < 0 and sum(mu[t] - new[t] for t in steps) / len(new) > 0.5:
        factor = [0.0 for _ in steps]
    loss = 0.0
    for t in steps:
        capped = min(r[t], 4.0) if a < 0 else r[t]
        loss -= factor[t] * min(capped * a, min(max(r[t], 0.8), 1.28) * a)
    return loss, [min(w[t], 2.0) if factor[t] else 0.0 for t in steps]


@pytest.mark.parametrize(("ratio", "correction", "reference"), COMBINATIONS)
def test_every_combination_equals_a_plain_loop(ratio: str, correction: str, reference: str):
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 2, 5, 7, 7, 3, 6, 4]

    def noise(scale: float) -> Tensor:
        return torch.randn(8, 7, generator=generator, dtype=torch.float64) * scale

    new = noise(1.0) - 3
    old = new + noise(0.3)
    behaviour = old + noise(0.5) + torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]
    signed = torch.tensor([[1.0], [-1.0]] * 4, dtype=torch.float64)
    mask = torch.tensor([[float(t < n) for t in range(7)] for n in lengths], dtype=torch.float64)
    config = section(ratio, correction, reference)
    terms, got, _ = loss_and_gradient(new, old, mask, batch_of(behaviour, signed), config)
    for i, n in enumerate(lengths):
        pi, pi_old, mu = (tensor[i, :n].tolist() for tensor in (new, old, behaviour))
        loss, weights = plain_answer(pi, pi_old, mu, signed[i, 0].item(), ratio, correction, reference)
        assert got[i].item() == pytest.approx(loss, rel=1e-12, abs=1e-14)
        assert terms.ess_weights[i].tolist() == pytest.approx([*weights, *[0.0] * (7 - n)], rel=1e-12, abs=1e-14)


LOGPROB = st.one_of(st.floats(-8, 0), st.sampled_from([-1e4, 1e4, -20.0, 0.0]))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(new, old, behaviour, mask, advantages); answers of any length, extreme log-probs, holes in the mask."""
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def matrix(values: st.SearchStrategy[float], width: int = length) -> Tensor:
        rows = draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=size, max_size=size))
        return torch.tensor(rows, dtype=torch.float64)

    signed = matrix(st.floats(-3, 3), width=1)
    return matrix(LOGPROB), matrix(LOGPROB), matrix(LOGPROB), matrix(st.sampled_from([0.0, 1.0])), signed


CHOICES = st.sampled_from(COMBINATIONS)


@given(batches(), CHOICES)
@settings(max_examples=150, deadline=None)
def test_extreme_ratios_give_no_nan(batch: tuple[Tensor, ...], choice: tuple[str, str, str]):
    new, old, behaviour, mask, signed = batch
    terms, loss, gradient = loss_and_gradient(new, old, mask, batch_of(behaviour, signed), section(*choice), base=old)
    assert loss.isfinite().all() and gradient.isfinite().all()
    assert terms.pull.isfinite().all() and terms.sampler_distance.isfinite().all()
    assert terms.ess_weights.isfinite().all()


@given(batches(), CHOICES, st.sampled_from([math.inf, -math.inf, math.nan, 1e4]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_masked_tokens_never_matter(
    batch: tuple[Tensor, ...], choice: tuple[str, str, str], garbage: float, everywhere: bool
):
    new, old, behaviour, mask, signed = batch
    config = section(*choice, kl_coef=0.1)
    clean = loss_and_gradient(new, old, mask, batch_of(behaviour, signed), config, base=old - 0.1)
    hidden = mask == 0
    dirty_new, dirty_mu = new.masked_fill(hidden, garbage), behaviour.masked_fill(hidden, garbage)
    dirty_old = old.masked_fill(hidden, garbage) if everywhere else old
    dirty_base = (old - 0.1).masked_fill(hidden, garbage)
    dirty = loss_and_gradient(dirty_new, dirty_old, mask, batch_of(dirty_mu, signed), config, base=dirty_base)
    assert torch.equal(clean[1], dirty[1]) and torch.equal(clean[2], dirty[2])
    assert torch.equal(clean[0].ess_weights, dirty[0].ess_weights)
    assert not dirty[2][hidden].any()


@given(batches(), CHOICES)
@settings(max_examples=75, deadline=None)
def test_order_of_answers_does_not_matter(batch: tuple[Tensor, ...], choice: tuple[str, str, str]):
    new, old, behaviour, mask, signed = batch
    config = section(*choice)
    _, loss, gradient = loss_and_gradient(new, old, mask, batch_of(behaviour, signed), config)
    flipped = batch_of(behaviour.flip(0), signed.flip(0))
    _, other, other_gradient = loss_and_gradient(new.flip(0), old.flip(0), mask.flip(0), flipped, config)
    assert torch.equal(other.flip(0), loss) and torch.equal(other_gradient.flip(0), gradient)


@given(batches(), CHOICES)
@settings(max_examples=75, deadline=None)
def test_no_advantage_gives_no_gradient(batch: tuple[Tensor, ...], choice: tuple[str, str, str]):
    new, old, behaviour, mask, signed = batch
    _, _, gradient = loss_and_gradient(new, old, mask, batch_of(behaviour, signed * 0), section(*choice))
    assert not gradient.any()


def equal_losses(batch: tuple[Tensor, ...], left: TrainingSection, right: TrainingSection) -> bool:
    new, old, behaviour, mask, signed = batch
    part = batch_of(behaviour, signed)
    a, b = (loss_and_gradient(new, old, mask, part, config) for config in (left, right))
    return torch.allclose(a[1], b[1], rtol=1e-12) and torch.allclose(a[2], b[2], rtol=1e-12)


@given(batches())
@settings(max_examples=75, deadline=None)
def test_icepop_and_tis_agree_without_a_cap(batch: tuple[Tensor, ...]):
    assert equal_losses(
        batch, section("token", "icepop", correction_cap=1e12), section("token", "tis", correction_cap=1e12)
    )


@given(batches(), st.sampled_from(["sequence", "minpro"]))
@settings(max_examples=75, deadline=None)
def test_ratio_levels_agree_on_answers_of_one_token(batch: tuple[Tensor, ...], level: str):
    one_token = (*(tensor[:, :1] for tensor in batch[:4]), batch[4])
    assert equal_losses(one_token, section("token"), section(level))


@given(batches())
@settings(max_examples=75, deadline=None)
def test_corrections_leave_fresh_data_alone(batch: tuple[Tensor, ...]):
    new, _, _, mask, signed = batch
    fresh = (new, new, new, mask, signed)
    assert all(equal_losses(fresh, section(), section("token", correction)) for correction in CORRECTIONS.names)


@given(batches())
@settings(max_examples=75, deadline=None)
def test_the_ratio_to_the_sampler_is_r_times_w(batch: tuple[Tensor, ...]):
    """Unclipped and unweighted, r = π/μ from the sampler equals π/π_old where π_old = μ."""
    new, old, _, mask, signed = batch
    assert equal_losses((new, old, old, mask, signed), section(), section("token", "none", "sampler"))


def test_the_adaptive_clip_weighs_answers_as_the_loss_does():
    new, mask = torch.zeros(2, 1), torch.ones(2, 1)
    terms, _, _ = loss_and_gradient(new, new, mask, batch_of(new, torch.tensor([[1.0], [-1.0]])), section())
    sums = StepSums()
    for _ in range(2):
        sums.add_bound_pulls(terms, torch.tensor([[0.5], [0.25]]), mask, 4.0)
    assert sums.bound_pulls[0].tolist() == [1.0, 0.5]


def test_distance_to_the_sampler_is_half_the_squared_difference_where_it_is_known():
    new, mask = torch.full((2, 2), -4.0), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    part = batch_of(torch.full((2, 2), -1.0), torch.ones(2, 1))._replace(has_behaviour=torch.tensor([[1.0], [0.0]]))
    terms, _, _ = loss_and_gradient(new, new, mask, part, section())
    assert terms.sampler_distance.tolist() == [[4.5, 4.5], [0.0, 0.0]]
    assert terms.sampler_known.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_unusable_logprobs_only_measure_the_distance():
    """Of another lineage: no weights, no ratio to the sampler, but opsm may drop the answer."""
    new = torch.full((2, 3), -4.0, dtype=torch.float64)
    mu = torch.full((2, 3), -1.0, dtype=torch.float64)
    part = batch_of(mu, torch.tensor([[1.0], [-1.0]]).double(), comparable=torch.zeros(2, 1))
    ones = torch.ones(2, 3, dtype=torch.float64)
    for correction, expected in (("tis", [-3.0, 3.0]), ("sequence_mask", [-3.0, 3.0]), ("opsm", [-3.0, 0.0])):
        terms, loss, _ = loss_and_gradient(new, new, ones, part, section("token", correction))
        assert loss.tolist() == expected
        assert terms.ess_weights[0].tolist() == [1.0] * 3
    _, loss, _ = loss_and_gradient(new, new, ones, part, section("token", "none", "sampler"))
    assert loss.tolist() == [-3.0, 3.0]


def test_own_tokens_of_the_current_version_are_fresh_in_ess_and_weighed_in_the_loss():
    """Rounding between engine and trainer is not staleness, but the loss is corrected for it all the same."""
    new = torch.full((2, 4), -2.0, dtype=torch.float64)
    mu = new + 0.3
    part = batch_of(mu, torch.ones(2, 1).double())._replace(fresh_from=torch.tensor([[0.0], [3.0]]))
    terms, loss, _ = loss_and_gradient(new, new, torch.ones(2, 4), part, section("token", "tis"))
    assert terms.fresh.tolist() == [[1] * 4, [0] * 3 + [1]]
    stale = math.exp(-0.3)
    assert terms.ess_weights.flatten().tolist() == pytest.approx([1.0] * 4 + [stale] * 3 + [1.0])
    assert loss.tolist() == pytest.approx([-4 * stale] * 2)


def test_the_gradient_of_the_kl_term_is_that_of_the_reverse_kl_whoever_sampled():
    """Over all three tokens, each as often as μ draws it; against ∇ KL(π ‖ base) by the logits in numpy."""
    logits = np.array([0.4, -0.3, 0.1])
    pi = np.exp(logits) / np.exp(logits).sum()
    base, mu = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.45, 0.25])
    kl = (pi * np.log(pi / base)).sum()
    expected = pi * (np.log(pi / base) - kl)  # d KL / d logits
    forward = pi - base  # d KL(base ‖ π) / d logits, which is what k3 as a loss gives where μ = π

    def gradient_and_value(sampler: np.ndarray, *, is_known: bool = True) -> tuple[list[float], float]:
        z = torch.tensor(logits, requires_grad=True)
        new = z.log_softmax(-1)[:, None]  # [3 answers of one token, 1]
        known = torch.ones(3, 1) if is_known else torch.zeros(3, 1)
        part = batch_of(torch.tensor(np.log(sampler))[:, None], torch.zeros(3, 1).double(), known)
        at = Logprobs(new, new.detach(), torch.tensor(np.log(base))[:, None], torch.ones(3, 1), torch.ones(3, 1))
        terms = policy_loss(part, at, section(kl_coef=1.0), CLIP)
        (gradient,) = torch.autograd.grad((terms.loss[:, 0] * torch.tensor(sampler)).sum(), z)
        return gradient.tolist(), (terms.kl[:, 0] * torch.tensor(sampler)).sum().item()

    for sampler in (pi, mu):
        gradient, value = gradient_and_value(sampler)
        assert gradient == pytest.approx(expected.tolist(), rel=1e-9) and value == pytest.approx(kl, rel=1e-9)
    assert gradient_and_value(pi)[0] != pytest.approx(forward.tolist(), rel=0.05)
    unknown, _ = gradient_and_value(mu, is_known=False)
    assert unknown != pytest.approx(expected.tolist(), rel=1e-3), "without log μ nothing can weigh it"


def test_the_weight_of_the_kl_term_is_cut_at_the_cap():
    new = torch.full((1, 1), -1.0, dtype=torch.float64)
    part = batch_of(new - 3.0, torch.zeros(1, 1).double())  # π / μ = e³
    _, loss, gradient = loss_and_gradient(new, new, torch.ones(1, 1), part, section(kl_coef=1.0), base=new - 0.5)
    assert loss.item() == pytest.approx(2 * (math.exp(-0.5) + 0.5 - 1))
    assert gradient.item() == pytest.approx(2 * 0.5)


def test_gspo_by_hand():
    """J = mean_i min(s_i A_i, clip(s_i) A_i), s_i = (Π_t r_t)^(1/|y_i|): every answer counts once (2507.18071)."""
    log_r = [[0.03, -0.02], [0.05, 0.01, 0.0, 0.02], [0.0, 0.0004, 0.0002]]
    advantages = [1.0, -1.0, 0.5]
    config = section("sequence", clip_delta=4.0)
    rollouts = tuple(Rollout("a", (1,) * len(row), (-1.0,) * len(row), True, float(i)) for i, row in enumerate(log_r))
    taught = TrainingGroup((1,), replace(group(), rollouts=rollouts), usable_logprobs=True, is_own=True)
    sequences = training_sequences([taught], config, 8)
    assert [sequence.scale for sequence in sequences] == pytest.approx([1 / 6, 1 / 12, 1 / 9])

    mask = torch.tensor([[float(t < len(row)) for t in range(4)] for row in log_r], dtype=torch.float64)
    new = torch.tensor([row + [0.0] * (4 - len(row)) for row in log_r], dtype=torch.float64, requires_grad=True)
    part = batch_of(torch.zeros(3, 4), torch.tensor(advantages).double()[:, None])
    terms = policy_loss(
        part, Logprobs(new, torch.zeros(3, 4).double(), None, None, mask), config, ClipRange(3e-4, 4e-4)
    )
    scales = torch.tensor([[sequence.scale] for sequence in sequences], dtype=torch.float64)
    loss = (terms.loss * mask * scales).sum()
    (gradient,) = torch.autograd.grad(loss, new)

    s = [math.exp(sum(row) / len(row)) for row in log_r]  # e^.005, e^.02, e^.0002
    # the first is good and above 1 + 4e-4: clipped; the second bad and likelier than before: not; the third inside
    assert loss.item() == pytest.approx(-(1.0004 * 1.0 - s[1] + s[2] * 0.5) / 3, rel=1e-12)
    expected = [[0.0] * 4, [s[1] / 12] * 4, [-0.5 * s[2] / 9] * 3 + [0.0]]  # s_i A_i / (3 |y_i|)
    assert gradient.tolist() == [pytest.approx(row, rel=1e-12) for row in expected]


@pytest.mark.parametrize("aggregation", ["dapo", "grpo", "dr_grpo"])
def test_with_ratio_sequence_an_answer_counts_once_whatever_its_length_and_the_aggregation(aggregation: str):
    rollouts = tuple(Rollout("a", (1,) * n, (-1.0,) * n, True, float(n > 2)) for n in (2, 6))
    taught = TrainingGroup((1,), replace(group(), rollouts=rollouts), usable_logprobs=True, is_own=True)
    short, long = training_sequences([taught], section("sequence", aggregation=aggregation), 8)
    assert (short.scale * 2, long.scale * 6) == pytest.approx((0.5, 0.5))

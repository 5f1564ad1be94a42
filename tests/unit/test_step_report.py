"""Reports of steps, by hand: means by tokens, epochs of one step, steps that were not applied."""

import math
from dataclasses import replace

import pytest

from swarm.training.step_report import Staleness, StepReport, StepSums

ONE = StepReport(
    loss=1.0, grad_norm=2.0, clip_fraction=0.1, entropy=0.5, ess_fraction=0.9, kl=0.2, sampler_kl=0.3, engine_kl=0.4,
    mean_ratio=1.1, num_tokens=10, lr=0.1, adapter_norm=5.0, staleness_mean=1.0, staleness_max=4,
)  # fmt: skip
OTHER = StepReport(
    loss=5.0, grad_norm=6.0, clip_fraction=0.5, entropy=0.9, ess_fraction=0.5, kl=0.6, sampler_kl=None, engine_kl=None,
    mean_ratio=1.5, num_tokens=30, lr=0.2, adapter_norm=7.0, staleness_mean=None, staleness_max=2,
)  # fmt: skip


def test_parts_of_a_batch_are_weighed_by_tokens_and_skipped_ones_left_out() -> None:
    skipped = StepReport.skip("nothing usable", lr=0.4)
    whole = StepReport.of_parts([ONE, OTHER, skipped])
    assert (whole.loss, whole.grad_norm, whole.kl) == pytest.approx((4.0, 5.0, 0.5))
    assert (whole.sampler_kl, whole.engine_kl, whole.staleness_mean) == pytest.approx((0.3, 0.4, 1.0)), (
        "of those that know it"
    )
    assert (whole.num_tokens, whole.staleness_max, whole.lr, whole.adapter_norm) == (40, 4, 0.2, 7.0)
    assert StepReport.of_parts([skipped]) == skipped


def test_epochs_of_one_step_are_averaged_and_end_as_the_last_one() -> None:
    last = replace(OTHER, skip_reason="all clipped")
    whole = StepReport.mean([ONE, last], adapter_norm=8.0, staleness=Staleness(None, None))
    assert (whole.loss, whole.grad_norm, whole.clip_fraction) == pytest.approx((3.0, 4.0, 0.3))
    assert (whole.entropy, whole.kl, whole.mean_ratio) == pytest.approx((0.7, 0.4, 1.3))
    assert (whole.ess_fraction, whole.sampler_kl, whole.num_tokens, whole.lr) == (0.5, 0.3, 30, 0.2)
    assert whole.engine_kl == 0.4, "of the first, as later ones have moved"
    assert whole.skipped and whole.adapter_norm == 8.0


def test_a_step_without_tokens_shows_its_rate_and_reason_alone() -> None:
    assert StepReport.skip("nothing usable", lr=0.4).row() == {"train/lr": 0.4, "train/skip_reason": "nothing usable"}
    skipped = StepReport.skip("nothing usable", lr=0.4)
    assert (skipped.loss, skipped.ess_fraction, skipped.mean_ratio, skipped.num_tokens) == (0.0, 1.0, 1.0, 0)
    assert replace(ONE, num_tokens=1).row()["train/loss"] == 1.0


def test_sums_become_means_over_the_tokens_for_which_a_value_is_known() -> None:
    sums = StepSums(
        loss=3.0, num_tokens=8.0, num_clipped=2.0, entropy=4.0, ratio=10.0, kl=6.0, num_base_known=4.0,
        sampler_distance=1.0, num_sampler_known=2.0, engine_distance=3.0, num_fresh=4.0,
    )  # fmt: skip
    report = sums.report(grad_norm=1.5, lr=0.1, skip_reason="")
    assert (report.loss, report.clip_fraction, report.entropy, report.mean_ratio) == (3.0, 0.25, 0.5, 1.25)
    assert (report.kl, report.sampler_kl, report.engine_kl, report.num_tokens) == (1.5, 0.5, 0.75, 8)
    nothing = StepSums().report(grad_norm=0.0, lr=0.1, skip_reason="")
    assert (nothing.clip_fraction, nothing.entropy, nothing.kl, nothing.engine_kl) == (0.0, 0.0, None, None)


@pytest.mark.parametrize(
    ("loss", "grad_norm", "signal", "reason"),
    [
        (math.nan, 1.0, 1.0, "not finite"),
        (1.0, math.inf, 1.0, "not finite"),
        (1.0, 0.0, 0.0, "every token"),
        (1.0, 0.0, 1.0, ""),
        (1.0, 1.0, 0.0, ""),
    ],
)
def test_why_a_step_is_not_applied(loss: float, grad_norm: float, signal: float, reason: str) -> None:
    found = StepSums(loss=loss, signal=signal).why_not_applicable(grad_norm)
    assert reason in found and bool(reason) == bool(found)

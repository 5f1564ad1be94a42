"""What a lying partner can do: clipping, majorities, the gate; and when a node merges at all."""

import math

import pytest
import torch
from torch import Tensor

from swarm.config import MergingSection
from swarm.errors import MergeError
from swarm.merging.merger import MergeSchedule
from swarm.merging.outer_optimizer import OuterOptimizer
from swarm.merging.robust import (
    HISTORY_LEN,
    SHARES,
    NormClip,
    Refusals,
    choose_share,
    is_clearly_better,
    refuse_unusable,
)

SLOW = {"w": torch.zeros(4)}


def moved(norm: float) -> dict[str, Tensor]:
    return {"w": torch.tensor([norm, 0.0, 0.0, 0.0])}


def clip_after(*norms: float) -> NormClip:
    clip = NormClip(2.0)
    for norm in norms:
        clip.observe(moved(norm), SLOW)
    return clip


def test_a_partner_moves_us_by_twice_our_own_median_at_most() -> None:
    clip = clip_after(1.0, 3.0, 100.0)
    assert clip.radius("w") == 6.0
    near, far = {"w": torch.tensor([0.0, 5.0, 0.0, 0.0])}, {"w": torch.tensor([0.0, 300.0, -400.0, 0.0])}
    assert torch.equal(clip.clip(near, SLOW)["w"], near["w"])
    torch.testing.assert_close(clip.clip(far, SLOW)["w"], torch.tensor([0.0, 3.6, -4.8, 0.0]))
    assert (clip.clipped_share(near, SLOW), clip.clipped_share(far, SLOW)) == (0.0, 1.0)


def test_nothing_is_taken_before_the_node_has_moved_itself() -> None:
    assert torch.equal(NormClip().clip(moved(9.0), SLOW)["w"], SLOW["w"])
    assert torch.equal(clip_after(0.0).clip(moved(9.0), SLOW)["w"], SLOW["w"])


def test_a_hostile_partner_cannot_raise_the_radius() -> None:
    """A history of what partners sent would double with every merge: 2⁴⁰ after forty."""
    outer, clip = OuterOptimizer(0.5, 0.7, SLOW), NormClip(2.0)
    radii: list[float] = []
    for _ in range(40):
        fast = {"w": outer.slow["w"] + moved(1.0)["w"]}
        clip.observe(fast, outer.slow)
        radii.append(clip.radius("w"))
        outer.step(fast, clip.clip({"w": torch.full((4,), 1e30)}, outer.slow))
    assert radii == pytest.approx([2.0] * 40, rel=1e-3)
    assert outer.slow["w"].norm() < 40 * 0.7 * 1.5 / (1 - 0.5) + 1


def test_huge_finite_weights_are_clipped_and_not_turned_into_nan() -> None:
    clipped = clip_after(1.0).clip({"w": torch.full((4,), 3e38)}, SLOW)["w"]
    assert clipped.norm().item() == pytest.approx(2.0)


def test_only_the_last_changes_count() -> None:
    clip = clip_after(*[100.0] * 20, *[1.0] * HISTORY_LEN)
    assert clip.radius("w") == 2.0
    again = NormClip(2.0)
    again.restore(clip.state())
    assert again.radius("w") == 2.0 and again.state() == clip.state()


@pytest.mark.parametrize(
    ("partner", "told"),
    [
        ({"w": torch.tensor([0.0, math.nan, 0.0, 0.0])}, "finite"),
        ({"w": torch.tensor([0.0, math.inf, 0.0, 0.0])}, "finite"),
        ({"w": torch.zeros(5)}, "shape"),
        ({"v": torch.zeros(4)}, "difference"),
        ({}, "difference"),
    ],
)
def test_unusable_partners_are_refused(partner: dict[str, Tensor], told: str) -> None:
    for check in (lambda: refuse_unusable(partner, SLOW), lambda: clip_after(1.0).clip(partner, SLOW)):
        with pytest.raises(MergeError, match=told):
            check()


def shifted(by: float) -> list[float]:
    """Scores of eight tasks."""
    return [by + 0.1 * (task % 3) for task in range(8)]


@pytest.mark.parametrize(
    ("scores", "chosen", "num_tried"),
    [
        ({1.0: shifted(0.9), 0.5: shifted(0.8), 0.25: shifted(0.7), 0.0: shifted(0.6)}, 1.0, 2),
        ({1.0: shifted(0.1), 0.5: shifted(0.8), 0.25: shifted(0.9), 0.0: shifted(0.6)}, 0.25, 4),
        ({1.0: shifted(0.1), 0.5: shifted(0.2), 0.25: shifted(0.3), 0.0: shifted(0.6)}, 0.0, 4),
        ({1.0: shifted(0.4), 0.5: shifted(0.5), 0.25: shifted(0.5), 0.0: shifted(0.5)}, 0.5, 4),
        ({1.0: shifted(0.5), 0.5: shifted(0.9), 0.25: shifted(0.9), 0.0: shifted(0.5)}, 1.0, 2),
        ({1.0: [math.nan], 0.5: [-math.inf], 0.25: shifted(0.1), 0.0: shifted(0.1)}, 0.25, 4),
        ({1.0: [math.inf], 0.5: [math.nan], 0.25: [math.nan], 0.0: shifted(0.1)}, 0.0, 4),
        ({share: [math.nan] for share in SHARES}, 0.0, 4),
        ({share: [] for share in SHARES}, 1.0, 2),
    ],
)
def test_gate_takes_all_unless_none_is_clearly_better(
    scores: dict[float, list[float]], chosen: float, num_tried: int
) -> None:
    result = choose_share(lambda share: share, lambda share: scores[share])
    assert (result.share, result.candidate, len(result.scores)) == (chosen, chosen, num_tried)


def test_gate_is_not_moved_by_luck() -> None:
    none, whole = [1.0, 0, 0, 1, 1, 0, 0, 0], [0.0, 0, 1, 1, 0, 0, 0, 0]  # two tasks won, one lost: .125 ± .23
    assert not is_clearly_better(none, whole)
    assert is_clearly_better([1.0] * 6 + [0, 0], [0.0] * 8)
    assert is_clearly_better([1.0] * 5, [0.0] * 8), "a verifier may have failed on some answers"
    assert not is_clearly_better([1.0, 0, 0], [0.0] * 4)


def test_a_partner_whose_every_second_adapter_is_refused_is_always_tried() -> None:
    refusals = Refusals()
    refusals.count("liar", was_refused=True)
    for _ in range(50):
        for was_refused in (False, True):
            assert refusals.are_held_against("liar")
            refusals.count("liar", was_refused=was_refused)


def test_refusals_are_forgotten_by_passes_and_have_a_bound() -> None:
    refusals = Refusals()
    assert [refusals.count("peer", was_refused=True) for _ in range(100)] == [False] + [True] * 99
    num_passes = 0
    while refusals.are_held_against("peer"):
        refusals.count("peer", was_refused=False)
        num_passes += 1
    assert num_passes == 8
    for number in range(1000):
        refusals.count(f"name {number}", was_refused=True)
    assert len(refusals.state()) == 64
    restored = Refusals()
    restored.restore(refusals.state())
    assert restored.are_held_against("name 999") and not restored.are_held_against("name 0")


def test_fixed_schedule_merges_every_so_many_steps() -> None:
    schedule = MergeSchedule(MergingSection(inner_steps=3), seed=0)
    assert [schedule.is_due(step, step / 6) for step in range(1, 7)] == [False, False, True] * 2


def test_late_schedule_is_rare_early_and_sure_at_the_end() -> None:
    config = MergingSection(inner_steps=1, schedule="late")

    def plan(seed: int) -> list[bool]:
        return [MergeSchedule(config, seed).is_due(step, step / 4000) for step in range(1, 4001)]

    first = plan(3)
    assert 500 < sum(first[:3000]) < 700, "one in five"
    assert all(first[3000:])
    assert first == plan(3) != plan(4)


def test_late_schedule_without_a_known_end_is_fixed() -> None:
    schedule = MergeSchedule(MergingSection(inner_steps=2, schedule="late"), seed=3)
    assert all(schedule.is_due(step, None) for step in range(2, 100, 2))

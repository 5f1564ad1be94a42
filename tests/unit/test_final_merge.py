"""One replica's side of a final merge, the others being what a test says."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm.config import MergingSection
from swarm.merging.final_merge import FinalMerge, FinalResult, Wire
from swarm.merging.merger import Merger, MergeSchedule
from swarm.merging.outer_optimizer import Adapter, AdapterOrigin
from swarm.merging.pairer import BoundOnStrangers
from swarm.merging.robust import Scores
from swarm.types import MeetResult, Partner
from tests.unit.memory_pairer import LINEAGE, SHAPES, MemoryFinal, snapshot_of, start


def trained(by: float) -> Adapter:
    return {name: tensor + by for name, tensor in start().items()}


def met(weights: Adapter, weight: int = 1, **changes: Any) -> MeetResult:
    return MeetResult(Partner("peer", snapshot_of(weights, **changes)), weight)


def final_merge(
    final: MemoryFinal,
    own: Adapter,
    score: Callable[[Adapter], Scores] | None = None,
    bound: BoundOnStrangers = lambda peer_ids: ((), 1.0),
    **settings: Any,
) -> FinalResult:
    config = MergingSection(**({"enabled": True, "clip_factor": 100.0, "drift_threshold": 10.0} | settings))
    merger = Merger(config, AdapterOrigin(LINEAGE, 2.0, start()), MergeSchedule(config, seed=0))
    wire = Wire(merger.snapshot, merger.opened)
    return FinalMerge(config, wire, merger.origin, pairer=final, score=score, bound=bound).run(own, 7)


def moved(weights: Adapter) -> float:
    """Mean distance from the start, per value."""
    return sum((weights[name] - tensor).mean().item() for name, tensor in start().items()) / len(SHAPES)


def test_mean_of_four_is_that_of_all() -> None:
    final = MemoryFinal(4, 1, [met(trained(0.3)), met(trained(0.6), weight=2)])
    result = final_merge(final, trained(0.1))
    assert moved(result.weights) == pytest.approx(((0.1 + 0.3) / 2 + 0.6) / 2, abs=2e-3)
    assert result.is_merged and result.row["final/replicas"] == 4
    assert [(one.peer_id, one.weight) for one in final.appointments] == [("peer-0", 1), ("peer-3", 2)]
    assert final.appointments[0].snapshot.policy_version == 7


def test_who_does_not_come_is_not_in_the_mean() -> None:
    final = MemoryFinal(4, 0, [MeetResult(None, 0, "deadline"), met(trained(0.7), weight=2)])
    result = final_merge(final, trained(0.1))
    assert moved(result.weights) == pytest.approx((0.1 + 0.7) / 2, abs=2e-3)
    assert result.row["final/reasons"] == {"deadline": 1, "merged": 1}


@pytest.mark.parametrize("reason", ["", "deadline"])
def test_passenger_keeps_half_of_its_own(reason: str) -> None:
    final = MemoryFinal(
        3, 2, [MeetResult(None, 1, reason), MeetResult(Partner("peer-0", snapshot_of(trained(0.4))), 2)]
    )
    result = final_merge(final, trained(0.1))
    assert moved(result.weights) == pytest.approx((0.1 + 0.4) / 2, abs=2e-3)
    assert [(one.gives, one.takes) for one in final.appointments] == [(True, False), (False, True)]


def test_whoever_is_silent_until_the_last_window_has_half_at_most_whatever_it_claims() -> None:
    """64 places: five windows in vain, then a partner that says 32 replicas are in its adapter."""
    silent = [MeetResult(None, 0, "deadline")] * 5
    final = MemoryFinal(64, 0, [*silent, met(trained(0.5), weight=32)])
    result = final_merge(final, trained(0.1))
    assert moved(result.weights) == pytest.approx((0.1 + 0.5) / 2, abs=2e-3)


def test_strangers_together_have_their_share_beside_known_ones() -> None:
    """A quarter: two of the three partners are strangers, the last of which claims most."""
    partners = [met(trained(1.0)), met(trained(0.1), weight=2), met(trained(1.0), weight=4)]
    final = MemoryFinal(8, 0, partners)
    result = final_merge(final, trained(0.1), None, lambda peer_ids: ({"peer-1", "peer-4"}, 0.25), strangers_factor=1e9)
    assert result.row["final/strangers_part"] == pytest.approx(0.25)
    assert moved(result.weights) <= 0.75 * 0.1 + 0.25 * 1.0 + 2e-3


def test_all_strangers_move_the_own_adapter_no_further_than_its_own_way() -> None:
    """Nobody is known and no gate sees anything: six windows of adapters as far away as the clip allows."""
    partners = [met(trained(50.0), weight=2**window) for window in range(6)]
    final = MemoryFinal(64, 0, partners)
    result = final_merge(final, trained(0.1), None, lambda peer_ids: (peer_ids, 1.0), clip_factor=4.0)
    for name, tensor in start().items():
        way = (trained(0.1)[name] - tensor).norm()
        assert (result.weights[name] - trained(0.1)[name]).norm() <= way * 1.01


@pytest.mark.parametrize(
    "bad",
    [
        met(trained(0.5), weight=3),
        met(trained(0.5), lineage="cd" * 16),
        met(trained(0.5), payload=b"\xc0\x7f" * 20),
        met(trained(0.5), payload=b"short"),
    ],
    ids=["too many replicas", "another lineage", "NaN", "too short"],
)
def test_what_is_of_no_use_costs_its_meeting(bad: MeetResult) -> None:
    own = trained(0.1)
    result = final_merge(MemoryFinal(2, 0, [bad]), own)
    assert not result.is_merged and result.row["final/reasons"] == {"unusable": 1}
    assert all(torch.equal(result.weights[name], own[name]) for name in own)


def test_nobody_may_be_further_away_than_a_multiple_of_the_own_way() -> None:
    result = final_merge(MemoryFinal(2, 0, [met(trained(50.0))]), trained(0.1), clip_factor=2.0)
    assert moved(result.weights) == pytest.approx(0.1 + 2 * 0.1 / 2, abs=2e-3)
    assert result.row["final/clipped_share"] == 1.0


def nearer_is_better(weights: Adapter) -> Scores:
    """To 0.2, on three tasks."""
    return [-abs(moved(weights) - 0.2) + 0.001 * task for task in range(3)]


def test_harmful_adapter_is_left_out_by_whoever_meets_it_and_the_others_are_not() -> None:
    final = MemoryFinal(4, 0, [met(trained(5.0)), met(trained(0.3), weight=2)])
    result = final_merge(final, trained(0.1), nearer_is_better)
    assert result.row["final/reasons"] == {"gate": 1, "merged": 1} and result.row["final/replicas"] == 3
    assert moved(result.weights) == pytest.approx((0.1 + 0.3) / 2, abs=2e-3)
    assert result.row["final/score_merged"] > result.row["final/score_own"]


def test_small_harms_that_add_up_leave_the_own_adapter() -> None:
    """Each meeting is worse by less than the gate sees, all of them together by more."""
    scores = iter([[0.5, 0.6, 0.7], [0.60, 0.40, 0.65], [0.45, 0.45, 0.6]])
    final = MemoryFinal(4, 0, [met(trained(0.2)), met(trained(0.3), weight=2)])
    own = trained(0.1)
    result = final_merge(final, own, lambda weights: next(scores))
    assert result.row["final/reasons"] == {"merged": 2} and not result.is_merged and result.row["final/is_taken"] == 0
    assert all(torch.equal(result.weights[name], own[name]) for name in own)
    assert result.reset_names == frozenset()


def test_candidate_without_finite_scores_is_left_out() -> None:
    scores = iter([[0.5, 0.6], [-math.inf]])
    result = final_merge(MemoryFinal(2, 0, [met(trained(0.2))]), trained(0.1), lambda weights: next(scores))
    assert not result.is_merged and result.row["final/reasons"] == {"gate": 1}


def test_layers_that_drifted_apart_are_merged_as_products() -> None:
    generator = torch.Generator().manual_seed(1)
    own, theirs = (
        {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in start().items()}
        for _ in range(2)
    )
    result = final_merge(MemoryFinal(2, 0, [met(theirs)]), own, drift_threshold=0.1)
    assert result.reset_names == set(SHAPES) and result.row["final/product_factors"] == 2
    wanted = (own["l.lora_B"] @ own["l.lora_A"] + theirs["l.lora_B"] @ theirs["l.lora_A"]) / 2
    u, s, v = torch.linalg.svd(wanted, full_matrices=False)
    best = u[:, :2] @ s[:2].diag() @ v[:2]
    torch.testing.assert_close(result.weights["l.lora_B"] @ result.weights["l.lora_A"], best, atol=5e-2, rtol=0)


@pytest.mark.parametrize("own", [trained(0.1), trained(math.nan)], ids=["alone", "unsendable"])
def test_without_others_nothing_changes(own: Adapter) -> None:
    result = final_merge(MemoryFinal(1, 0, []), own)
    assert not result.is_merged and result.num_places == 1 and result.weights is own
    assert set(result.row["final/reasons"]) <= {"nobody", "unsendable"}


@pytest.mark.parametrize(("num_alone", "num_places"), [(2, 2), (3, 1)])
def test_who_ended_first_waits_for_the_others_so_many_times(num_alone: int, num_places: int) -> None:
    final = MemoryFinal(2, 0, [met(trained(0.3))])
    final.num_alone = num_alone
    result = final_merge(final, trained(0.1), final_tries=3)
    assert result.num_places == num_places and result.row["final/reasons"]["nobody"] == num_alone

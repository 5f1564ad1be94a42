"""The sources from which a lost stage is rebuilt, and the formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.errors import PipelineError
from swarm.pipeline.driver.recovery import (
    NeighbourCopy,
    Recovery,
    Situation,
    average_products,
    average_weights,
    checkfree_average,
    plan_recovery,
    twin_copy,
)

PREFIX = "model.layers."
NORMS = st.floats(0, 1e30)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stage(*layers: int, seed: int = 0) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{layer}.{name}": random(*shape, seed=100 * seed + 10 * layer + i)
        for layer in layers
        for i, (name, shape) in enumerate((("mlp.up_proj.weight", (4, 3)), ("norm.weight", (3,))))
    }


def shapes_of(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (1.0, 1.0, 0.5),
        (2.0, 1.0, 2 / 3),
        (1.0, 2.0, 1 / 3),
        (3.0, 1.0, 0.75),
        (8.0, 1.0, 0.75),
        (1.0, 8.0, 0.25),
        (0.0, 0.0, 0.5),
        (0.0, 5.0, 0.25),
    ],
)
def test_shares_by_hand(before: float, after: float, share: float) -> None:
    assert average_weights(before, after) == pytest.approx((share, 1 - share))


@given(NORMS, NORMS)
def test_shares_add_up_and_are_capped(before: float, after: float) -> None:
    one, other = average_weights(before, after)
    assert one + other == pytest.approx(1)
    assert 0.25 - 1e-12 <= one <= 0.75 + 1e-12
    assert (one > other) == (before > after) or before == pytest.approx(after)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0])
def test_odd_norms_are_refused(odd: float) -> None:
    with pytest.raises(PipelineError, match="finite and not negative"):
        average_weights(1.0, odd)


def test_the_average_is_that_of_the_paper_layer_by_layer() -> None:
    """Golden values in float64: ω = 2 and 1, so two thirds of the stage before."""
    lost, before, after = stage(2, 3), stage(0, 1, seed=1), stage(4, 5, seed=2)
    found = checkfree_average(shapes_of(lost), before, after, norm_before=2.0, norm_after=1.0, layer_prefix=PREFIX)
    assert list(found) == list(lost)
    for name in ("mlp.up_proj.weight", "norm.weight"):
        for place in (0, 1):
            one, other = before[f"{PREFIX}{place}.{name}"].double(), after[f"{PREFIX}{4 + place}.{name}"].double()
            wanted = ((2 * one + 1 * other) / 3).float()
            torch.testing.assert_close(found[f"{PREFIX}{2 + place}.{name}"], wanted, rtol=0, atol=0)


def test_stages_of_different_sizes_are_matched_by_place() -> None:
    lost, before, after = stage(2, 3, 4), stage(0, 1, seed=1), stage(5, 6, 7, 8, 9, seed=2)
    found = checkfree_average(shapes_of(lost), before, after, norm_before=1, norm_after=1, layer_prefix=PREFIX)
    name = "norm.weight"
    # the first with the first, the last with the last; the middle of three with the middle of five
    for layer, one, other in ((2, 0, 5), (3, 0, 7), (4, 1, 9)):
        wanted = (before[f"{PREFIX}{one}.{name}"].double() + after[f"{PREFIX}{other}.{name}"].double()) / 2
        torch.testing.assert_close(found[f"{PREFIX}{layer}.{name}"], wanted.float(), rtol=0, atol=0)


def test_a_replica_of_an_end_is_copied_from_the_neighbour_that_has_it() -> None:
    end = {"model.embed_tokens.weight": random(5, 3, seed=9)}
    lost, before, after = stage(1) | end, stage(0, seed=1) | end, stage(2, seed=2)
    found = checkfree_average(shapes_of(lost), before, after, norm_before=1, norm_after=3, layer_prefix=PREFIX)
    assert torch.equal(found["model.embed_tokens.weight"], end["model.embed_tokens.weight"])
    with pytest.raises(PipelineError, match=r"none for model\.embed_tokens"):
        checkfree_average(shapes_of(lost), stage(0), after, norm_before=1, norm_after=1, layer_prefix=PREFIX)


def test_what_neighbours_cannot_give_is_refused() -> None:
    lost, before, after = stage(1), stage(0), stage(2)
    norm = f"{PREFIX}2.norm.weight"
    for odd, rule in (
        ({norm: after[norm]}, "none for"),
        (after | {norm: torch.ones(4)}, "equal shape"),
        (after | {norm: torch.full((3,), float("nan"))}, "finite"),
        ({}, "trains layers"),
    ):
        with pytest.raises(PipelineError, match=rule):
            checkfree_average(shapes_of(lost), before, odd, norm_before=1, norm_after=1, layer_prefix=PREFIX)


def adapter(layer: int, seed: int, b_scale: float = 1.0) -> dict[str, Tensor]:
    name = f"{PREFIX}{layer}.mlp.up_proj.lora_"
    return {f"{name}A": random(2, 6, seed=seed), f"{name}B": random(5, 2, seed=seed + 1) * b_scale}


def test_adapters_are_averaged_by_their_products() -> None:
    """Compared with the truncated SVD of the whole matrix in float64 (Eckart–Young)."""
    before, after = adapter(0, 1), adapter(2, 5)
    found = checkfree_average(shapes_of(adapter(1, 0)), before, after, norm_before=3, norm_after=1, layer_prefix=PREFIX)

    def product(weights: dict[str, Tensor], layer: int) -> Tensor:
        name = f"{PREFIX}{layer}.mlp.up_proj.lora_"
        return weights[f"{name}B"].double() @ weights[f"{name}A"].double()

    u, values, v = torch.linalg.svd(0.75 * product(before, 0) + 0.25 * product(after, 2), full_matrices=False)
    wanted = u[:, :2] * values[:2] @ v[:2]
    torch.testing.assert_close(product(found, 1), wanted, rtol=0, atol=1e-5)


def test_equal_products_average_to_themselves_and_empty_ones_stay_learnable() -> None:
    b, a = random(5, 2, seed=1), random(2, 6, seed=2)
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])  # the same product, other factors
    found_b, found_a = average_products([(b, a), (b @ turn, turn.T @ a)], (0.5, 0.5))
    torch.testing.assert_close(found_b @ found_a, b @ a, rtol=0, atol=1e-5)
    torch.testing.assert_close(found_a.norm(dim=1), torch.full((2,), 1 / math.sqrt(3)))
    found_b, found_a = average_products([(b * 0, a), (b * 0, random(2, 6, seed=3))], (0.5, 0.5))
    assert not found_b.any()
    assert (found_a.norm(dim=1) > 0.5).all()


def test_an_edge_stage_is_copied_from_its_twin() -> None:
    ends = {"model.norm.weight": random(3, seed=8), "lm_head.weight": random(5, 3, seed=9)}
    lost, twin = stage(4, 5) | ends, stage(2, 3, seed=1) | ends
    found = twin_copy(shapes_of(lost), twin, layer_prefix=PREFIX)
    for name in ("mlp.up_proj.weight", "norm.weight"):
        assert torch.equal(found[f"{PREFIX}5.{name}"], twin[f"{PREFIX}3.{name}"])
    assert all(torch.equal(found[name], value) for name, value in ends.items())
    found["lm_head.weight"].zero_()
    assert twin["lm_head.weight"].any(), "a copy, not the twin's own"
    with pytest.raises(PipelineError, match="as many layers, got 2 and 1"):
        twin_copy(shapes_of(lost), stage(3) | ends, layer_prefix=PREFIX)


def copy_of(stage: int, holder: int, version: int) -> NeighbourCopy:
    return NeighbourCopy(stage, holder, version, {})


def plans(**situation: object) -> list[tuple[int, str, tuple[int, ...]]]:
    made: list[Recovery] = plan_recovery(Situation(**({"num_stages": 6, "version": 50} | situation)))  # type: ignore[arg-type]
    return [(plan.stage, plan.strategy, plan.sources) for plan in made]


def test_the_order_of_recovery() -> None:
    lost = frozenset({2})
    copies = (copy_of(2, 1, 41), copy_of(2, 3, 47), copy_of(4, 3, 50))
    assert plans(lost=lost, copies=copies) == [(2, "neighbour_copy", (3,))]
    assert plans(lost=lost, copies=copies, max_copy_age=2) == [(2, "average", (1, 3))]
    assert plans(lost=lost, copies=(copy_of(2, 3, 51),)) == [(2, "average", (1, 3))], "of a future that was lost"
    assert plans(lost=frozenset({0}), swaps_edges=True) == [(0, "twin_copy", (1,))]
    assert plans(lost=frozenset({5}), swaps_edges=True) == [(5, "twin_copy", (4,))]
    assert plans(lost=frozenset({0}), is_frozen=True) == [(0, "base", ())]
    assert plans(lost=frozenset({0}), has_checkpoint=True) == [(0, "checkpoint", ())]
    assert plans(lost=frozenset({1, 3})) == [(1, "average", (0, 2)), (3, "average", (2, 4))]
    assert plans(lost=frozenset()) == []


def test_two_adjacent_losses_are_said_plainly_and_fall_back() -> None:
    lost = frozenset({2, 3})
    with pytest.raises(PipelineError, match=r"nothing for stage 2: stages \[2, 3\] are adjacent and lost together"):
        plans(lost=lost)
    assert plans(lost=lost, has_checkpoint=True) == [(2, "checkpoint", ()), (3, "checkpoint", ())]
    assert plans(lost=lost, is_frozen=True) == [(2, "base", ()), (3, "base", ())]
    # the copy of 2 that 3 held is gone with it; that of 3 at 4 is not
    copies = (copy_of(2, 3, 50), copy_of(3, 4, 50))
    assert plans(lost=lost, copies=copies, is_frozen=True) == [(2, "base", ()), (3, "neighbour_copy", (4,))]
    assert plans(lost=frozenset({0, 1}), swaps_edges=True, is_frozen=True) == [(0, "base", ()), (1, "base", ())]


def test_an_edge_without_a_twin_needs_more_than_one_neighbour() -> None:
    with pytest.raises(PipelineError, match=r"stage 5 is at an edge .* save checkpoints or neighbour copies"):
        plans(lost=frozenset({5}))

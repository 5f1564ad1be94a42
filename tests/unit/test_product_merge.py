"""Merging B·A: exact where the rank allows, best where not, and drift measured without the large matrix."""

import math

import pytest
import torch
from torch import Tensor

from swarm.adapters.product_merge import (
    LowRank,
    Merged,
    average_factors,
    averaging_error,
    drift,
    merge_by_layer,
    merge_products,
)
from swarm.errors import MergeError

INPUTS, OUTPUTS = 12, 9


def adapter(seed: int, rank: int = 3, layers: tuple[str, ...] = ("one", "two")) -> dict[str, Tensor]:
    """Rows of A at right angles, as those that LoRA draws nearly are in a wide layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        drawn = torch.randn(max(rank, INPUTS), rank, generator=generator)
        tensors[f"{layer}.lora_A"] = 2 * torch.linalg.qr(drawn).Q[:INPUTS].T.contiguous()
        tensors[f"{layer}.lora_B"] = torch.randn(OUTPUTS, rank, generator=generator)
    return tensors


def product(tensors: dict[str, Tensor], scaling: float, layer: str = "one") -> Tensor:
    return scaling * (tensors[f"{layer}.lora_B"].double() @ tensors[f"{layer}.lora_A"].double())


def test_merge_of_other_ranks_and_scalings_is_exact_where_it_fits() -> None:
    first, second = adapter(0, rank=3), adapter(1, rank=5)
    merged = merge_products([LowRank(first, 2.0), LowRank(second, 0.5)], [0.7, 0.3], rank=8, scaling=4.0)
    expected = 0.7 * product(first, 2.0) + 0.3 * product(second, 0.5)
    torch.testing.assert_close(product(merged.tensors, 4.0), expected, atol=1e-5, rtol=1e-5)
    assert merged.truncation["one"] < 1e-12
    assert merged.tensors["one.lora_A"].shape == (8, INPUTS) and merged.tensors["one.lora_B"].shape == (OUTPUTS, 8)


@pytest.mark.parametrize("like_own", [False, True])
def test_what_does_not_fit_is_cut_best_and_said(like_own: bool) -> None:
    first, second = adapter(0), adapter(1)
    like = first if like_own else None
    merged = merge_products([LowRank(first, 2.0), LowRank(second, 2.0)], [0.5, 0.5], rank=3, scaling=2.0, like=like)
    full = 0.5 * product(first, 2.0) + 0.5 * product(second, 2.0)
    singular = torch.linalg.svdvals(full)
    error = torch.linalg.norm(product(merged.tensors, 2.0) - full) / torch.linalg.norm(full)
    best = singular[3:].norm() / singular.norm()
    assert error.item() == pytest.approx(best.item(), rel=1e-5)
    assert merged.truncation["one"] == pytest.approx(best.item(), rel=1e-9)


def test_a_rank_larger_than_all_is_padded_with_nothing() -> None:
    only = adapter(0, rank=2)
    merged = merge_products([LowRank(only, 1.0)], [1.0], rank=20, scaling=1.0, like=adapter(0, rank=20))
    assert merged.tensors["one.lora_A"].shape == (20, INPUTS)
    torch.testing.assert_close(product(merged.tensors, 1.0), product(only, 1.0), atol=1e-5, rtol=1e-5)


def test_merging_with_oneself_gives_back_the_own_factors() -> None:
    own = adapter(0)
    merged = merge_products([LowRank(own, 2.0)] * 2, [0.5, 0.5], rank=3, scaling=2.0, like=own)
    for name, tensor in own.items():
        torch.testing.assert_close(merged.tensors[name], tensor, atol=1e-4, rtol=1e-4)


def test_untrained_adapters_merge_into_an_untrained_one() -> None:
    fresh = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in adapter(0).items()}
    merged = merge_products([LowRank(fresh, 2.0)] * 2, [0.5, 0.5], rank=3, scaling=2.0, like=fresh)
    assert product(merged.tensors, 2.0).abs().max() == 0
    assert all(torch.isfinite(tensor).all() for tensor in merged.tensors.values())
    assert drift(fresh, fresh) == {"one": 0.0, "two": 0.0}


def test_drift_is_the_error_of_averaging_factors() -> None:
    first, second = adapter(0), adapter(1)
    separate = average_factors([first, second], [0.5, 0.5])
    mean = (product(first, 1.0) + product(second, 1.0)) / 2
    expected = torch.linalg.norm(product(separate, 1.0) - mean) / torch.linalg.norm(mean)
    assert drift(first, second)["one"] == pytest.approx(expected.item(), rel=1e-6)
    assert drift(first, first)["one"] == pytest.approx(0.0, abs=1e-7)
    opposite = {name: -t if "lora_B" in name else t.clone() for name, t in first.items()}
    assert drift(first, opposite)["one"] == 0.0, "same A: averaging factors is exact whatever B is"
    both = {name: -t for name, t in first.items()}
    assert drift(first, both)["one"] == pytest.approx(1.0), "the same product in another form averages to nothing"
    lost = {name: t if "lora_A" in name else torch.zeros_like(t) for name, t in second.items()}
    nothing = {name: torch.zeros_like(t) for name, t in first.items()}
    assert drift(lost, nothing)["one"] == 0.0
    cancelling = {"x.lora_A": torch.eye(1), "x.lora_B": torch.eye(1)}
    other = {"x.lora_A": 2 * torch.eye(1), "x.lora_B": -0.5 * torch.eye(1)}
    assert drift(cancelling, other)["x"] == math.inf


def test_averaging_error_is_drift_for_any_number_and_weights() -> None:
    first, second, third = adapter(0), adapter(1), adapter(2)
    pair = averaging_error([first, second], [0.5, 0.5])
    assert pair == pytest.approx(drift(first, second), rel=1e-6)
    weights = [0.5, 0.3, 0.2]
    separate = average_factors([first, second, third], weights)
    wanted = sum(
        (w * product(one, 1.0) for w, one in zip(weights, (first, second, third), strict=True)), torch.zeros(())
    )
    expected = torch.linalg.norm(product(separate, 1.0) - wanted) / torch.linalg.norm(wanted)
    assert averaging_error([first, second, third], weights)["one"] == pytest.approx(expected.item(), rel=1e-6)


def pair_merge(own: dict[str, Tensor], partner: dict[str, Tensor], drift_threshold: float) -> Merged:
    return merge_by_layer([LowRank(own, 2.0), LowRank(partner, 2.0)], [0.5, 0.5], 3, 2.0, drift_threshold, like=own)


def test_only_layers_that_drifted_apart_are_merged_as_products() -> None:
    own = adapter(0)
    partner = {**own, **{name: t for name, t in adapter(1).items() if name.startswith("two")}}
    merged = pair_merge(own, partner, drift_threshold=0.1)
    assert merged.reset_names == ["two.lora_A", "two.lora_B"]
    torch.testing.assert_close(merged.tensors["one.lora_A"], own["one.lora_A"])
    separate = average_factors([own, partner], [0.5, 0.5])
    full = (product(own, 2.0, "two") + product(partner, 2.0, "two")) / 2
    by_product = torch.linalg.norm(product(merged.tensors, 2.0, "two") - full)
    assert by_product < torch.linalg.norm(product(separate, 2.0, "two") - full)
    assert pair_merge(own, partner, drift_threshold=10.0).reset_names == []


def test_after_a_product_merge_others_can_still_average_factor_by_factor() -> None:
    """The form turned as the own A is chosen; any other form of the same product would be foreign to all replicas."""
    generator = torch.Generator().manual_seed(5)
    own = adapter(0)
    partner, third = (
        {name: t + 0.3 * torch.randn(t.shape, generator=generator) for name, t in own.items()} for _ in range(2)
    )
    aligned = pair_merge(own, partner, 0.0).tensors
    split = merge_products([LowRank(own, 2.0), LowRank(partner, 2.0)], [0.5, 0.5], 3, 2.0).tensors
    torch.testing.assert_close(product(aligned, 2.0), product(split, 2.0), atol=1e-4, rtol=1e-4)
    assert drift(aligned, third)["one"] < 0.08 < 0.3 < drift(split, third)["one"]


def test_other_layers_or_sides_are_refused() -> None:
    with pytest.raises(MergeError, match="same layers of one base, got a difference at two"):
        drift(adapter(0), adapter(1, layers=("one",)))
    wider = {name: torch.randn(3, INPUTS + 1) if "lora_A" in name else t for name, t in adapter(0).items()}
    with pytest.raises(MergeError, match="same layers of one base, got a difference at one"):
        merge_products([LowRank(adapter(0), 1.0), LowRank(wider, 1.0)], [0.5, 0.5], 3, 1.0)
    with pytest.raises(MergeError, match="lora_A and a lora_B"):
        drift({"one.lora_A": torch.zeros(3, 4)}, {"one.lora_A": torch.zeros(3, 4)})
    with pytest.raises(MergeError, match="one rank, got 3 and 2"):
        drift(adapter(0), adapter(1, rank=2))
    odd = {"one.lora_A": torch.zeros(3, 4), "one.lora_B": torch.zeros(4, 2)}
    with pytest.raises(MergeError, match=r"\[rank, inputs\]"):
        drift(odd, odd)


def test_factors_keep_their_sizes_over_many_merges() -> None:
    """A alone would shrink and B grow with each merge, where the form of the product is only as close as can be."""
    own = adapter(0)
    sizes = {name: tensor.norm().item() for name, tensor in own.items()}
    for seed in range(1, 13):
        both = [LowRank(own, 2.0), LowRank(adapter(seed), 2.0)]
        own = merge_products(both, [0.5, 0.5], rank=len(own["one.lora_A"]), scaling=2.0, like=own).tensors
    for name, tensor in own.items():
        if name.endswith("lora_A"):
            assert tensor.norm().item() == pytest.approx(sizes[name], rel=1e-4)
        else:
            assert tensor.norm().item() < 1.5 * sizes[name]

"""Merges adapters by their products B·A, and measures how far that is from merging their factors one by one.

Averaging A and B separately differs from averaging B·A by (B₁ − B₂)(A₁ − A₂)/4: second order, and small while replicas of one
start stay close. For other ranks, other initial values, or after much drift the products are merged:

    Σ wᵢ·sᵢ·Bᵢ·Aᵢ = [w₁s₁B₁ …]·[A₁; …]  ──QR of both──▶  core R×R, R = Σ rᵢ  ──SVD──▶  the wanted rank

at a cost of O((d + k)·R²); the d×k matrix is never made. Everything is computed in float64.

The factors of stacked experts hold one small pair for each expert, so their product means nothing. They are averaged one by
one, always.

`greedy_soup` chooses which adapters to merge by the score of each mixture (Wortsman et al., arXiv 2203.05482).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.errors import MergeError


@dataclass(frozen=True, slots=True)
class Soup:
    """The chosen mixture."""

    weights: list[float]
    """Weights by adapter: equal for those in the mixture, 0 for the others; they sum to 1."""
    score: float
    alone: list[float]
    """Score of each adapter alone."""


def greedy_soup(num_adapters: int, score: Callable[[Sequence[float]], float]) -> Soup:
    """Start with the best adapter and add each next one if the mean with it scores no worse. `score` takes weights.

    On a tie the adapter is added, since a mean of more adapters is less noisy.
    """
    alone = [score([float(i == one) for i in range(num_adapters)]) for one in range(num_adapters)]
    order = sorted(range(num_adapters), key=lambda one: -alone[one])
    members, best = {order[0]}, alone[order[0]]
    for candidate in order[1:]:
        tried = score(_equal_weights(members | {candidate}, num_adapters))
        if tried >= best:
            members, best = members | {candidate}, tried
    return Soup(_equal_weights(members, num_adapters), best, alone)


def _equal_weights(members: set[int], num_adapters: int) -> list[float]:
    return [1 / len(members) if i in members else 0.0 for i in range(num_adapters)]


Adapter = Mapping[str, Tensor]
_A, _B = ".lora_A", ".lora_B"
_INNER = ".base_layer"


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter to merge."""

    tensors: Adapter
    scaling: float
    """alpha / rank: the layer adds scaling · B·A."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged adapter."""

    tensors: dict[str, Tensor]
    truncation: dict[str, float] = field(default_factory=dict)
    """Layer → ‖part beyond the rank‖ / ‖whole product‖, of layers merged as products."""

    @property
    def reset_names(self) -> list[str]:
        """Tensors whose basis was rotated, so their optimizer moments are no longer valid."""
        return [layer + part for layer in self.truncation for part in (_A, _B)]


def layers_of(tensors: Adapter) -> list[str]:
    """Return the names of the adapted layers. Raises MergeError for a factor without its partner."""
    layers = sorted({name.removesuffix(_A).removesuffix(_B) for name in tensors})
    for layer in layers:
        if set(tensors) & {layer, layer + _A, layer + _B} != {layer + _A, layer + _B}:
            raise MergeError(f"an adapter must have a lora_A and a lora_B for every layer; {layer} has others")
    return layers


def rank_of(tensors: Adapter) -> int:
    """Return the rank of an adapter: that of its plain layers, or the number of rows where it has none."""
    stacked = stacked_layers(tensors)
    layers = layers_of(tensors)
    return len(tensors[next((layer for layer in layers if layer not in stacked), layers[0]) + _A])


def stacked_layers(tensors: Adapter) -> set[str]:
    """Return the layers whose factors are of all experts of a mixture, A [experts · rank, k] and B [d, rank · experts].

    peft wraps the two weights of stacked experts one in the other, and names the inner one `base_layer`.
    """
    inner = {name.removesuffix(_A) for name in tensors if name.endswith(_INNER + _A)}
    return inner | {layer.removesuffix(_INNER) for layer in inner}


def average_factors(adapters: Sequence[Adapter], weights: Sequence[float]) -> dict[str, Tensor]:
    """Average A and B separately, for adapters of one rank, scaling and start."""
    return {
        name: sum((w * one[name].double() for w, one in zip(weights, adapters, strict=True)), torch.zeros(())).float()
        for name in adapters[0]
    }


def merge_products(
    adapters: Sequence[LowRank],
    weights: Sequence[float],
    rank: int,
    scaling: float,
    like: Adapter | None = None,
    layers: Sequence[str] | None = None,
) -> Merged:
    """Compute Σ wᵢ·sᵢ·Bᵢ·Aᵢ of each layer as B·A of `rank` with `scaling`: the best approximation of that rank.

    Of the equal forms of a product, `like` selects the one whose A has orthogonal rows, as in a fresh adapter, oriented like
    A of `like` and with its norm, so that factors can be averaged again. Without it both factors get the same norm.
    `layers` are those to merge, all by default. Raises MergeError if layers or their sides differ.
    """
    check_layers([one.tensors for one in adapters])
    layers = layers_of(adapters[0].tensors) if layers is None else layers
    if stacked := sorted(stacked_layers(adapters[0].tensors) & set(layers)):
        raise MergeError(
            f"factors of stacked experts can be averaged, but not merged as products, got {stacked[0]}; merge adapters of "
            "one rank and alpha, without --product"
        )
    tensors: dict[str, Tensor] = {}
    truncation: dict[str, float] = {}
    for layer in layers:
        pairs = list(zip(adapters, weights, strict=True))
        stacked_b = torch.cat([w * one.scaling * one.tensors[layer + _B].double() for one, w in pairs], 1)  # [d, R]
        stacked_a = torch.cat([one.tensors[layer + _A].double() for one, _ in pairs], 0)  # [R, k]
        near = None if like is None else like[layer + _A].double()
        factor_b, factor_a, truncation[layer] = _refactored(stacked_b, stacked_a, rank, like_a=near)
        tensors[layer + _B] = (factor_b / scaling).float().contiguous()
        tensors[layer + _A] = factor_a.float().contiguous()
    return Merged(tensors, truncation)


def merge_by_layer(
    adapters: Sequence[LowRank],
    weights: Sequence[float],
    rank: int,
    scaling: float,
    drift_threshold: float,
    like: Adapter | None = None,
) -> Merged:
    """Compute Σ wᵢ·adapterᵢ: by factors where that is accurate enough, by products elsewhere.

    Products are used in layers where averaging factors has an error above `drift_threshold`, and in all layers where a rank
    or scaling differs from the wanted one. `reset_names` of the result are the factors whose basis was rotated.
    """
    tensors = [one.tensors for one in adapters]
    alike = all(one.scaling == scaling and rank_of(one.tensors) == rank for one in adapters)
    if not alike:
        return merge_products(adapters, weights, rank, scaling=scaling, like=like)
    apart = [layer for layer, error in averaging_error(tensors, weights).items() if error > drift_threshold]
    products = merge_products(adapters, weights, rank, scaling=scaling, like=like, layers=apart)
    return Merged({**average_factors(tensors, weights), **products.tensors}, products.truncation)


def drift(first: Adapter, second: Adapter) -> dict[str, float]:
    """Return by layer the error of averaging factors: ‖(B₁−B₂)(A₁−A₂)‖/4 over ‖(B₁A₁+B₂A₂)/2‖, by Gram matrices.

    The adapters have one rank and scaling. 0 where they are equal, infinity where their products cancel. Stacked experts are
    left out.
    """
    check_layers([first, second])
    values: dict[str, float] = {}
    for layer in _plain_layers(first):
        b1, b2 = first[layer + _B].double(), second[layer + _B].double()
        a1, a2 = first[layer + _A].double(), second[layer + _A].double()
        if a1.shape != a2.shape:
            raise MergeError(f"drift is between adapters of one rank, got {len(a1)} and {len(a2)}; merge products")
        error = _product_norm(b1 - b2, a1 - a2) / 4
        mean = _product_norm(torch.cat([b1, b2], 1), torch.cat([a1, a2], 0)) / 2
        values[layer] = error / mean if mean > 0 else math.inf if error > 0 else 0.0
    return values


def averaging_error(adapters: Sequence[Adapter], weights: Sequence[float]) -> dict[str, float]:
    """Return by layer ‖ΣwB·ΣwA − ΣwBA‖ / ‖ΣwBA‖: `drift` for any number of adapters and weights, to about 1e-7."""
    check_layers(adapters)
    mean = average_factors(adapters, weights)
    errors: dict[str, float] = {}
    for layer in _plain_layers(adapters[0]):
        weighted = [w * one[layer + _B].double() for one, w in zip(adapters, weights, strict=True)]
        factors = [one[layer + _A].double() for one in adapters]
        wanted = _product_norm(torch.cat(weighted, 1), torch.cat(factors, 0))
        mean_b, mean_a = mean[layer + _B].double(), mean[layer + _A].double()
        error = _product_norm(torch.cat([mean_b, *(-b for b in weighted)], 1), torch.cat([mean_a, *factors], 0))
        errors[layer] = error / wanted if wanted > 0 else math.inf if error > 0 else 0.0
    return errors


def check_layers(adapters: Sequence[Adapter]) -> None:
    """Raises MergeError unless all have the same layers with the same inputs and outputs; ranks may differ."""
    stacked = stacked_layers(adapters[0])
    expected = {layer: _sides(adapters[0], layer, is_stacked=layer in stacked) for layer in layers_of(adapters[0])}
    for one in adapters[1:]:
        different = sorted(expected.keys() ^ set(layers_of(one)))
        different = different or [
            k for k, sides in expected.items() if _sides(one, k, is_stacked=k in stacked) != sides
        ]
        if different:
            raise MergeError(
                f"adapters to merge must adapt the same layers of one base, got a difference at {different[0]}"
            )


def _sides(tensors: Adapter, layer: str, *, is_stacked: bool) -> tuple[int, int]:
    factor_a, factor_b = tensors[layer + _A], tensors[layer + _B]
    if factor_a.dim() != 2 or factor_b.dim() != 2 or factor_a.shape[0] != factor_b.shape[1]:
        raise MergeError(
            f"factors of a layer must be [rank, inputs] and [outputs, rank], got {tuple(factor_a.shape)} and "
            f"{tuple(factor_b.shape)} at {layer}"
        )
    sides = factor_b.shape[0], factor_a.shape[1]
    if (
        len(factor_a) > max(sides) and not is_stacked
    ):  # a rank × rank matrix would be larger than the factors, which may hold no numbers
        raise MergeError(
            f"a rank must be at most the longer side of its layer, got {len(factor_a)} of {sides} at {layer}"
        )
    return sides


def _plain_layers(tensors: Adapter) -> list[str]:
    stacked = stacked_layers(tensors)
    return [layer for layer in layers_of(tensors) if layer not in stacked]


def _product_norm(factor_b: Tensor, factor_a: Tensor) -> float:
    """Return ‖B·A‖ = √tr(BᵀB·AAᵀ)."""
    return math.sqrt(max(0.0, ((factor_b.T @ factor_b) * (factor_a @ factor_a.T)).sum().item()))


def _refactored(stacked_b: Tensor, stacked_a: Tensor, rank: int, like_a: Tensor | None) -> tuple[Tensor, Tensor, float]:
    """Return (B [d, rank], A [rank, k], relative error) of the best approximation of stacked_b @ stacked_a."""
    basis_b, triangle_b = torch.linalg.qr(stacked_b)
    basis_a, triangle_a = torch.linalg.qr(stacked_a.T)
    u, s, vh = torch.linalg.svd(triangle_b @ triangle_a.T)
    total, left_out = s.norm().item(), s[rank:].norm().item()
    rank_found = min(rank, len(s))
    outputs = basis_b @ u[:, :rank_found] * s[:rank_found]  # [d, rank_found]
    directions = vh[:rank_found] @ basis_a.T  # [rank_found, k], orthonormal rows
    if like_a is None or rank_found < rank:
        root = s[:rank_found].sqrt()
        factor_b, factor_a = _divided(outputs, root), root[:, None] * directions
    else:
        gauge, inverse = _rotation(like_a @ directions.T, like_a.norm().item())
        factor_b, factor_a = outputs @ inverse, gauge @ directions
    padding = rank - rank_found
    factor_b = torch.nn.functional.pad(factor_b, (0, padding))
    factor_a = torch.nn.functional.pad(factor_a, (0, 0, 0, padding))
    return factor_b, factor_a, left_out / total if total > 0 else 0.0


def _divided(outputs: Tensor, root: Tensor) -> Tensor:
    return torch.where(root > 0, outputs / root.clamp_min(torch.finfo(root.dtype).tiny), 0.0)


def _rotation(wanted: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Return the rotated and scaled basis closest to `wanted` [r, r], with A of norm `size`, and its inverse.

    Norm and condition must be preserved. If A were only as close to the old one as possible, it would shrink and B grow with
    every merge, until the steps of the inner optimizer, whose size is fixed, were far too large.
    """
    u, _, vh = torch.linalg.svd(wanted)
    scale = size / math.sqrt(len(wanted)) if size > 0 else 1.0
    return scale * (u @ vh), (u @ vh).T / scale

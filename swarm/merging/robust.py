"""Bounds what a lying partner can do. Two replicas have no median, so the bounds are around the node's own weights.

    u = θ_j − φ_i ;  u ← u · min(1, ρ/‖u‖) per tensor ;  ρ = 2 · median of the last own ‖θ_i − φ_i‖

The median is over the node's *own* changes between outer steps: a partner that could write into that history would double ρ with
every merge. A partner can still choose the direction of u; the gate is against that.

Several partners may be one attacker under several names, and private tasks do not show what an adapter does on a prompt that only
its author knows. Therefore all strangers together move a node no further than a multiple of its own training: `StrangerBudget`.

A newcomer has no own changes to clip around and takes the median of at least three adapters.

`choose_share` is the gate: it tries none, a quarter, half or all of the partner's part on private tasks. All of it is used unless
none of it is clearly better: by more than one standard error of the difference, task by task. On a few tasks the best of four is
mostly the luckiest, and the purpose of a merge, less noise and replicas that stay together, does not show there.

The gate is not asked at every merge. `Refusals` says with whom it always is.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from swarm.errors import MergeError
from swarm.limits.bounded_maps import BoundedMap

SHARES = (1.0, 0.5, 0.25, 0.0)
"""λ, in the order of preference."""

Candidate = TypeVar("Candidate")
Scores = Sequence[float]
"""One number per private task, larger is better. All candidates of a merge get the same tasks with the same seed."""


@dataclass(frozen=True, slots=True)
class GateResult(Generic[Candidate]):
    """The choice of the gate."""

    share: float
    """λ, the part of the partner's weight; 0 is a step alone."""
    candidate: Candidate
    scores: dict[float, float]
    """Mean score by λ, for every λ that was tried."""


def choose_share(
    candidate_of: Callable[[float], Candidate],
    score: Callable[[Candidate], Scores],
    shares: Sequence[float] = SHARES,
) -> GateResult[Candidate]:
    """The candidate of the largest share, or where the smallest share is clearly better, that with the best mean.

    Scores that are not finite are the worst there are; of equal means the larger share wins, and if none is finite the
    smallest one.
    """
    if not shares:
        raise ValueError("a gate must have shares to try, got none; pass gate.SHARES")
    ordered = sorted(set(shares), reverse=True)
    most, least = ordered[0], ordered[-1]
    scores = {share: score(candidate_of(share)) for share in (most, least)}
    if not is_clearly_better(scores[least], scores[most]):
        return GateResult(most, candidate_of(most), _means(scores))
    scores |= {share: score(candidate_of(share)) for share in ordered[1:-1]}
    means = _means(scores)
    finite = [share for share in ordered if math.isfinite(means[share])]
    best = max(finite, key=lambda share: means[share]) if finite else least  # max takes the first of equals
    return GateResult(best, candidate_of(best), means)


_MAX_REFUSED = 64
_PASSES_OWED = 2  # for each refusal
_MAX_OWED = 4 * _PASSES_OWED


class Refusals:
    """The partners that the gate refused lately. Each refusal is held against its partner until it has passed the gate twice.

    So a partner that lies at every second merge or more often is tried at every merge, and one that is refused by chance is
    forgotten soon.
    """

    def __init__(self) -> None:
        self._owed: BoundedMap[str, int] = BoundedMap(_MAX_REFUSED)
        """How many times a partner has to pass yet."""

    def are_held_against(self, peer_id: str) -> bool:
        """Whether a merge with this partner has to be tried."""
        return peer_id in self._owed

    def count(self, peer_id: str, *, was_refused: bool) -> bool:
        """Note how a merge that was tried ended. Returns whether the partner was refused twice within a few merges."""
        owed = self._owed.pop(peer_id, 0)
        owed = min(owed + _PASSES_OWED, _MAX_OWED) if was_refused else owed - 1
        if owed > 0:
            self._owed[peer_id] = owed
        return was_refused and owed >= 2 * _PASSES_OWED

    def state(self) -> dict[str, int]:
        """The JSON-able state for a checkpoint."""
        return dict(self._owed)

    def restore(self, state: Mapping[str, int]) -> None:
        self._owed.clear()
        self._owed.update(state)


def is_clearly_better(first: Scores, second: Scores) -> bool:
    """Whether `first` is better by more than the standard error of the difference; anything is better than not finite."""
    if not all(map(math.isfinite, second)):
        return True
    if not first or not second or not all(map(math.isfinite, first)):
        return False
    gain = statistics.fmean(first) - statistics.fmean(second)
    if len(first) == len(second):
        return gain > _error([a - b for a, b in zip(first, second, strict=True)])
    return gain > math.hypot(_error(first), _error(second))  # a verifier failed on the one's answer and not the other's


def _error(values: Scores) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _means(scores: dict[float, Scores]) -> dict[float, float]:
    return {share: statistics.fmean(values) if values else 0.0 for share, values in scores.items()}


HISTORY_LEN = 16
"""Number of outer steps that the median is over."""
FEWEST_FOR_MEDIAN = 3
"""Fewest adapters that have a median: of two, nobody knows which one is false."""


class NormClip:
    """Clips a partner's weights around the own slow ones, tensor by tensor, by how far the node itself moves.

    Until the first `observe`, and for tensors that own training does not move, the radius is 0, and nothing of a partner is used.
    """

    def __init__(self, factor: float = 2.0) -> None:
        self._factor = factor
        self._norms: dict[str, deque[float]] = {}

    def observe(self, fast: Mapping[str, Tensor], slow: Mapping[str, Tensor]) -> None:
        """Note the own change since the last outer step, before each merge."""
        for name, tensor in slow.items():
            norm = (fast[name].to(tensor) - tensor).norm().item()
            self._norms.setdefault(name, deque(maxlen=HISTORY_LEN)).append(norm)

    def radius(self, name: str) -> float:
        """ρ of one tensor."""
        history = self._norms.get(name)
        return self._factor * statistics.median(history) if history else 0.0

    def clip(self, partner: Mapping[str, Tensor], slow: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The partner's weights, pulled to within ρ of `slow`. Raises MergeError as `refuse_unusable` does."""
        refuse_unusable(partner, slow)
        return {name: phi + _clipped(partner[name].to(phi) - phi, self.radius(name)) for name, phi in slow.items()}

    def clipped_share(self, partner: Mapping[str, Tensor], slow: Mapping[str, Tensor]) -> float:
        """Part of the tensors that `clip` would shorten; it should not stay near 1 for a partner of the same lineage."""
        beyond = sum((partner[name].to(phi) - phi).norm().item() > self.radius(name) for name, phi in slow.items())
        return beyond / len(slow) if slow else 0.0

    def state(self) -> dict[str, list[float]]:
        """The JSON-able state for a checkpoint."""
        return {name: list(history) for name, history in self._norms.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        self._norms = {name: deque(history, maxlen=HISTORY_LEN) for name, history in state.items()}


class StrangerBudget:
    """Bounds how far all strangers together move a node, tensor by tensor.

    Over the last HISTORY_LEN outer steps, the sum of ‖w·(θ_j − θ_i)‖ over merges with strangers is at most `factor` times the sum
    of the node's own changes ‖θ_i − φ_i‖. Names cost nothing, so the bound is on the sum and not on each stranger.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._steps: dict[
            str, deque[tuple[float, float]]
        ] = {}  # (own change, movement by strangers) of each outer step

    def observe(self, fast: Mapping[str, Tensor], slow: Mapping[str, Tensor]) -> None:
        """Begin an outer step: note the own change since the last one."""
        for name, tensor in slow.items():
            norm = (fast[name].to(tensor) - tensor).norm().item()
            self._steps.setdefault(name, deque(maxlen=HISTORY_LEN)).append((norm, 0.0))

    def left(self, name: str) -> float:
        """How far strangers may still move this tensor in the outer step that `observe` began."""
        steps = self._steps.get(name, ())
        return max(0.0, self._factor * sum(own for own, _ in steps) - sum(moved for _, moved in steps))

    def limit(self, stranger: Mapping[str, Tensor], fast: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
        """The stranger's weights, pulled towards `fast` until a merge of `weight` moves it by no more than what is left."""
        if weight <= 0:
            return dict(stranger)
        return {
            name: own + _clipped(stranger[name].to(own) - own, self.left(name) / weight) for name, own in fast.items()
        }

    def spend(self, stranger: Mapping[str, Tensor], fast: Mapping[str, Tensor], weight: float) -> None:
        """Note a merge with a stranger, limited already, that was taken with this weight."""
        for name, own in fast.items():
            change, moved = self._steps[name][-1]
            self._steps[name][-1] = (change, moved + weight * (stranger[name].to(own) - own).norm().item())

    def state(self) -> dict[str, list[list[float]]]:
        """The JSON-able state for a checkpoint."""
        return {name: [list(step) for step in steps] for name, steps in self._steps.items()}

    def restore(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Continue from what `state` gave."""
        self._steps = {
            name: deque(((own, moved) for own, moved in steps), maxlen=HISTORY_LEN) for name, steps in state.items()
        }


def refuse_unusable(partner: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise MergeError for missing or extra tensors, other shapes, NaN or infinity."""
    different = sorted(set(own).symmetric_difference(partner))
    if different:
        raise MergeError(
            f"a partner must send the adapter's own tensors, got a difference at {different[0]}; leave it out"
        )
    for name, tensor in partner.items():
        if tensor.shape != own[name].shape:
            raise MergeError(
                f"a partner's {name} must have shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}; leave it out"
            )
        if not torch.isfinite(tensor).all():
            raise MergeError(f"a partner's {name} must be finite, got NaN or infinity; leave it out")


def median_adapter(pulled: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Median of each coordinate, of an even number the mean of the two in the middle; float32.

    Every value lies between those of two adapters at least, and fewer liars than half cannot leave the range of the
    others. Raises MergeError for fewer than three adapters.
    """
    if len(pulled) < FEWEST_FOR_MEDIAN:
        raise MergeError(f"a median needs at least {FEWEST_FOR_MEDIAN} adapters, got {len(pulled)}; begin without")
    middle = slice((len(pulled) - 1) // 2, len(pulled) // 2 + 1)
    return {
        name: torch.stack([one[name].float() for one in pulled]).sort(0).values[middle].mean(0) for name in pulled[0]
    }


def cut_to_median_norm(pulled: Sequence[Mapping[str, Tensor]], origin: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each adapter with its difference from `origin` no longer than the median of all of them, tensor by tensor."""
    radius = {
        name: statistics.median_low((one[name] - start).double().norm().item() for one in pulled)
        for name, start in origin.items()
    }
    return [
        {name: start + _clipped(one[name] - start, radius[name]) for name, start in origin.items()} for one in pulled
    ]


def _clipped(difference: Tensor, radius: float) -> Tensor:
    """`difference`, no longer than `radius`; its norm in float64, where no float32 overflows."""
    norm = difference.double().norm().item()
    return difference if norm <= radius else difference * (radius / norm)

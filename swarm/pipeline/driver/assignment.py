"""Assignment of layers to machines, so that the slowest stage, which limits the pipeline, is as fast as possible.

The search over all splits of the layers into consecutive ranges is exact (dynamic programming, s·L² steps). It minimizes
first the time of the slowest stage and then, among equal splits, the sum of times, which one token waits for in decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from swarm.errors import MemoryBudgetError, PipelineError


@dataclass(frozen=True, slots=True)
class Machine:
    """The measured speed and memory of one machine."""

    layers_per_s: float
    """Forward and backward passes of one layer per second, for the micro-batches in use."""
    memory_bytes: int
    """Memory free for weights, optimizer, activations in flight and caches."""
    max_layers: int = 1 << 30
    """Most layers that it gets, whatever speed and memory it claims."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Memory and time of layers and of the model's ends. Times are in layers, so they hold for every machine."""

    layer_bytes: tuple[int, ...]  # [L] weights, optimizer, activations in flight and caches
    embedding_bytes: int = 0
    head_bytes: int = 0
    """Bytes of final norm and head."""
    embedding_layers: float = 0.0
    """Time of the embedding, in layers."""
    head_layers: float = 0.0


def assign_layers(machines: Sequence[Machine], cost: ModelCost) -> list[int]:
    """Return the number of layers of each machine, in the given order, at least one each.

    The first machine also holds the embedding, the last one norm and head. Raises PipelineError for more machines than
    layers or a speed that is not positive, MemoryBudgetError where the layers do not fit in any split.
    """
    num_layers = len(cost.layer_bytes)
    if not 1 <= len(machines) <= num_layers:
        raise PipelineError(f"{num_layers} layers must have between 1 and as many machines, got {len(machines)}")
    for machine in machines:
        if not 0 < machine.layers_per_s < float("inf"):
            raise PipelineError(f"a machine's speed must be positive, got {machine.layers_per_s}; measure it again")
    fastest = _split(machines, cost, max, limit_s=float("inf"))
    if fastest is None:
        raise MemoryBudgetError(
            f"{num_layers} layers of {sum(cost.layer_bytes)} bytes and ends of {cost.embedding_bytes + cost.head_bytes} must "
            f"fit into the machines, got {[machine.memory_bytes for machine in machines]}; add one or take a smaller base"
        )
    shortest = _split(machines, cost, add, limit_s=fastest[0])
    assert shortest is not None  # the fastest split is one
    return shortest[1]


def _split(
    machines: Sequence[Machine], cost: ModelCost, combine: Callable[[float, float], float], limit_s: float
) -> tuple[float, list[int]] | None:
    """Return (smallest `combine` of the stages' times, layers of each machine), with no stage slower than `limit_s`."""
    num_layers, bytes_before = len(cost.layer_bytes), [0, *accumulate(cost.layer_bytes)]
    best: list[tuple[float, list[int]] | None] = [(0.0, []), *[None] * num_layers]  # by layers assigned so far
    for index, machine in enumerate(machines):
        following: list[tuple[float, list[int]] | None] = [None] * (num_layers + 1)
        room = machine.memory_bytes
        room -= cost.embedding_bytes if index == 0 else 0
        room -= cost.head_bytes if index == len(machines) - 1 else 0
        for start, before in enumerate(best):
            most = min(num_layers, start + machine.max_layers)
            for stop in range(start + 1, most + 1) if before is not None else ():
                time_s = _time_s(machines, cost, index, start=start, stop=stop)
                if bytes_before[stop] - bytes_before[start] > room or time_s > limit_s:
                    break  # more layers do not fit either
                assert before is not None
                value, known = combine(before[0], time_s), following[stop]
                if known is None or value < known[0]:
                    following[stop] = value, [*before[1], stop - start]
        best = following
    return best[num_layers]


def _time_s(machines: Sequence[Machine], cost: ModelCost, index: int, start: int, stop: int) -> float:
    extra = cost.embedding_layers if index == 0 else 0.0
    extra += cost.head_layers if index == len(machines) - 1 else 0.0
    return (stop - start + extra) / machines[index].layers_per_s

"""Assignment of layers by measured speed and memory, compared with all possible splits."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import MemoryBudgetError, PipelineError
from swarm.pipeline.driver.assignment import Machine, ModelCost, assign_layers

MACHINES = st.lists(
    st.builds(Machine, st.sampled_from([0.5, 1.0, 2.0, 3.0, 10.0]), st.integers(0, 40)), min_size=1, max_size=4
)
COSTS = st.builds(
    ModelCost,
    st.lists(st.integers(1, 6), min_size=4, max_size=8).map(tuple),
    st.integers(0, 8),
    st.integers(0, 8),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 2.0]),
)


def all_cuts(num_machines: int, num_layers: int) -> Iterator[list[int]]:
    if num_machines == 1:
        yield [num_layers]
        return
    for first in range(1, num_layers - num_machines + 2):
        for rest in all_cuts(num_machines - 1, num_layers - first):
            yield [first, *rest]


def fits(machines: Sequence[Machine], cost: ModelCost, sizes: Sequence[int]) -> bool:
    start, last = 0, len(machines) - 1
    for index, (machine, size) in enumerate(zip(machines, sizes, strict=True)):
        need = sum(cost.layer_bytes[start : start + size])
        need += cost.embedding_bytes * (index == 0) + cost.head_bytes * (index == last)
        if need > machine.memory_bytes:
            return False
        start += size
    return True


def stage_times(machines: list[Machine], cost: ModelCost, sizes: Sequence[int]) -> list[float]:
    """Seconds that each stage takes for a micro-batch, forward and backward."""
    layers = [float(size) for size in sizes]
    layers[0] += cost.embedding_layers
    layers[-1] += cost.head_layers
    return [count / machine.layers_per_s for count, machine in zip(layers, machines, strict=True)]


@given(MACHINES, COSTS)
def test_no_cut_is_faster(machines: list[Machine], cost: ModelCost) -> None:
    cuts = [sizes for sizes in all_cuts(len(machines), len(cost.layer_bytes)) if fits(machines, cost, sizes)]
    if not cuts:
        with pytest.raises(MemoryBudgetError, match="must fit into the machines"):
            assign_layers(machines, cost)
        return
    found = assign_layers(machines, cost)
    assert found in cuts
    times = [stage_times(machines, cost, sizes) for sizes in cuts]
    best = min((max(one), sum(one)) for one in times)
    own = stage_times(machines, cost, found)
    assert max(own) == best[0]
    assert sum(own) == pytest.approx(best[1])


def test_layers_follow_speed_and_memory() -> None:
    cost = ModelCost((1,) * 12)
    even, fast = Machine(10, 100), Machine(20, 100)
    assert assign_layers([even, even, even], cost) == [4, 4, 4]
    assert assign_layers([even, fast], cost) == [4, 8]
    assert assign_layers([even, Machine(20, 5)], cost) == [7, 5]
    # the head takes as long as four layers
    assert assign_layers([even, even], ModelCost((1,) * 12, head_layers=4.0)) == [8, 4]
    # of the cuts whose slowest stage takes .2 s, the one in which a token waits least
    assert assign_layers([Machine(10, 2), Machine(20, 100), Machine(100, 100)], cost)[0] == 1


def test_a_large_model_is_cut_in_no_time() -> None:
    machines = [Machine(5 + index % 3, 40) for index in range(16)]
    sizes = assign_layers(machines, ModelCost((3,) * 126))
    assert sum(sizes) == 126
    assert max(sizes) <= 13


def test_what_cannot_be_assigned_is_refused() -> None:
    machine = Machine(1, 10)
    with pytest.raises(PipelineError, match="2 layers must have"):
        assign_layers([machine] * 3, ModelCost((1, 1)))
    with pytest.raises(PipelineError, match="2 layers must have"):
        assign_layers([], ModelCost((1, 1)))
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PipelineError, match="speed must be positive"):
            assign_layers([Machine(speed, 10)], ModelCost((1, 1)))
    with pytest.raises(MemoryBudgetError, match=r"ends of 9 must fit into the machines, got \[10, 10\]"):
        assign_layers([machine, machine], ModelCost((5, 5), embedding_bytes=1, head_bytes=8))

"""A settled swarm of light nodes for a scenario of faults, and what must hold when it is over."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from swarm.config import SharingSection
from swarm.network.memory.transport import Faults, MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run
from swarm.simulation.light_node import LightNode, LightRounds
from swarm.simulation.simulation import INTERNET, Simulation, SimulationSettings

NUM_NODES = 14
"""One more than a mesh has places for besides its owner, so that gossip takes several hops."""
ROUNDS = LightRounds(round_s=5.0, swarm_groups=4)
HARMLESS = {"no_signal", "unavailable", "replay"}
"""What loss, duplication and restarts may cause among honest nodes."""
MAX_NODE_ITEMS, MAX_NODE_BYTES = 40_000, 6 << 20

Scenario = Callable[[Simulation], Awaitable[None]]


def in_swarm(scenario: Scenario, faults: Faults = INTERNET, seed: int = 1) -> None:
    """Run `scenario` in a swarm that has lived for ten seconds. After it, all is bounded and no node's work broke."""
    settings = SimulationSettings(
        NUM_NODES, seed, faults, ROUNDS, SharingSection(swarm_groups=4), join_over_s=2.0, verify="cached"
    )

    async def main() -> None:
        async with Simulation(settings) as simulation:
            await simulation.start()
            await simulation.let(10)
            await scenario(simulation)
            assert_bounded(simulation.nodes)
            assert sum(node.num_failed_steps for node in simulation.nodes) == 0

    run(main())


def trained(nodes: Sequence[LightNode]) -> list[int]:
    return [node.num_groups_trained for node in nodes]


async def all_train_on(simulation: Simulation, nodes: Sequence[LightNode], duration_s: float = 20.0) -> None:
    """Each of them trains on groups of others within the time."""
    before = trained(nodes)
    await simulation.let(duration_s)
    assert all(now > then for now, then in zip(trained(nodes), before, strict=True))


def assert_bounded(nodes: Sequence[LightNode]) -> None:
    """What a node remembers of peers and their messages, whatever they sent."""
    for node in nodes:
        assert isinstance(node.transport, MemoryTransport)
        num_items, num_bytes = held(node)
        assert num_items < MAX_NODE_ITEMS and num_bytes < MAX_NODE_BYTES, (num_items, num_bytes)
        assert node.pool.num_fresh() <= 512


def held(node: LightNode) -> tuple[int, int]:
    """(items in containers, bytes of text and binary) reachable from a node, the air between the nodes left out."""
    seen, waiting, num_items, num_bytes = set[int](), list[object]([node]), 0, 0
    while waiting:
        part = waiting.pop()
        if isinstance(part, int | float | None) or id(part) in seen or isinstance(part, MemoryNetwork):
            continue
        seen.add(id(part))
        if isinstance(part, bytes | str):
            num_bytes += len(part)
        elif isinstance(part, dict):
            waiting += part.keys()
            waiting += part.values()
            num_items += len(part)
        elif isinstance(part, list | set | deque | tuple):
            waiting += part
            num_items += len(part)
        elif isinstance(part, asyncio.Queue) or type(part).__module__.startswith("swarm."):
            slots = [name for one in type(part).__mro__ for name in getattr(one, "__slots__", ())]
            waiting += (getattr(part, "__dict__", {}), *(getattr(part, name, None) for name in slots))
    return num_items, num_bytes

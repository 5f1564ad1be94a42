"""Gossip and whole swarms on the in-memory network and a virtual clock, with one-way delays of 20 to 120 ms.

Times and bytes are those of the simulated network: they do not depend on the machine, nor on what else it does.
"""

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from measuring.peak_memory import resident_mib
from swarm.network.memory.mesh import GossipMessage
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.network.transport import TrafficCounter, ValidationResult
from swarm.simulation.simulation import INTERNET, Simulation, SimulationSettings, quantile

_NUM_MESSAGES = 10
_SETTLE_S = 20.0
_MEASURE_S = 60.0
"""Two windows of the index, two intervals of presence. A quarter of the nodes look into the index, as in each minute."""
_TAIL_S = 5.0
_MAX_REAL_CHECKS = 64


@dataclass(frozen=True, slots=True)
class TopicRow:
    """Means over the messages."""

    nodes: int
    hops_95: float
    t95_s: float
    reached: float
    received: float
    """What a node receives per message: copies of it, and control."""


@dataclass(frozen=True, slots=True)
class CrowdRow:
    """Several swarms in one process, each for itself."""

    swarms: int
    nodes_of_each: int
    cpu_ms: float
    """As in `SwarmRow`: what more of it is than there comes from the memory that all of them take, and not from their size."""


@dataclass(frozen=True, slots=True)
class SwarmRow:
    """Per node and minute, except times."""

    nodes: int
    shard_nodes: float
    headers: float
    """Different headers of others that a node admitted."""
    bodies: float
    gossip_messages: float
    """Messages sent, copies and control together."""
    gossip_bytes: float
    bytes: float
    """All bytes sent: gossip, index and bodies."""
    t50_s: float
    t95_s: float
    """Until 95 % of its readers have a header: the median header."""
    t95_slow_s: float
    """The same for the header at the 95th percentile."""
    coverage: float
    cpu_ms: float
    """Processor time of this machine. Above 64 nodes without the check of signatures, which is done once for all of them."""
    memory_kib: float
    """Of a node, not per minute."""


def measure_topic(num_nodes: int, seed: int) -> TopicRow:
    """One message after the other among the subscribers of one topic: no shards, no sharing, gossip alone."""
    return run(_spread_in_one_topic(num_nodes, seed))


def measure_swarm(num_nodes: int, seed: int) -> SwarmRow:
    """Light nodes with the real Publisher, Reader, Admission, Directory and pool. In a process of its own."""
    gc.disable()  # it would walk millions of live objects again and again; the process ends with the run
    return run(_live(num_nodes, seed))


def measure_crowd(num_swarms: int, num_nodes: int, seed: int) -> CrowdRow:
    """Swarms of `num_nodes` each, which know nothing of each other. In a process of its own."""
    gc.disable()
    return run(_live_side_by_side(num_swarms, num_nodes, seed))


async def _spread_in_one_topic(num_nodes: int, seed: int) -> TopicRow:
    network = MemoryNetwork(random.Random(seed), virtual_now, INTERNET)
    nodes = [MemoryTransport(network, f"node-{number}") for number in range(num_nodes)]
    arrivals: dict[bytes, list[tuple[float, int]]] = {}

    def note(peer_id: str, message: GossipMessage, hops: int) -> None:
        arrivals.setdefault(message.id, []).append((virtual_now(), hops))

    for node in nodes:
        node.gossip.on_accept = note
        node.subscribe("topic", lambda sender, data: ValidationResult.ACCEPT)
        await node.start()
    await asyncio.sleep(5)
    before = sum(node.traffic.gossip_messages_received for node in nodes)
    for number in range(_NUM_MESSAGES):
        await network.rng.choice(nodes).publish("topic", b"%0300d" % number)
        await asyncio.sleep(1)
    received = sum(node.traffic.gossip_messages_received for node in nodes) - before
    await asyncio.sleep(5)
    spreads = list(arrivals.values())
    return TopicRow(
        nodes=num_nodes,
        hops_95=_mean([quantile([hops for _, hops in spread], 0.95) for spread in spreads]),
        t95_s=_mean([quantile([when - spread[0][0] for when, _ in spread], 0.95) for spread in spreads]),
        reached=_mean([len(spread) / num_nodes for spread in spreads]),
        received=received / _NUM_MESSAGES / num_nodes,
    )


async def _live(num_nodes: int, seed: int) -> SwarmRow:
    empty_mib = resident_mib()
    verify = "real" if num_nodes <= _MAX_REAL_CHECKS else "cached"
    async with Simulation(SimulationSettings(num_nodes, seed, verify=verify)) as simulation:
        spread = simulation.spread
        await simulation.start_grown()
        await simulation.let(_SETTLE_S)
        spread.begin(virtual_now())
        before, cpu_s = _counts(simulation), time.process_time()
        await simulation.let(_MEASURE_S)
        messages, gossip_bytes, all_bytes, bodies = (
            (now - then) / num_nodes * 60 / _MEASURE_S for now, then in zip(_counts(simulation), before, strict=True)
        )
        cpu_s = time.process_time() - cpu_s
        memory_kib = (resident_mib() - empty_mib) * 1024 / num_nodes
        headers, until = spread.num_arrivals() / num_nodes * 60 / _MEASURE_S, virtual_now()
        await simulation.let(_TAIL_S)
        shard_nodes = num_nodes / len({node.directory.shard for node in simulation.nodes})
        t50s, t95s = spread.times_s(0.5, until), spread.times_s(0.95, until)
        coverage = spread.coverage(until)
    return SwarmRow(
        nodes=num_nodes,
        shard_nodes=shard_nodes,
        headers=headers,
        bodies=bodies,
        gossip_messages=messages,
        gossip_bytes=gossip_bytes,
        bytes=all_bytes,
        t50_s=quantile(t50s, 0.5),
        t95_s=quantile(t95s, 0.5),
        t95_slow_s=quantile(t95s, 0.95),
        coverage=coverage,
        cpu_ms=cpu_s * 1000 / num_nodes * 60 / _MEASURE_S,
        memory_kib=memory_kib,
    )


async def _live_side_by_side(num_swarms: int, num_nodes: int, seed: int) -> CrowdRow:
    async with contextlib.AsyncExitStack() as running:
        swarms = [
            await running.enter_async_context(Simulation(SimulationSettings(num_nodes, seed + number, verify="cached")))
            for number in range(num_swarms)
        ]
        await asyncio.gather(*(swarm.start_grown() for swarm in swarms))
        await asyncio.gather(*(swarm.let(_SETTLE_S) for swarm in swarms))
        cpu_s = time.process_time()
        await asyncio.gather(*(swarm.let(_MEASURE_S) for swarm in swarms))
        cpu_s = time.process_time() - cpu_s
    return CrowdRow(num_swarms, num_nodes, cpu_s * 1000 / (num_swarms * num_nodes) * 60 / _MEASURE_S)


def _counts(simulation: Simulation) -> tuple[int, int, int, int]:
    """So far, all nodes together: gossip messages, gossip bytes and all bytes sent, bodies read."""
    counters: list[TrafficCounter] = [node.transport.traffic for node in simulation.nodes]
    return (
        sum(counter.gossip_messages_sent for counter in counters),
        sum(counter.gossip_bytes_sent for counter in counters),
        sum(counter.bytes_sent for counter in counters),
        sum(node.totals.num_records_admitted for node in simulation.nodes),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

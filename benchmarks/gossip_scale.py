"""What one node pays as the swarm grows, and how long a header takes to its readers.

    python benchmarks/gossip_scale.py [--quick] [--sizes 8,32,…] [--plot FILE]

Two tables on a virtual clock, both with one-way delays of 20 to 120 ms:
  one topic   one message among N subscribers of one topic: hops and time against log2 N (no sharding)
  swarm       N light nodes with the real Publisher, Reader, Admission, Directory: traffic per node, time to 95 % of a shard
Above 200 nodes a signature is checked once per process instead of once per node. The last line is JSON.
"""

import argparse
import asyncio
import json
import math
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.network.memory.message import GossipMessage
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.network.transport import TrafficCounter, Verdict
from swarm.simulation.simulation import INTERNET, Simulation, SimulationSettings
from swarm.simulation.spread_log import quantile

SIZES, QUICK_SIZES = (8, 32, 128, 512, 2048, 5000), (8, 32, 128)
TOPIC_SIZES, QUICK_TOPIC_SIZES = (8, 32, 128, 512, 2048, 5000), (8, 32, 128, 512)
NUM_MESSAGES = 10
SETTLE_S, MEASURE_S, TAIL_S = 20.0, 60.0, 10.0
MAX_REAL_CHECKS = 200


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
class SwarmRow:
    """Per node and minute, except times."""

    nodes: int
    shard_nodes: float
    headers: float
    """Different headers of others that a node admitted."""
    gossip_messages: float
    """Messages sent, copies and control together."""
    gossip_bytes: float
    bodies: float
    bytes: float
    """All bytes sent: gossip, index and bodies."""
    t50_s: float
    t95_s: float
    coverage: float
    real_s: float


async def spread_in_one_topic(num_nodes: int, seed: int) -> TopicRow:
    network = MemoryNetwork(random.Random(seed), virtual_now, INTERNET)
    nodes = [MemoryTransport(network, f"node-{number}") for number in range(num_nodes)]
    arrivals: dict[bytes, list[tuple[float, int]]] = {}

    def note(peer_id: str, message: GossipMessage, hops: int) -> None:
        arrivals.setdefault(message.id, []).append((virtual_now(), hops))

    for node in nodes:
        node.gossip.on_accept = note
        node.subscribe("topic", lambda sender, data: Verdict.ACCEPT)
        await node.start()
    await asyncio.sleep(5)
    received = 0
    for number in range(NUM_MESSAGES):
        before = sum(node.traffic.gossip_messages_received for node in nodes)
        await network.rng.choice(nodes).publish("topic", b"%0300d" % number)
        await asyncio.sleep(0.99)
        received += sum(node.traffic.gossip_messages_received for node in nodes) - before
    await asyncio.sleep(5)
    spreads = list(arrivals.values())
    return TopicRow(
        nodes=num_nodes,
        hops_95=_mean([quantile([hops for _, hops in spread], 0.95) for spread in spreads]),
        t95_s=_mean([quantile([when - spread[0][0] for when, _ in spread], 0.95) for spread in spreads]),
        reached=_mean([len(spread) / num_nodes for spread in spreads]),
        received=received / NUM_MESSAGES / num_nodes,
    )


async def live_as_swarm(num_nodes: int, seed: int) -> SwarmRow:
    started_at = time.monotonic()
    verify = "real" if num_nodes <= MAX_REAL_CHECKS else "cached"
    simulation = Simulation(SimulationSettings(num_nodes, seed, verify=verify))
    with simulation.verified():
        await simulation.start_grown()
    await simulation.let(SETTLE_S)
    simulation.spread.begin(virtual_now())
    before, bodies_before = _traffic(simulation), _bodies(simulation)
    await simulation.let(MEASURE_S)
    sent = [now - then for now, then in zip(_traffic(simulation), before, strict=True)]
    num_bodies = _bodies(simulation) - bodies_before
    num_headers = simulation.spread.num_arrivals()
    until = virtual_now()
    await simulation.let(TAIL_S)
    times = simulation.spread.times_s(0.5, until), simulation.spread.times_s(0.95, until)
    shards = {node.directory.shard for node in simulation.nodes}
    row = SwarmRow(
        nodes=num_nodes,
        shard_nodes=num_nodes / len(shards),
        headers=num_headers / num_nodes * 60 / MEASURE_S,
        gossip_messages=sent[0] / num_nodes * 60 / MEASURE_S,
        gossip_bytes=sent[1] / num_nodes * 60 / MEASURE_S,
        bodies=num_bodies / num_nodes * 60 / MEASURE_S,
        bytes=sent[2] / num_nodes * 60 / MEASURE_S,
        t50_s=quantile(times[0], 0.5),
        t95_s=quantile(times[1], 0.5),
        coverage=simulation.spread.coverage(until),
        real_s=time.monotonic() - started_at,
    )
    await simulation.stop()
    return row


def _traffic(simulation: Simulation) -> list[int]:
    counters: list[TrafficCounter] = [node.transport.traffic for node in simulation.nodes]
    return [
        sum(counter.gossip_messages_sent for counter in counters),
        sum(counter.gossip_bytes_sent for counter in counters),
        sum(counter.bytes_sent for counter in counters),
    ]


def _bodies(simulation: Simulation) -> int:
    return sum(node.reader.num_records_admitted for node in simulation.nodes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def hops_per_doubling(rows: Sequence[TopicRow]) -> float:
    """Slope of the least-squares line of hops over log2 N."""
    xs, ys = [math.log2(row.nodes) for row in rows], [row.hops_95 for row in rows]
    mean_x, mean_y = _mean(xs), _mean(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def show(rows: Sequence[TopicRow] | Sequence[SwarmRow]) -> None:
    """A Markdown table."""
    names = list(asdict(rows[0]))
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in asdict(row).values()) + " |")
    print(flush=True)


def _cell(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"


def plot(rows: Sequence[SwarmRow], topics: Sequence[TopicRow], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (cost, speed) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    cost.plot([r.nodes for r in rows], [r.bytes / 1e3 for r in rows], "o-", label="all")
    cost.plot([r.nodes for r in rows], [r.gossip_bytes / 1e3 for r in rows], "s--", label="gossip")
    cost.set(xscale="log", ylim=(0, None), xlabel="nodes", ylabel="kB sent per node and minute")
    cost.legend()
    speed.plot([r.nodes for r in rows], [r.t95_s for r in rows], "o-", label="to 95 % of a shard")
    speed.plot([r.nodes for r in topics], [r.t95_s for r in topics], "s--", label="to 95 % of one topic of all")
    speed.set(xscale="log", ylim=(0, None), xlabel="nodes", ylabel="s")
    speed.legend()
    figure.savefig(path, dpi=120)


def figures(topics: Sequence[TopicRow], rows: Sequence[SwarmRow]) -> dict[str, object]:
    cost = {row.nodes: row.bytes for row in rows}
    return {
        **{f"bytes_per_node_{nodes}": round(value) for nodes, value in cost.items()},
        "flat_ratio": round(rows[-1].bytes / cost.get(128, rows[0].bytes), 3),
        "t95_s": {row.nodes: round(row.t95_s, 3) for row in rows},
        "topic_t95_s": {row.nodes: round(row.t95_s, 3) for row in topics},
        "hops": {row.nodes: round(row.hops_95, 2) for row in topics},
        "hops_per_doubling": round(hops_per_doubling(topics), 3),
        "max_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--sizes", help="sizes of the swarm, such as 8,128,5000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="PNG to write")
    arguments = parser.parse_args()
    sizes = QUICK_SIZES if arguments.quick else SIZES
    if arguments.sizes:
        sizes = tuple(int(size) for size in arguments.sizes.split(","))
    topic_sizes = QUICK_TOPIC_SIZES if arguments.quick else TOPIC_SIZES
    topics = [run(spread_in_one_topic(size, arguments.seed)) for size in topic_sizes]
    show(topics)
    rows: list[SwarmRow] = []
    for size in sizes:
        rows.append(run(live_as_swarm(size, arguments.seed)))
        print(f"{size} nodes: {rows[-1].real_s:.0f} s", file=sys.stderr, flush=True)
    show(rows)
    if arguments.plot:
        plot(rows, topics, arguments.plot)
    print(json.dumps(figures(topics, rows)))


if __name__ == "__main__":
    main()

"""What one node pays as the swarm grows, and how long a header takes to its readers.

    python benchmarks/gossip_scale.py            processes to 32 nodes, simulated to 10,000; about two hours on two cores
    python benchmarks/gossip_scale.py --quick    4 processes, simulated to 64; under a minute

Five tables:
  processes  N light nodes on this machine: libp2p daemon, streams, py-libp2p gossip over loopback
  swarm      the same nodes, simulated: the same Publisher, Reader, Admission, Directory and pool on the in-memory transport
             and a virtual clock, with one-way delays of 20 to 120 ms
  crowd      several swarms of 128 in one process that know nothing of each other: how much of the processor time of a large
             swarm is the memory of this machine, and not the size of the swarm
  expected   a node of a larger swarm, by the rule that the simulated ones follow; beside it the largest simulated one, by the
             rule of those before it
  topic      gossip alone, simulated: one message among N subscribers of one topic; hops and time against log2 N
A light node publishes two groups about every 20 s and trains on two of others, as a real one does, but has no policy.
Above 64 simulated nodes a signature is checked once per process instead of once per node. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring.loopback import enter_private_network
from measuring.node_processes import NodeFailed
from measuring.real_scale import RealRow, measure_processes
from measuring.simulated_scale import CrowdRow, SwarmRow, TopicRow, measure_crowd, measure_swarm, measure_topic

_HEADLINE_NODES = 128
"""From here on shards are full, and cost should stay flat."""
_EXPECTED_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Plan:
    real_sizes: tuple[int, ...] = (8, 16, 32)
    settle_s: float = 240.0
    """Until the real nodes look into the index at their steady pace."""
    measure_s: float = 45.0
    swarm_sizes: tuple[int, ...] = (8, 16, 32, 128, 512, 2048, 10_000)
    topic_sizes: tuple[int, ...] = (8, 32, 128, 512, 2048, 10_000)
    crowds: tuple[int, ...] = (4, 16)
    """Numbers of swarms of 128 nodes."""


_QUICK = Plan((4,), 4.0, 12.0, (8, 32, 64), (8, 32, 128), ())


def measure_real(plan: Plan) -> list[RealRow]:
    rows: list[RealRow] = []
    if plan.real_sizes and not enter_private_network():
        _say("no network of its own: other programs' traffic on loopback is counted too")
    for size in plan.real_sizes:
        try:
            rows.append(asyncio.run(measure_processes(size, plan.settle_s, plan.measure_s)))
        except NodeFailed as error:
            _say(f"{size} processes: {error}")
            continue
        _say(
            f"{size} processes: {rows[-1].t95_s:.3f} s to 95 %, {rows[-1].wire_bytes / 1e3:,.0f} kB per node and minute"
        )
    return rows


def measure_swarms(sizes: Sequence[int], crowds: Sequence[int], seed: int) -> tuple[list[SwarmRow], list[CrowdRow]]:
    """Largest first, each in a process of its own; neither virtual nor processor time minds much what else the machine does."""
    context, workers = multiprocessing.get_context("spawn"), min(2, os.cpu_count() or 1)
    rows: list[SwarmRow] = []
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        runs = [pool.submit(measure_swarm, size, seed) for size in sorted(sizes, reverse=True)]
        side_by_side = [pool.submit(measure_crowd, number, _HEADLINE_NODES, seed) for number in crowds]
        for one in reversed(runs):
            rows.append(row := one.result())
            _say(
                f"{row.nodes} simulated nodes: {row.bytes / 1e3:,.0f} kB and {row.cpu_ms:,.0f} ms of processor time per node "
                f"and minute, {row.memory_kib:,.0f} KiB, {row.t95_s:.2f} s to 95 %"
            )
        return rows, [one.result() for one in side_by_side]


def hops_per_doubling(rows: Sequence[TopicRow]) -> float:
    """Slope of the least-squares line of hops over log2 N."""
    return statistics.linear_regression([math.log2(row.nodes) for row in rows], [row.hops_95 for row in rows]).slope


@dataclass(frozen=True, slots=True)
class ExpectedRow:
    """Per node and minute, but for the memory of a node."""

    nodes: int
    shard_nodes: float
    headers: float
    bodies: float
    bytes: float
    cpu_ms: float
    memory_kib: float


def expected(rows: Sequence[SwarmRow], nodes: int) -> ExpectedRow:
    """What a node of a swarm of this size does, by the rule of smaller ones with full shards.

    Headers follow the members of a shard. What a header costs follows the steps of a look-up in the index, so log2 N; bodies
    and memory follow nothing.
    """
    shard_nodes = nodes / 2 ** math.floor(math.log2(nodes / 64))
    logs = [math.log2(row.nodes) for row in rows]
    headers = sum(row.headers / (row.shard_nodes - 1) for row in rows) / len(rows) * (shard_nodes - 1)

    def cost(per_header: Sequence[float]) -> float:
        rise, start = statistics.linear_regression(logs, per_header)
        return headers * (start + rise * math.log2(nodes))

    return ExpectedRow(
        nodes=nodes,
        shard_nodes=shard_nodes,
        headers=headers,
        bodies=statistics.mean(row.bodies for row in rows),
        bytes=cost([row.bytes / row.headers for row in rows]),
        cpu_ms=cost([row.cpu_ms / row.headers for row in rows]),
        memory_kib=statistics.mean(row.memory_kib for row in rows),
    )


def expectations(rows: Sequence[SwarmRow]) -> list[ExpectedRow]:
    """The largest simulated swarm by the rule of those before it, and one beyond; none from fewer than three full ones."""
    full = [row for row in rows if row.nodes >= _HEADLINE_NODES]
    return [expected(full[:-1], full[-1].nodes), expected(full, _EXPECTED_NODES)] if len(full) > 2 else []


def show(title: str, rows: Sequence[RealRow | SwarmRow | CrowdRow | ExpectedRow | TopicRow]) -> None:
    """A Markdown table."""
    if not rows:
        return
    print(f"{title}\n\n| " + " | ".join(asdict(rows[0])) + " |\n|" + "---|" * len(asdict(rows[0])))
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in asdict(row).values()) + " |")
    print(flush=True)


def plot(real: Sequence[RealRow], swarms: Sequence[SwarmRow], topics: Sequence[TopicRow], path: Path) -> None:
    from swarm.report.plot import new_figure

    figure, (cost, speed) = new_figure(2, 9.0, 3.6)
    cost.plot([r.nodes for r in swarms], [r.bytes / 1e3 for r in swarms], "o-", label="simulated, all")
    cost.plot([r.nodes for r in swarms], [r.gossip_bytes / 1e3 for r in swarms], "s--", label="simulated, gossip alone")
    cost.set(title="kB sent per node and minute")
    speed.plot([r.nodes for r in swarms], [r.t95_s for r in swarms], "o-", label="simulated, shards")
    speed.plot([r.nodes for r in topics], [r.t95_s for r in topics], "s--", label="simulated, one topic of all")
    speed.set(title="seconds until 95 % of the readers have a header")
    if real:
        cost.plot([r.nodes for r in real], [r.wire_bytes / 1e3 for r in real], "^-", label="processes, on the wire")
        speed.plot([r.nodes for r in real], [r.t95_s for r in real], "^-", label="processes, loopback")
    for axis in (cost, speed):
        axis.set(xscale="log", ylim=(0, None), xlabel="nodes")
        axis.legend(fontsize=8)
    figure.savefig(path)


def figures(
    real: Sequence[RealRow], swarms: Sequence[SwarmRow], crowds: Sequence[CrowdRow], topics: Sequence[TopicRow]
) -> dict[str, Any]:
    full = [row for row in swarms if row.nodes >= _HEADLINE_NODES]  # none in a quick run, which says nothing of growth
    return {
        "flat_ratio": _number(full[-1].bytes / full[0].bytes) if full else None,
        "flat_ratio_cpu": _number(full[-1].cpu_ms / full[0].cpu_ms) if full else None,
        "flat_ratio_memory": _number(full[-1].memory_kib / full[0].memory_kib) if full else None,
        "flat_ratio_per_header": _number(_bytes_per_header(full[-1]) / _bytes_per_header(full[0])) if full else None,
        "cpu_ms": {row.nodes: _number(row.cpu_ms) for row in swarms},
        "cpu_ms_side_by_side": {row.swarms * row.nodes_of_each: _number(row.cpu_ms) for row in crowds},
        "hops_per_doubling": _number(hops_per_doubling(topics)) if len(topics) > 1 else None,
        "bytes_per_node": {row.nodes: round(row.bytes) for row in swarms},
        "expected_bytes": {row.nodes: round(row.bytes) for row in expectations(swarms)},
        "t95_s": {row.nodes: _number(row.t95_s) for row in swarms},
        "topic_t95_s": {row.nodes: _number(row.t95_s) for row in topics},
        "topic_hops": {row.nodes: _number(row.hops_95) for row in topics},
        "real_wire_bytes_per_node": {row.nodes: round(row.wire_bytes) for row in real},
        "real_t95_s": {row.nodes: _number(row.t95_s) for row in real},
        "real_coverage": {row.nodes: _number(row.coverage) for row in real},
        "coverage": {row.nodes: _number(row.coverage) for row in swarms},
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--real", type=_numbers, help="numbers of processes, comma-separated; `none` for none")
    parser.add_argument("--sizes", type=_numbers, help="sizes of simulated swarms, comma-separated; `none` for none")
    parser.add_argument("--crowds", type=_numbers, help="numbers of swarms of 128 in one process; `none` for none")
    parser.add_argument("--seed", type=int, default=0, help="of the simulations, default 0")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    plan = _QUICK if options.quick else Plan()
    real_sizes = plan.real_sizes if options.real is None else options.real
    swarm_sizes = plan.swarm_sizes if options.sizes is None else options.sizes
    crowd_sizes = plan.crowds if options.crowds is None else options.crowds
    real = measure_real(Plan(real_sizes, plan.settle_s, plan.measure_s))
    topics = [measure_topic(size, options.seed) for size in plan.topic_sizes]
    swarms, crowds = measure_swarms(swarm_sizes, crowd_sizes, options.seed)
    show("processes", real)
    show("swarm", swarms)
    show("crowd", crowds)
    show("expected", expectations(swarms))
    show("topic", topics)
    if options.plot:
        plot(real, swarms, topics, options.plot)
    print(json.dumps(figures(real, swarms, crowds, topics)))


def _bytes_per_header(row: SwarmRow) -> float:
    """Shards differ in size by up to a factor of two from one size of the swarm to the next; this takes that out."""
    return row.bytes / row.headers


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(sorted(int(part) for part in text.split(",")))


def _cell(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"


def _number(value: float) -> float | None:
    """As JSON can say it."""
    return round(value, 3) if math.isfinite(value) else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Swarms of light-node processes on this machine: the same rounds as in the simulation, over real sockets."""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from measuring.loopback import loopback_bytes
from measuring.node_processes import NodeProcess, Reply, all_of
from swarm.simulation.simulation import SpreadLog, quantile

_BENCHMARKS = Path(__file__).resolve().parent.parent
_STARTED_AT_ONCE = 4
"""More would only wait for each other's imports."""
_START_TIMEOUT_S = 90.0
_REPLY_TIMEOUT_S = 30.0
_TAIL_S = 5.0


@dataclass(frozen=True, slots=True)
class RealRow:
    """Per node and minute, except times."""

    nodes: int
    headers: float
    """Different headers of others that a node admitted."""
    bodies: float
    wire_bytes: float
    """What the loopback device carried, by node: everything, with TCP/IP's own bytes. Each byte is sent by one node."""
    t50_s: float
    t95_s: float
    """Until 95 % of the other nodes have a header: the median header."""
    t95_slow_s: float
    """The same for the header at the 95th percentile."""
    coverage: float
    cpu_percent: float
    """Of one core, mean over the nodes."""
    node_mib: float
    """Largest resident set of a node, Python and daemon."""


async def measure_processes(num_nodes: int, settle_s: float, measure_s: float) -> RealRow:
    """Raises NodeFailed where a node does not come up or breaks."""
    async with _running(num_nodes) as nodes:
        await asyncio.sleep(settle_s)
        await _ask(nodes, "begin")
        bytes_before, cpu_before, since = loopback_bytes(), _cpu_s(nodes), time.time()
        await asyncio.sleep(measure_s)
        wire_bytes, until = loopback_bytes() - bytes_before, time.time()
        cpu_percent = 100 * (_cpu_s(nodes) - cpu_before) / (until - since) / num_nodes
        await asyncio.sleep(_TAIL_S)
        reports = await _ask(nodes, "report")
        node_mib = max(node.footprint().rss_mib for node in nodes)
    spread = SpreadLog()
    spread.begin(since)
    for report in reports:
        for header, created_at, admitted_at in report["arrivals"]:
            if created_at < until:
                spread.note(header, created_at, admitted_at, num_nodes - 1)
    t95s = spread.times_s(0.95, until)
    per_minute = 60 / (until - since)
    return RealRow(
        nodes=num_nodes,
        headers=spread.num_arrivals() / num_nodes * per_minute,
        bodies=statistics.mean(report["bodies"] for report in reports) * 60 / (until - since + _TAIL_S),
        wire_bytes=wire_bytes / num_nodes * per_minute,
        t50_s=quantile(spread.times_s(0.5, until), 0.5),
        t95_s=quantile(t95s, 0.5),
        t95_slow_s=quantile(t95s, 0.95),
        coverage=spread.coverage(until),
        cpu_percent=cpu_percent,
        node_mib=node_mib,
    )


@asynccontextmanager
async def _running(num_nodes: int) -> AsyncIterator[list[NodeProcess]]:
    """Nodes that joined through the first one."""
    command = (sys.executable, "-m", "measuring.light_node_process")
    environment = {"PYTHONPATH": str(_BENCHMARKS), "OMP_NUM_THREADS": "1"}
    nodes: list[NodeProcess] = []
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:

        async def start(number: int, initial_peers: Sequence[str]) -> Reply:
            node_folder = Path(folder) / str(number)
            node_folder.mkdir(mode=0o700)
            node = await NodeProcess.spawn(command, environment, node_folder / "log")
            nodes.append(node)
            return await node.ask(
                "start", timeout_s=_START_TIMEOUT_S, folder=str(node_folder), initial_peers=initial_peers
            )

        try:
            first = await start(0, ())
            for number in range(1, num_nodes, _STARTED_AT_ONCE):
                batch = range(number, min(number + _STARTED_AT_ONCE, num_nodes))
                await all_of([start(one, first["addresses"]) for one in batch])
            yield nodes
        finally:
            await asyncio.gather(*(node.end() for node in nodes))


async def _ask(nodes: Sequence[NodeProcess], do: str) -> list[Reply]:
    return await all_of([node.ask(do, timeout_s=_REPLY_TIMEOUT_S) for node in nodes])


def _cpu_s(nodes: Sequence[NodeProcess]) -> float:
    return sum(node.footprint().cpu_s for node in nodes)

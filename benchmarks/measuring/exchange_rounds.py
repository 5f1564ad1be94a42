"""Swarms of node processes that exchange one batch per node, round by round, and what each round took.

start nodes ─ (clear ─ prepare ─ common start signal ─ last node has its bodies ─ nothing is left to send) x rounds ─ end

Time counts until the last node has its bodies; bytes and processor time until nothing is left to send.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from measuring.loopback import loopback_bytes
from measuring.node_processes import Footprint, NodeFailed, NodeProcess, Reply, all_of

_BENCHMARKS = Path(__file__).resolve().parent.parent
_START_TIMEOUT_S = 90.0
_STEP_TIMEOUT_S = 30.0
_GRACE_S = 5.0
_SIGNAL_DELAY_S = 0.1
"""From the signal's sending to its moment, so that every node has read it by then."""


@dataclass(frozen=True, slots=True)
class System:
    """How to run one node of a system."""

    command: tuple[str, ...]
    start: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the command `start`."""
    settle_s: float = 0.0
    """Rest after the start, for what a node does in its first seconds only."""


@dataclass(frozen=True, slots=True)
class Case:
    """Every node publishes one body and wants those of `num_bodies` others."""

    system: Literal["swarm", "requests alone", "genrl", "genrl, no sleep"]
    num_nodes: int
    body_kib: int
    num_bodies: int


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one swarm."""

    seconds: float | None
    """From the start signal until the last node had its bodies; None where one did not get them in time."""
    num_complete: int
    """Nodes that got all their bodies in time."""
    num_nodes: int
    wire_bytes: int
    """What the loopback device carried, of all nodes together."""
    python_cpu_s: float
    """Processor time of the Python processes of all nodes together."""
    children_cpu_s: float
    """The same of their children: the network daemons, and what genrl starts."""
    replies: tuple[Reply, ...] = ()
    failure: str = ""
    """Of a node, after which its swarm is of no more use."""


class NodeSwarm:
    """Running nodes of one system."""

    def __init__(self, nodes: Sequence[NodeProcess], time_limit_s: float) -> None:
        self._nodes = tuple(nodes)
        self._time_limit_s = time_limit_s
        self._num_rounds = 0

    async def run_round(self, case: Case) -> Round:
        """What goes wrong is part of the result."""
        self._num_rounds += 1
        num_nodes = len(self._nodes)
        try:
            if self._num_rounds > 1:
                await self._all("clear", _STEP_TIMEOUT_S)
            await self._all(
                "prepare",
                _STEP_TIMEOUT_S,
                number=self._num_rounds,
                body_bytes=case.body_kib * 1024,
                num_bodies=case.num_bodies,
                sleep=case.system == "genrl",
                bare=case.system == "requests alone",
            )
            bytes_before, cpu_before_s = loopback_bytes(), self._cpu_s_by_part()
            replies = await self._go(time.monotonic() + _SIGNAL_DELAY_S)  # one clock for all processes of a machine
            failures = [reply["error"] for reply in replies if "error" in reply]
            if not failures:
                ends = await self._all("finish", _STEP_TIMEOUT_S)
                replies = [reply | end for reply, end in zip(replies, ends, strict=True)]
            wire_bytes, cpu_s = loopback_bytes() - bytes_before, self._cpu_s_by_part()
        except NodeFailed as error:
            return Round(None, 0, num_nodes, 0, 0.0, 0.0, failure=str(error))
        times = [reply["seconds"] for reply in replies if reply.get("seconds") is not None]
        return Round(
            seconds=max(times) if len(times) == num_nodes else None,
            num_complete=len(times),
            num_nodes=num_nodes,
            wire_bytes=wire_bytes,
            python_cpu_s=cpu_s[0] - cpu_before_s[0],
            children_cpu_s=cpu_s[1] - cpu_before_s[1],
            replies=tuple(replies),
            failure=failures[0] if failures else "",
        )

    async def footprints(self) -> list[Footprint]:
        return await asyncio.to_thread(lambda: [node.footprint() for node in self._nodes])

    async def idle_cpu_percent(self, idle_s: float) -> float:
        """Mean over the nodes, of one core, while no node publishes."""
        before_s, start = sum(self._cpu_s_by_part()), time.monotonic()
        await asyncio.sleep(idle_s)
        return 100 * (sum(self._cpu_s_by_part()) - before_s) / len(self._nodes) / (time.monotonic() - start)

    def _cpu_s_by_part(self) -> tuple[float, float]:
        parts = [node.cpu_s_by_part() for node in self._nodes]
        return sum(own for own, _ in parts), sum(children for _, children in parts)

    async def _go(self, start_at: float) -> list[Reply]:
        """Replies in the order of nodes; a node that failed or was late answers with its error."""

        async def go(node: NodeProcess) -> Reply:
            try:
                timeout_s = self._time_limit_s + _GRACE_S
                return await node.ask("go", timeout_s=timeout_s, start_at=start_at, time_limit_s=self._time_limit_s)
            except NodeFailed as error:
                return {"error": str(error)}

        return list(await asyncio.gather(*map(go, self._nodes)))

    async def _all(self, do: str, timeout_s: float, **arguments: Any) -> list[Reply]:
        return await all_of([node.ask(do, timeout_s=timeout_s, **arguments) for node in self._nodes])


@contextlib.asynccontextmanager
async def running(system: System, num_nodes: int, time_limit_s: float) -> AsyncIterator[NodeSwarm]:
    """A swarm whose nodes joined through the first one. Raises NodeFailed where it does not come up."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        nodes: list[NodeProcess] = []
        try:
            for number in range(num_nodes):
                node_folder = Path(folder) / str(number)
                node_folder.mkdir(mode=0o700)
                environment = {"PYTHONPATH": str(_BENCHMARKS), "OMP_NUM_THREADS": "1"}
                nodes.append(await NodeProcess.spawn(system.command, environment, node_folder / "log"))

            async def start(number: int, initial_peers: Sequence[str]) -> Reply:
                return await nodes[number].ask(
                    "start",
                    timeout_s=_START_TIMEOUT_S,
                    folder=str(Path(folder) / str(number)),
                    num_nodes=num_nodes,
                    initial_peers=initial_peers,
                    **system.start,
                )

            first = await start(0, ())
            await all_of([start(number, first["addresses"]) for number in range(1, num_nodes)])
            await asyncio.sleep(system.settle_s)
            yield NodeSwarm(nodes, time_limit_s)
        finally:
            await asyncio.gather(*(node.end() for node in nodes))

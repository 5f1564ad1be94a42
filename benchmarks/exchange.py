"""How long until every node has the bodies it wants: this project beside genrl.

    python benchmarks/exchange.py            N = 2, 4, 8, 16; 8, 64 and 512 KB; about a quarter of an hour
    python benchmarks/exchange.py --quick    N = 8; under a minute
    python benchmarks/exchange.py --prepare  make genrl's environment, once (2 GB in ~/.cache, some minutes)

In a round every node publishes one batch, and the round ends when the last node has what it wants. Nodes of this project
pull J = 4 bodies of others, as for a training step, each checked by signature, hash and recomputed rewards; genrl's
`all_gather_object` gives every node all N - 1, unchecked. So this project runs with J = N - 1 as well: like for like.
*Requests alone* is the bound of any design over these daemons: four bodies of peers that are connected already, of which
nothing is announced, checked or stored. genrl runs as it is, and without the second that it sleeps in each call. Above
16 KiB its call hangs: that is incomplete.
Both swarms are alive at the same time and take turns, round by round: what else the machine does, it does to both. The
last line of the output is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring.exchange_report import HEADLINE_NODES, Measurement, figures, print_table
from measuring.exchange_rounds import Case, NodeSwarm, System, running
from measuring.loopback import enter_private_network
from measuring.node_processes import NodeFailed
from peers.genrl_venv import PeerUnavailable, default_folder, make, python_of

_HERE = Path(__file__).resolve().parent
_NUM_WARM_UP_ROUNDS = 2
_WANTED_BODIES = 4
_PIPE_KIB = 16
"""What is larger kills genrl's DHT process."""


class SwarmBroke(Exception):
    """A node failed in a round; its swarm is of no more use."""


class Benchmark:
    """Collects measurements, one number of nodes after the other."""

    def __init__(self, options: argparse.Namespace, ours: System, peer: System | None) -> None:
        self._options = options
        self._ours = ours
        self._peer = peer
        self._measurements: dict[Case, Measurement] = {}
        self.idle_cpu_percent: float | None = None

    @property
    def measurements(self) -> list[Measurement]:
        return sorted(
            self._measurements.values(),
            key=lambda one: (one.case.body_kib, one.case.num_nodes, one.case.system != "swarm", one.case.num_bodies),
        )

    async def measure(self, num_nodes: int) -> None:
        """All sizes. What breaks is told, and the rest goes on."""
        options = self._options
        try:
            async with contextlib.AsyncExitStack() as alive:
                async with contextlib.AsyncExitStack() as alive_too:
                    ours, peer = await asyncio.gather(
                        self._start(alive, self._ours, num_nodes), self._start_peer(alive_too, num_nodes)
                    )
                    await self._warm_up(ours, Case("swarm", num_nodes, options.sizes[0], self._wanted(num_nodes)))
                    if peer is not None and not await self._warm_up_peer(peer, num_nodes):
                        peer = None
                    for size in (size for size in options.sizes if size < _PIPE_KIB):
                        await self._take_turns(num_nodes, size, ours, peer)
                for size in (size for size in options.sizes if size > _PIPE_KIB):
                    await self._take_turns(num_nodes, size, ours, None)
                if options.idle_s and (num_nodes == HEADLINE_NODES or len(options.nodes) == 1):
                    self.idle_cpu_percent = await ours.idle_cpu_percent(options.idle_s)
        except (NodeFailed, SwarmBroke) as error:
            _say(f"N = {num_nodes}: {error}")
        for size in options.sizes:
            if size > _PIPE_KIB and not options.quick:
                await self._let_it_hang(num_nodes, size)

    async def _take_turns(self, num_nodes: int, size_kib: int, ours: NodeSwarm, peer: NodeSwarm | None) -> None:
        many = self._options.rounds if size_kib < _PIPE_KIB else self._options.large_rounds
        few = many // 3  # of what is no headline
        others = num_nodes - 1
        turns = [(Case("swarm", num_nodes, size_kib, self._wanted(num_nodes)), ours, many)]
        if others > _WANTED_BODIES:
            turns.append((Case("swarm", num_nodes, size_kib, others), ours, few))
        if size_kib < _PIPE_KIB:
            turns.append((Case("requests alone", num_nodes, size_kib, self._wanted(num_nodes)), ours, many))
        if peer is not None:
            turns.append((Case("genrl, no sleep", num_nodes, size_kib, others), peer, many))
            turns.append((Case("genrl", num_nodes, size_kib, others), peer, 0 if self._options.quick else few))
        for number in range(many):
            for case, swarm, num_rounds in turns:
                if number < num_rounds:
                    await self._round(swarm, case)
        for case, swarm, num_rounds in turns:
            if num_rounds == 0:
                continue
            measurement = self._measurements[case]
            measurement.footprints = await swarm.footprints()
            _say(_line(measurement))

    async def _let_it_hang(self, num_nodes: int, size_kib: int) -> None:
        """One round of the peer with more than it can take, in a swarm of its own."""
        with contextlib.suppress(NodeFailed, SwarmBroke):
            async with contextlib.AsyncExitStack() as alive:
                peer = await self._start_peer(alive, num_nodes)
                if peer is not None and await self._warm_up_peer(peer, num_nodes):
                    await self._round(peer, Case("genrl, no sleep", num_nodes, size_kib, num_nodes - 1))

    async def _start(self, alive: contextlib.AsyncExitStack, system: System, num_nodes: int) -> NodeSwarm:
        return await alive.enter_async_context(running(system, num_nodes, self._options.time_limit_s))

    async def _start_peer(self, alive: contextlib.AsyncExitStack, num_nodes: int) -> NodeSwarm | None:
        if self._peer is None:
            return None
        try:
            return await self._start(alive, self._peer, num_nodes)
        except NodeFailed as error:
            _say(f"genrl, N = {num_nodes}: {error}")
            return None

    async def _warm_up_peer(self, peer: NodeSwarm, num_nodes: int) -> bool:
        """Whether it came through."""
        try:
            await self._warm_up(peer, Case("genrl, no sleep", num_nodes, 1, num_nodes - 1))
        except SwarmBroke as error:
            _say(f"genrl, N = {num_nodes}: {error}")
            return False
        return True

    async def _warm_up(self, swarm: NodeSwarm, case: Case) -> None:
        for _ in range(1 if self._options.quick else _NUM_WARM_UP_ROUNDS):
            if failure := (await swarm.run_round(case)).failure:
                raise SwarmBroke(failure)

    async def _round(self, swarm: NodeSwarm, case: Case) -> None:
        one = await swarm.run_round(case)
        self._measurements.setdefault(case, Measurement(case)).rounds.append(one)
        if one.failure:
            _say(_line(self._measurements[case]))
            raise SwarmBroke(f"{case.system}, {case.body_kib} KiB: {one.failure}")

    @staticmethod
    def _wanted(num_nodes: int) -> int:
        return min(_WANTED_BODIES, num_nodes - 1)


def peer_system(options: argparse.Namespace) -> System | None:
    if not options.peer:
        return None
    try:
        python = python_of(options.peer_venv)
    except PeerUnavailable as error:
        _say(f"genrl is left out: {error}")
        return None
    command = (str(python), str(_HERE / "peers" / "genrl_exchange.py"))
    return System(command, start={"gather_timeout_s": int(options.time_limit_s)})


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="N = 8 only, few rounds")
    parser.add_argument("--prepare", action="store_true", help="only make genrl's environment")
    parser.add_argument("--nodes", type=_numbers, help="comma-separated, default 2,4,8,16")
    parser.add_argument("--sizes", type=_numbers, default=[8, 64, 512], help="KiB, comma-separated, default 8,64,512")
    parser.add_argument(
        "--rounds", type=int, help="rounds of a case, default 9 (quick: 3, large bodies 1, genrl with its sleep 0)"
    )
    parser.add_argument("--time-limit-s", type=float, default=30.0, help="longest wait for a round, default 30")
    parser.add_argument("--idle-s", type=float, help="how long idle nodes are watched, default 20 (quick: not)")
    parser.add_argument("--settle-s", type=float, help="rest of our nodes after their start, default 8 (quick: 3)")
    parser.add_argument("--gossip", choices=("libp2p", "daemon", "off"), help="default: as the project comes")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="run genrl as well")
    parser.add_argument("--peer-venv", type=Path, default=default_folder(), help="where genrl's environment is kept")
    options = parser.parse_args(arguments)
    options.nodes = options.nodes or ([HEADLINE_NODES] if options.quick else [2, 4, 8, 16])
    options.large_rounds = options.rounds or (1 if options.quick else 9)
    options.rounds = options.rounds or (3 if options.quick else 9)
    options.idle_s = options.idle_s or (0.0 if options.quick else 20.0)
    options.settle_s = options.settle_s or (3.0 if options.quick else 8.0)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.prepare:
        make(options.peer_venv)
        return
    peer = peer_system(options)
    if not enter_private_network():
        _say("no network of its own: other programs' traffic on loopback is counted too")
    network = {} if options.gossip is None else {"gossip": options.gossip}
    ours = System((sys.executable, "-m", "measuring.swarm_node"), start={"network": network}, settle_s=options.settle_s)
    benchmark = Benchmark(options, ours, peer)

    async def run() -> None:
        for num_nodes in options.nodes:
            await benchmark.measure(num_nodes)

    asyncio.run(run())
    print_table(benchmark.measurements)
    print(json.dumps(figures(benchmark.measurements, benchmark.idle_cpu_percent)))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _line(measurement: Measurement) -> str:
    row = measurement.row
    return (
        f"{row['system']}, N = {row['num_nodes']}, {row['body_kib']} KiB, {row['num_bodies']} bodies: "
        f"p50 {row['p50_s']} s, worst {row['worst_s']} s, complete {row['completeness']:.0%}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

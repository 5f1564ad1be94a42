"""How long until every node has the bodies it wants: this project beside genrl.

    python benchmarks/exchange.py            N = 2, 4, 8, 16; 8, 64 and 512 KB; about a quarter of an hour
    python benchmarks/exchange.py --quick    N = 8; under a minute once genrl's environment exists

In a round every node publishes one batch, and the round ends when the last node has what it wants. Nodes of this project
pull J = 4 bodies of others, as for a training step, each checked by signature, hash and recomputed rewards; genrl's
`all_gather_object` gives every node all N - 1, unchecked. So this project runs with J = N - 1 as well: like for like.
genrl runs as it is, and without the second that it sleeps in each call. Above 16 KiB its call hangs: that is incomplete.
The systems take turns, swarm by swarm, because a machine's speed wanders. The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring.exchange_report import HEADLINE_NODES, Measurement, figures, print_table
from measuring.exchange_rounds import Case, System, running
from measuring.loopback import enter_private_network
from measuring.node_processes import NodeFailed
from peers.genrl_venv import PeerUnavailable, default_folder, python_of

_HERE = Path(__file__).resolve().parent
_VENV_TIMEOUT_S, _QUICK_VENV_TIMEOUT_S = 1200.0, 240.0
_NUM_WARM_UP_ROUNDS = 2
_WANTED_BODIES = 4
_PIPE_KIB = 16
"""What is larger kills genrl's DHT process."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Some rounds of one case."""

    case: Case
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Visit:
    """One life of a swarm, and what is measured in it."""

    system: System
    turns: tuple[Turn, ...]
    idle_s: float = 0.0
    """Measure the idle processor time for so long after the first turn."""

    @property
    def num_nodes(self) -> int:
        return self.turns[0].case.num_nodes


class Benchmark:
    """Collects measurements, visit by visit."""

    def __init__(self, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._measurements: dict[Case, Measurement] = {}
        self.idle_cpu_percent: float | None = None

    @property
    def measurements(self) -> list[Measurement]:
        return sorted(
            self._measurements.values(),
            key=lambda one: (one.case.body_kib, one.case.num_nodes, one.case.system[0] != "s", one.case.num_bodies),
        )

    async def visit(self, visit: Visit) -> None:
        try:
            async with running(visit.system, visit.num_nodes, self._time_limit_s) as swarm:
                first = visit.turns[0].case
                for _ in range(_NUM_WARM_UP_ROUNDS if first.system == "swarm" or first.body_kib < _PIPE_KIB else 0):
                    await swarm.run_round(first)
                for turn in visit.turns:
                    measurement = self._measurements.setdefault(turn.case, Measurement(turn.case))
                    for _ in range(turn.num_rounds):
                        one = await swarm.run_round(turn.case)
                        measurement.rounds.append(one)
                        if one.failure:
                            _say(f"{turn.case.system}, N = {visit.num_nodes}, {turn.case.body_kib} KiB: {one.failure}")
                            return
                    measurement.footprints = await swarm.footprints()
                    _say(_line(measurement))
                    if visit.idle_s and turn is visit.turns[0]:
                        self.idle_cpu_percent = await swarm.idle_cpu_percent(visit.idle_s)
        except NodeFailed as error:
            _say(f"{visit.turns[0].case.system}, N = {visit.num_nodes}: did not start: {error}")


def our_visit(system: System, num_nodes: int, sizes: Sequence[int], num_rounds: int, idle_s: float = 0.0) -> Visit:
    """J = 4 and J = N - 1 (once, where that is the same)."""
    wanted = sorted({min(_WANTED_BODIES, num_nodes - 1), num_nodes - 1})
    turns = [Turn(Case("swarm", num_nodes, size, bodies), num_rounds) for size in sizes for bodies in wanted]
    return Visit(system, tuple(turns), idle_s)


def peer_visits(system: System, num_nodes: int, sizes: Sequence[int], num_rounds: int) -> list[Visit]:
    """Sizes that hang have a swarm of their own, for one round."""
    visits: list[Visit] = []
    for size in sizes:
        quick = Turn(Case("genrl, no sleep", num_nodes, size, num_nodes - 1), num_rounds)
        if size < _PIPE_KIB:
            stock = Turn(Case("genrl", num_nodes, size, num_nodes - 1), max(2, num_rounds // 2))
            visits.append(Visit(system, (quick, stock)))
        else:
            visits.append(Visit(system, (Turn(quick.case, 1),)))
    return visits


def plan(options: argparse.Namespace, ours: System, peer: System | None) -> list[Visit]:
    """ABAB: the peer always runs between two swarms of ours."""
    sizes, rounds = options.sizes, options.rounds
    small = [size for size in sizes if size < _PIPE_KIB]
    visits: list[Visit] = []
    for num_nodes in options.nodes:
        idle_s = options.idle_s if num_nodes == HEADLINE_NODES or len(options.nodes) == 1 else 0.0
        visits.append(our_visit(ours, num_nodes, small or sizes, rounds))
        visits += peer_visits(peer, num_nodes, small, rounds) if peer else []
        visits.append(our_visit(ours, num_nodes, sizes, rounds, idle_s))
        if peer and not options.quick:
            visits += peer_visits(peer, num_nodes, sizes, rounds)
    return [visit for visit in visits if visit.turns]


def peer_system(options: argparse.Namespace) -> System | None:
    if not options.peer:
        return None
    try:
        python = python_of(options.peer_venv, _QUICK_VENV_TIMEOUT_S if options.quick else _VENV_TIMEOUT_S)
    except PeerUnavailable as error:
        _say(f"genrl is left out: {error}")
        return None
    command = (str(python), str(_HERE / "peers" / "genrl_exchange.py"))
    return System(command, start={"gather_timeout_s": int(options.time_limit_s)})


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="N = 8 only, few rounds")
    parser.add_argument("--nodes", type=_numbers, help="comma-separated, default 2,4,8,16")
    parser.add_argument("--sizes", type=_numbers, default=[8, 64, 512], help="KiB, comma-separated, default 8,64,512")
    parser.add_argument("--rounds", type=int, help="rounds of a case in one turn, default 5 (quick: 3)")
    parser.add_argument("--time-limit-s", type=float, default=30.0, help="longest wait for a round, default 30")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long idle nodes are watched, default 10")
    parser.add_argument("--settle-s", type=float, default=5.0, help="rest of our nodes after their start, default 5")
    parser.add_argument("--gossip", choices=("libp2p", "daemon", "off"), help="default: as the project comes")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="run genrl as well")
    parser.add_argument("--peer-venv", type=Path, default=default_folder(), help="where genrl's environment is kept")
    options = parser.parse_args(arguments)
    options.nodes = options.nodes or ([HEADLINE_NODES] if options.quick else [2, 4, 8, 16])
    options.rounds = options.rounds or (3 if options.quick else 5)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    peer = peer_system(options)  # before the way to the package index is cut
    if not enter_private_network():
        _say("no network of its own: other programs' traffic on loopback is counted too")
    network = {} if options.gossip is None else {"gossip": options.gossip}
    ours = System((sys.executable, "-m", "measuring.swarm_node"), start={"network": network}, settle_s=options.settle_s)
    benchmark = Benchmark(options.time_limit_s)

    async def run() -> None:
        for visit in plan(options, ours, peer):
            await benchmark.visit(visit)

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

"""Six light nodes through a week on a virtual clock, with an event every hour; what they remember must stay flat.

    python -m tests.swarm.week [--days 7] [--seed 0]

What shares and admits is the code of real nodes; only rollouts and network are light. After every event it waits until the node
that it happened to trains on groups of others, and others on its own. The last line is a JSON object.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from swarm.network.memory.transport import Faults
from swarm.network.memory.virtual_clock import run
from swarm.simulation.light_node import LightRounds
from swarm.simulation.simulation import INTERNET, Simulation, SimulationSettings
from tests.swarm.light_swarm import held

NUM_NODES = 6
HOUR_S, DAY_S = 3600.0, 86_400.0
HOLD_S = (30.0, 1800.0)
RECOVERY_TIMEOUT_S = 900.0
_STEP_S = 20.0
_CLOCK_JUMP_S = 3600.0
_ROUNDS = LightRounds(round_s=60.0)
_BAD_LINE = Faults(loss=0.2, duplication=0.1, corruption=0.01, delay_s=(0.1, 0.4))


class NotRecovered(Exception):
    """What was expected, and what was seen."""


@dataclass
class Figures:
    """What came of a week."""

    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    """{event: times from its end until the node exchanged again}"""
    rejected: Counter[str] = field(default_factory=Counter)
    items: list[int] = field(default_factory=list)
    """Every hour: items in all that a node remembers, of the node with most. Bounded tables fill up, and then stay."""


class Week:
    """Things that happen to the nodes of a simulation, one after the other."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self.figures = Figures()
        self._simulation = simulation
        self._network = simulation.network
        self._rng = random.Random(f"week/{seed}")
        self._events: dict[str, Callable[[int, float], Coroutine[Any, Any, None]]] = {
            "killed": self._kill,
            "left and came back": self._leave,
            "froze": self._freeze,
            "network cut": self._cut,
            "bad lines": self._bad_lines,
            "clock an hour ahead": self._clock_ahead,
            "clock an hour behind": self._clock_behind,
        }

    async def live(self, duration_s: float) -> None:
        """Raises NotRecovered, and what broke a node."""
        names: list[str] = []
        for _ in range(int(duration_s / HOUR_S)):
            began = asyncio.get_running_loop().time()
            names = names or self._rng.sample(sorted(self._events), len(self._events))
            name, number = names.pop(), self._rng.randrange(NUM_NODES)
            await self._events[name](number, self._rng.uniform(*HOLD_S))
            self.figures.recovery_s.setdefault(name, []).append(await self._recover(name, number))
            await self._simulation.let(max(0.0, began + HOUR_S - asyncio.get_running_loop().time()))
            self.figures.items.append(max(held(node)[0] for node in self._simulation.nodes))
        self.figures.rejected.update(self._simulation.rejected())

    async def _recover(self, name: str, number: int) -> float:
        node, start = self._simulation.nodes[number], asyncio.get_running_loop().time()
        others = [one for one in self._simulation.nodes if one is not node]
        taken = node.num_groups_trained
        given = sum(one.trained_authors[node.peer_id] for one in others)
        while True:
            await self._simulation.let(_STEP_S)
            now = asyncio.get_running_loop().time()
            if node.num_groups_trained > taken and sum(one.trained_authors[node.peer_id] for one in others) > given:
                return now - start
            if now > start + RECOVERY_TIMEOUT_S:
                raise NotRecovered(f"{name}, node {number}: no exchange both ways within {RECOVERY_TIMEOUT_S:.0f} s")

    async def _kill(self, number: int, hold_s: float) -> None:
        self._network.crash(self._simulation.nodes[number].peer_id)
        await self._replace(number, hold_s)

    async def _leave(self, number: int, hold_s: float) -> None:
        await self._replace(number, hold_s)

    async def _replace(self, number: int, hold_s: float) -> None:
        """Start the node again, with its identity and without what it remembered."""
        old = self._simulation.nodes[number]
        await old.stop()
        self.figures.rejected.update(old.rejected)
        await asyncio.sleep(hold_s)
        node = self._simulation.make_node(number)
        node._round = old._round  # as from its checkpoint: it does not repeat its groups
        self._simulation.nodes[number] = node
        await node.start()

    async def _freeze(self, number: int, hold_s: float) -> None:
        self._network.freeze(self._simulation.nodes[number].peer_id)
        await asyncio.sleep(hold_s)
        self._network.thaw(self._simulation.nodes[number].peer_id)

    async def _cut(self, number: int, hold_s: float) -> None:
        ids = [node.peer_id for node in self._simulation.nodes]
        side = {ids[number], *self._rng.sample(ids, NUM_NODES // 2 - 1)}
        self._network.partition(side, set(ids) - side)
        await asyncio.sleep(hold_s)
        self._network.heal()

    async def _bad_lines(self, number: int, hold_s: float) -> None:
        self._network.faults = _BAD_LINE
        await asyncio.sleep(hold_s)
        self._network.faults = INTERNET

    async def _clock_ahead(self, number: int, hold_s: float) -> None:
        await self._jump(number, _CLOCK_JUMP_S, hold_s)

    async def _clock_behind(self, number: int, hold_s: float) -> None:
        await self._jump(number, -_CLOCK_JUMP_S, hold_s)

    async def _jump(self, number: int, offset_s: float, hold_s: float) -> None:
        peer_id = self._simulation.nodes[number].peer_id
        self._network.skew_clock(peer_id, offset_s)
        await asyncio.sleep(hold_s)
        self._network.skew_clock(peer_id, 0.0)


async def week(duration_s: float, seed: int) -> Figures:
    """Live so long, in virtual seconds."""
    async with Simulation(SimulationSettings(NUM_NODES, seed, rounds=_ROUNDS)) as simulation:
        await simulation.start()
        await simulation.let(300.0)
        lived = Week(simulation, seed)
        await lived.live(duration_s)
        return lived.figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.swarm.week", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=0, help="Decides what happens when, and to whom.")
    options = parser.parse_args()
    start = time.monotonic()
    print(f"seed {options.seed}", flush=True)
    try:
        figures = run(week(options.days * DAY_S, options.seed))
    except NotRecovered as error:
        sys.exit(str(error))
    print(
        json.dumps(
            {
                "num_events": sum(map(len, figures.recovery_s.values())),
                "recovery_worst_s": {name: round(max(times)) for name, times in sorted(figures.recovery_s.items())},
                "items_every_six_hours": figures.items[5::6],
                "rejected": dict(figures.rejected),
                "took_s": round(time.monotonic() - start),
            }
        )
    )


if __name__ == "__main__":
    main()

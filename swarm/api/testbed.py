"""`swarm.testbed`: a swarm of several nodes on this machine, as `swarm testbed` runs it, in the same folders."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swarm.api.node import Evaluation, Node, Round, frame_of, near, settings_of
from swarm.api.own_tasks import OwnTasks, own_tasks
from swarm.config import merge
from swarm.errors import ConfigError
from swarm.testbeds.profiles import PlanRequest, plan_nodes
from swarm.testbeds.testbed import open_testbed, run_and_report

if TYPE_CHECKING:
    from pandas import DataFrame

_KEYWORDS = ("nodes", "folder", "reward", "dataset", "task", "base", "seed")


def testbed(
    nodes: int = 4,
    *files: str | Path,
    folder: str | Path = "runs/testbed",
    reward: Any = None,
    dataset: Any = None,
    task: Mapping[str, Any] | None = None,
    base: str | None = None,
    seed: int = 0,
    **sections: Mapping[str, Any],
) -> "Testbed":
    """A testbed of `nodes` nodes, each a process of its own, which meet over loopback. It starts nothing and writes nothing.

    `reward`, `dataset`, `task`: as of `Node.from_config`. `base`: `policy.base`. `files` and `sections` are for all nodes;
    sections win over the profiles by which the nodes differ. `seed`: nodes of another seed draw other tasks.

    Raises ConfigError or TaskError.
    """
    own = merge(settings_of((), sections, _KEYWORDS), {} if base is None else {"policy": {"base": str(base)}})
    place = Path(folder).absolute()
    request = PlanRequest(num_nodes=nodes, seed=seed, configs=[Path(file) for file in files], settings=own)
    tasks = own_tasks(reward, dataset, task, plan_nodes(place, request)[0].config.tasks.sources)
    return Testbed(place, replace(request, settings=merge(own, tasks.section(place))), tasks)


class Testbed:
    """Several nodes on this machine. All commands for a testbed work on its folder."""

    def __init__(self, folder: Path, request: PlanRequest, tasks: OwnTasks) -> None:
        """`tasks`: functions and rows that the settings of `request` name as files. Raises ConfigError."""
        self.folder = folder
        self._request = request
        self._tasks = tasks
        self.nodes = [Node(plan.config, tasks) for plan in plan_nodes(folder, request)]
        """In the order of their numbers; they have what `swarm.Node` has."""

    def run(
        self, rounds: int = 150, *, minutes: float | None = None, fresh: bool = False, progress: bool = True
    ) -> dict[str, list[Round]]:
        """Run until each node has `rounds` rounds, those of earlier runs included, and return all rounds: {node: rounds}.

        Slower profiles do fewer rounds. `minutes`: end training by then. `fresh`: begin a new run; the earlier is moved aside.
        `progress`: show a live table and what was learned. Ctrl-C ends all nodes, and the same call goes on.

        Raises ConfigError, also for a folder in which another testbed runs, and SwarmError where a node failed.
        """
        if isinstance(rounds, bool) or not isinstance(rounds, int):
            raise ConfigError(f"rounds must be a whole number, got {rounds!r}; set rounds")
        request = replace(self._request, num_rounds=rounds)
        plan_nodes(self.folder, request)  # whether the settings are valid, before an earlier run is moved
        console = Console(quiet=not progress)
        with open_testbed(near(self.folder), console, fresh=fresh):
            self._tasks.write(self.folder)
            run_and_report(near(self.folder), request, console, minutes)
        return self.rounds()

    def rounds(self) -> dict[str, list[Round]]:
        """All rounds so far: {node: rounds}."""
        return {node.folder.name: [Round.of(row) for row in node.metrics()] for node in self.nodes}

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds of all nodes as records, each with its `node`."""
        return [{"node": node.folder.name, **row} for node in self.nodes for row in node.metrics()]

    def frame(self) -> "DataFrame":
        """The same as a DataFrame. Raises SwarmError where pandas is not installed."""
        return frame_of(self.metrics())

    def evaluation(self) -> dict[str, Evaluation]:
        """Reward on held-out tasks before and after: {node: evaluation}."""
        return {node.folder.name: node.evaluation() for node in self.nodes}

"""`swarm.train`: one call from a base, rewards and a data set to a trained policy, alone or with a swarm."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swarm.api.node import Evaluation, Node, near, settings_of
from swarm.api.own_tasks import own_tasks
from swarm.config import merge, parse, read, ready_configs
from swarm.errors import ConfigError
from swarm.machine.node_folder import NodeFolder
from swarm.report.live_table import LiveTable, NodeView
from swarm.report.node_history import NodeHistory

if TYPE_CHECKING:
    from pandas import DataFrame

    from swarm.api.saved_policy import SavedPolicy

_KEYWORDS = ("base", "rewards", "dataset", "task", "rounds", "fresh", "progress")


def train(
    base: str | Path | None = None,
    rewards: Any = None,
    dataset: Any = None,
    *,
    swarm: str | Path | None = None,
    rounds: int = 100,
    task: Mapping[str, Any] | None = None,
    fresh: bool = False,
    progress: bool = True,
    **sections: Mapping[str, Any],
) -> "Training":
    """Train a LoRA adapter of `base` until it has `rounds` rounds: alone, or in the swarm of a manifest.

    `base`: as `policy.base`; None is the bundled policy, or what the manifest and this machine suggest. `rewards`, `dataset`,
    `task`: as of `Node.from_config`. `swarm`: file or address of a manifest, which decides the tasks; `rewards` and `dataset` are
    then your copies of what it names. `sections`: settings, such as training={"lr": 1e-5}.

    The same call again goes on from the newest checkpoint, for example after an interrupt, and returns at once where all rounds
    are done. Another call has another folder, `runs/train-…`, unless node={"dir": …} names one. `fresh` moves the earlier run
    aside.

    Raises the SwarmError that ended the training, such as ConfigError or TaskError.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds!r}; set rounds")
    own = merge(settings_of((), sections, _KEYWORDS), {} if base is None else {"policy": {"base": str(base)}})
    if swarm is None:
        node = _alone(rewards, dataset, task, own)
    elif not isinstance(swarm, str | Path):
        raise ConfigError(f"swarm must be the file or address of a manifest, got {swarm!r}; see `swarm create`")
    elif task is not None:
        raise ConfigError("task is decided by the manifest of a swarm, got both; leave task out")
    else:
        node = Node.join(swarm, reward=rewards, dataset=dataset, **own)
    training = Training(node)
    with LiveTable(Console(quiet=not progress), f"training in {near(node.folder)}") as table:
        training.run(rounds, table, fresh=fresh)
    return training


def _alone(rewards: Any, dataset: Any, task: Mapping[str, Any] | None, sections: dict[str, Any]) -> Node:
    silo = ready_configs() / "silo.toml"
    settings = merge(read([silo]), sections)
    if "dir" not in settings.get("node", {}):
        tasks = own_tasks(rewards, dataset, task, parse(settings).tasks.sources)
        what = json.dumps([settings, tasks.sources, sorted(tasks.files)], sort_keys=True, default=str)
        folder = f"runs/train-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
        sections = sections | {"node": {**sections.get("node", {}), "dir": folder}}
    return Node.from_config(silo, reward=rewards, dataset=dataset, task=task, **sections)


class Training:
    """What `swarm.train` returns."""

    def __init__(self, node: Node) -> None:
        self.node = node
        """The node that was trained; `node.run(rounds=…)` goes on."""
        self._history = NodeHistory(NodeFolder(node.folder).metrics)

    def run(self, rounds: int, table: LiveTable, *, fresh: bool) -> None:
        """Train until `rounds` rounds are done, those of earlier calls included."""
        left = rounds - (0 if fresh else self.node.num_rounds)
        if left < 1:
            table.say(
                f"all {self.node.num_rounds} rounds are done in {near(self.node.folder)}; raise rounds, or set fresh=True"
            )
            return
        self._show(table, rounds, "starting")
        with closing(self.node.run(left, fresh=fresh)) as told:  # whatever interrupts, the node ends
            for _ in told:
                self._show(table, rounds, "learning")
        self._show(table, rounds, "done")
        found = self.evaluation
        if found.before is not None and found.after is not None:
            table.say(f"mean reward on held-out tasks: {found.before:.2f} before, {found.after:.2f} after")

    def _show(self, table: LiveTable, rounds: int, state: str) -> None:
        self._history.refresh()
        table.update([NodeView("node", "", rounds, state, self._history)])

    @property
    def evaluation(self) -> Evaluation:
        """Reward on held-out tasks, before and after."""
        return self.node.evaluation()

    @property
    def policy(self) -> "SavedPolicy":
        """The trained policy, loaded into this process each time."""
        return self.node.policy

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds as records."""
        return self.node.metrics()

    def frame(self) -> "DataFrame":
        """The same as a DataFrame. Raises SwarmError where pandas is not installed."""
        return self.node.frame()

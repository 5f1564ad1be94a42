"""Reward functions that installed packages offer under the entry point group `swarm.rewards`.

    def reward(prompt: str, expected: str, answer: str, **parameters) -> float      # in [0, 1]

The function runs in a process of its own (`plugin_process`), without a network and with installed packages as its only files:
it meets text of strangers. One that takes too long or too much is stopped, and one that crashes takes nothing along. It costs its
task then, never the node. An operator may let a function out of its fence by name (`tasks.unsandboxed_rewards`).
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from swarm.config import TasksSection
from swarm.errors import TaskError
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.plugin_process import GROUP
from swarm.tasks.task_source import TaskFailure

MAX_ANSWER_CHARS = 16_384
"""Longer answers have the value 0 without a look."""
TIME_BUDGET_S = 5.0
"""For one answer. The function is then started anew."""
FILE_BYTES = 16 << 20
"""Of all files that a function may write, in a /tmp of its own that ends with its process."""


def installed_rewards() -> dict[str, EntryPoint]:
    """Every reward function that can be named, by its name. Raises TaskError where two packages offer one name."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry)
        if _origin(other) != _origin(entry):
            raise TaskError(
                f"a reward function must come from one package, got {entry.name!r} of {_origin(other)} and "
                f"{_origin(entry)}; remove one"
            )
    return found


class RewardPlugin:
    """One reward function with its parameters, called by several threads one after the other."""

    def __init__(
        self, source: str, entry: EntryPoint, parameters: dict[str, Any], tasks: TasksSection, *, time_budget_s: float
    ) -> None:
        """Raises TaskError where the function cannot be loaded or fenced, or its parameters are refused.

        `tasks`: its memory, whether it may run without a fence, and whether a manifest has set the parameters
        (`sandboxed`), which then have to pass `check_declared`.
        """
        self.version = _origin(entry)
        """Package and its version: nodes with others do not compare rewards."""
        self._source = source
        self._name = entry.name
        self._time_budget_s = time_budget_s
        fence = "none" if entry.name in tasks.unsandboxed_rewards else "required"
        file_bytes = None if fence == "none" else FILE_BYTES
        confinement = Confinement(tasks.reward_memory_mib << 20, file_bytes, fence)
        opening = [entry.name, entry.value, parameters, tasks.sandboxed]
        self._process = LineProcess("swarm.tasks.plugin_process", opening, confinement)
        try:
            self._process.start()
        except LineProcessError as error:
            raise TaskError(
                f"reward function {entry.name} of {self.version} must be loadable behind a fence, got {error}; "
                f"mend or remove it, or list {entry.name} in tasks.unsandboxed_rewards if it needs your files or the network"
            ) from None

    def __call__(self, prompt: str, expected: str, answer: str) -> float:
        """Whatever number the function gives. Raises TaskFailure where it fails or takes too long."""
        if len(answer) > MAX_ANSWER_CHARS:
            return 0.0
        try:
            reply = self._process.ask([prompt, expected, answer], self._time_budget_s)
        except LineProcessError as error:
            raise self._failure(str(error)) from None
        value = reply.get("value")
        if type(value) is not float:  # the function may have written the reply itself, and something else into it
            raise self._failure(str(reply.get("error", "a reply without a number")))
        return value

    def _failure(self, message: str) -> TaskFailure:
        return TaskFailure(self._source, f"reward function {self._name}: {message}")


def _origin(entry: EntryPoint) -> str:
    """NAME==VERSION of the package. Raises TaskError where that is not told."""
    name = entry.dist.name if entry.dist is not None else None
    version = entry.dist.version if entry.dist is not None else None
    if not name or not version:
        raise TaskError(f"a reward function must come from a package with a version, got {entry}; mend its metadata")
    return f"{name}=={version}"

"""Runs reward functions that installed packages offer under the entry point group `swarm.rewards`.

    def reward(prompt: str, expected: str, answer: str, **parameters) -> float      # in [0, 1]

The function reads text of strangers, so it runs in a sandboxed process of its own (`plugin_process`), without a network and
with installed packages as its only files. One that takes too long or too much memory is stopped, and one that crashes harms
nothing else: it costs its task, never the node. An operator may let a function out of its sandbox by name
(`tasks.unsandboxed_rewards`).
"""

from importlib.metadata import EntryPoint
from typing import Any

from swarm.config import TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import REWARDS
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.task_source import TaskFailure

MAX_ANSWER_CHARS = 16_384
"""Longer answers have the value 0 and are not passed to the function."""
TIME_BUDGET_S = 5.0
"""Time for one answer. A function that takes longer is stopped and started again."""
FILE_BYTES = 16 << 20
"""Size of the /tmp that a function has to itself and that ends with its process."""


class RewardPlugin:
    """One reward function with its parameters. Calls from several threads are answered one after the other."""

    def __init__(
        self, source: str, entry: EntryPoint, parameters: dict[str, Any], tasks: TasksSection, *, time_budget_s: float
    ) -> None:
        """Raises TaskError where the function cannot be loaded or sandboxed, or its parameters are refused.

        `tasks` has its memory, whether it may run without a sandbox, and whether a manifest has set the parameters
        (`sandboxed`), which then have to pass `check_declared`.
        """
        self.version = REWARDS.origin(entry.name)
        """Package and version: nodes with others do not compare rewards."""
        self._source = source
        self._name = entry.name
        self._time_budget_s = time_budget_s
        namespaces = "none" if entry.name in tasks.unsandboxed_rewards else "required"
        file_bytes = None if namespaces == "none" else FILE_BYTES
        confinement = Confinement(tasks.reward_memory_mib << 20, file_bytes, namespaces)
        opening = [entry.name, entry.value, parameters, tasks.sandboxed]
        self._process = LineProcess("swarm.tasks.plugin_process", opening, confinement)
        try:
            self._process.start()
        except LineProcessError as error:
            raise TaskError(
                f"reward function {entry.name} of {self.version} must be loadable in a sandbox, got {error}; "
                f"fix or remove it, or list {entry.name} in tasks.unsandboxed_rewards if it needs your files or the network"
            ) from None

    def __call__(self, prompt: str, expected: str, answer: str) -> float:
        """The number that the function gives, in any range. Raises TaskFailure where it fails or takes too long."""
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

"""Runs reward functions that are not built in: those of a file, of a module, or that a package offers as `swarm.rewards`.

    def score(task, answer, **parameters) -> float | dict[str, float]                      # each in [0, 1]
    def score(prompt: str, expected: str, answer: str, **parameters) -> float              # a package's, as in version 0.1

The function reads text of strangers, so it runs in a sandboxed process of its own (`plugin_process`), without a network and
with installed packages as its only files; the text of its file is handed over. One that takes too long or too much memory is
stopped, and one that crashes harms nothing else: it costs its task, never the node. An operator may let a function out of its
sandbox by name (`tasks.unsandboxed_rewards`).
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from swarm.config import RewardSignalSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import REWARDS
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.rewards.plugin_process import FORM
from swarm.tasks.task_source import TaskFailure
from swarm.types import Task

MAX_ANSWER_CHARS = 16_384
"""Longer answers have the value 0 and are not passed to the function."""
TIME_BUDGET_S = 5.0
"""Time for one answer. A function that takes longer is stopped and started again."""
FILE_BYTES = 16 << 20
"""Size of the /tmp that a function has to itself and that ends with its process."""
MAX_CODE_BYTES = 256 << 10
"""Largest file of a function."""
REWARD = "reward"
"""The value in a function's dict that is all of its signal unless the signal has weights."""
_MAX_VALUES = 8
_VALUE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function that was found, and not yet imported."""

    target: str
    """`module:attribute`, or the name of the function in its file."""
    version: str
    """Part of the config digest: nodes with others do not compare rewards."""
    origin: str
    """Where it comes from, for messages."""
    file: str = ""
    code: str = ""
    sha256: str = ""


def find_function(signal: RewardSignalSection, source: str) -> RewardFunction:
    """The function of a signal. Nothing is imported.

    Raises TaskError where its file cannot be read or has another SHA-256 than the signal says, and where its package is not
    installed in the version that the signal says.
    """
    if signal.is_of_file:
        return _in_file(signal, source)
    if signal.function:
        package = _package_of(signal, source)
        return RewardFunction(signal.function, f"{package} {signal.function}", package)
    origin = REWARDS.origin(signal.name)
    return RewardFunction(REWARDS.installed()[signal.name].value, origin, origin)


def _in_file(signal: RewardSignalSection, source: str) -> RewardFunction:
    path, _, name = signal.function.rpartition(":")
    try:
        with Path(path).open("rb") as file:
            code = file.read(MAX_CODE_BYTES + 1)
        text = code.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TaskError(
            f"the file of a reward function must be readable, got {path}: {reason}; set function of signal {signal.name} in "
            f"tasks.sources.signals of {source!r}"
        ) from None
    if len(code) > MAX_CODE_BYTES:
        raise TaskError(
            f"the file of a reward function must have at most {MAX_CODE_BYTES >> 10} KiB, got more in {path}; make it a package"
        )
    sha256 = hashlib.sha256(code).hexdigest()
    if signal.sha256 not in (None, sha256):
        raise TaskError(
            f"the file of signal {signal.name} must have SHA-256 {signal.sha256}, got {sha256} of {path}; get the file from who "
            "chose the tasks"
        )
    return RewardFunction(name, f"sha256:{sha256}:{name}", path, path, text, sha256)


def _package_of(signal: RewardSignalSection, source: str) -> str:
    """NAME==VERSION of the package that has the module."""
    module = signal.function.partition(":")[0].partition(".")[0]
    packages = {_plain(name): name for name in metadata.packages_distributions().get(module, ())}
    wanted, _, version = signal.package.partition("==")
    if wanted and (not packages or _plain(wanted) in packages):  # of an editable install nobody knows the modules
        packages = {_plain(wanted): wanted}
    found = {f"{name}=={metadata.version(name)}" for name in packages.values() if _is_installed(name)}
    if len(found) != 1 or (version and next(iter(found)).partition("==")[2] != version):
        raise TaskError(
            f"signal {signal.name} of source {source!r} needs {signal.package or 'an installed package'} for {signal.function}, "
            f"got {', '.join(sorted(found)) or 'none'}; "
            + (
                f"install it: pip install {signal.package}"
                if signal.package
                else "install one that has the module, name it as `package` of the signal, or use a file"
            )
        )
    return found.pop()


def _plain(name: str) -> str:
    """The name of a package as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _named_by_operator(signal: RewardSignalSection, function: RewardFunction, tasks: TasksSection) -> str:
    """How the operator names it in `unsandboxed_rewards`: a file of a manifest by its content, as its founder chose its name."""
    return function.sha256 if signal.is_of_file and tasks.sandboxed else signal.reference or signal.name


_WRONG_ANSWERS = ("0", "no such answer")
"""What a policy may write in place of a right answer."""
_SIGNS_OF_SANDBOX = (
    "PermissionError", "FileNotFoundError", "OSError", "ConnectionError", "gaierror", "TimeoutError", "URLError", "sandbox",
)  # fmt: skip


class RewardPlugin:
    """One reward function with its parameters. Calls from several threads are answered one after the other."""

    def __init__(
        self, source: str, signal: RewardSignalSection, tasks: TasksSection, *, time_budget_s: float = TIME_BUDGET_S
    ) -> None:
        """Raises TaskError where the function cannot be found, loaded or sandboxed, or its parameters are refused.

        `tasks` has its memory, whether it may run without a sandbox, and whether a manifest has set the parameters
        (`sandboxed`), which then have to pass `check_declared`.
        """
        function = find_function(signal, source)
        self.version = function.version
        self._source = source
        self._signal = signal
        self._time_budget_s = time_budget_s
        self.shares = {signal.name: 1.0}
        """{signal that the function gives: its share of the weight}, with a sum of 1. Final once the function was tried."""
        named = _named_by_operator(signal, function, tasks)
        self._way_out = f"list {named} in tasks.unsandboxed_rewards if it needs your files or the network"
        is_unsandboxed = named in tasks.unsandboxed_rewards
        confinement = Confinement(
            tasks.reward_memory_mib << 20,
            None if is_unsandboxed else FILE_BYTES,
            "none" if is_unsandboxed else "required",
        )
        opening = {
            "target": function.target, "file": function.file, "code": function.code, "parameters": signal.parameters,
            "is_offered": not signal.function, "is_by_manifest": tasks.sandboxed,
        }  # fmt: skip
        self._process = LineProcess("swarm.tasks.rewards.plugin_process", opening, confinement)
        try:
            self._process.start()
            self.takes_task = self._process.ask(FORM, time_budget_s).get("takes_task") is True
        except LineProcessError as error:
            raise TaskError(
                f"reward function {signal.reference or signal.name} of {function.origin} must be loadable in a sandbox, got "
                f"{error}; {self._advice(str(error))}"
            ) from None

    def try_out(self, task: Task, right: str) -> None:
        """Call the function with a right answer, to learn which signals it gives, and with wrong ones, which it must bear.

        Raises TaskError where it fails.
        """
        for place, answer in enumerate((right, *_WRONG_ANSWERS)):
            try:
                given = self._ask([task.prompt, right, dict(task.facts), answer])
                if outside := [value for value in given.values() if not 0 <= value <= 1]:  # nan, too
                    raise self._failure(f"gave {outside[0]}")
                if place and given.keys() != self.shares.keys():
                    raise self._failure(f"gave {', '.join(given)}, and {', '.join(self.shares)} for the right answer")
            except TaskFailure as failure:
                raise TaskError(
                    f"a reward function must give a number in [0, 1] or a dict of such numbers, got {failure}, with the "
                    f"answer {answer[:80]!r} to {task.prompt[:80]!r}; {self._advice(str(failure))}"
                ) from None
            if not place:
                self.shares = self._shares_of(given)

    def _advice(self, failure: str) -> str:
        """What to do about a failure; whether it can come from the sandbox shows in its text."""
        return f"fix it, or {self._way_out}" if any(sign in failure for sign in _SIGNS_OF_SANDBOX) else "fix it"

    def __call__(self, task: Task, expected: Callable[[], str], answer: str | None) -> dict[str, float]:
        """The signals that the function gives, in any range; 0 where the text has no final answer (None).

        Raises TaskFailure where the function fails or takes too long.
        """
        if answer is None or len(answer) > MAX_ANSWER_CHARS:
            return dict.fromkeys(self.shares, 0.0)
        facts = dict(task.facts) if self.takes_task else {}
        given = self._ask([task.prompt, expected(), facts, answer])
        if given.keys() != self.shares.keys():
            raise self._failure(f"gave {', '.join(given)}, and {', '.join(self.shares)} for another answer")
        return given

    def _shares_of(self, names: Collection[str]) -> dict[str, float]:
        weights = self._signal.weights or {name: float(REWARD not in names or name == REWARD) for name in names}
        if weights.keys() != set(names):
            raise TaskError(
                f"weights of signal {self._signal.name} must be of {', '.join(names)}, which its function gives, got "
                f"{', '.join(weights)}; name each of them, with 0 for what is not to count"
            )
        total = sum(weights.values())
        return {name: weights[name] / total for name in names}

    def _ask(self, question: list[object]) -> dict[str, float]:
        """The values that the function gives, by name of the signal. Raises TaskFailure."""
        try:
            reply = self._process.ask(question, self._time_budget_s)
        except LineProcessError as error:
            raise self._failure(str(error)) from None
        if reply.get("is_spent"):
            with contextlib.suppress(LineProcessError):  # the next question tries again, and reports it
                self._process.renew()
        value, values = reply.get("value"), reply.get("values")
        if type(value) is float:  # the function may have written the reply itself, and something else into it
            return {self._signal.name: value}
        if isinstance(values, dict) and all(type(one) is float for one in values.values()):
            if 0 < len(values) <= _MAX_VALUES and all(map(_VALUE_NAME.fullmatch, values)):
                return values
            names = ", ".join(map(ascii, list(values)[:_MAX_VALUES]))[:200]
            raise self._failure(
                f"a dict must have 1 to {_MAX_VALUES} names of letters, digits and _, got {names or 'none'}"
            )
        raise self._failure(str(reply.get("error", "a reply without a number")))

    def _failure(self, message: str) -> TaskFailure:
        return TaskFailure(self._source, f"reward function {self._signal.name}: {message}")

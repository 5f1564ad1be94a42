"""`swarm tasks check`: shows what task sources ask and what their verifiers say, and finds what two processes disagree about.

source ─▶ task ─▶ expected answer and near misses ─▶ verifier ─▶ rewards, here and in another process
"""

import json
import math
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config, prepare_imports
from swarm.cli.node.run import OVERRIDES
from swarm.errors import TaskError, error_of_exit_code

if TYPE_CHECKING:
    from swarm.tasks.task_source import TaskSource
    from swarm.types import Task

app = typer.Typer(help="Look at task sources before a node trains on them.", no_args_is_help=True)

_SEED = 2
"""Of a stream that no node draws from."""
_CHILD_TIMEOUT_S = 600.0
_SHOWN_CHARACTERS = 2000
_NUM_TOKENS = 1
"""As which a made-up answer counts, where a signal asks for its length."""
Facts = dict[str, Any]


@app.command("check", context_settings=OVERRIDES)
def check(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    tasks: int = typer.Option(3, "--tasks", min=1, max=1000, metavar="N", help="Tasks of each source."),
    as_json: bool = typer.Option(False, "--json", help="Print the facts as JSON, from this process alone."),
) -> None:
    """Draw tasks of every source, and try their verifiers.

    Shows the first prompt of a source, the expected answer, and the reward of
    that and of near misses, and how long both take. All is computed again in a
    second process: nodes verify each other's rewards, so these must agree.

    Reads: CONFIG, variables SWARM_SECTION__KEY, files and data sets of tasks.
    Writes: nothing, but data sets are prepared in the cache of HF_HOME.

    Examples:
      swarm tasks check mine.toml
      swarm tasks check mine.toml --tasks 50

    Exit codes: 0 done, 3 configuration, 6 a source, verifier or reward is wrong.
    """
    from swarm.machine.child_python import swarm_command
    from swarm.observability.plain_text import counted
    from swarm.tasks.task_mixture import TaskMixture

    resolved = load_config(config or [], ("--tasks", "--json"))
    prepare_imports(resolved)
    mixture = TaskMixture(resolved.tasks)
    try:
        found = {name: [_examined(source, index) for index in range(tasks)] for name, source in mixture.sources.items()}
        broken = dict(mixture.broken)
    finally:
        mixture.close()
    if as_json:
        print(json.dumps(found))
        return
    command = swarm_command("tasks", "check", *(config or []), "--tasks", str(tasks), "--json")
    other_hashes = {**os.environ, "PYTHONHASHSEED": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, env=other_hashes)
    if ended.returncode:
        raise error_of_exit_code(ended.returncode, f"in a second process: {ended.stderr.strip().splitlines()[-1]}")
    again: dict[str, list[Facts]] = json.loads(ended.stdout.splitlines()[-1])
    wrong = [f"{name}: {reason}" for name, reason in broken.items()]
    for name, examined in found.items():
        wrong += _shown(name, examined, again.get(name, []))
    if wrong:
        raise TaskError("every task source must work and be the same in each process, got " + "; ".join(wrong))
    print(f"all is well with {counted(len(found), 'source')}; a second process computes the same")


def _examined(source: "TaskSource", index: int) -> Facts:
    """Of one task: its prompt, tries with their rewards, and times. A failure is told in its place."""
    from swarm.tasks.task_source import TaskFailure

    started = time.perf_counter()
    try:
        task = source.task(_SEED, index)
        built_s = time.perf_counter() - started
        if task.begin is not None:
            return {"prompt": task.prompt, "built_s": built_s, "tries": [], "is_episode": True}
        expected = _expected(source, index)
        tries = [_tried(task, text) for text in near_misses(expected)]
    except TaskFailure as failure:
        return {"failure": str(failure)}
    return {"prompt": task.prompt, "built_s": built_s, "expected": expected, "tries": tries}


def _expected(source: "TaskSource", index: int) -> str | None:
    """None where the source knows none, such as where functions of its operator alone decide."""
    from swarm.tasks.task_source import TaskFailure

    try:
        return source.answer(_SEED, index)
    except (TaskFailure, AttributeError):
        return None


def near_misses(expected: str | None) -> list[str]:
    """The expected answer, then what is near to it and what is not, each once."""
    found = [] if expected is None else [expected, f" {expected}\n", f"{expected}.", expected.upper(), expected[:-1]]
    if expected is not None and expected.lstrip("-").isdecimal():
        found.append(str(int(expected) + 1))
    return list(dict.fromkeys([*found, "", "no such answer"]))


def _tried(task: "Task", text: str) -> Facts:
    from swarm.tasks.task_source import TaskFailure, assess

    started = time.perf_counter()
    try:
        scored = assess(task, text, _NUM_TOKENS)
    except TaskFailure as failure:
        return {"text": text, "failure": str(failure)}
    return {
        "text": text,
        "reward": scored.reward,
        "signals": dict(scored.signals),
        "checked_s": time.perf_counter() - started,
    }


def _shown(name: str, examined: list[Facts], again: list[Facts]) -> list[str]:
    """Print one source. Returns what is wrong with it."""
    from swarm.observability.plain_text import plain

    failures = [one["failure"] for one in examined if "failure" in one]
    works = [one for one in examined if "failure" not in one]
    failures += [each["failure"] for one in works for each in one["tries"] if "failure" in each]
    print(f"── {plain(name)}: {len(works)} of {len(examined)} tasks built")
    if works:
        print(plain(works[0]["prompt"][:_SHOWN_CHARACTERS], keep="\n\t"))
        for each in works[0]["tries"]:
            signals = ", ".join(f"{signal} {value:.2f}" for signal, value in each.get("signals", {}).items())
            reward = f"{each['reward']:.2f}" if "reward" in each else "failed"
            what = "  expected" if each["text"] == works[0]["expected"] else ""
            print(f"   {reward}  {plain(repr(each['text']))}{what}{f'  ({signals})' if signals else ''}")
        if works[0].get("is_episode"):
            print("   an environment, which replies to answers: `swarm sample` plays it")
        checked = [each["checked_s"] for one in works for each in one["tries"] if "checked_s" in each]
        slowest = f", an answer checked in {1000 * max(checked):.1f} ms" if checked else ""
        print(f"   at most: a task built in {1000 * max(one['built_s'] for one in works):.1f} ms{slowest}")
    wrong = [f"{name}: {failures[0]}"] if failures else []
    refused = [one for one in works if one.get("expected") is not None and not _earns_most(one["tries"])]
    if refused:
        wrong.append(
            f"{name}: {len(refused)} expected answers earn less than another try, such as "
            f"{refused[0]['expected']!r} to {refused[0]['prompt'][-80:]!r}"
        )
    if [_lasting(one) for one in examined] != [_lasting(one) for one in again]:
        wrong.append(
            f"{name}: prompts or rewards differ between two processes; use no clock, no set order, no global state"
        )
    return wrong


def _earns_most(tries: list[Facts]) -> bool:
    """Whether the first try, the expected answer, earns something and no less than any other. A failure is told elsewhere."""
    rewards = [each.get("reward", math.nan) for each in tries]
    return math.isnan(rewards[0]) or (rewards[0] > 0 and not any(reward > rewards[0] for reward in rewards))


def _lasting(examined: Facts) -> Facts:
    """What has to be the same in every process: all but the times."""
    tries = [{name: value for name, value in each.items() if name != "checked_s"} for each in examined.get("tries", [])]
    return {name: value for name, value in examined.items() if name != "built_s"} | {"tries": tries}

"""`swarm sample`: samples answers of the policy to prompts or tasks."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config
from swarm.cli.policy.saved_policy import config_arguments, load_saved_policy
from swarm.errors import ConfigError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.config import Config
    from swarm.types import Task

KEPT = "\n\t"
"""Of a text's control characters, on a terminal."""


def sample(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    folder: Path = typer.Option(
        None, "--dir", metavar="DIR", help="A node's folder: use its configuration and newest checkpoint."
    ),
    prompt: str = typer.Option(None, help="Answer this prompt and end. Default: prompts are read line by line."),
    tasks: int = typer.Option(
        None,
        "--tasks",
        min=1,
        help="Use this many held-out tasks per source as prompts, and show each answer's reward.",
    ),
    num: int = typer.Option(1, min=1, help="Answers per prompt."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 decodes greedily."),
    seed: int = typer.Option(0, min=0, help="The same seed gives the same answers."),
    base: bool = typer.Option(False, "--base", help="Sample from the base without its adapter."),
) -> None:
    """Sample answers to one prompt, or to one prompt per line until Ctrl-D.

    A policy answers in the form of the tasks that it was trained on: --tasks shows some.

    Reads: CONFIG, or config.toml of --dir; the newest checkpoint; prompts.
    Writes: nothing.

    Examples:
      swarm sample --dir runs/mine --tasks 1
      swarm sample --dir runs/mine --prompt "What is 3 + 4?" --num 4 --temperature 1
      swarm sample --dir runs/mine < prompts.txt

    Exit codes: 0 done, 3 configuration, 5 policy, 8 no checkpoint.
    """
    resolved = load_config(
        config_arguments(config, folder), ("--dir", "--prompt", "--tasks", "--num", "--temperature", "--seed", "--base")
    )
    from swarm.engine.engine import AnswerRequest
    from swarm.engine.make_engine import make_engine
    from swarm.engine.sampling import Sampling

    if prompt and tasks:
        raise ConfigError("there must be --prompt or --tasks, got both; leave one out")
    policy, _ = load_saved_policy(resolved, base_only=base)
    engine = make_engine(policy, resolved.rollouts)
    asked = _held_out(resolved, tasks) if tasks else ((text, None) for text in ([prompt] if prompt else _lines()))
    for number, (text, task) in enumerate(asked):
        (answers,) = engine.generate(
            [AnswerRequest(policy.encode_prompt(text), num, resolved.rollouts.max_new_tokens)],
            Sampling(temperature=temperature),
            seed=seed + number,
            stop=resolved.rollouts.stop,
        )
        if task is not None:
            print(f"{task.ref.source}: {plain(text, keep=KEPT)}")
        for answer in answers:
            said = policy.decode(answer.token_ids)
            cut = " …" if answer.end == "limit" else ""
            reward = "" if task is None else f"   ({_reward(task, said)})"
            print(("" if task is None else "  → ") + plain(said, keep=KEPT) + cut + reward, flush=True)


def _held_out(config: "Config", tasks_per_source: int) -> Iterator[tuple[str, "Task"]]:
    from swarm.tasks.task_mixture import TaskMixture

    for task in TaskMixture(config.tasks).held_out(tasks_per_source):
        yield task.prompt, task


def _reward(task: "Task", text: str) -> str:
    from swarm.tasks.task_mixture import score
    from swarm.tasks.task_source import TaskFailure

    try:
        return f"reward {score(task, text):.2f}"
    except TaskFailure as failure:
        return f"no reward: {plain(str(failure))}"


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")

"""`swarm sample`: samples answers of the policy to prompts or tasks."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config, prepare_imports
from swarm.cli.policy.saved_policy import BEST, config_arguments, load_saved_policy
from swarm.errors import ConfigError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.config import Config
    from swarm.rollouts.worker import RolloutBatch
    from swarm.types import Task

_OPTIONS = ("--dir", "--prompt", "--tasks", "--num", "--temperature", "--seed", "--base", "--best", "--show-prompt")
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
    best: bool = typer.Option(False, "--best", help=BEST),
    base: bool = typer.Option(False, "--base", help="Sample from the base without its adapter."),
    show_prompt: bool = typer.Option(
        False, "--show-prompt", help="Print one prompt of every task source as the policy reads it, first or alone."
    ),
) -> None:
    """Sample answers to one prompt, or to one prompt per line until Ctrl-D.

    A policy answers in the form of the tasks that it was trained on:
    --tasks shows some. Prompts of your own get the system prompt, examples and
    template arguments of the task sources if all sources have the same.

    Reads: CONFIG, or config.toml of --dir; the newest checkpoint; prompts.
    Writes: nothing.

    Examples:
      swarm sample --dir runs/mine --tasks 1
      swarm sample --dir runs/mine --prompt "What is 3 + 4?" --num 4 --temperature 1
      swarm sample --dir runs/mine < prompts.txt
      swarm sample mine.toml --show-prompt

    Exit codes: 0 done, 3 configuration, 5 policy, 6 tasks, 8 no checkpoint.
    """
    resolved = load_config(config_arguments(config, folder), _OPTIONS)
    if show_prompt:
        _show_prompts(resolved)
        if not (prompt or tasks):
            return
    from swarm.engine.engine import AnswerRequest
    from swarm.engine.make_engine import make_engine
    from swarm.engine.sampling import Sampling
    from swarm.policy.base_folder import fitted_to_base
    from swarm.rollouts.worker import RolloutWorker
    from swarm.tasks.prompted_source import shared_context

    if prompt and tasks:
        raise ConfigError("there must be --prompt or --tasks, got both; leave one out")
    policy, _ = load_saved_policy(resolved, base_only=base, best=best)
    resolved = fitted_to_base(resolved)
    max_new_tokens = resolved.rollouts.max_new_tokens
    engine = make_engine(policy, resolved.rollouts)
    asked = _held_out(resolved, tasks) if tasks else ((text, None) for text in ([prompt] if prompt else _lines()))
    own = shared_context(resolved.tasks.sources)
    worker = RolloutWorker(resolved.rollouts.model_copy(update={"temperature": temperature}), policy, engine, author="")
    for number, (text, task) in enumerate(asked):
        if task is not None and task.begin is not None:
            _print_episodes(task, worker.rollout([task], seed + number, [num]))
            continue
        (answers,) = engine.generate(
            [AnswerRequest(policy.encode_prompt(text, task.context if task else own), num, max_new_tokens)],
            Sampling(temperature=temperature),
            seed=seed + number,
            stop=resolved.rollouts.stop,
        )
        if task is not None:
            print(f"{task.ref.source}: {plain(text, keep=KEPT)}")
        for answer in answers:
            said = policy.decode(answer.token_ids)
            cut = " …" if answer.end == "limit" else ""
            reward = "" if task is None else f"   ({_reward(task, said, len(answer.token_ids))})"
            print(("" if task is None else "  → ") + plain(said, keep=KEPT) + cut + reward, flush=True)


def _print_episodes(task: "Task", batch: "RolloutBatch") -> None:
    """Print the episodes of a task, turn by turn."""
    print(f"{task.ref.source}: {plain(task.prompt, keep=KEPT)}")
    for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
        for turn in rollout.turns:
            print(f"  → {plain(turn.text, keep=KEPT)}\n    ← {plain(turn.reply, keep=KEPT)}")
        cut = "" if rollout.finished else " …"
        print(f"  → {plain(rollout.text, keep=KEPT)}{cut}   (reward {rollout.reward:.2f})", flush=True)
    if not batch.groups:
        print("  no episode: its environment failed, or its prompt is longer than policy.max_prompt_tokens")


def _held_out(config: "Config", tasks_per_source: int) -> Iterator[tuple[str, "Task"]]:
    from swarm.tasks.task_mixture import TaskMixture

    for task in TaskMixture(config.tasks).held_out(tasks_per_source):
        yield task.prompt, task


def _reward(task: "Task", text: str, num_tokens: int) -> str:
    from swarm.tasks.task_source import TaskFailure, assess

    try:
        score = assess(task, text, num_tokens)
    except TaskFailure as failure:
        return f"no reward: {plain(str(failure))}"
    signals = ", ".join(f"{name} {value:.2f}" for name, value in score.signals)
    return f"reward {score.reward:.2f}" + (f": {signals}" if len(score.signals) > 1 else "")


def _show_prompts(config: "Config") -> None:
    prepare_imports(config)
    from swarm.cli.policy.show_prompts import show_prompts
    from swarm.policy.base_folder import locate_base

    policy = config.policy
    show_prompts(config, locate_base(policy.base, policy.revision, policy.max_download_gib), sys.stdout)


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")

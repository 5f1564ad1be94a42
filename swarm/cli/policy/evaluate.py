"""`swarm eval`: measures the mean reward on held-out tasks."""

import json
from pathlib import Path

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config
from swarm.cli.policy.saved_policy import config_arguments, load_saved_policy
from swarm.observability.plain_text import plain


def evaluate(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    folder: Path = typer.Option(
        None, "--dir", metavar="DIR", help="A node's folder: use its configuration and newest checkpoint."
    ),
    tasks: int = typer.Option(128, min=1, help="Held-out tasks per source."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 decodes greedily."),
    base: bool = typer.Option(False, "--base", help="Evaluate the base without its adapter."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Evaluate a policy on tasks that nobody trains on.

    Reads: CONFIG, or config.toml of --dir; the newest checkpoint.
    Writes: nothing.

    Examples:
      swarm eval --dir runs/mine
      swarm eval --dir runs/mine --base --tasks 32 --json

    Exit codes: 0 done, 3 configuration, 5 policy, 6 tasks, 8 no checkpoint.
    """
    resolved = load_config(config_arguments(config, folder), ("--dir", "--tasks", "--temperature", "--base", "--json"))
    from swarm.engine.make_engine import make_engine
    from swarm.policy.base_folder import fitted_to_base
    from swarm.rollouts.worker import RolloutWorker
    from swarm.tasks.task_mixture import TaskMixture

    policy, trained_rounds = load_saved_policy(resolved, base_only=base)
    resolved = fitted_to_base(resolved)
    mixture = TaskMixture(resolved.tasks)
    engine = make_engine(policy, resolved.rollouts)
    worker = RolloutWorker(resolved.rollouts, policy, engine, author="")
    rewards = worker.evaluate(mixture.held_out(tasks), temperature=temperature, seed=resolved.node.seed)
    means = {source: sum(values) / len(values) for source, values in sorted(rewards.items())}
    overall = sum(means.values()) / len(means) if means else 0.0
    if as_json:
        print(
            json.dumps({"round": trained_rounds, "reward_mean": overall, "reward": means, "temperature": temperature})
        )
        return
    _print(means, overall, {source: len(values) for source, values in rewards.items()}, trained_rounds)


def _print(means: dict[str, float], overall: float, counts: dict[str, int], trained_rounds: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    after = "the base" if trained_rounds is None else f"round {trained_rounds}"
    table = Table("task source", "tasks", "mean reward", title=f"held-out tasks, {after}", title_justify="left")
    for source, mean in means.items():
        table.add_row(plain(source), str(counts[source]), f"{mean:.3f}")
    table.add_row("mean", str(sum(counts.values())), f"{overall:.3f}")
    Console(markup=False).print(table)

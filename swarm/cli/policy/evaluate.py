"""`swarm eval`: measures rewards and pass@k on held-out tasks, of the policy and of its base."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config
from swarm.cli.policy.saved_policy import BEST, config_arguments, load_saved_policy
from swarm.errors import ConfigError, TaskError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.rollouts.pass_at_k import Estimate, SourceScore
    from swarm.rollouts.worker import RolloutWorker
    from swarm.types import Task

Scores = Mapping[str, "SourceScore"]
"""By task source; all of them together as `ALL`."""
ALL = "all sources"
_OPTIONS = (
    "--dir",
    "--tasks",
    "--temperature",
    "--base",
    "--best",
    "--json",
    "--k",
    "--samples",
    "--pass-at",
    "--compare",
)
_BATCHES = 2
"""Tasks are sampled in portions of so many full batches, between which the progress is shown."""


def evaluate(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    folder: Path = typer.Option(
        None, "--dir", metavar="DIR", help="A node's folder: use its configuration and newest checkpoint."
    ),
    tasks: int = typer.Option(128, min=1, help="Held-out tasks per source."),
    k: int = typer.Option(1, "--k", min=1, max=1024, help="Report pass@k: is one of k answers right?"),
    samples: int = typer.Option(None, min=1, max=4096, help="Answers per task, at least k. Default: k."),
    threshold: float = typer.Option(1.0, "--pass-at", min=0.0, max=1.0, help="Reward from which an answer is right."),
    temperature: float = typer.Option(None, min=0.0, help="Default: 0, greedy; with several answers per task 1."),
    compare: bool = typer.Option(False, "--compare", help="Evaluate the base, too, beside the policy."),
    best: bool = typer.Option(False, "--best", help=BEST),
    base: bool = typer.Option(False, "--base", help="Evaluate the base alone, without its adapter."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Evaluate a policy on tasks that nobody trains on.

    Means are over tasks, with 95 % confidence intervals (Wilson's score interval;
    of the mean over sources by Newcombe's addition of squares). pass@k is the
    unbiased estimate of Chen et al. from all answers to a task.

    Reads: CONFIG, or config.toml of --dir; the newest checkpoint.
    Writes: nothing.

    Examples:
      swarm eval --dir runs/mine
      swarm eval --dir runs/mine --compare --k 8 --samples 16
      swarm eval --dir runs/mine --base --tasks 32 --json

    Exit codes: 0 done, 3 configuration, 5 policy, 6 tasks, 8 no checkpoint.
    """
    num_answers = samples or k
    _check(k, num_answers, compare=compare, base=base)
    temperature = (0.0 if num_answers == 1 else 1.0) if temperature is None else temperature
    resolved = load_config(config_arguments(config, folder), _OPTIONS)
    from swarm.adapters.adapter_state import read_adapter, write_adapter
    from swarm.engine.make_engine import make_engine
    from swarm.policy.base_folder import fitted_to_base
    from swarm.rollouts.worker import RolloutWorker
    from swarm.tasks.task_mixture import TaskMixture

    policy, trained_round = load_saved_policy(resolved, base_only=base, best=best)
    resolved = fitted_to_base(resolved)
    held_out = TaskMixture(resolved.tasks).held_out(tasks)
    worker = RolloutWorker(resolved.rollouts, policy, make_engine(policy, resolved.rollouts), author="")
    portion = max(1, _BATCHES * resolved.rollouts.max_batch_sequences // num_answers)

    def measured(what: str) -> Scores:
        rewards = _rewards(
            worker, held_out, num_answers, portion=portion, what=what, temperature=temperature, seed=resolved.node.seed
        )
        return _scores(rewards, _ks(k), threshold)

    policies = {"the base" if trained_round is None else f"round {trained_round}": measured("evaluating")}
    if compare:
        write_adapter(
            policy.model, {name: one.new_zeros(one.shape) for name, one in read_adapter(policy.model).items()}
        )
        policies["the base"] = measured("evaluating the base")
    if as_json:
        told = [_as_json(scores) for scores in policies.values()]
        facts = {"temperature": temperature, "k": k, "samples": num_answers, "pass_at": threshold}
        print(json.dumps({"round": trained_round, **told[0], **facts, **({"base": told[1]} if compare else {})}))
        return
    _print(policies, k, _how(num_answers, temperature))


def _check(k: int, num_answers: int, *, compare: bool, base: bool) -> None:
    if num_answers < k:
        raise ConfigError(f"--samples must be at least --k, got {num_answers} for k = {k}; raise --samples")
    if compare and base:
        raise ConfigError("there must be --compare or --base, got both; leave one out")


def _how(num_answers: int, temperature: float) -> str:
    """How the answers were sampled, in the words of the title."""
    kind, drawn = ("", f" at temperature {temperature:g}") if temperature else (" greedy", "")
    return f"{num_answers if num_answers > 1 else 'one'}{kind} {'answers' if num_answers > 1 else 'answer'} each{drawn}"


def _ks(k: int) -> list[int]:
    """1 and k."""
    return sorted({1, k})


def _rewards(
    worker: "RolloutWorker",
    tasks: Sequence["Task"],
    num_answers: int,
    *,
    portion: int,
    what: str,
    temperature: float,
    seed: int,
) -> dict[str, list[list[float]]]:
    """Return the rewards of the answers to each task, by source."""
    from swarm.observability.progress import progress
    from swarm.policy.counter_noise import derive_seed

    rewards: dict[str, list[list[float]]] = {}
    with progress(what, len(tasks)) as add:
        for start in range(0, len(tasks), portion):
            some = tasks[start : start + portion]
            own_seed = derive_seed("evaluate", seed, start) if start else seed
            found = worker.evaluate_each(some, num_answers, temperature=temperature, seed=own_seed)
            for source, of_tasks in found.items():
                rewards.setdefault(source, []).extend(of_tasks)
            add(len(some))
    return rewards


def _scores(rewards: Mapping[str, Sequence[Sequence[float]]], ks: Sequence[int], threshold: float) -> Scores:
    """Raises TaskError where nothing was scored."""
    from swarm.rollouts.pass_at_k import overall, score

    if not rewards:
        raise TaskError(
            "an evaluation needs tasks whose answers can be scored, got none; see tasks.sources, and policy.max_prompt_tokens"
        )
    by_source = {source: score(of_tasks, ks, threshold) for source, of_tasks in sorted(rewards.items())}
    return {**by_source, ALL: overall(list(by_source.values()))}


def _as_json(scores: Scores) -> dict[str, Any]:
    by_source = {source: one for source, one in scores.items() if source != ALL}
    return {
        "reward_mean": scores[ALL].reward.mean,
        "reward": {source: one.reward.mean for source, one in by_source.items()},
        "tasks": {source: one.num_tasks for source, one in by_source.items()},
        "estimates": {
            source: {
                "reward": asdict(one.reward),
                **{f"pass@{k}": asdict(estimate) for k, estimate in one.pass_at.items()},
            }
            for source, one in scores.items()
        },
    }


def _print(policies: Mapping[str, Scores], k: int, how: str) -> None:
    """Print a line per source and policy, 80 columns wide. `how`: how the answers were sampled."""
    from rich.console import Console
    from rich.table import Table

    title = f"held-out tasks, {' beside '.join(policies)}, {how}"
    table = Table("task source", "tasks", title=title, title_justify="left")
    if len(policies) > 1:
        table.add_column("policy")
    for what in ("mean reward", f"pass@{k}"):
        table.add_column(what, justify="right", no_wrap=True)
    for source, first in next(iter(policies.values())).items():
        for number, (name, scores) in enumerate(policies.items()):
            known = scores.get(source)  # None where no answer of it could be scored
            head = ["", ""] if number else [plain(source), str(first.num_tasks)]
            whose = [name] if len(policies) > 1 else []
            cells = ("", "") if known is None else (_cell(known.reward), _cell(known.pass_at[k]))
            table.add_row(*head, *whose, *cells)
        table.add_section()
    Console(markup=False).print(table)


def _cell(estimate: "Estimate") -> str:
    return f"{estimate.mean:.3f} [{estimate.low:.2f}, {estimate.high:.2f}]"

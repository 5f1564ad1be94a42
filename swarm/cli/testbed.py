"""`swarm testbed`: a swarm of several nodes on this machine, or a comparison of sharing with silos."""

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, seed_list, split_arguments
from swarm.errors import SwarmError
from swarm.observability.plain_text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from swarm.testbed.profiles import PlanRequest

_OPTIONS = (
    "--nodes",
    "--policy",
    "--rounds",
    "--minutes",
    "--dir",
    "--fresh",
    "--resume",
    "--compare",
    "--seeds",
    "--merge",
)


class What(StrEnum):
    """What to compare."""

    sharing = "sharing"


class BundledPolicy(StrEnum):
    """A policy that is part of this package."""

    tiny = "tiny"
    reasoning = "reasoning"


def testbed(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    nodes: int = typer.Option(4, min=1, help="Number of nodes; each fourth one has the same profile."),
    policy: BundledPolicy = typer.Option(
        None,
        help="tiny: answers of a few characters. reasoning: steps first, of 60 to 250 tokens.",
        show_default="tiny",
    ),
    rounds: int = typer.Option(150, min=1, help="Rounds of each node, those of earlier runs in the folder included."),
    minutes: float = typer.Option(None, min=0.1, help="End training after so many minutes, wherever the nodes are."),
    folder: Path = typer.Option(
        None, "--dir", metavar="DIR", help="Folder of the run.", show_default="runs/testbed, or runs/reasoning"
    ),
    fresh: bool = typer.Option(
        False,
        "--fresh/--resume",
        help="Start a new run; the earlier run is moved aside. Default: resume the earlier run.",
    ),
    merge: bool = typer.Option(False, "--merge", help="Let nodes of one lineage merge their adapters as they train."),
    compare: What = typer.Option(None, help="Run the same nodes with sharing and as silos, once per seed."),
    seeds: str = typer.Option("0,1,2", help="Seeds of a comparison."),
) -> None:
    """Run a swarm of different nodes on this machine and show what they learn.

    Each node is a process with its own policy; they meet over libp2p on
    loopback. Ctrl-C ends all of them.

    Reads: CONFIG, for all nodes; earlier runs in the folder.
    Writes: a node's folder each, plots, and summary.json in --dir.

    Examples:
      swarm testbed --nodes 4 --minutes 3
      swarm testbed --nodes 2 --policy reasoning
      swarm testbed --nodes 2 --rounds 40 --merge --dir runs/small

    Exit codes: 0 done, 1 a node failed, 3 configuration, 130 interrupted.
    """
    from rich.console import Console

    from swarm.config import setting_variables
    from swarm.config.policy import BUNDLED, BUNDLED_REASONING
    from swarm.machine.node_folder import set_aside
    from swarm.testbed.profiles import MERGING, PlanRequest, final_merge_time
    from swarm.testbed.testbed import LOCK_FILE, exclusive

    configs, overrides = split_arguments(config or [], _OPTIONS)
    overrides = {**setting_variables(os.environ), **overrides}
    if merge:
        at: dict[str, str] = {}
        if minutes and not compare:
            at, minutes = final_merge_time(minutes, time.time())
        overrides = {**MERGING, **at, **overrides}
    if policy is not None:
        bases = {BundledPolicy.tiny: BUNDLED, BundledPolicy.reasoning: BUNDLED_REASONING}
        overrides = {"policy.base": bases[policy], **overrides}
    request = PlanRequest(num_nodes=nodes, num_rounds=rounds, configs=configs, overrides=overrides)
    folder = folder or _default_folder(compare, policy)
    console = Console()
    with exclusive(folder):
        if fresh and (aside := set_aside(folder, {LOCK_FILE})):
            console.print(f"earlier run moved to {aside}", highlight=False, soft_wrap=True)
        try:
            if compare:
                _compare(folder, request, seed_list(seeds), console)
            else:
                _run(folder, request, minutes, console)
        except KeyboardInterrupt:
            console.print(f"all nodes have ended; the same command resumes {folder}", highlight=False)
            raise


def _default_folder(compare: What | None, policy: BundledPolicy | None) -> Path:
    """A folder for each kind of run, so that none resumes another."""
    if policy == BundledPolicy.reasoning:
        return Path("runs/reasoning-comparison" if compare else "runs/reasoning")
    return Path("runs/comparison" if compare else "runs/testbed")


def _run(folder: Path, request: "PlanRequest", minutes: float | None, console: "Console") -> None:
    from swarm.report.plot import plot_testbed
    from swarm.report.summary import conclusion, exchange_table, learning_table, source_table, summarize, write_summary
    from swarm.testbed.profiles import plan_nodes
    from swarm.testbed.testbed import Testbed

    swarm = Testbed(plan_nodes(folder, request), console)
    before = swarm.views()
    if all(view.state == "done" for view in before):
        console.print(f"this run is complete; --fresh starts anew, --rounds beyond {before[0].max_rounds} goes on")
    elif any(view.history.rounds for view in before):
        console.print(f"resuming the run in {folder}; --fresh would start anew", highlight=False)
    views = swarm.run(f"{counted(request.num_nodes, 'node')} in {folder}", minutes)
    summaries = [summarize(view) for view in views]
    write_summary(summaries, folder / "summary.json")
    console.print(learning_table(summaries), source_table(summaries), exchange_table(summaries))
    console.print(conclusion(summaries), highlight=False)
    plot_testbed(views, folder / "progress.png")
    console.print(f"plot: {folder / 'progress.png'}", highlight=False, soft_wrap=True)
    if any(view.state not in ("done", "stopped") for view in views):
        raise SwarmError(f"every node should end in good order, see the table above; logs are in {folder}/node-*/logs")


def _compare(folder: Path, request: "PlanRequest", seeds: list[int], console: "Console") -> None:
    from swarm.testbed.comparison import Comparison, comparison_table, plot_comparison

    results = Comparison(folder, request, console).run(seeds)
    console.print(comparison_table(results))
    plot_comparison(results, folder / "comparison.png")
    console.print(f"plot: {folder / 'comparison.png'}, numbers: {folder / 'results.json'}", highlight=False)

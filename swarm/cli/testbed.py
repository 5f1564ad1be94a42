"""`swarm testbed`: a swarm of several nodes on this machine, or a comparison of sharing with silos."""

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, seed_list, split_arguments

if TYPE_CHECKING:
    from rich.console import Console

    from swarm.testbeds.profiles import PlanRequest

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
    from swarm.testbeds.profiles import MERGING, PlanRequest, final_merge_time
    from swarm.testbeds.testbed import open_testbed, run_and_report

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
    with open_testbed(folder, console, fresh=fresh):
        if compare:
            _compare(folder, request, seed_list(seeds), console)
        else:
            run_and_report(folder, request, console, minutes)


def _default_folder(compare: What | None, policy: BundledPolicy | None) -> Path:
    """A folder for each kind of run, so that none resumes another."""
    if policy == BundledPolicy.reasoning:
        return Path("runs/reasoning-comparison" if compare else "runs/reasoning")
    return Path("runs/comparison" if compare else "runs/testbed")


def _compare(folder: Path, request: "PlanRequest", seeds: list[int], console: "Console") -> None:
    from swarm.testbeds.comparison import Comparison, comparison_table, plot_comparison

    results = Comparison(folder, request, console).run(seeds)
    console.print(comparison_table(results))
    plot_comparison(results, folder / "comparison.png")
    console.print(f"plot: {folder / 'comparison.png'}, numbers: {folder / 'results.json'}", highlight=False)

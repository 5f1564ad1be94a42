"""`swarm run`: runs one node until it is done or interrupted."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, given_layers, prepare_imports
from swarm.errors import ConfigError
from swarm.machine.child_python import swarm_command

if TYPE_CHECKING:
    from swarm.config import Config, Origin, TaskSourceSection
    from swarm.machine.hardware import Gpu

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Lets `--section.key value` through to `load_config`."""
_OPTIONS = ("--fresh", "--resume", "--from-best", "--dry-run", "--gpus", "--supervised", "--end-when-stuck")
GPUS_HELP = "One node on each GPU: all, or numbers such as 0,2. Folders, identities and ports are made for each."


def run(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    fresh: bool = typer.Option(
        False,
        "--fresh/--resume",
        help="Start a new run; the earlier run is moved aside. Default: resume the earlier run.",
    ),
    from_best: bool = typer.Option(
        False,
        "--from-best",
        help="Resume from the checkpoint that did best on held-out tasks; later ones are set aside.",
    ),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Print the resolved configuration with the origin of each value, and exit; to stderr, also the prompts of "
        "sources that set how they ask.",
    ),
    gpus: str = typer.Option(None, metavar="all|N,...", help=GPUS_HELP),
    supervised: bool = typer.Option(
        False, "--supervised", help="Restart the node when it has crashed or is stuck, with growing pauses."
    ),
    end_when_stuck: bool = typer.Option(
        False, "--end-when-stuck", help="End with code 18 when the node is stuck, so that a supervisor can restart it."
    ),
) -> None:
    """Run one node: roll out, share, learn.

    With no CONFIG the bundled tiny policy and its tasks are used. Ctrl-C ends
    after the current round, a second Ctrl-C at once. node.max_rounds counts the
    rounds of all starts: a run that has made them goes on with a larger number.

    Reads: CONFIG, variables SWARM_SECTION__KEY; in node.dir the identity and
    the newest checkpoint.
    Writes: all of node.dir: config.toml, checkpoints/, logs/, metrics.jsonl,
    status.json, pool.sqlite. With --gpus, a folder in it for each node.

    Examples:
      swarm run node_configs/laptop-cpu.toml --node.max_rounds 100
      swarm run runs/mine/config.toml --node.max_rounds 200   # 100 more
      swarm run runs/mine/config.toml --from-best --training.lr 1e-5
      swarm run runs/mine/node.toml --training.lr 1e-5 --dry-run
      swarm run node_configs/gpu-24gb.toml --gpus all

    Exit codes: 0 done, 3 configuration, 4 identity, 5 policy, 6 tasks, 7 network,
    8 checkpoint, 10 memory, 11 training, 17 silo, 130 interrupted.
    """
    from swarm.config import adjusted, dump_toml, origin_in, resolve

    layers = given_layers(config or [], _OPTIONS)
    resolved, origin = resolve(layers), origin_in(layers)
    _check_home(resolved.node.dir, origin(["node", "dir"]) or "")
    if from_best and (fresh or gpus is not None):
        other = "--fresh" if fresh else "--gpus"
        raise ConfigError(f"--from-best is for the run of one node, got {other} beside it; leave one out")
    if gpus is not None:
        if end_when_stuck:
            raise ConfigError(
                "--gpus starts a node again that is stuck, so it goes without --end-when-stuck; remove it"
            )
        run_on_gpus(gpus, lambda gpu: (resolved, origin), fresh=fresh, dry_run=dry_run)
        return
    if dry_run:
        fitted = _fitted(resolved)
        print(dump_toml(fitted, adjusted(origin, resolved, fitted, "policy.base")), end="", flush=True)
        if any(_has_own_parts(source) for source in fitted.tasks.sources):
            _show_prompts(fitted)
        return
    if supervised:
        first = [flag for flag, is_given in (("--fresh", fresh), ("--from-best", from_best)) if is_given]
        raise typer.Exit(_supervise(config or [], first))
    prepare_imports(resolved)
    run_to_the_end(resolved, origin, fresh=fresh, from_best=from_best, end_when_stuck=end_when_stuck)


def _check_home(folder: Path, source: str) -> None:
    """Raise ConfigError for the config.toml of a node that was moved: it names the old folder, and would begin anew there."""
    home = Path(source).parent
    is_of_node = Path(source).name == "config.toml" and (home / "checkpoints").exists()
    if is_of_node and home.resolve() != folder.resolve():
        raise ConfigError(
            f"node.dir must be the folder in which its config.toml lies, got {folder} in {source}; if the node was moved, add "
            f"--node.dir {home}"
        )


def run_to_the_end(
    config: "Config", origin: "Origin", *, fresh: bool, from_best: bool = False, end_when_stuck: bool
) -> None:
    """Run a node in this process, and print what it has learned. Raises SwarmError."""
    from swarm.cli.swarm.passphrase import unlock
    from swarm.node.process import run_node
    from swarm.report.summary import last_words

    run_node(config, origin, fresh=fresh, from_best=from_best, unlock=unlock, end_when_stuck=end_when_stuck)
    for line in last_words(config.node.dir, config.node.max_rounds):
        print(line)


def run_on_gpus(
    text: str,
    resolve_for: Callable[["Gpu"], tuple["Config", "Origin"]],
    *,
    fresh: bool,
    dry_run: bool = False,
    prepare: Callable[["Config"], None] = lambda config: None,
) -> None:
    """Run a node on each GPU that `text` names, until all have ended. Raises SwarmError.

    `resolve_for`: the configuration of a node on that GPU, before folder and ports are its own. `prepare` is called with
    each complete one before anything starts.
    """
    from rich.console import Console

    from swarm.config import adjusted, dump_toml
    from swarm.machine.hardware import nvidia_gpus
    from swarm.testbeds.gpu_nodes import choose_gpus, plan_gpu_nodes, run_gpu_nodes
    from swarm.testbeds.testbed import exclusive

    gpus = choose_gpus(text, nvidia_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))
    nodes = plan_gpu_nodes(gpus, lambda gpu: resolve_for(gpu)[0])
    if dry_run:
        for gpu, plan in zip(gpus, nodes.plans, strict=True):
            config, origin = resolve_for(gpu)
            print(f"# {plan.config_path}, on GPU {gpu.number}, {gpu.name}")
            print(dump_toml(plan.config, adjusted(origin, config, plan.config, "--gpus")), flush=True)
        return
    with exclusive(nodes.folder, "--node.dir"):
        for plan in nodes.plans:
            prepare(plan.config)
        run_gpu_nodes(nodes, Console(), fresh=fresh)


def _has_own_parts(source: "TaskSourceSection") -> bool:
    """Whether the prompts of a source, or its rewards, come from what its operator wrote."""
    has_file = source.path is not None and source.path.exists()
    return bool(source.form) or has_file or any(one.function for one in source.signals)


def _fitted(config: "Config") -> "Config":
    """The configuration with lengths that fit its base; unchanged where the base is still to be downloaded."""
    prepare_imports(config)
    from swarm.policy.base_folder import base_at_hand, fitted_to_base

    is_at_hand = base_at_hand(config.policy.base, config.policy.revision) is not None
    return fitted_to_base(config) if is_at_hand else config


def _show_prompts(config: "Config") -> None:
    prepare_imports(config)
    from swarm.cli.policy.show_prompts import show_prompts
    from swarm.policy.base_folder import base_at_hand
    from swarm.tasks.data_sets.source import is_at_hand

    folder = base_at_hand(config.policy.base, config.policy.revision)
    missing = [one.hub for one in config.tasks.sources if one.kind == "dataset" and not is_at_hand(one)]
    missing += [config.policy.base] if folder is None else []
    if folder is None or missing:
        print(f"prompts are shown once {', '.join(missing)} is downloaded: swarm sample --show-prompt", file=sys.stderr)
        return
    show_prompts(config, folder, sys.stderr)


def _supervise(config: list[str], first: list[str]) -> int:
    """The exit code to end with. `first`: further arguments of the first start.

    An identity that is locked needs its passphrase in a file or in the environment.
    """
    import random

    from swarm.node.supervisor import BackOff, Supervisor
    from swarm.testbeds.testbed import SUPERVISOR

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}{SUPERVISOR}{line}", file=sys.stderr, flush=True)

    command = swarm_command("run", *config, "--end-when-stuck")
    return Supervisor(command, BackOff(), random.Random(), say).run(first)

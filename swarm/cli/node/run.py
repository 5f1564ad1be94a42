"""`swarm run`: runs one node until it is done or interrupted."""

import sys
import time
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config, prepare_imports
from swarm.machine.child_python import swarm_command

if TYPE_CHECKING:
    from swarm.config import Config, TaskSourceSection

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Lets `--section.key value` through to `load_config`."""
_OPTIONS = ("--fresh", "--resume", "--dry-run", "--supervised", "--end-when-stuck")


def run(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    fresh: bool = typer.Option(
        False,
        "--fresh/--resume",
        help="Start a new run; the earlier run is moved aside. Default: resume the earlier run.",
    ),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Print the resolved configuration and exit; to stderr, also the prompts of sources that set how they ask.",
    ),
    supervised: bool = typer.Option(
        False, "--supervised", help="Restart the node when it has crashed or is stuck, with growing pauses."
    ),
    end_when_stuck: bool = typer.Option(
        False, "--end-when-stuck", help="End with code 18 when the node is stuck, so that a supervisor can restart it."
    ),
) -> None:
    """Run one node: roll out, share, learn.

    With no CONFIG the bundled tiny policy and its tasks are used. Ctrl-C ends
    after the current round, a second Ctrl-C at once.

    Reads: CONFIG; in node.dir the identity and the newest checkpoint.
    Writes: all of node.dir: config.toml, checkpoints/, logs/, metrics.jsonl,
    status.json, pool.sqlite.

    Examples:
      swarm run node_configs/laptop-cpu.toml --node.max_rounds 100
      swarm run runs/mine/node.toml --training.lr 1e-5 --dry-run

    Exit codes: 0 done, 3 configuration, 4 identity, 5 policy, 6 tasks, 7 network,
    8 checkpoint, 10 memory, 11 training, 17 silo, 130 interrupted.
    """
    resolved = load_config(config or [], _OPTIONS)
    if dry_run:
        from swarm.config import dump_toml

        resolved = _fitted(resolved)
        print(dump_toml(resolved), end="", flush=True)
        if any(_has_own_parts(source) for source in resolved.tasks.sources):
            _show_prompts(resolved)
        return
    if supervised:
        raise typer.Exit(_supervise(config or [], fresh=fresh))
    prepare_imports(resolved)
    from swarm.cli.swarm.passphrase import unlock
    from swarm.node.process import run_node

    run_node(resolved, fresh=fresh, unlock=unlock, end_when_stuck=end_when_stuck)


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


def _supervise(config: list[str], *, fresh: bool) -> int:
    """The exit code to end with. An identity that is locked needs its passphrase in a file or in the environment."""
    import random

    from swarm.node.supervisor import BackOff, Supervisor

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} supervisor: {line}", file=sys.stderr, flush=True)

    command = swarm_command("run", *config, "--end-when-stuck")
    return Supervisor(command, BackOff(), random.Random(), say).run(["--fresh"] if fresh else [])

"""`swarm run`: one node, until interrupted or done."""

import os
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, load_config

if TYPE_CHECKING:
    from swarm.config import Config

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Lets `--section.key value` through to `load_config`."""


def run(
    config: list[str] = typer.Argument(None, metavar="CONFIG... [--section.key VALUE]...", help=CONFIG_HELP),
    fresh: bool = typer.Option(
        False, "--fresh/--resume", help="Start anew; the earlier run is moved aside. Default: resume what is there."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the resolved configuration and exit."),
) -> None:
    """Run one node: roll out, share, learn.

    With no CONFIG the bundled tiny policy and its tasks are used. Ctrl-C ends after the round in flight, a second one at once.
    """
    resolved = load_config(config or [], ("--fresh", "--resume", "--dry-run"))
    if dry_run:
        from swarm.config import dump_toml

        print(dump_toml(resolved), end="")
        return
    stay_off_hubs(resolved)
    from swarm.cli.passphrase import unlock
    from swarm.node import run_node

    run_node(resolved, fresh=fresh, unlock=unlock)


def stay_off_hubs(config: "Config") -> None:
    """A silo's node contacts nobody but its peers. The hub's libraries are told so before anything imports them."""
    if config.swarm.silo_owner:
        os.environ["HF_HUB_OFFLINE"] = "1"

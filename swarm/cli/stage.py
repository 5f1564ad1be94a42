"""`swarm stage`: hold some layers of a policy that no single machine holds."""

import re

import typer

from swarm.cli.arguments import CONFIG_HELP, load_config
from swarm.errors import ConfigError


def stage(
    config: list[str] = typer.Argument(None, metavar="CONFIG... [--section.key VALUE]...", help=CONFIG_HELP),
    layers: str = typer.Option(
        None,
        metavar="START:STOP",
        help="Hold these layers, such as 0:4. Default: those that the driver assigns, if any.",
    ),
) -> None:
    """Hold a range of layers for the node that drives the crew of policy.pipeline, and copies of neighbours' adapters.

    Serves until Ctrl-C. A machine without layers is a spare: it takes those of one that is lost.
    """
    resolved = load_config(config or [], ("--layers",))
    wanted = None if layers is None else parse_layers(layers)
    from swarm.stage_process import run_stage

    run_stage(resolved, wanted)


def parse_layers(text: str) -> tuple[int, int]:
    """(start, stop) of START:STOP. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"layers must be START:STOP with START < STOP, got {text!r}; write --layers 0:4")
    return int(match[1]), int(match[2])

"""`swarm stage`: holds some layers of a policy that is spread over several machines."""

import re

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config, prepare_imports
from swarm.cli.swarm.passphrase import unlock
from swarm.errors import ConfigError


def stage(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    layers: str = typer.Option(
        None,
        metavar="START:STOP",
        help="Hold these layers, such as 0:4. Default: the layers that the driver assigns.",
    ),
) -> None:
    """Hold some layers of a policy for the node that drives the pipeline.

    Serves until Ctrl-C, with copies of neighbours' adapters. A machine without
    layers is a spare: it gets the layers of a machine that is lost.

    Reads: CONFIG, the same policy table as the driver's; files of the base.
    Writes: the identity, logs and status of node.dir; no checkpoint, which is
    the driver's.

    Examples:
      swarm stage pipeline.toml --layers 0:12
      swarm stage pipeline.toml --network.listen '["/ip4/0.0.0.0/tcp/28000"]'

    Exit codes: 3 configuration, 4 identity, 5 policy, 7 network, 10 memory,
    16 pipeline, 130 interrupted.
    """
    resolved = load_config(config or [], ("--layers",))
    wanted = None if layers is None else parse_layers(layers)
    prepare_imports(resolved)
    from swarm.node.stage_process import run_stage

    run_stage(resolved, wanted, unlock)


def parse_layers(text: str) -> tuple[int, int]:
    """(start, stop) of START:STOP. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"layers must be START:STOP with START < STOP, got {text!r}; write --layers 0:4")
    return int(match[1]), int(match[2])

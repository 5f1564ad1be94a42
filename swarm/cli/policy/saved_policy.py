"""The policy that `swarm eval`, `sample`, `chat`, `serve` and `export` are asked for."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.cli.arguments import prepare_imports
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import Config
    from swarm.policy.policy import Policy


BEST = "Use the checkpoint that did best on held-out tasks in place of the newest one."
"""Help of `--best`."""


def load_saved_policy(config: "Config", *, base_only: bool = False, best: bool = False) -> tuple["Policy", int | None]:
    """As `swarm.api.saved_policy.load`, in a process that loads this policy and no other; it is said on stderr."""
    if base_only and best:
        raise ConfigError("there must be --best or --base, got both; leave one out")
    prepare_imports(config)
    from swarm.api.saved_policy import load

    print(f"loading policy {config.policy.base} …", file=sys.stderr)
    return load(config, base_only=base_only, best=best)


def config_arguments(config: list[str] | None, folder: Path | None) -> list[str]:
    """`--dir FOLDER` stands for the configuration that the node of that folder ran with. Raises ConfigError where there
    is no node."""
    if folder is None:
        return list(config or [])
    from swarm.machine.node_folder import NodeFolder

    NodeFolder(folder).check()
    if not (folder / "config.toml").is_file():
        raise ConfigError(
            f"--dir must be the folder of a node that ran, got {folder}: there is no node in it; name another"
        )
    return [str(folder / "config.toml"), *(config or []), f"--node.dir={folder}"]

"""Loads the policy of a configuration with the adapter of its newest checkpoint, for `swarm eval`, `sample` and `export`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.cli.arguments import prepare_imports
from swarm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from swarm.config import Config
    from swarm.policy.policy import Policy


def load_saved_policy(config: "Config", *, base_only: bool = False) -> tuple["Policy", int | None]:
    """(policy, round of its checkpoint), or the untrained base and None.

    Raises CheckpointError where node.dir holds no checkpoint, or one of another lineage, or one that no learner has written.
    """
    prepare_imports(config)
    from swarm.adapters.adapter_state import write_adapter
    from swarm.adapters.checkpoint import CheckpointStore
    from swarm.machine.node_folder import NodeFolder
    from swarm.node.run_state import check_run_state
    from swarm.policy.base_folder import fitted_to_base
    from swarm.policy.policy import load_policy
    from swarm.warm_start.start_digest import start_digest

    print(f"loading policy {config.policy.base} …", file=sys.stderr)
    folder = NodeFolder(config.node.dir)
    folder.check()
    cache = folder.hash_cache if folder.path.is_dir() else None
    start = start_digest(config)
    if base_only:
        return load_policy(
            fitted_to_base(config).policy, device=config.node.device, hash_cache=cache, start=start
        ), None
    checkpoint = CheckpointStore(folder.checkpoints, config.checkpoint.keep).load_newest()
    if checkpoint is None:
        raise CheckpointError(
            f"node.dir must hold a checkpoint, got none in {folder.path}; run the node first, set node.dir, or use --base"
        )
    policy = load_policy(fitted_to_base(config).policy, device=config.node.device, hash_cache=cache, start=start)
    check_run_state(checkpoint, policy.vocab_size)
    if not policy.lineage.has_name(checkpoint.state["lineage"]["policy"]):
        raise CheckpointError(
            f"policy settings must be those of the run, got another lineage than {checkpoint.path}; "
            f"pass {folder.config} as the config"
        )
    write_adapter(policy.model, checkpoint.tensors["adapter"])
    policy.version = checkpoint.state["policy_version"]
    return policy, checkpoint.round


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

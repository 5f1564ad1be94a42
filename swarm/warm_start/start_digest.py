"""What begins a policy before RL, as a part of its lineage."""

import hashlib
import json
from pathlib import Path

from swarm.config import Config
from swarm.errors import PolicyError
from swarm.tasks.task_mixture import TaskMixture
from swarm.warm_start.hub_adapter import ADAPTER_FILES, hub_adapter


def start_digest(config: Config) -> str:
    """What begins the policy, for its lineage; empty where RL begins from a fresh adapter.

    Reads the adapter and builds the sources of the examples. Raises PolicyError and TaskError.
    """
    start, folder = config.warm_start, adapter_folder(config)
    if not start.steps and folder is None:
        return ""
    facts: list[object] = ["start-1"]
    if folder is not None:
        facts.append(_digest_of(folder))
    if start.steps:
        mixture = examples_of(config)
        sources = sorted(
            [name, source.config_digest, mixture.weights[name]] for name, source in mixture.sources.items()
        )
        mixture.close()
        facts += [start.steps, start.batch_size, start.lr, sources]
        facts += [config.tasks.held_out_share] if config.tasks.held_out_share else []
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def adapter_folder(config: Config) -> Path | None:
    """The adapter that begins the policy, fetched where it is on a hub and not here yet. Raises PolicyError."""
    start = config.warm_start
    if not start.adapter_hub:
        return start.adapter
    return hub_adapter(start.adapter_hub, start.adapter_revision, config.policy.max_download_gib)


def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    try:
        for name in ADAPTER_FILES:
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise PolicyError(
            f"warm_start.adapter must be a folder with an adapter in peft format, got {folder}: {error.strerror}; see swarm "
            "export, or set warm_start.adapter_hub"
        ) from None
    return digest.hexdigest()


def examples_of(config: Config) -> TaskMixture:
    """The sources of the examples of a warm start. Raises TaskError."""
    sources = config.warm_start.sources or config.tasks.sources
    return TaskMixture(config.tasks.model_copy(update={"sources": tuple(sources)}))

"""What begins a policy before RL, as a part of its lineage; an adapter from a hub is downloaded once.

Of the hub's repository only files of known names and sizes are fetched.
"""

import hashlib
import json
import logging
import shutil
from pathlib import Path

from swarm.config import Config
from swarm.errors import PolicyError
from swarm.machine.hub_requests import bound_hub_requests
from swarm.tasks.task_mixture import TaskMixture

logger = logging.getLogger(__name__)

BASE_FACTS = "swarm_base.json"
"""As of `swarm.adapters.export`: which base the adapter is of, where it says so."""
_MAX_FACTS_BYTES = 4096
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_GIB = 2**30
_TIMEOUT_S = 20.0


def hub_adapter(name: str, revision: str, max_gib: float) -> Path:
    """Return the folder with a copy of the adapter, which later starts use without the hub. Raises PolicyError.

    Where `revision` is a branch, or empty, the copy stays at the commit that it had at the first start.
    """
    from huggingface_hub import HfApi, cached_assets_path, constants, hf_hub_download

    what = f"{name}@{revision}" if revision else name
    folder = cached_assets_path("swarm", "adapters", what, assets_dir=constants.HF_ASSETS_CACHE)
    if all((folder / file).is_file() for file in ADAPTER_FILES):
        return folder
    bound_hub_requests()
    fetched = folder / "fetched"
    try:
        info = HfApi().model_info(name, revision=revision or None, files_metadata=True, timeout=_TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if missing := [file for file in ADAPTER_FILES if file not in sizes]:
            raise PolicyError(
                f"warm_start.adapter_hub must name an adapter in peft format, got {what} without {missing[0]}; set it to another"
            )
        known_base = [BASE_FACTS] if 0 < sizes.get(BASE_FACTS, 0) <= _MAX_FACTS_BYTES else []
        num_bytes = sum(sizes[file] for file in ADAPTER_FILES)
        free = shutil.disk_usage(folder).free
        if num_bytes > min(max_gib * _GIB, free):
            raise PolicyError(
                f"an adapter must be within policy.max_download_gib = {max_gib:g} and the free disk, got "
                f"{num_bytes / _GIB:.1f} GiB of {what} and {free / _GIB:.1f} GiB free; take a smaller one"
            )
        for file in (*known_base, *ADAPTER_FILES):
            hf_hub_download(name, file, revision=info.sha, local_dir=fetched)
        for file in (*known_base, *ADAPTER_FILES):
            (fetched / file).replace(folder / file)
    except PolicyError:
        raise
    except Exception as error:  # the library passes the errors of its HTTP client through
        reason = " ".join(str(error).split())[:200]
        raise PolicyError(
            f"warm_start.adapter_hub must be an adapter on a hub that can be reached, got {what}: {type(error).__name__}: "
            f"{reason}; connect, or set warm_start.adapter to a folder"
        ) from None
    shutil.rmtree(fetched, ignore_errors=True)
    logger.info("fetched adapter %s at commit %s", what, info.sha)
    return folder


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

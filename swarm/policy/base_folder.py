"""Finds the files of a base model: the bundled one, a folder, or a download from the hub.

    names and sizes (from the hub) ─▶ within policy.max_download_gib and the disk? ─▶ download ─▶ a folder of the cache

A manifest names bases, and a name does not show the size. The sizes are therefore checked before the first file is fetched.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.config import BUNDLED_BASES, Config
from swarm.config.policy import BUNDLED, BUNDLED_REASONING
from swarm.errors import ConfigError, PolicyError
from swarm.machine.hub_requests import bound_hub_requests
from swarm.machine.safe_files import is_bare_name, read_json
from swarm.observability.progress import progress

logger = logging.getLogger(__name__)


_GIB = 2**30
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_OTHER_COPIES = ("original/*", "onnx/*", "consolidated*")  # the same weights in formats that are not read
_TIMEOUT_S = 20.0
_MAX_FILES = 2000
"""The largest models have a few hundred files; each takes a request and space on the disk."""
_WEIGHTS = ("*.safetensors", "*.bin")
"""The kinds of weights that transformers reads. A base is loaded from the first kind that it has."""


def download(base: str, revision: str | None, max_gib: float) -> Path:
    """Return the folder of a base in the hub's cache, downloading it where needed; offline, what the cache has.

    Raises PolicyError, also for a base of more than `max_gib` or more than the free disk; nothing is fetched then.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with _policy_errors(base, revision):
        try:
            num_bytes = _num_missing_bytes(base, revision)
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            try:
                return _snapshot(base, revision, local_files_only=True)
            except LocalEntryNotFoundError:
                raise error from None
        check_size(base, num_bytes, max_gib)
        with progress(f"downloading {base}", num_bytes, in_bytes=True) as add:
            return _snapshot(base, revision, tqdm_class=_counting(add))


def download_bytes(base: str, revision: str | None) -> int:
    """Return the bytes that a node would download of a base now. Raises PolicyError where the hub lists nothing."""
    with _policy_errors(base, revision):
        return _num_missing_bytes(base, revision)


def cache_folder() -> Path:
    """Return the hub's cache folder, or its nearest parent that exists."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    return next(path for path in (cache, *cache.parents) if path.exists())


def check_size(base: str, num_bytes: int, max_gib: float) -> None:
    """Raises PolicyError for a download above the limit, or larger than the free disk."""
    if num_bytes > max_gib * _GIB:
        raise PolicyError(
            f"policy.base must be a download of <= {max_gib:g} GiB, got {num_bytes / _GIB:.1f} of {base}; take a smaller "
            "base, or set policy.max_download_gib"
        )
    folder = cache_folder()
    if num_bytes > (free := shutil.disk_usage(folder).free):
        raise PolicyError(
            f"policy.base must fit on the disk, got {num_bytes / _GIB:.1f} GiB of {base} for {free / _GIB:.1f} GiB free in "
            f"{folder}; take a smaller base, or set HF_HOME to a larger disk"
        )


def _num_missing_bytes(base: str, revision: str | None) -> int:
    """Bytes of all files that `_snapshot` would fetch. Raises HfHubHTTPError, or LocalEntryNotFoundError when offline."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    bound_hub_requests()
    try:
        info = HfApi().model_info(base, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:  # the library may change its HTTP client, whose errors it passes through
        raise LocalEntryNotFoundError(str(error)) from None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    has_first = any(name.endswith(_WEIGHTS[0][1:]) and "/" not in name for name in sizes)
    wanted = [*_SMALL_FILES, *(_WEIGHTS[:1] if has_first else _WEIGHTS)]
    used = list(filter_repo_objects(sizes, allow_patterns=wanted, ignore_patterns=list(_OTHER_COPIES)))
    if len(used) > _MAX_FILES:
        raise PolicyError(f"policy.base must be <= {_MAX_FILES} files, got {len(used)} of {base}; take another base")
    return sum(sizes[name] for name in used if try_to_load_from_cache(base, name, revision=info.sha) is None)


def _counting(add: Callable[[float], None]) -> Any:
    """Return a class of bars for the hub's library that draw nothing, and pass on how many bytes have come."""
    from tqdm.auto import tqdm

    class Counting(tqdm):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._is_of_files = str(options.get("desc")).startswith(
                "Reconstructing"
            )  # the others count files, or the same bytes
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._is_of_files:
                add(n or 0)
            return super().update(n)

    return Counting


def _snapshot(base: str, revision: str | None, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    folder = Path()
    for weights in _WEIGHTS:
        folder = Path(snapshot_download(base, revision=revision, **_patterns(weights), **options))  # type: ignore[arg-type]
        if any(folder.glob(weights)):
            break
    return folder


def _patterns(weights: str) -> dict[str, list[str]]:
    return {"allow_patterns": [*_SMALL_FILES, weights], "ignore_patterns": list(_OTHER_COPIES)}


@contextmanager
def _policy_errors(base: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub into PolicyError."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError:
        raise PolicyError(
            f"policy.base must be {', '.join(BUNDLED_BASES)}, a folder or a hub id, got {base!r}; set policy.base"
        ) from None
    except GatedRepoError:
        raise PolicyError(
            f"policy.base must be a model you may read, got gated {base}; "
            "accept its terms on the hub and log in with `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise PolicyError(f"policy.revision must exist in {base}, got {revision}; set policy.revision") from None
    except RepositoryNotFoundError:
        raise PolicyError(f"policy.base must exist as a folder or on the hub, got {base}; check the name") from None
    except LocalEntryNotFoundError:
        raise PolicyError(
            f"policy.base must be at hand or on a hub that can be reached, got no folder {base}, no cached copy and "
            f"the hub cannot be reached; connect, or fetch it before with `hf download {base}`"
        ) from None
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise PolicyError(
            f"policy.base must be downloadable, got {base}: {reason}; try again, or fetch it before with `hf download {base}`"
        ) from None


_ASSETS = Path(__file__).resolve().parent.parent / "assets"
BUNDLED_FOLDER = _ASSETS / "tiny_policy"
_BUNDLED_FOLDERS = {BUNDLED: BUNDLED_FOLDER, BUNDLED_REASONING: _ASSETS / "reasoning_policy"}

_MAX_JSON_BYTES = 64 << 20
_ADAPTER = "adapter_config.json"
_NO_WEIGHTS = ("consolidated", "adapter_")
"""Files whose names begin like this are no weights of the base; they are not hashed."""
_INDICES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}
"""The indices that transformers reads, and the suffix of the files that they may name."""
_KERNELS = "implementation"
"""Part of the name of every setting that selects an implementation, which could be a repository of code."""


def locate_base(base: str, revision: str | None, max_download_gib: float = math.inf) -> Path:
    """Return the folder of base model `base`, downloaded first if it is a hub id that is not in the cache.

    Raises PolicyError: no such folder, no such hub model, gated, no network, too large for the limit or the disk.
    """
    folder = _folder_here(base, revision)
    if folder is None and _looks_like_path(base):
        raise PolicyError(
            f"policy.base must be an existing folder, got {base} ({Path(base).expanduser()}); set policy.base"
        )
    if folder is None:
        folder = download(base, revision, max_download_gib)
    elif base not in _BUNDLED_FOLDERS and not _looks_like_path(base):
        logger.warning(
            "policy.base %s is a folder here, so it is used, and no model of the hub; write ./%s", base, base
        )
    if not (folder / "config.json").is_file():
        raise PolicyError(f"policy.base must hold a config.json, got none in {folder}; point policy.base at a model")
    if (folder / _ADAPTER).exists():  # transformers would merge it into the base, and no hash would show that
        raise PolicyError(f"policy.base must be a base alone, got one with {_ADAPTER} in {folder}; remove that")
    _check_names(folder)
    _check_indices(folder)
    return folder


def read_base_json(path: Path) -> Any:
    """Read a JSON file of a base's folder. Raises OSError and ValueError.

    It follows links, because those of the hub's cache lead into its store.
    """
    return read_json(path.resolve(), _MAX_JSON_BYTES)


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def max_positions(folder: Path) -> int | None:
    """Return the tokens of prompt and answer together for which a base was made, or None where its config.json has no number."""
    try:
        settings = read_base_json(folder / "config.json")
        settings = settings.get("text_config") or settings
        found = next((settings[name] for name in _POSITIONS if type(settings.get(name)) is int), None)
        scaling = settings.get("rope_scaling") or {}
        factor = scaling.get("factor", 1) if "original_max_position_embeddings" not in scaling else 1
        return found if found is None or found <= 0 else int(found * max(1, factor))
    except (
        OSError,
        ValueError,
        OverflowError,
        AttributeError,
        TypeError,
    ):  # what is damaged is reported where it is loaded
        return None


def _check_names(folder: Path) -> None:
    """Raises PolicyError where config.json, at any depth, names other weights or code to download."""
    try:
        settings = list(_settings(read_base_json(folder / "config.json")))
    except (OSError, ValueError):
        raise PolicyError(
            f"policy.base must hold a valid config.json, got a damaged one in {folder}; fetch the model again"
        ) from None
    for key, value in settings:
        if key == "transformers_weights" and value is not None:
            raise PolicyError(
                f"policy.base must have its weights in the usual files, got {ascii(value)[:100]} in config.json of {folder}; "
                "set policy.base"
            )
        if _KERNELS in key and "/" in json.dumps(value):
            raise PolicyError(
                f"policy.base must not name code to download, got {ascii(value)[:100]} in config.json of {folder}; remove it"
            )


def _settings(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys of all tables in a value, with their values."""
    if isinstance(value, dict):
        yield from value.items()
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _settings(part)


def _check_indices(folder: Path) -> None:
    """Raises PolicyError where an index of weights names files outside of the folder or files that are not hashed."""
    for path in folder.glob("*.index.json"):
        try:
            names = set(read_base_json(path)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError(
                f"policy.base must hold a readable {path.name}, got {error} in {folder}; fetch it again"
            ) from None
        if odd := sorted(str(name) for name in names if not isinstance(name, str) or not is_bare_name(name)):
            raise PolicyError(
                f"{path.name} must name files beside it, got {odd[0][:100]!r} in {folder}; set policy.base"
            )
        suffix = _INDICES.get(path.name, "")
        if suffix and (
            other := sorted(one for one in names if one.startswith(_NO_WEIGHTS) or not one.endswith(suffix))
        ):
            raise PolicyError(
                f"{path.name} must name weights of the base, *{suffix}, got {other[0]!r} in {folder}; set policy.base"
            )


def check_obtainable(base: str, revision: str | None, max_download_gib: float) -> None:
    """Raise PolicyError for a base that is not at hand and cannot be downloaded. Downloads nothing."""
    if _folder_here(base, revision) is not None or _looks_like_path(base):
        locate_base(base, revision)
    elif base_at_hand(base, revision) is None:
        check_size(base, download_bytes(base, revision), max_download_gib)


def base_at_hand(base: str, revision: str | None) -> Path | None:
    """Return the folder of a base that loads without the network, or None. Downloads nothing, raises nothing."""
    folder = _folder_here(base, revision)
    if folder is None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(base, revision=revision, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError, OSError):
            return None
    try:
        return folder if (folder / "config.json").is_file() and weight_files(folder) else None
    except PolicyError:
        return None


def names_folder(base: str, revision: str | None = None) -> bool:
    """Return whether `base` is a path or the name of a folder here, and so neither bundled nor a model of a hub."""
    return base not in _BUNDLED_FOLDERS and (_looks_like_path(base) or _folder_here(base, revision) is not None)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights: safetensors where there are any, otherwise PyTorch files. Raises PolicyError."""
    for pattern in ("*.safetensors", "*.bin"):
        files = sorted(path for path in folder.glob(pattern) if not path.name.startswith(_NO_WEIGHTS))
        if files:
            return files
    raise PolicyError(f"policy.base must hold *.safetensors weights, got none in {folder}; complete the folder")


def _folder_here(base: str, revision: str | None) -> Path | None:
    """Return the folder that `base` names, or None for a name of the hub.

    A base with a revision is of the hub: folders have no revision, and a folder that somebody put into the current folder
    must not replace what a founder or a user has pinned.
    """
    if base in _BUNDLED_FOLDERS:
        return _BUNDLED_FOLDERS[base]
    if revision is not None and not _looks_like_path(base):
        return None
    folder = Path(base).expanduser()
    return folder if folder.is_dir() else None


def _looks_like_path(base: str) -> bool:
    return base.startswith((".", "/", "~")) or "\\" in base or base.count("/") > 1


def fitted_to_base(config: Config) -> Config:
    """Return the configuration with defaults of lengths that fit into the positions of its base; downloads the base first.

    Lengths that the user set stay as they are: the other one gets the rest. Raises ConfigError where they do not fit,
    PolicyError where there is no such base.
    """
    policy, rollouts = config.policy, config.rollouts
    if policy.base in BUNDLED_BASES:
        return config
    positions = max_positions(locate_base(policy.base, policy.revision, policy.max_download_gib))
    if positions is None or policy.max_prompt_tokens + rollouts.max_new_tokens <= positions:
        return config
    prompt, answer = _lengths(config, positions)
    logger.info(
        "%s has %d positions: policy.max_prompt_tokens = %d, rollouts.max_new_tokens = %d",
        policy.base, positions, prompt, answer,
    )  # fmt: skip
    return config.model_copy(
        update={
            "policy": policy.model_copy(update={"max_prompt_tokens": prompt}),
            "rollouts": rollouts.model_copy(update={"max_new_tokens": answer}),
        }
    )


def _lengths(config: Config, positions: int) -> tuple[int, int]:
    """Return the most tokens of a prompt and of an answer."""
    lengths = {
        "policy.max_prompt_tokens": config.policy.max_prompt_tokens,
        "rollouts.max_new_tokens": config.rollouts.max_new_tokens,
    }
    are_set = (
        "max_prompt_tokens" in config.policy.model_fields_set,
        "max_new_tokens" in config.rollouts.model_fields_set,
    )
    chosen = {name: tokens for (name, tokens), is_set in zip(lengths.items(), are_set, strict=True) if is_set}
    rest = positions - sum(chosen.values())
    if rest < 2 - len(chosen):  # one position at least for each that is not set
        raise ConfigError(
            f"prompt and answer must fit into the {positions} positions of {config.policy.base}, got "
            + " and ".join(f"{name} = {tokens}" for name, tokens in chosen.items())
            + ("; lower it, or leave it out" if len(chosen) == 1 else "; lower one, or leave one out")
        )
    prompt = chosen.get("policy.max_prompt_tokens", rest if chosen else rest - rest // 2)
    return prompt, positions - prompt if "rollouts.max_new_tokens" not in chosen else config.rollouts.max_new_tokens

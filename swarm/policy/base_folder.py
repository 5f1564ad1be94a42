"""Where the files of a base model are: the bundled one, a folder, or a download from the hub.

The files of a base from the hub: how large they are, and the download of those that a node uses.

    names and sizes (the hub's list) ─▶ within policy.max_download_gib, and on the disk? ─▶ download ─▶ a folder of the cache

A manifest names bases, and a name says nothing about the size. So the list comes before the first file.
"""

import json
import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import PolicyError
from swarm.machine.safe_files import is_bare_name, read_json

logger = logging.getLogger(__name__)


_GIB = 2**30
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_OTHER_COPIES = ("original/*", "onnx/*", "consolidated*")  # the same weights once more, in formats that are not read
_TIMEOUT_S = 20.0
_MAX_FILES = 2000
"""The largest models have a few hundred; each takes a request and a place on the disk."""
_WEIGHTS = ("*.safetensors", "*.bin")
"""The kinds of weights that transformers reads. The first one that a base has is taken."""


def download(base: str, revision: str | None, max_gib: float) -> Path:
    """The folder of a base in the hub's cache. Where the hub does not answer it is what the cache has.

    Raises PolicyError, also for more than `max_gib` or than the disk has room for; nothing is fetched then.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with _told(base, revision):
        try:
            num_bytes = _num_missing_bytes(base, revision)
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            try:
                return _snapshot(base, revision, local_files_only=True)
            except LocalEntryNotFoundError:
                raise error from None
        check_size(base, num_bytes, max_gib)
        return _snapshot(base, revision)


def download_bytes(base: str, revision: str | None) -> int:
    """What a node would fetch of a base now, as the hub lists it. Raises PolicyError where the hub lists nothing."""
    with _told(base, revision):
        return _num_missing_bytes(base, revision)


def cache_folder() -> Path:
    """The folder that the hub's cache is in, or will be: the first one on the way to it that exists."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    return next(path for path in (cache, *cache.parents) if path.exists())


def check_size(base: str, num_bytes: int, max_gib: float) -> None:
    """Raises PolicyError for a download beyond the bound, or that the disk has no room for."""
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
    """Of all files that `_snapshot` would fetch. Raises HfHubHTTPError, or LocalEntryNotFoundError where no hub answers."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    try:
        info = HfApi().model_info(base, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:  # the library changes its HTTP client, and does not translate what that raises
        raise LocalEntryNotFoundError(str(error)) from None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    has_first = any(name.endswith(_WEIGHTS[0][1:]) and "/" not in name for name in sizes)
    wanted = [*_SMALL_FILES, *(_WEIGHTS[:1] if has_first else _WEIGHTS)]
    used = list(filter_repo_objects(sizes, allow_patterns=wanted, ignore_patterns=list(_OTHER_COPIES)))
    if len(used) > _MAX_FILES:
        raise PolicyError(f"policy.base must be <= {_MAX_FILES} files, got {len(used)} of {base}; take another base")
    return sum(sizes[name] for name in used if try_to_load_from_cache(base, name, revision=info.sha) is None)


def _snapshot(base: str, revision: str | None, **options: bool) -> Path:
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
def _told(base: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub as PolicyError."""
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
        raise PolicyError(f"policy.base must be bundled, a folder or a hub id, got {base!r}; set policy.base") from None
    except GatedRepoError:
        raise PolicyError(
            f"policy.base must be a model you may read, got gated {base}; "
            "accept its terms on the hub and log in with `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise PolicyError(f"policy.revision must exist in {base}, got {revision}; set policy.revision") from None
    except RepositoryNotFoundError:
        raise PolicyError(f"policy.base must exist as a folder or on the hub, got {base}; set policy.base") from None
    except LocalEntryNotFoundError:
        raise PolicyError(
            f"policy.base must be at hand or on a hub that can be reached, got no folder {base}, no cached copy and "
            "the hub cannot be reached; connect, or set policy.base to a folder"
        ) from None
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise PolicyError(
            f"policy.base must be downloadable, got {base}: {reason}; try again, or set policy.base to a folder"
        ) from None


BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "tiny_policy"

_MAX_JSON_BYTES = 64 << 20
_ADAPTER = "adapter_config.json"
_NO_WEIGHTS = ("consolidated", "adapter_")
"""Files whose names begin so are no weights of the base: they are not hashed."""
_INDICES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}
"""Those that transformers reads, and the files that they may name."""
_KERNELS = "implementation"
"""In the name of every setting that says what computes a part of the model, which may be a repository of code."""


def locate_base(base: str, revision: str | None, max_download_gib: float = math.inf) -> Path:
    """The folder of base model `base`, downloaded first if it is a hub id that is not in the cache yet.

    Raises PolicyError: no such folder, no such hub model, gated, no network, too large for this bound or for the disk.
    """
    folder = _folder_here(base, revision)
    if folder is None and _looks_like_path(base):
        raise PolicyError(
            f"policy.base must be an existing folder, got {base} ({Path(base).expanduser()}); set policy.base"
        )
    if folder is None:
        folder = download(base, revision, max_download_gib)
    elif base != "bundled" and not _looks_like_path(base):
        logger.warning("policy.base %s is the folder of that name here, no model of the hub; ./%s says so", base, base)
    if not (folder / "config.json").is_file():
        raise PolicyError(f"policy.base must hold a config.json, got none in {folder}; point policy.base at a model")
    if (folder / _ADAPTER).exists():  # transformers would put that adapter into the base, and no hash would tell
        raise PolicyError(f"policy.base must be a base alone, got one with {_ADAPTER} in {folder}; remove that")
    _check_names(folder)
    _check_indices(folder)
    return folder


def read_base_json(path: Path) -> Any:
    """What a file of JSON in a base's folder holds. Raises OSError and ValueError.

    Links are followed here: those of the hub's cache lead into its store.
    """
    return read_json(path.resolve(), _MAX_JSON_BYTES)


def _check_names(folder: Path) -> None:
    """Raise PolicyError where config.json, also for a part of the model, names other weights, or code to download."""
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
    """All keys of all tables in a value, with what they are set to."""
    if isinstance(value, dict):
        yield from value.items()
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _settings(part)


def _check_indices(folder: Path) -> None:
    """Raise PolicyError where an index of weights names files outside of the folder, or some that are not hashed."""
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


def base_at_hand(base: str, revision: str | None) -> Path | None:
    """The folder of a base that loads without the network, or None. Downloads nothing, raises nothing."""
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


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: safetensors where there are any, PyTorch files else. Raises PolicyError."""
    for pattern in ("*.safetensors", "*.bin"):
        files = sorted(path for path in folder.glob(pattern) if not path.name.startswith(_NO_WEIGHTS))
        if files:
            return files
    raise PolicyError(f"policy.base must hold *.safetensors weights, got none in {folder}; complete the folder")


def _folder_here(base: str, revision: str | None) -> Path | None:
    """The folder that `base` names. None: it is a name of the hub.

    What has a revision is of the hub: a folder has none, and one that somebody else has put into the current folder must not
    take the place of what a founder or a user has pinned.
    """
    if base == "bundled":
        return BUNDLED_FOLDER
    if revision is not None and not _looks_like_path(base):
        return None
    folder = Path(base).expanduser()
    return folder if folder.is_dir() else None


def _looks_like_path(base: str) -> bool:
    return base.startswith((".", "/", "~")) or "\\" in base or base.count("/") > 1

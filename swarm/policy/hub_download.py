"""The files of a base from the hub: how large they are, and the download of those that a node uses.

    names and sizes (the hub's list) ─▶ within policy.max_download_gib, and on the disk? ─▶ download ─▶ a folder of the cache

A manifest names bases, and a name says nothing about the size. So the list comes before the first file.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.errors import PolicyError

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

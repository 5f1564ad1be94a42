"""Downloads the data files of a data set from a hub, after their names and sizes are known.

    revision ─▶ commit ─▶ names and sizes ─▶ within tasks.max_data_gib and the disk? ─▶ download ─▶ a folder of the hub's cache

A manifest names data sets, and a name does not show the size. Only formats of data are fetched, never a script. The hub's
library is imported when it is needed: a silo turns it off before.
"""

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import TaskError
from swarm.machine.hub_requests import bound_hub_requests

logger = logging.getLogger(__name__)

_COMMIT = re.compile("[0-9a-f]{40}")
_GIB = 2**30
_MAX_FILES = 2000
_TIMEOUT_S = 20.0
_SUFFIXES = ("parquet", "arrow", "csv", "tsv", "json", "jsonl", "ndjson")
_PATTERNS = [
    "README.md",
    *(f"*.{suffix}{packed}" for suffix in _SUFFIXES for packed in ("", ".gz", ".bz2", ".xz", ".zst")),
]


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def commit_of(name: str, revision: str) -> str:
    """The commit of a revision; offline, the one in the cache. Raises TaskError."""
    if is_commit(revision):
        return revision
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _task_errors(name, revision):
        try:
            commit = str(_info(name, revision).sha)
        except LocalEntryNotFoundError:
            commit = _snapshot(name, revision, local_files_only=True).name
    if not is_commit(commit):
        raise TaskError(f"a revision must lead to a commit, got {commit[:64]!a} for {name}; set revision")
    logger.info(
        "revision %s of data set %s is commit %s; set revision to it to stay there", revision or "main", name, commit
    )
    return commit


def fetched(name: str, commit: str, max_gib: float) -> Path:
    """The folder with the data files of a commit, downloaded where needed. Raises TaskError, also for too large a data set."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _task_errors(name, commit):
        try:
            _check_size(name, commit, max_gib)
        except LocalEntryNotFoundError:  # offline: the cache may have all of them
            return _snapshot(name, commit, local_files_only=True)
        return _snapshot(name, commit)


def _check_size(name: str, commit: str, max_gib: float) -> None:
    """Raise TaskError for a download above the limit, or larger than the free disk."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    info = _info(name, commit)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    used = list(filter_repo_objects(sizes, allow_patterns=_PATTERNS))
    is_missing = {
        file: try_to_load_from_cache(name, file, revision=commit, repo_type="dataset") is None for file in used
    }
    missing = sum(sizes[file] for file in used if is_missing[file])
    if len(used) > _MAX_FILES or missing > max_gib * _GIB:
        raise TaskError(
            f"a data set must be at most {_MAX_FILES} files and a download of <= {max_gib:g} GiB, got {len(used)} files and "
            f"{missing / _GIB:.1f} GiB of {name}; set tasks.max_data_gib, which data sets share, or path to a copy of a part"
        )
    cache = Path(constants.HF_HUB_CACHE).absolute()
    folder = next(one for one in (cache, *cache.parents) if one.exists())
    if missing > (free := shutil.disk_usage(folder).free):
        raise TaskError(
            f"a data set must fit on the disk, got {missing / _GIB:.1f} GiB of {name} for {free / _GIB:.1f} GiB free in "
            f"{folder}; set HF_HOME to a larger disk"
        )


def _info(name: str, revision: str) -> Any:
    """What the hub says of a revision. Raises HfHubHTTPError, or LocalEntryNotFoundError when offline."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    bound_hub_requests()
    try:
        return HfApi().dataset_info(name, revision=revision or None, files_metadata=True, timeout=_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:  # the library passes the errors of its HTTP client through
        raise LocalEntryNotFoundError(str(error)) from None


def _snapshot(name: str, revision: str, **options: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = {"repo_type": "dataset", "revision": revision or None, "allow_patterns": _PATTERNS}
    return Path(snapshot_download(name, **wanted, **options))  # type: ignore[arg-type]


@contextmanager
def _task_errors(name: str, revision: str) -> Iterator[None]:
    """Turn errors of the hub into TaskError."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at {revision}" if revision else ""
    try:
        yield
    except GatedRepoError:
        raise TaskError(
            f"hub must be a data set that you may read, got gated {name}; accept its terms on the hub and log in with `hf auth "
            "login`"
        ) from None
    except RevisionNotFoundError:
        raise TaskError(f"revision must exist in the data set {name}, got {revision}; set revision") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise TaskError(
            f"hub must name a data set of the hub, got {name}; set hub, or path for files of your own"
        ) from None
    except LocalEntryNotFoundError:
        raise TaskError(
            f"a data set must be at hand or on a hub that can be reached, got no copy of {name}{at} in the cache and no answer "
            "of the hub; connect, unset HF_HUB_OFFLINE, or set path to a copy, as of "
            f"`hf download {name} --repo-type dataset --local-dir FOLDER`"
        ) from None
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskError(
            f"a data set must be downloadable, got {name}{at}: {reason}; try again, or set path to a copy"
        ) from None

"""The tasks of a data set in one file: written once, row after row, and read by row number without holding them in memory.

    rows (JSON lines) │ offset of each row and of the end (u64) │ facts (JSON) │ where offsets and facts begin, mark

The file is written beside its place and then renamed, so that readers see a whole one or none. An open file stays readable when
another one replaces it. Memory does not grow with the number of rows, while writing neither.
"""

import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from swarm.errors import TaskError
from swarm.machine.safe_files import SHARED, new_file

MAX_FILES = 10_000
"""Files of one data set."""
MAX_ROW_BYTES = 4 << 20
_MAX_FACTS_BYTES = 64 << 10
_OFFSET = struct.Struct("<Q")
_END = struct.Struct("<QQ8s")
_MARK = b"swrows-1"


class RowStore:
    """The rows of a file. It is safe from any thread. Reading takes two system calls for a row."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is no such file, ValueError for another or a damaged one."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        if size < _END.size:
            raise ValueError("no file of rows")
        self._offsets, facts_at, mark = _END.unpack(os.pread(self._descriptor, _END.size, size - _END.size))
        num_bytes = size - _END.size - facts_at
        if mark != _MARK or not 0 <= num_bytes <= _MAX_FACTS_BYTES or not 0 <= self._offsets < facts_at:
            raise ValueError("no file of rows")
        self._num_rows = (facts_at - self._offsets) // _OFFSET.size - 1
        self.facts: dict[str, Any] = json.loads(os.pread(self._descriptor, num_bytes, facts_at))
        """What was stored beside the rows."""

    def close(self) -> None:
        self._close()

    def __len__(self) -> int:
        return self._num_rows

    def row(self, number: int) -> dict[str, Any]:
        """A row by its number. Raises OSError and ValueError for a damaged file."""
        both = os.pread(self._descriptor, 2 * _OFFSET.size, self._offsets + number * _OFFSET.size)
        begin, end = struct.unpack("<QQ", both) if 0 <= number < self._num_rows and len(both) == 16 else (0, 0)
        if not 0 < end - begin <= MAX_ROW_BYTES:
            raise ValueError(f"row {number} is damaged")
        row: dict[str, Any] = json.loads(os.pread(self._descriptor, end - begin, begin))
        return row


class RowWriter:
    """Writes a file of rows. `finish` puts it in its place; without it nothing is left. One writer at a time per file."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError."""
        self._path = path
        self._max_bytes = max_bytes
        self._new = path.with_name(f".{path.name}.new")
        self._new.unlink(missing_ok=True)  # of a writer that was killed
        self._rows = new_file(self._new, SHARED)
        self._offsets = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115  closed by __exit__
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        self._offsets.write(_OFFSET.pack(0))

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.close()
        self._offsets.close()
        self._new.unlink(missing_ok=True)

    @property
    def sha256(self) -> str:
        """SHA-256 of all rows and parts so far, 64 hex digits."""
        return self._digest.hexdigest()

    def begin(self, part: str) -> None:
        """Begin a part of the data set, such as its held-out split: which rows belong to it is a part of the hash."""
        self._digest.update(f"{part}\n".encode())

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one row. Raises OSError, and TaskError above the largest size."""
        data = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise TaskError(
                f"the tasks of a data set must take at most {self._max_bytes / 2**30:.3g} GiB, got more; "
                "set tasks.max_data_gib, which data sets share"
            )
        self._digest.update(data)
        self._rows.write(data)
        self._offsets.write(_OFFSET.pack(self._num_bytes))

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Complete the file and put it in its place. Raises OSError."""
        self._offsets.seek(0)
        shutil.copyfileobj(self._offsets, self._rows)
        facts_at = self._rows.tell()
        self._rows.write(json.dumps(facts).encode())
        self._rows.write(_END.pack(self._num_bytes, facts_at, _MARK))
        self._rows.flush()
        self._new.replace(self._path)


def files_identity(path: Path) -> str:
    """A hash of names, sizes and times of change of a file, or of the files in a folder. Follows no link. Raises OSError."""
    files = [path] if path.is_file() else [Path(folder, name) for folder, name in _names(path)]
    found = [
        (os.path.relpath(file, path), status.st_size, status.st_mtime_ns) for file in files for status in [file.lstat()]
    ]
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()


def _names(root: Path) -> Iterator[tuple[str, str]]:
    count = 0
    for folder, _, names in os.walk(root, onerror=_raise):
        for name in names:
            count += 1
            if count > MAX_FILES:
                raise OSError(errno.EFBIG, "it holds more files", str(root))
            yield folder, name


def _raise(error: OSError) -> None:
    raise error


def opened(path: Path, identity: str) -> RowStore | None:
    """The rows in a file if they are those of `identity`, which their facts name, or None."""
    try:
        found = RowStore(path)
    except (OSError, ValueError):
        return None
    if found.facts.get("identity") == identity:
        return found
    found.close()
    return None

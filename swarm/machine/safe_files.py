"""Reads and writes files in folders that somebody else may have filled, such as a backup or the folder of a bug report.

    writing: a new file under a random name in the same folder ─▶ renamed over the old one; links are replaced, not followed
    reading: a regular file that is no link, up to a number of bytes that the caller names

`O_NOFOLLOW` protects only the last part of a path. The rest is checked by `check_no_links`, once, when a folder is
opened.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

PRIVATE, SHARED = 0o600, 0o644
"""Modes of new files: only for their owner, or readable by others as far as the umask allows."""
MAX_JSON_DEPTH = 64
"""Depth of nested objects and lists. Nothing that this software writes has more than ten levels."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A text in JSON, or the beginning of an unterminated one, matched in a single pass over any input."""
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEP.keys())
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.new")
_BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_LEFTOVER_S = 60.0
"""A temporary file of this age was left by a writer that was killed."""
_ANY_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSALS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, *_FULL}
)


def close_to_others() -> None:
    """Make all files that this process creates from now on private to their owner, whatever library creates them."""
    os.umask(0o077)


def keep_others_from_writing() -> None:
    """Keep others from writing files that this process creates from now on, however open its umask was."""
    os.umask(os.umask(0o077) | 0o022)


def replace_file(path: Path, content: bytes | str, mode: int = PRIVATE, *, is_durable: bool = False) -> None:
    """Replace the file at `path` by `content`, completely or not at all. A link there is replaced and not followed.

    `is_durable`: it also survives a power failure. Raises OSError, which names `path`.
    """
    try:
        _replace(path, content.encode() if isinstance(content, str) else content, mode, is_durable=is_durable)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from None


def _replace(path: Path, content: bytes, mode: int, *, is_durable: bool) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | _NEW, mode), "wb") as file:
        try:
            file.write(content)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if is_durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the renames in `folder` survive a power failure. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_file(path: Path, mode: int = PRIVATE) -> IO[bytes]:
    """Create a file and open it for writing. Raises FileExistsError where anything is there, a link included."""
    return os.fdopen(os.open(path, os.O_WRONLY | _NEW, mode), "wb")


def open_to_append(path: Path) -> IO[bytes]:
    """Open a regular file, created with mode 0600 if missing, for unbuffered appending.

    Raises OSError, also for a link and for anything that is no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(_regular(path, flags), "ab", buffering=0)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which stays there, and wait while another process holds it. Raises OSError."""
    with open_to_append(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_to_read(path: Path) -> IO[bytes]:
    """Open a regular file that is no link. Raises OSError."""
    return os.fdopen(_regular(path, _ANY_READ), "rb")


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file that is no link. Raises OSError, also for one of more than `max_bytes`."""
    with open_to_read(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        content = file.read(num_bytes) if num_bytes <= max_bytes else None
    if content is None:
        raise refusal(path, f"it must have at most {max_bytes} bytes, got more")
    return content


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file. Raises OSError as `read_file` does, and ValueError as `parse_json` does."""
    return parse_json(read_file(path, max_bytes))


def parse_json(content: bytes | str, max_values: int | None = None) -> Any:
    """Parse JSON of unknown origin.

    Raises ValueError for invalid JSON, for nesting deeper than MAX_JSON_DEPTH, and for more values than `max_values`: a
    value of three bytes, such as an empty list, takes a hundred times as much memory as its text.
    """
    data = content.encode() if isinstance(content, str) else content
    without_texts = _TEXT.sub(b"", data)
    if max_values is not None and without_texts.count(b",") >= max_values:
        raise ValueError(f"JSON must hold at most {max_values} values")
    brackets = without_texts.translate(None, _NO_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_JSON_DEPTH:
        raise ValueError(f"JSON must be nested at most {MAX_JSON_DEPTH} deep")
    return json.loads(data.decode())  # UTF-8 only: the encoding in which the brackets were counted


def parse_json_text(content: bytes, max_values: int | None = None) -> Any:
    """Parse JSON as `parse_json` does. Also raises ValueError for a text that UTF-8 cannot hold.

    An escape in JSON can be half of a surrogate pair, which no tokenizer and no hash accepts.
    """
    value = parse_json(content, max_values)
    if b"\\u" in content:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def is_bare_name(name: str) -> bool:
    """Return whether `name` is a plain file name: no path, and not hidden."""
    return bool(_BARE_NAME.fullmatch(name))


def check_no_links(folder: Path, inner: Collection[str] = ()) -> None:
    """Raise OSError where `folder` contains a link, a pipe or anything else that is neither a file nor a folder.

    `inner` names folders in it that are checked as well, at any depth. `folder` itself may be a link, since the user
    has named it. A missing folder is empty.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            kind = entry.stat(follow_symlinks=False).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise refusal(Path(entry.path), f"it must be a file or a folder, got {_kind_of(kind)}")
            if stat.S_ISDIR(kind) and (entry.name in inner or "*" in inner):
                check_no_links(Path(entry.path), "*")


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed writers of `replace_file` left in `folder`. Raises OSError."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > _LEFTOVER_S:
                    path.unlink()


def why_refused(error: OSError) -> str:
    """Rule, value and fix for a place that cannot be read or written; empty for any other error, which may be a bug."""
    if error.errno not in _REFUSALS or error.filename is None:
        return ""
    fix = "make room on its disk" if error.errno in _FULL else "name another place, or change its permissions"
    place = os.fsdecode(error.filename)
    return f"files and folders must be open to this command, got {place}: {error.strerror}; {fix}"


def refusal(path: Path, why: str) -> OSError:
    """Return an error about a file that is there but refused. `why` gives the rule and the value."""
    return PermissionError(errno.EPERM, why, str(path))


def _regular(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags, PRIVATE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refusal(path, "it must be a file, got a link") from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise refusal(path, "it must be a regular file, got a pipe or a socket") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise refusal(path, f"it must be a regular file, got {_kind_of(mode)}")


def _kind_of(mode: int) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return kinds.get(stat.S_IFMT(mode), "a device")

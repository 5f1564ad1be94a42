"""Files in folders that somebody else may have filled, such as a backup, or the folder that comes with a bug report.

    writing: a new file under a random name in the same folder ─▶ renamed over the old one; a link there is replaced, not followed
    reading: a regular file that is no link, up to a number of bytes that the caller names

`O_NOFOLLOW` is about the last part of a path only. What stands before it is for `check_no_links`, once, when a folder is opened.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Collection
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

PRIVATE, SHARED = 0o600, 0o644
"""Modes of new files: for their owner alone; for others to read, as far as the umask allows it."""
MAX_JSON_DEPTH = 64
"""Of objects and lists within each other. Nothing that this software writes has more than ten."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A text in JSON, or the beginning of one that does not end: in one pass over whatever it meets."""
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEP.keys())
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.new")
_BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_LEFTOVER_S = 60.0
"""A temporary file of this age belongs to a writer that was killed."""
_ANY_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def close_to_others() -> None:
    """Give the files that this process makes from now on to their owner alone, whatever library makes them."""
    os.umask(0o077)


def keep_others_from_writing() -> None:
    """Let nobody else write the files that this process makes from now on, however open its umask was."""
    os.umask(os.umask(0o077) | 0o022)


def replace_file(path: Path, content: bytes | str, mode: int = PRIVATE, *, is_durable: bool = False) -> None:
    """All of `content` or nothing at `path`, in place of what is there. A link there is replaced and not followed.

    `is_durable`: also when power fails in between. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | _NEW, mode), "wb") as file:
        try:
            file.write(content.encode() if isinstance(content, str) else content)
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
    """A file that was not there before, open for writing. Raises FileExistsError where anything is there, a link included."""
    return os.fdopen(os.open(path, os.O_WRONLY | _NEW, mode), "wb")


def open_to_append(path: Path) -> IO[bytes]:
    """A regular file, made with mode 0600 where there is none; what is written goes to its end at once.

    Raises OSError, also for a link and for what is no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(_regular(path, flags), "ab", buffering=0)


def open_to_read(path: Path) -> IO[bytes]:
    """A regular file that is no link. Raises OSError."""
    return os.fdopen(_regular(path, _ANY_READ), "rb")


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file that is no link. Raises OSError, also for one of more than `max_bytes`."""
    with open_to_read(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        content = file.read(num_bytes) if num_bytes <= max_bytes else None
    if content is None:
        raise refusal(path, f"it must have at most {max_bytes} bytes, got more")
    return content


def read_json(path: Path, max_bytes: int) -> Any:
    """What a file of JSON holds. Raises OSError as `read_file` does, and ValueError as `parse_json` does."""
    return parse_json(read_file(path, max_bytes))


def parse_json(content: bytes | str, max_values: int | None = None) -> Any:
    """What JSON of unknown origin holds.

    Raises ValueError where it is none, is nested deeper than MAX_JSON_DEPTH, or holds more values than `max_values`: one
    of three bytes, such as an empty list, takes a hundred times as much memory as its text.
    """
    data = content.encode() if isinstance(content, str) else content
    without_texts = _TEXT.sub(b"", data)
    if max_values is not None and without_texts.count(b",") >= max_values:
        raise ValueError(f"JSON must hold at most {max_values} values")
    brackets = without_texts.translate(None, _NO_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_JSON_DEPTH:
        raise ValueError(f"JSON must be nested at most {MAX_JSON_DEPTH} deep")
    return json.loads(data.decode())  # UTF-8 alone: what the brackets were counted in


def parse_json_text(content: bytes) -> Any:
    """As `parse_json`. Raises ValueError also where a text in it is none that UTF-8 can hold.

    JSON can write half of a surrogate pair as an escape. No tokenizer and no hash takes such a text.
    """
    value = parse_json(content)
    if b"\\u" in content:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def is_bare_name(name: str) -> bool:
    """Whether `name` is that of a file in a folder, and leads nowhere else: no path, and nothing hidden."""
    return bool(_BARE_NAME.fullmatch(name))


def check_no_links(folder: Path, inner: Collection[str] = ()) -> None:
    """Raise OSError where `folder` holds a link, a pipe or anything else that is neither a file nor a folder.

    `inner`: names of folders in it whose content is looked at, too, however deep. `folder` itself may be a link, as who
    names it knows it. One that is not there has nothing in it.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            kind = entry.stat(follow_symlinks=False).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise refusal(Path(entry.path), f"it must be a file or a folder, got {_word(kind)}")
            if stat.S_ISDIR(kind) and (entry.name in inner or "*" in inner):
                check_no_links(Path(entry.path), "*")


def remove_leftovers(folder: Path) -> None:
    """Remove what writers of `replace_file` left in `folder` that were killed. Raises OSError."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > _LEFTOVER_S:
                    path.unlink()


def refusal(path: Path, why: str) -> OSError:
    """An error about a file that is there and is not taken. `why` says the rule and the value."""
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
    raise refusal(path, f"it must be a regular file, got {_word(mode)}")


def _word(mode: int) -> str:
    words = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return words.get(stat.S_IFMT(mode), "a device")

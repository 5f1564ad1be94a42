"""Rows of earlier rounds, read from the end of metrics.jsonl in bounded memory and time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swarm.safe_files import open_to_read, parse_json

MAX_BYTES = 24 << 20
"""Some 15,000 rounds; parsing takes a second."""
_MAX_VALUES_PER_ROW = 10_000
"""A node writes some hundred."""


def last_rows(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[dict[str, Any]]:
    """Rows of the newest `max_bytes`, oldest first: of the older file `.1`, too, where the newer one leaves room.

    A line that is torn or damaged is left out. Raises OSError where a file that is there cannot be read.
    """
    parts: list[bytes] = []
    for file in (path, path.with_name(f"{path.name}.1")):
        content = _end_of(file, max_bytes - sum(map(len, parts)))
        parts.insert(0, content)
    for part in parts:
        for line in part.split(b"\n"):
            try:
                row = parse_json(line, _MAX_VALUES_PER_ROW) if line else None
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _end_of(path: Path, max_bytes: int) -> bytes:
    """Whole lines only; nothing of a file that is not there."""
    if max_bytes <= 0:
        return b""
    try:
        with open_to_read(path) as file:
            start = max(0, file.seek(0, 2) - max_bytes)
            file.seek(start)
            content = file.read(max_bytes)
    except FileNotFoundError:
        return b""
    content = content[: content.rfind(b"\n") + 1]
    return content[content.find(b"\n") + 1 :] if start else content

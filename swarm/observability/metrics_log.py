"""`metrics.jsonl`: one JSON object per line, appended while the node runs, readable at any time."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends rows; a line that an earlier process left torn is cut off at opening."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """One line, handed to the operating system at once: it survives the death of this process."""
        self._file.write(json.dumps(row, allow_nan=True) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """All complete rows; nothing where the file does not exist yet. A torn last line is left out."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for line in content.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            logger.warning("%s holds a damaged line", path)
            continue
        if isinstance(row, dict):
            yield row


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)

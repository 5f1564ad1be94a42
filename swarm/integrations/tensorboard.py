"""Curves for TensorBoard, written by tensorboardX: event files need neither TensorFlow nor torch."""

from pathlib import Path
from typing import Any

from swarm.integrations.sink import scalars

_FLUSH_S = 10


class TensorboardSink:
    """Event files in `folder`, a new one for each run; `folder` itself is shown as one run."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_S)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row.get("round", 0))

    def close(self) -> None:
        self._writer.close()

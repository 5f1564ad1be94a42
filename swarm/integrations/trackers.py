"""Sinks for TensorBoard and Weights & Biases. Each imports its package when it is made.

The run of Weights & Biases gets rows and shareable settings, and nothing else about the machine.
"""

import contextlib
import os
from pathlib import Path
from typing import Any, Literal

from swarm.integrations.sink import scalars

_FLUSH_S = 10


class TensorboardSink:
    """Curves for TensorBoard, by tensorboardX, which needs neither TensorFlow nor torch.

    Event files in `folder`, a new one for each run; `folder` itself is shown as one run."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_S)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row.get("round", 0))

    def close(self) -> None:
        self._writer.close()


def read_settings() -> None:
    """Have wandb read its settings, once for this process: of the environment and the user, and none of the current folder.

    Such a file names the address to which the key of the user goes. Whoever may write in the current folder could put it
    there at any time before the first row. For the start of a node: it changes the current folder for a moment.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read at import; else its makers get crash reports
    import wandb

    with contextlib.chdir(Path(__file__).parent):
        wandb.setup()


class WandbSink:
    def __init__(
        self, mode: Literal["offline", "online"], project: str, name: str, folder: Path, settings: dict[str, Any]
    ) -> None:
        """`folder`: its wandb/ holds the run. Online it needs the key of `wandb login`; without one it fails rather than asks.

        To be made after `read_settings`.
        """
        import wandb

        self._run = wandb.init(  # its service has another current folder
            project=project, name=name, dir=str(folder.resolve()), mode=mode, config=settings, force=mode == "online",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True,
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            ),
        )  # fmt: skip

    def write(self, row: dict[str, Any]) -> None:
        self._run.log(dict(scalars(row)), step=row.get("round", 0))

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its service has written all when it has ended, not before

"""Computes one cell: `python -m swarm.experiments.cell_process SPEC FOLDER`. It uses one thread."""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swarm.experiments.cells import Cell, CellStore, Result
from swarm.machine.safe_files import read_json

_MAX_SPEC_BYTES = 1 << 20
KINDS: Mapping[str, str] = {
    "sharing": "swarm.experiments.sharing.cell",
    "offpolicy": "swarm.experiments.offpolicy_cell",
    "heterogeneous": "swarm.experiments.heterogeneous.cell",
    "merging": "swarm.experiments.merging.merging_cell",
    "hostile_merging": "swarm.experiments.merging.hostile_run",
    "recovery": "swarm.experiments.recovery.recovery_cell",
    "attacks": "swarm.experiments.attacks.attacks_cell",
    "second_policy": "swarm.experiments.heterogeneous.second_policy",
}
"""Modules with a function `run(settings) -> Result`; imported only where wanted, as they need torch."""


def run_cell(cell: Cell) -> Result:
    """Compute it here and now."""
    run: Callable[[Mapping[str, Any]], Result] = importlib.import_module(KINDS[cell.kind]).run
    return run(cell.settings)


def main() -> None:
    import torch

    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    spec, folder = Path(sys.argv[1]), Path(sys.argv[2])
    cell = Cell(*read_json(spec, _MAX_SPEC_BYTES))
    CellStore(folder).write(cell, run_cell(cell))
    spec.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

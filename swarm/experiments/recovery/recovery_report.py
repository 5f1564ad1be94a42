"""The recovery experiment as a page, a picture and tables in a folder."""

from pathlib import Path

from swarm.experiments.recovery import clocks
from swarm.experiments.recovery.figures import Runs, curves, tables
from swarm.experiments.recovery.plan import NUM_STAGES, STEP_S
from swarm.experiments.report import Table, plot, write_report
from swarm.safe_files import SHARED, replace_file


def write_all(folder: Path, runs: Runs) -> tuple[Path, list[Table]]:
    """report.html, curves.png and table.md in `folder`. Returns the report and its tables."""
    found, picture = tables(runs), plot(curves(runs))
    replace_file(folder / "curves.png", picture, SHARED)
    text = "\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in found)
    replace_file(folder / "table.md", text + "\n", SHARED)
    report = folder / "report.html"
    write_report(report, "What losing a stage costs, by the way it is rebuilt", told(), found, picture)
    return report, found


def told() -> list[str]:
    """What was done, in sentences."""
    state_gb, weight_gb = clocks.STATE_BYTES / 1e9, clocks.WEIGHT_BYTES / 1e9
    return [
        f"A toy of {NUM_STAGES} stages with one layer each learns text that is made on the spot. The same trace of failures "
        "hits every way of recovery; a lost stage gets fresh moments and a learning rate a tenth higher, the others go on as "
        "they are. Embedding and head are held by the stages next to them too, so they are never lost.",
        "Plain CheckFree has no average for an edge stage: it becomes a copy of its one neighbour. CheckFree+ trains half of "
        "the micro-batches with the edge stages in swapped order, so that this copy has learned the place.",
        f"Hours are modelled, not measured: a step takes {STEP_S:g} s, a model of 500 million parameters is cut into the "
        f"stages, each of which saves {state_gb:.1f} GB for a checkpoint while training waits; a replacement takes "
        f"{clocks.REPLACE_S:g} s and {weight_gb:.2f} GB per neighbour that it reads. Nobody fails in a pause. Checkpoints and "
        "redundant computation lose no learning, so they have the curve of no failure on another clock.",
    ]

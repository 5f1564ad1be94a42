"""The merging experiment as a page, a picture and tables in a folder."""

from collections.abc import Sequence
from pathlib import Path

from swarm.experiments.cells import Result
from swarm.experiments.merging.arms import Part
from swarm.experiments.merging.figures import curves, part_tables, told
from swarm.experiments.report import Table, plot, write_report
from swarm.safe_files import SHARED, replace_file


def write_all(folder: Path, parts: Sequence[Part], results: Sequence[Result]) -> tuple[Path, list[Table]]:
    """report.html, table.md and, where anything was measured on the way, curves.png in `folder`. Returns the report and its
    tables.
    """
    tables = [table for part in parts for table in part_tables(results, part)]
    drawn = curves(results)
    picture = plot(drawn) if drawn else b""
    if picture:
        replace_file(folder / "curves.png", picture, SHARED)
    text = "\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables) + "\n"
    replace_file(folder / "table.md", text, SHARED)
    report = folder / "report.html"
    write_report(report, "What merging without an all-reduce gives", told(), tables, picture)
    return report, tables

"""What all experiments do with their cells: compute what is missing, report what there is, once per folder."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.errors import SwarmError
from swarm.experiments.cells import Cell, CellStore, Result, compute
from swarm.safe_files import SHARED, replace_file

if TYPE_CHECKING:
    from rich.console import Console

    from swarm.experiments.report import Curves, Table


def run_cells(
    folder: Path,
    cells: Sequence[Cell],
    write: Callable[[Sequence[Result]], "tuple[Path, list[Table]]"],
    figures: Callable[[Sequence[Result]], Mapping[str, Any]],
    *,
    workers: int,
    as_json: bool,
    report_only: bool = False,
    first: Sequence[Cell] = (),
) -> None:
    """`write`: the report of what there is. `first`: cells that the others need, one at a time. Raises SwarmError where a
    report finds nothing."""
    with contextlib.nullcontext(console()) if report_only else one_run(folder) as screen:
        store = CellStore(folder / "cells")
        if not report_only:
            compute(first, store, 1, screen.print)
            compute(cells, store, workers, screen.print)
        results = store.read_all(cells)
        if not results:
            raise SwarmError(f"a report needs finished cells, got none in {folder}; leave --report out")
        report, tables = write(results)
        screen.print(*(table.rich() for table in tables), f"report: {report}")
    finish(folder, figures(results), as_json)


def write_one(
    folder: Path, title: str, told: str, table: "Table", lines: "Sequence[Curves]"
) -> "tuple[Path, list[Table]]":
    """report.html and table.md of an experiment with one table."""
    from swarm.experiments.report import plot, write_report

    report = folder / "report.html"
    write_report(report, title, [told], [table], plot(lines))
    replace_file(folder / "table.md", table.markdown() + "\n", SHARED)
    return report, [table]


@contextlib.contextmanager
def one_run(folder: Path) -> "Iterator[Console]":
    """One run per folder; says how to go on when it is interrupted."""
    from swarm.testbed.testbed import exclusive

    screen = console()
    with exclusive(folder):
        try:
            yield screen
        except KeyboardInterrupt:
            screen.print(f"stopped; the same command goes on in {folder}")
            raise


def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def finish(folder: Path, figures: Mapping[str, Any], as_json: bool) -> None:
    from swarm.safe_files import SHARED, replace_file

    replace_file(folder / "figures.json", json.dumps(figures, indent=1) + "\n", SHARED)
    if as_json:
        print(json.dumps(figures))

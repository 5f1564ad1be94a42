"""`swarm report`: writes one HTML file about finished or running runs."""

from pathlib import Path

import typer

from swarm.observability.plain_text import counted


def report(
    folders: list[Path] = typer.Argument(
        None, metavar="[DIR]...", help="A node's folder, or a testbed's; several are set beside each other."
    ),
    out: Path = typer.Option(None, "--out", help="File to write.", show_default="report.html in the first DIR"),
) -> None:
    """Write a run's story, curves, peers, exchange, merges and configuration to one self-contained file.

    With several folders, or nodes of several swarms in one, also their figures
    beside each other and the settings in which they differ.

    Examples:
      swarm report runs/mine
      swarm report runs/before runs/after --out beside.html
    """
    from swarm.report.run_report import write_report

    folders = folders or [Path("runs/node")]
    path = out or folders[0] / ("report.html" if len(folders) == 1 else "beside.html")
    num_nodes = write_report(folders, path)
    print(f"wrote {path}: {counted(num_nodes, 'node')}" + (f" of {len(folders)} runs" if len(folders) > 1 else ""))

"""`swarm report`: writes one HTML file about a finished or running run."""

from pathlib import Path

import typer

from swarm.observability.plain_text import counted


def report(
    folder: Path = typer.Argument(Path("runs/node"), metavar="[DIR]", help="A node's folder, or a testbed's."),
    out: Path = typer.Option(None, "--out", help="File to write.", show_default="DIR/report.html"),
) -> None:
    """Write curves, peers, exchange, merges and configuration of a run to one self-contained file."""
    from swarm.report.run_report import write_report

    path = out or folder / "report.html"
    num_nodes = write_report(folder, path)
    print(f"wrote {path}: {counted(num_nodes, 'node')}")

"""Tables of experiments in a terminal: nothing is cut off, however narrow it is."""

import io

import pytest
from rich.console import Console

from swarm.report.tables import Table

TABLE = Table(
    "Arms",
    ["arm", "replicas' loss", "worst", "all merged at the end"],
    [["silo", "1.5238 ± 0.0180", "1.5848", "1.7161 ± 0.0382"], ["NoLoCo, default settings", "1.37 ± 0.04", "1.4", "2"]],
)


@pytest.mark.parametrize("width", [45, 60, 80, 200])
def test_every_number_is_there_at_any_width(width: int) -> None:
    output = io.StringIO()
    Console(file=output, width=width).print(TABLE.rich())
    told = output.getvalue()
    assert max(map(len, told.splitlines())) <= width
    assert all(cell in told for row in TABLE.rows for cell in row)
    assert "…" not in told and told.startswith("Arms")


def test_what_fits_is_one_table() -> None:
    assert [len(part.columns) for part in TABLE.parts(200)] == [4]
    assert [len(part.columns) for part in TABLE.parts(45)] == [2, 2, 2]

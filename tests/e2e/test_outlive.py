"""Telling cells of `outlive`: swarms that lose their bootstrap peer for ever, and nodes of which restart."""

from pathlib import Path

import pytest

from tests.e2e.outlive import Cell, Reach, Restart, run_cell

pytestmark = [pytest.mark.netns, pytest.mark.asyncio]
PAUSE_S = 3.0


@pytest.mark.parametrize(
    ("reach", "restart"),
    [("loopback", "one"), ("machine", "all"), ("public", "all"), ("one-public", "one"), ("light", "all")],
)
async def test_exchange_goes_on_without_the_bootstrap_peer(reach: Reach, restart: Restart, tmp_path: Path) -> None:
    outcome = await run_cell(Cell(reach, "ever", restart, 2), tmp_path, pause_s=PAUSE_S)
    assert outcome.seconds is not None, outcome


async def test_nodes_that_nobody_can_dial_say_so_when_their_relay_is_gone(tmp_path: Path) -> None:
    outcome = await run_cell(Cell("nat", "ever", "all", 2), tmp_path, exchange_timeout_s=30.0, pause_s=PAUSE_S)
    assert outcome.seconds is None
    assert any("network.initial_peers" in line for line in outcome.advice), outcome

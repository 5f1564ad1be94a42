"""Leaves out tests of pages in a browser where there is none, and says so."""

import pytest

from tests.chromium import find_chromium

_LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `browser` run where a Chromium is installed."""
    wanted = [item for item in items if item.get_closest_marker("browser")]
    if not wanted or find_chromium():
        return
    left_out = set(map(id, wanted))
    items[:] = [item for item in items if id(item) not in left_out]
    config.hook.pytest_deselected(items=wanted)
    config.stash[_LEFT_OUT] = len(wanted)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if number := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{number} tests of pages are left out: no Chromium is installed (apt-get install chromium)", yellow=True
        )

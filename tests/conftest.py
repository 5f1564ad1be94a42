"""Leaves out what this machine cannot run, and says so."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `netns` build networks of their own: only where root may do that."""
    wanted = [item for item in items if item.get_closest_marker("netns")]
    if not wanted:
        return
    from tests.e2e.namespaces import missing_capability

    reason = missing_capability()
    if reason is None:
        return
    left_out = set(map(id, wanted))
    items[:] = [item for item in items if id(item) not in left_out]
    config.hook.pytest_deselected(items=wanted)
    config.stash[_LEFT_OUT] = f"{len(wanted)} tests of nodes behind routers are left out: {reason}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if message := config.stash.get(_LEFT_OUT, ""):
        terminalreporter.write_line(message, yellow=True)


_LEFT_OUT = pytest.StashKey[str]()

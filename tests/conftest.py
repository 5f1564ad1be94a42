"""Marks tests that take long, and leaves out what this machine cannot run, and says so."""

import os
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import long

# How long an example takes depends on what else the machine does; pytest bounds the whole test.
settings.register_profile("swarm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", settings.get_profile("swarm"), max_examples=25)
settings.load_profile("swarm")

# Prepared data sets go here, in this process and in those that it starts, and not into the cache of whoever runs the tests.
os.environ["HF_ASSETS_CACHE"] = str(Path(tempfile.gettempdir()) / f"swarm-tests-{os.getuid()}")

# Shells start what runs in the background with SIGINT ignored, and so would all processes that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `netns` build networks of their own: only where root may do that. `extra`: only with that package."""
    listed = long.listed()
    for item in items:
        if long.name_of(item.nodeid) in listed and not item.get_closest_marker("essential"):
            item.add_marker("long")
    _leave_out_missing_extras(config, items)
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


def _leave_out_missing_extras(config: pytest.Config, items: list[pytest.Item]) -> None:
    needed = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("extra"))}
    missing = {package for package in set(needed.values()) if find_spec(package) is None}
    left_out = [item for item, package in needed.items() if package in missing]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_WITHOUT_EXTRAS] = (
            f"{len(left_out)} tests of extras are left out: {', '.join(sorted(missing))} missing"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for key in (_LEFT_OUT, _WITHOUT_EXTRAS):
        if message := config.stash.get(key, ""):
            terminalreporter.write_line(message, yellow=True)


_LEFT_OUT = pytest.StashKey[str]()
_WITHOUT_EXTRAS = pytest.StashKey[str]()

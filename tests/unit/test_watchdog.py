"""What makes no progress is told, with the place where it is, and ended only where somebody starts it again."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.node.watchdog import END_AFTER_S, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A watchdog that looks once a second, by its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ended: list[str] = []
        self.dog = Watchdog(self.clock, end=self.ended.append)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1
            self.dog.look()


@pytest.fixture
def held_thread() -> Iterator[tuple[Watched, threading.Thread]]:
    """One that marks the beginning of its round, and then gets no further."""
    watched, begun, release = Watched(), threading.Event(), threading.Event()

    def a_round_that_hangs() -> None:
        watched.dog.mark("compute thread", "round 13", 60)
        begun.set()
        release.wait()

    thread = threading.Thread(target=a_round_that_hangs)
    thread.start()
    assert begun.wait(30)
    yield watched, thread
    release.set()
    thread.join()


def test_a_part_that_hangs_is_told_once_with_its_stack(
    held_thread: tuple[Watched, threading.Thread], caplog: pytest.LogCaptureFixture
) -> None:
    watched, _ = held_thread
    watched.wait(60)
    assert watched.dog.stuck() == [] and not caplog.records
    watched.wait(90)
    assert watched.dog.stuck() == ["compute thread: round 13 for 2 min"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "compute thread: round 13 for 61 s" in record.getMessage()
    assert "in a_round_that_hangs" in record.getMessage(), "where it is"
    assert not watched.ended


def test_a_part_that_goes_on_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.dog.mark("network loop", "one turn", 30)
    watched.wait(31)
    watched.dog.mark("network loop", "one turn", 30)
    watched.wait(1)
    assert watched.dog.stuck() == []
    assert [record.getMessage() for record in caplog.records][-1] == "network loop goes on"


def test_the_process_is_ended_only_after_long_and_what_may_take_long_never_is() -> None:
    watched = Watched()
    watched.dog.mark("compute thread", "round 2", 60)
    watched.dog.mark("waiting", "for others", None)
    watched.wait(60 + int(END_AFTER_S))
    assert watched.ended == []
    watched.wait(1)
    assert watched.ended == ["compute thread: round 2 for 6 min"]


def test_time_in_which_the_whole_process_stood_still_is_nobodys_fault() -> None:
    watched = Watched()
    watched.wait(1)
    watched.dog.mark("compute thread", "round 2", 60)
    watched.clock.now += 8 * 3600  # a laptop that slept
    watched.wait(59)
    assert watched.dog.stuck() == [] and watched.ended == []
    watched.wait(5)
    assert watched.dog.stuck() == ["compute thread: round 2 for 64 s"]


HANGS = """
import sys, time
from pathlib import Path
from swarm.node import watchdog as watchdog
from swarm.node.crash_report import crash_reports
from swarm.machine.node_folder import NodeFolder
watchdog.END_AFTER_S = watchdog._FROZEN_AFTER_S = 0.3

def round_without_end():
    if sys.argv[2] == "python":
        while True:
            time.sleep(0.01)
    import ctypes
    ctypes.PyDLL(None).sleep(60)  # with the interpreter's lock held

with crash_reports(NodeFolder(Path(sys.argv[1]))) as crashes:
    with watchdog.Watchdog(time.monotonic, stacks=crashes.stacks, end=crashes.end_stuck, look_interval_s=0.05) as dog:
        dog.mark("compute thread", "round 7", 0.1)
        round_without_end()
"""


@pytest.mark.parametrize(("kind", "code"), [("python", 18), ("native", 1)])
def test_a_process_that_hangs_ends_and_leaves_the_stack_behind(tmp_path: Path, kind: str, code: int) -> None:
    command = [sys.executable, "-c", HANGS, str(tmp_path), kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, env=os.environ)
    assert ended.returncode == code, ended.stderr
    left = [*tmp_path.glob("crash-*.txt"), tmp_path / "logs" / "fatal.txt"]
    assert any("round_without_end" in path.read_text() for path in left)

"""A supervisor of real processes: what is started again, what is not, and who gets the signals."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarm.errors import NEEDS_A_PERSON, ConfigError, NetworkError, StuckError, SwarmError
from swarm.node.supervisor import BackOff, Supervisor

CHILD = """
import os, signal, sys, time
from pathlib import Path
starts = Path(sys.argv[1])
with starts.open("a") as file:
    file.write(" ".join(sys.argv[3:]) + "|")
number = starts.read_text().count("|") - 1
what = sys.argv[2].split(",")[number]
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (starts.with_suffix(".told").open("a").write("x"), sys.exit(0)))
    starts.with_suffix(".pid").write_text(str(os.getpid()))
    time.sleep(60)
os.kill(os.getpid(), signal.SIGKILL) if what == "killed" else sys.exit(int(what))
"""
QUICK = BackOff(first_s=0.01, longest_s=0.02, max_in_a_row=4)


def supervise(starts: Path, endings: str, back_off: BackOff = QUICK) -> tuple[int, list[str]]:
    said: list[str] = []
    command = [sys.executable, "-c", CHILD, str(starts), endings]
    code = Supervisor(command, back_off, random.Random(0), said.append).run(["--fresh"])
    return code, said


@pytest.mark.parametrize(
    ("endings", "code", "num_starts"),
    [
        ("0", 0, 1),
        ("130", 130, 1),
        ("1,18,killed,0", 0, 4),
        ("1,3,0", 3, 2),
        ("1,1,1,1,0", 1, 4),
        ("killed,killed,killed,killed", 137, 4),
    ],
)
def test_crashes_are_started_again_and_the_rest_ends(tmp_path: Path, endings: str, code: int, num_starts: int) -> None:
    ended, said = supervise(tmp_path / "starts", endings)
    starts = (tmp_path / "starts").read_text().split("|")[:-1]
    assert (ended, len(starts)) == (code, num_starts), said
    assert starts[0] == "--fresh" and not any(starts[1:]), "only the first start is a fresh one"
    assert len(said) == num_starts - (code in (0, 130))


def test_a_node_that_was_sound_for_long_counts_anew(tmp_path: Path) -> None:
    always_sound = BackOff(first_s=0.01, longest_s=0.02, max_in_a_row=2, sound_after_s=0.0)
    assert supervise(tmp_path / "starts", "1,1,1,1,0", always_sound)[0] == 0


def test_what_a_person_must_mend_is_what_the_same_start_would_meet_again() -> None:
    assert ConfigError.exit_code in NEEDS_A_PERSON
    restarted = {error.exit_code for error in (SwarmError, NetworkError, StuckError)}
    assert not restarted & NEEDS_A_PERSON
    assert not {0, 1, 130} & NEEDS_A_PERSON


SUPERVISOR = """
import random, sys
from swarm.node.supervisor import BackOff, Supervisor
pause_s = float(sys.argv[1])
print("up", flush=True)
say = lambda line: print(line, flush=True)
sys.exit(Supervisor(sys.argv[2:], BackOff(first_s=pause_s), random.Random(0), say).run())
"""


def started(tmp_path: Path, endings: str, pause_s: float) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-c",
        SUPERVISOR,
        str(pause_s),
        sys.executable,
        "-c",
        CHILD,
        str(tmp_path / "starts"),
        endings,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def child_of(tmp_path: Path) -> int:
    deadline = time.monotonic() + 30
    while not (tmp_path / "starts.pid").exists() or not (tmp_path / "starts.pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # nobody tells
    return int((tmp_path / "starts.pid").read_text())


@pytest.fixture
def supervisor(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    process = started(tmp_path, *request.param)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.mark.parametrize("supervisor", [("wait", 1.0)], indirect=True)
def test_a_signal_reaches_the_node_once_and_ends_both(tmp_path: Path, supervisor: "subprocess.Popen[str]") -> None:
    child = child_of(tmp_path)
    os.killpg(supervisor.pid, signal.SIGTERM)  # as a terminal does, to all of its group
    assert supervisor.wait(30) == 0
    assert (tmp_path / "starts.told").read_text() == "x"
    assert not psutil.pid_exists(child)


@pytest.mark.parametrize("supervisor", [("1,0", 600.0)], indirect=True)
def test_an_interrupt_during_the_pause_ends_it_at_once(tmp_path: Path, supervisor: "subprocess.Popen[str]") -> None:
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "up\n"
    assert "started again in" in supervisor.stdout.readline()
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(30) == 130


@pytest.mark.parametrize("supervisor", [("wait", 1.0)], indirect=True)
def test_a_node_does_not_outlive_a_supervisor_that_was_killed(
    tmp_path: Path, supervisor: "subprocess.Popen[str]"
) -> None:
    child = psutil.Process(child_of(tmp_path))
    supervisor.kill()
    child.wait(30)

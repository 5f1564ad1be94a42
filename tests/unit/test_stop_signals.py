"""A process ends within its deadline after a signal, whatever holds its interpreter. Real processes."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import asyncio, re, sys, threading
from swarm.machine.stop_signals import obey_stop_signals
kind, deadline_s = sys.argv[1], float(sys.argv[2])

def hold():
    print("stuck", flush=True)
    re.fullmatch(r"(?:[0-9][0-9]?,?)+", "1" * 60 + "!")  # for years, and with the interpreter's lock

async def main():
    stop = asyncio.Event()
    obey_stop_signals(stop.set, deadline_s)
    if kind == "obeys":
        print("ready", flush=True)
        await stop.wait()
        print("stopped", flush=True)
    elif kind == "executor":  # the loop ends in good order, and then waits for its threads
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, threading.Event().wait)
        print("ready", flush=True)
        await stop.wait()
    else:
        threading.Thread(target=hold, daemon=True).start()
        await asyncio.Event().wait()

asyncio.run(main())
"""
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    begun: list[subprocess.Popen[str]] = []

    def start(kind: str, deadline_s: float) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, kind, str(deadline_s)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        begun.append(process)
        assert process.stdout is not None and process.stdout.readline() in ("stuck\n", "ready\n")
        return process

    yield start
    for process in begun:
        process.kill()
        process.wait()


def helper_of(process: "subprocess.Popen[str]") -> psutil.Process:
    (helper,) = psutil.Process(process.pid).children()
    return helper


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_whose_interpreter_is_held_ends_after_the_deadline(begin: Begin, number: int) -> None:
    process = begin("stuck", 0.5)
    helper = helper_of(process)
    process.send_signal(number)
    assert process.wait(15) == -signal.SIGKILL
    assert "did not stop in time" in process.communicate()[1]
    helper.wait(10)


def test_a_second_signal_does_not_wait_for_the_deadline(begin: Begin) -> None:
    process = begin("stuck", 600.0)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)  # two signals that are pending at once would be one
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGKILL
    assert time.monotonic() - started < 20


def test_the_deadline_also_holds_while_the_loop_waits_for_its_threads(begin: Begin) -> None:
    process = begin("executor", 0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == -signal.SIGKILL


def test_a_process_that_obeys_ends_by_itself_and_its_helper_with_it(begin: Begin) -> None:
    process = begin("obeys", 600.0)
    helper = helper_of(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its group
    output, errors = process.communicate(timeout=15)
    assert (process.returncode, output, errors) == (0, "stopped\n", "")
    helper.wait(10)


def test_the_helper_ends_with_a_process_that_was_killed_and_holds_nothing_of_it(begin: Begin) -> None:
    process = begin("obeys", 600.0)
    helper = helper_of(process)
    assert helper.memory_info().rss < 24 << 20
    assert set(Path(f"/proc/{helper.pid}/environ").read_bytes().split(b"\0")) <= {b"", b"LC_CTYPE=C.UTF-8"}
    process.kill()
    process.wait()
    helper.wait(10)
    assert process.stdout is not None and select.select([process.stdout], [], [], 10)[0], "its output has ended"

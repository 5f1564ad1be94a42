"""`swarm logs`: the last messages of a node, and those that come, over rotations and restarts."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

import pytest

from swarm.observability.logging_setup import follow, last_records, newest_log
from tests.swarm_process import swarm

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def logger_to(path: Path, max_bytes: int = 0) -> logging.Logger:
    path.parent.mkdir(exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.Logger(f"swarm.{path.stem}", logging.DEBUG)
    logger.addHandler(handler)
    return logger


def swarm_logs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return swarm("logs", *arguments)


def test_the_last_messages_of_the_newest_run_are_shown_by_level(tmp_path: Path) -> None:
    logger_to(tmp_path / "logs" / "run-0009.log").info("of an earlier run")
    log = logger_to(tmp_path / "logs" / "run-0010.log")
    for number in range(5):
        log.info("message %d", number)
    log.warning("disk nearly full")
    assert [line.split(": ")[1] for line in swarm_logs(str(tmp_path), "-n", "2").stdout.splitlines()] == [
        "message 4", "disk nearly full"
    ]  # fmt: skip
    (told,) = swarm_logs(str(tmp_path), "--level", "warning", "--json").stdout.splitlines()
    record = json.loads(told)
    assert (record["level"], record["logger"], record["message"]) == ("WARNING", "swarm.run-0010", "disk nearly full")


def test_a_folder_without_logs_is_told(tmp_path: Path) -> None:
    told = swarm_logs(str(tmp_path))
    assert told.returncode == 9
    assert "must hold logs" in told.stderr and "start it with `swarm run` or name its folder" in told.stderr


def test_a_testbeds_folder_is_met_with_the_names_of_its_nodes(tmp_path: Path) -> None:
    for name in ("node-1", "node-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").touch()
    told = swarm_logs(str(tmp_path))
    assert told.returncode == 9
    assert f"got none in {tmp_path} but 2 nodes inside it: node-1, node-2; name one of these" in told.stderr


def test_a_traceback_belongs_to_its_message_and_cannot_move_the_cursor(tmp_path: Path) -> None:
    log = logger_to(tmp_path / "logs" / "run-0001.log")
    try:
        raise ValueError("of a peer: \x1b[2J\x07")
    except ValueError:
        log.exception("a step failed")
    log.info("next")
    (first, second), num_read = last_records(tmp_path / "logs" / "run-0001.log", 9)
    assert first.message.splitlines()[0] == "a step failed"
    assert first.message.splitlines()[-1] == r"ValueError: of a peer: \x1b[2J\x07"
    assert second.message == "next"
    assert num_read == (tmp_path / "logs" / "run-0001.log").stat().st_size
    assert last_records(tmp_path / "logs" / "run-0001.log", 9, "ERROR")[0] == [first]


def test_the_part_before_a_rotation_is_shown_too(tmp_path: Path) -> None:
    log = logger_to(tmp_path / "logs" / "run-0001.log", max_bytes=400)
    for number in range(12):
        log.info("message %d", number)
    records, _ = last_records(tmp_path / "logs" / "run-0001.log", 6)
    assert [record.message for record in records] == [f"message {number}" for number in range(6, 12)]


def test_following_loses_nothing_and_doubles_nothing_over_rotations_and_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run-0001.log"
    log = logger_to(path, max_bytes=2000)
    log.info("0")
    records, num_read = last_records(path, 1)
    coming = follow(tmp_path / "logs", newest_log(tmp_path / "logs"), num_read, 0.001)
    seen = [int(record.message) for record in records]
    for number in range(1, 200):  # a rotation about every 40 messages; each is read before the next one comes
        log.info("%d", number)
        seen.append(int(next(coming).message))
    again = logger_to(tmp_path / "logs" / "run-0002.log")
    again.info("200")
    seen.append(int(next(coming).message))
    assert all(later == earlier + 1 for earlier, later in pairwise(seen)), seen
    assert seen[-1] == 200


@pytest.fixture
def following(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-m", "swarm.cli.main", "logs", str(tmp_path), "--follow", "--json", "--level", "info"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_the_command_follows_a_node_that_starts_later(tmp_path: Path, following: "subprocess.Popen[str]") -> None:
    output: IO[str] | None = following.stdout
    assert output is not None
    log = logger_to(tmp_path / "logs" / "run-0001.log")
    log.debug("not asked for")
    log.info("first")
    assert json.loads(output.readline())["message"] == "first"
    logger_to(tmp_path / "logs" / "run-0002.log").error("after a restart")
    assert json.loads(output.readline())["message"] == "after a restart"

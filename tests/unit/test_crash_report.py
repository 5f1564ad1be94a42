"""What is kept of an unexpected end, and what is not."""

import errno
import json
import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm import __version__
from swarm.errors import ConfigError, UnexpectedError
from swarm.machine.node_folder import NodeFolder
from swarm.node.crash_report import CrashReports, crash_reports


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[CrashReports]:
    made = CrashReports(NodeFolder(tmp_path))
    yield made
    made.close()


def test_a_report_holds_what_is_needed_to_find_the_cause(tmp_path: Path, reports: CrashReports) -> None:
    (tmp_path / "config.toml").write_text('[swarm]\nname = "friends"\n[[tasks.sources]]\napi_key = "hunter2"\n')
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"round": n}) + "\n" for n in range(20)))
    for number in range(120):
        logging.getLogger("swarm.test").warning("event %d of \x1b[2J", number)
    try:
        raise ZeroDivisionError("of a peer: \x07")
    except ZeroDivisionError as error:
        path = reports.write("it broke", error)
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for part in (
        f"swarm {__version__}",
        "it broke",
        "ZeroDivisionError: of a peer: \\x07",
        "thread MainThread",
        "friends",
    ):
        assert part in text, part
    assert "event 119" in text and "event 20 " in text and "event 19 " not in text, "the last hundred"
    assert '{"round": 19}' in text and '{"round": 14}' not in text
    assert "hunter2" not in text
    assert not set(text) & {"\x1b", "\x07"}


def test_ten_reports_are_kept_and_the_newest_of_them(tmp_path: Path, reports: CrashReports) -> None:
    written = []
    for number in range(13):
        written.append(reports.write(f"crash {number}"))
        os.utime(written[-1], (number, number))  # one second apart
    kept = list(tmp_path.glob("crash-*.txt"))
    assert len(kept) == 10
    first_lines = {path.read_text().splitlines()[1].split(": ")[1] for path in kept}
    assert first_lines == {f"crash {number}" for number in range(3, 13)}


def test_an_unexpected_error_names_its_report_and_others_pass(tmp_path: Path) -> None:
    told = pytest.raises(UnexpectedError, match=r"unexpected KeyError: 'x'; details in .*crash-.*\.txt")
    with told as caught, crash_reports(NodeFolder(tmp_path)):
        raise KeyError("x")
    assert caught.value.exit_code == 1
    assert len(list(tmp_path.glob("crash-*.txt"))) == 1
    with pytest.raises(ConfigError), crash_reports(NodeFolder(tmp_path)):
        raise ConfigError("a person can mend this")
    assert len(list(tmp_path.glob("crash-*.txt"))) == 1


def test_a_place_that_cannot_be_written_is_a_mistake_and_no_bug(tmp_path: Path) -> None:
    told = pytest.raises(ConfigError, match=r"got .*metrics\.jsonl: Is a directory; name another place, or change its")
    (tmp_path / "metrics.jsonl").mkdir()
    with told, crash_reports(NodeFolder(tmp_path)):
        (tmp_path / "metrics.jsonl").open("ab")
    full = pytest.raises(ConfigError, match=r"got x: No space left on device; make room on its disk")
    with full, crash_reports(NodeFolder(tmp_path)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")
    assert not list(tmp_path.glob("crash-*.txt"))


def test_where_no_report_can_be_written_the_error_is_still_told(tmp_path: Path) -> None:
    told = pytest.raises(UnexpectedError, match="KeyError: 'x'; and no report of it was written")
    with told, crash_reports(NodeFolder(tmp_path)):
        (tmp_path / "logs" / "fatal.txt").unlink()
        (tmp_path / "logs").rmdir()
        tmp_path.rmdir()
        raise KeyError("x")


def test_no_part_of_a_report_is_left_where_the_disk_is_full(tmp_path: Path, reports: CrashReports) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError):
            reports.write("it broke")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("crash-*.txt"))


def test_a_fault_of_an_earlier_process_becomes_a_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "fatal.txt").write_text("Fatal Python error: Segmentation fault")
    CrashReports(NodeFolder(tmp_path)).close()
    (report,) = tmp_path.glob("crash-*.txt")
    assert "Segmentation fault" in report.read_text()
    assert report.name in caplog.text
    CrashReports(NodeFolder(tmp_path)).close()
    assert len(list(tmp_path.glob("crash-*.txt"))) == 1, "an empty one tells nothing"


def test_the_command_names_the_report_of_what_it_did_not_expect(tmp_path: Path) -> None:
    broken = "from swarm.node import node; del node.Node.run_until_signal; from swarm.cli.main import main; main()"
    command = [sys.executable, "-c", broken, "run", "--node.dir", "n", "--network.backend", "off"]
    ended = subprocess.run(
        [*command, "--sharing.swarm_groups", "0"], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert ended.returncode == 1, ended.stderr
    (report,) = (tmp_path / "n").glob("crash-*.txt")
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: unexpected AttributeError") and last.endswith(f"details in n/{report.name}")
    assert "process.py" in report.read_text()

"""A disk that takes nothing more, and bounds that keep it from coming to that. Limits of this process, no root needed."""

import asyncio
import contextlib
import json
import logging
import random
import resource
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.adapters.checkpoint import CheckpointWriter
from swarm.cli.swarm import bootstrap
from swarm.config import SharingSection, parse
from swarm.errors import CheckpointError, ConfigError
from swarm.machine import stop_signals
from swarm.machine.node_folder import NodeFolder
from swarm.network.memory.transport import NO_FAULTS, MemoryNetwork, MemoryTransport
from swarm.node import stage_process
from swarm.node.controls import NodeControls
from swarm.node.report import NodeReport
from swarm.node.stage_process import StageProcess
from swarm.node.training_loop import TrainingRun
from swarm.node.watchdog import Watchdog
from swarm.observability import metrics
from swarm.observability.logging_setup import logs_of_runs, set_up_logging
from swarm.observability.metrics import MetricsLog, last_rows, read_rows
from swarm.observability.status_file import NodeStatus, read_status
from swarm.pool import experience_pool
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity
from swarm.sharing.reputation import Reputation
from swarm.sharing.totals import SharingPause
from swarm.silo import silo_transport
from swarm.testbeds import testbed
from swarm.testbeds.testbed import NodeProcess
from tests.unit.experience_factory import NOW, Clock, group


@contextlib.contextmanager
def no_file_grows_beyond(num_bytes: int) -> Iterator[None]:
    """Writing past it raises OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_rows_that_the_disk_refuses_are_lost_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"round": 1})
    with no_file_grows_beyond(path.stat().st_size + 7):  # a part of the next row would fit
        log.write({"round": 2})
        log.write({"round": 3})
    log.write({"round": 4})
    assert log.num_lost == 2
    assert path.read_text() == '{"round": 1}\n{"round": 4}\n'


def test_a_log_line_that_the_disk_refuses_is_on_the_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # it closes those that it finds
    path = set_up_logging(tmp_path, "info")
    logging.info("first")
    with no_file_grows_beyond(path.stat().st_size):
        logging.info("refused")
    logging.info("last")
    for handler in root.handlers:
        handler.close()
    told = capsys.readouterr().err
    assert "refused" in told and "Traceback" not in told
    assert [line.rsplit(" ", 1)[-1] for line in path.read_text().splitlines()] == ["first", "last"]


def test_metrics_begin_anew_at_their_bound(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, max_bytes=1000)
    for number in range(500):
        log.write({"round": number})
    assert [row["round"] for row in read_rows(path)][-1] == 499
    assert max(p.stat().st_size for p in tmp_path.iterdir()) <= 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.1"]
    again = MetricsLog(path, max_bytes=1000)
    again.write({"round": 500})
    assert [row["round"] for row in read_rows(path)][-2:] == [499, 500]


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_where_no_new_metrics_file_can_be_begun_rows_go_on_into_the_old_one(
    error: type[OSError], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, max_bytes=100)

    def refuse(*of: object) -> None:
        raise error("refused")

    with monkeypatch.context() as failing:
        if error is PermissionError:
            failing.setattr(metrics, "open_to_append", refuse)
        else:
            failing.setattr(Path, "replace", refuse)
        for number in range(20):
            log.write({"round": number})
    assert log.num_lost == 0 and [row["round"] for row in read_rows(path)] == list(range(20))
    assert caplog.text.count("grows beyond its bound") == 1
    log.write({"round": 20})
    assert [row["round"] for row in last_rows(path)] == list(range(21))
    assert [row["round"] for row in read_rows(path)] == [20]


def test_logs_are_bounded_in_number(tmp_path: Path) -> None:
    for _ in range(20):
        path = set_up_logging(tmp_path, "info", max_bytes=100_000)
        logging.getLogger("swarm.test").info("a line")
    assert path.name == "run-0020.log"
    assert [log.name for log in logs_of_runs(tmp_path)] == [f"run-{number:04d}.log" for number in range(5, 21)]


def test_logs_of_all_runs_together_are_bounded_in_bytes(tmp_path: Path) -> None:
    for run in range(1, 7):
        path = set_up_logging(tmp_path, "info", max_bytes=2000)
        assert run == 1 or len(list(tmp_path.iterdir())) >= 2, "what the run before said last is kept"
        for number in range(10 * run**2):
            logging.getLogger("swarm.test").info("line %d", number)
            assert sum(log.stat().st_size for log in tmp_path.iterdir()) <= 4000
    assert sorted(log.name for log in tmp_path.iterdir()) == [path.name, f"{path.name}.1"]


def test_of_what_a_process_prints_over_many_starts_two_files_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testbed, "_MAX_TERMINAL_BYTES", 1000)
    for number in range(8):
        process = NodeProcess(tmp_path, [sys.executable, "-c", f"print('x' * 599, {number}); exit(1)"])
        process.wait(time.monotonic() + 20)
        assert process.cause_of_death() == f"{'x' * 599} {number}"
    kept = [(tmp_path / name).read_text().split("x" * 599)[1:] for name in ("terminal.log.1", "terminal.log")]
    assert kept == [[" 4\n", " 5\n"], [" 6\n", " 7\n"]]


def test_the_pool_is_bounded_in_bytes_and_the_oldest_groups_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience_pool, "_MAX_PAYLOAD_BYTES", 3000)
    pool = ExperiencePool(":memory:", SharingSection(), Clock())
    rng = random.Random(0)
    for number in range(20):
        texts = ["".join(rng.choices("abcdefgh", k=400)), "right"]
        pool.add(bytes([number]) * 32, NOW + 600, NOW, [group(*texts, index=number)])
    left = sorted(drawn.task.index for drawn in pool.draw(99, random.Random(0)))
    assert left[-1] == 19 and left == list(range(left[0], 20)) and 2 <= len(left) <= 8
    assert pool.dropped["too_large"] == 20 - len(left)


def test_a_full_disk_costs_groups_of_others_and_not_the_node(tmp_path: Path) -> None:
    pool = ExperiencePool(tmp_path / "pool.sqlite", SharingSection(), Clock())
    pool.add(b"a" * 32, NOW + 600, NOW, [group()])
    largest = max(path.stat().st_size for path in tmp_path.iterdir())
    with no_file_grows_beyond(largest):
        assert pool.draw(1, random.Random(0)) == []
        with pytest.raises(sqlite3.OperationalError):  # which the network loop counts, and tries again
            pool.add(b"b" * 32, NOW + 600, NOW, [group(index=1)])
    assert len(pool.draw(1, random.Random(0))) == 1


def test_a_full_disk_at_the_start_leaves_the_pool_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    pool = ExperiencePool(path, SharingSection(), Clock())
    pool.add(b"a" * 32, NOW + 600, NOW, [group()])
    pool.close()
    refused = pytest.raises(ConfigError, match=r"got .*pool\.sqlite: .*; free its disk, and check its permissions")
    with no_file_grows_beyond(1000), refused:
        ExperiencePool(path, SharingSection(), Clock())
    assert not path.with_name("pool.sqlite.damaged").exists()
    assert ExperiencePool(path, SharingSection(), Clock()).num_fresh() == 1


def test_a_pool_does_not_grow_beyond_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience_pool, "_MAX_FILE_BYTES", 100_000)
    pool = ExperiencePool(tmp_path / "pool.sqlite", SharingSection(), Clock())
    rng = random.Random(0)
    with pytest.raises(sqlite3.OperationalError):
        for number in range(400):
            texts = ["".join(rng.choices("abcdefgh", k=2000)), "right"]
            pool.add(number.to_bytes(32, "big"), NOW + 600, NOW, [group(*texts, index=number)])
    pool.close()
    assert (tmp_path / "pool.sqlite").stat().st_size <= 100_000


def test_reputation_on_a_full_disk_keeps_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "reputation.json"
    reputation = Reputation(3600.0, Clock(), path)
    reputation.save()
    for number in range(100):
        reputation.admitted(f"author {number}")
    with no_file_grows_beyond(100), pytest.raises(OSError):
        reputation.save()
    assert json.loads(path.read_text()) == {}


Running = tuple[Awaitable[None], Callable[[], None]]
"""A process as a coroutine, and what stops it."""


def running_bootstrap(folder: NodeFolder, transport: MemoryTransport, patch: pytest.MonkeyPatch) -> Running:
    stops: list[Callable[[], None]] = []
    patch.setattr(silo_transport, "node_transport", lambda *_, **__: transport)
    patch.setattr(stop_signals, "obey_stop_signals", stops.append)
    patch.setattr(bootstrap, "_STATUS_INTERVAL_S", 0.01)
    start = bootstrap.BootstrapStart.of(folder, {"network.gossip": "off"}, None, None)
    return bootstrap._serve(start, folder, Identity(b"n" * 32)), lambda: stops[0]()


def running_stage(folder: NodeFolder, transport: MemoryTransport, patch: pytest.MonkeyPatch) -> Running:
    patch.setattr(stage_process, "node_transport", lambda *_, **__: transport)
    patch.setattr(stage_process, "_STATUS_INTERVAL_S", 0.01)
    held = SimpleNamespace(parts=(), versions=(), num_copies=0)
    host = SimpleNamespace(carry_out=None, carry_out_relayed=None, max_payload_bytes=None, status=lambda: held)
    process = StageProcess(parse({"node": {"dir": str(folder.path)}}), folder, Identity(b"n" * 32), layers=None)
    return process._serve(host), process._stop.set  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [running_bootstrap, running_stage])
async def test_a_full_disk_ends_no_bootstrap_peer_and_no_stage(
    make: Callable[..., Running],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],  # keeps output in memory, which the limit spares
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = NodeFolder(tmp_path / "n")
    folder.create()
    transport = MemoryTransport(MemoryNetwork(random.Random(0), time.time, NO_FAULTS), Identity(b"n" * 32).peer_id)
    work, stop = make(folder, transport, monkeypatch)
    num_writes, write = 0, NodeStatus.write

    def counted(status: NodeStatus, path: Path) -> None:
        nonlocal num_writes
        num_writes += 1
        write(status, path)

    monkeypatch.setattr(NodeStatus, "write", counted)
    running = asyncio.ensure_future(work)

    async def until(is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_true():
                assert not running.done(), running
                await asyncio.sleep(0.01)

    def num_outages() -> int:
        return caplog.text.count("free disk space; the process goes on without it")

    await until(folder.status.exists)
    for outage in (1, 2):
        with no_file_grows_beyond(10):
            await until(lambda number=outage: num_outages() == number)
            await until(lambda before=num_writes: num_writes >= before + 3)
            assert num_outages() == outage and not running.done()
            if outage == 2:
                stop()
                await asyncio.wait_for(running, 20)
        written_at = read_status(folder.status).written_at
        if outage == 1:
            await until(lambda before=written_at: read_status(folder.status).written_at > before)
    assert num_outages() == 2 and read_status(folder.status).phase == "serving"


class RefusingLearner:
    """Rounds without a policy; every checkpoint meets a full disk."""

    merging = None
    round = 0

    def run_round(self) -> dict[str, Any]:
        self.round += 1
        row = {"kind": "round", "round": self.round, "policy_version": 0, "time/round_s": 0.0}
        return row | {
            "rollout/reward_mean": 0.0,
            "rollout/tokens_per_s": 0.0,
            "train/own_groups": 0,
            "train/swarm_groups": 0,
        }

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"filling": "x" * 1_000_000}

    def save(self, store: CheckpointWriter) -> None:
        store.save(self.round, *self.state())


def test_a_node_learns_on_where_checkpoints_are_refused_and_fails_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse(
        {
            "node": {"dir": str(tmp_path / "n"), "max_rounds": 3},
            "network": {"backend": "off"},
            "sharing": {"swarm_groups": 0, "publish": False},
            "checkpoint": {"interval_rounds": 1},
            "evaluation": {"tasks_per_source": 0},
            "observability": {"http": False},
        }
    )
    folder = NodeFolder(config.node.dir)
    folder.create()
    learner = RefusingLearner()
    watchdog = Watchdog(time.monotonic)
    report = NodeReport(config, folder, Identity(b"n" * 32), network=None, watchdog=watchdog)
    run = TrainingRun(
        config,
        folder,
        learner,  # type: ignore[arg-type]
        report=report,
        clock=time.time,
        watchdog=watchdog,
        controls=NodeControls(SharingPause()),
    )
    with no_file_grows_beyond(500_000), pytest.raises(CheckpointError, match="free disk space"):
        run.run()
    assert learner.round == 3, "the last checkpoint is the one that must not be missed in silence"
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [line.partition(":")[0] for line in told] == [f"round {number} was not saved" for number in (1, 2, 3, 3)]
    assert list(folder.checkpoints.iterdir()) == [], "and what was begun is cleaned up"

"""What a person and a monitor see: logs, metrics, status, health."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from swarm.config import ObservabilitySection
from swarm.errors import ConfigError, NodeNotRunningError
from swarm.observability.http_server import HttpServer
from swarm.observability.logging_setup import set_up_logging
from swarm.observability.metrics import RENAMED, Metrics, MetricsLog, last_rows, read_rows
from swarm.observability.repeat import repeat
from swarm.observability.status_file import NodeStatus, judge, read_status
from swarm.report.node_history import NodeHistory


@pytest.fixture(autouse=True)
def restore_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.handlers[:], root.level = handlers, level


def test_counters_add_up_and_gauges_replace() -> None:
    metrics = Metrics()
    metrics.count("exchange/rejected", reason="replay")
    metrics.count("exchange/rejected", 2, reason="replay")
    metrics.gauge("rollout/tokens_per_s", 5.0)
    metrics.gauge("rollout/tokens_per_s", 7.0)
    assert metrics.value("exchange/rejected", reason="replay") == 3
    assert metrics.value("rollout/tokens_per_s") == 7
    assert metrics.value("never/seen") is None
    assert b'swarm_exchange_rejected_total{reason="replay"} 3.0' in metrics.render()


async def test_a_step_that_failed_is_told_in_words_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[None] = []

    async def step() -> None:
        raise ConnectionError("no route") if len(counted) < 2 else KeyError("a bug")

    with pytest.raises(KeyError):
        await repeat(step, "read groups of peers", on_failure=lambda: counted.append(None))
    assert caplog.messages == ["cannot read groups of peers, and tries again: no route"], "and not every second"


def test_label_sets_are_bounded() -> None:
    metrics = Metrics()
    for number in range(200):
        metrics.count("exchange/rejected", reason=str(number))
    assert metrics.value("exchange/rejected", reason="other") == 200 - 64


def test_two_registries_do_not_meet_and_threads_lose_nothing() -> None:
    one, other = Metrics(), Metrics()
    threads = [threading.Thread(target=lambda: [one.count("node/ticks") for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.value("node/ticks") == 2000
    assert other.value("node/ticks") is None


def test_torn_last_line_is_cut_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path)
    first.write({"round": 1})
    first.close()
    with path.open("a") as torn:
        torn.write('{"round": 2, "rew')
    assert list(read_rows(path)) == [{"round": 1}]
    again = MetricsLog(path)
    again.write({"round": 2})
    again.close()
    assert list(read_rows(path)) == [{"round": 1}, {"round": 2}]
    assert list(read_rows(tmp_path / "missing")) == []


def test_a_renamed_metric_is_read_under_its_present_name_and_exported_under_both(tmp_path: Path) -> None:
    for old, new in RENAMED.items():
        path = tmp_path / "metrics.jsonl"
        path.write_text(json.dumps({"kind": "round", "round": 1, old: 3}) + "\n")
        history = NodeHistory(path)
        history.refresh()
        for row in (*read_rows(path), *last_rows(path), history.last_round):
            assert row == {"kind": "round", "round": 1, new: 3}
        metrics = Metrics()
        metrics.gauge(new, 3)
        assert metrics.value(new) == metrics.value(old) == 3


def test_status_is_read_back_and_knows_whether_its_process_lives(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = NodeStatus("12D3x", "brave-otter-3f", os.getpid(), 1.0, "learning", addresses=("/ip4/1.2.3.4",), round=3)
    status.write(path)
    assert read_status(path) == status
    assert read_status(path).is_alive
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    NodeStatus("12D3x", "brave-otter-3f", dead.pid, 1.0, "learning").write(path)
    assert not read_status(path).is_alive


def test_a_copy_of_a_folder_does_not_pass_for_the_running_node(tmp_path: Path) -> None:
    original, copy = tmp_path / "node", tmp_path / "copy"
    original.mkdir()
    NodeStatus("12D3x", "brave-otter-3f", os.getpid(), 1.0, "learning", round=3).write(original / "status.json")
    shutil.copytree(original, copy)
    told = read_status(copy / "status.json")
    assert not told.is_alive and "copy" in judge(told, time.time()).why
    original.rename(moved := tmp_path / "moved")
    assert read_status(moved / "status.json").is_alive, "its process goes on there"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"pid": 1}'])
def test_missing_or_damaged_status_is_told(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "status.json").write_text(content)
    with pytest.raises(NodeNotRunningError):
        read_status(tmp_path / "status.json")


def test_each_run_logs_to_a_file_of_its_own_and_no_message_forges_a_line(tmp_path: Path) -> None:
    first = set_up_logging(tmp_path, "info")
    logging.getLogger("swarm.test").info("from a peer: %s", "x\n05:00:00 INFO forged\x1b[2J [red]")
    logging.getLogger("swarm.test").debug("not shown")
    second = set_up_logging(tmp_path, "debug")
    logging.getLogger("swarm.test").debug("shown")
    assert (first.name, second.name) == ("run-0001.log", "run-0002.log")
    lines = first.read_text().splitlines()
    assert len(lines) == 1
    assert r"x\n05:00:00 INFO forged\x1b[2J [red]" in lines[0]
    assert "shown" in second.read_text()


async def test_metrics_and_health_are_served_until_stop() -> None:
    metrics = Metrics()
    metrics.gauge("network/peers", 3)
    server = HttpServer(ObservabilitySection(), metrics, lambda: {"round": 7})
    await server.start()
    address = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{address}/health")).json() == {"round": 7}
        assert "swarm_network_peers 3.0" in (await client.get(f"{address}/metrics")).text
        assert (await client.get(f"{address}/elsewhere")).status_code == 404
        for path in ("metrics", "health"):  # a name that a web page makes point here
            assert (await client.get(f"{address}/{path}", headers={"host": "evil.example"})).status_code == 421
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{address}/health")


async def test_taken_port_is_told_with_the_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = HttpServer(ObservabilitySection(http_port=taken.getsockname()[1]), Metrics(), dict)
        with pytest.raises(ConfigError, match=r"set observability\.http_port = 0"):
            await server.start()


async def test_switched_off_server_opens_nothing() -> None:
    server = HttpServer(ObservabilitySection(http=False), Metrics(), dict)
    await server.start()
    assert server.port == 0
    await server.stop()


def test_rows_with_odd_numbers_stay_one_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write({"loss": float("nan"), "text": "a\nb"})
    log.close()
    (row,) = read_rows(tmp_path / "m.jsonl")
    assert row["loss"] != row["loss"]
    assert json.dumps(row["text"]) == '"a\\nb"'

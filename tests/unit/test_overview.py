"""One page over several nodes: found by name, asked in bounds, dead ones shown as such; nothing to touch through it."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from swarm.config import Config, ObservabilitySection
from swarm.dashboard import overview as node_watch
from swarm.dashboard.node_page import TOKEN_HEADER, NodePage
from swarm.dashboard.overview import NodeWatch, Overview, Target, parse_target
from swarm.dashboard.static_files import read_token
from swarm.errors import ConfigError
from swarm.node.controls import NodeControls
from swarm.sharing.totals import SharingPause
from tests.unit.experience_factory import group
from tests.unit.fake_node import evaluation_row
from tests.unit.page_factory import round_row, served, status

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@contextlib.asynccontextmanager
async def odd_server(serve: Serve) -> AsyncIterator[Target]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Target("127.0.0.1", server.sockets[0].getsockname()[1])


def answering(content: bytes, kind: bytes = b"application/json") -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\nConnection: close\r\n\r\n" + content)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    return serve


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@contextlib.asynccontextmanager
async def one_node(folder: Path, name: str) -> AsyncIterator[tuple[NodePage, str]]:
    folder.mkdir(exist_ok=True)
    page = NodePage(Config(), folder, NodeControls(SharingPause()))
    async with served(page) as url:
        assert page._loading is not None
        await page._loading
        row = round_row(7, random.Random(0))
        page._take_row({"time_s": 0.0, **row})
        page.show_status(status(2, row, peer_name=name))
        yield page, url


@contextlib.asynccontextmanager
async def overview_of(*targets: Target | Path) -> AsyncIterator[tuple[Overview, str]]:
    overview = Overview(targets, ObservabilitySection())
    await overview.watch.resolve()
    await overview.watch.poll()
    await overview._server.start()
    try:
        yield overview, f"http://127.0.0.1:{overview.port}/"
    finally:
        await overview.stop()


@pytest.mark.parametrize("text", ["http://127.0.0.1:80", "http://node:8400/", "http://[::1]:9"])
def test_addresses_are_understood(text: str) -> None:
    assert parse_target(text).port in (80, 8400, 9)


@pytest.mark.parametrize(
    "text", ["https://a:1", "http://a", "http://a:99999", "http://a:1/x", "http://a:1/?q", "runs/node", "http://:1"]
)
def test_other_addresses_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        parse_target(text)


async def test_a_name_with_several_addresses_is_several_nodes_and_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"node": ["10.0.0.2", "10.0.0.3"], "six": ["::1"], "both": ["127.0.0.1", "::1"]}

    async def look_up(host: str, port: int, **_: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    async with httpx.AsyncClient(trust_env=False) as client:
        watch = NodeWatch([Target(name, 80) for name in ("node", "six", "both", "nobody")], client)
        await watch.resolve()
        addresses = [node.address for node in watch.nodes.values()]
        assert addresses == ["10.0.0.2:80", "10.0.0.3:80", "[::1]:80", "127.0.0.1:80"]
        answering_node = watch.nodes["10.0.0.2-80"]
        answering_node.seen_at, answering_node.error = 5.0, ""
        known["node"] = ["10.0.0.4"]
        await watch.resolve()
        assert {"10.0.0.2-80", "10.0.0.4-80"} <= set(watch.nodes)  # gone from the names but answering; new
        assert "10.0.0.3-80" not in watch.nodes
        known["node"] = [f"10.1.{number // 250}.{number % 250}" for number in range(2000)]
        await watch.resolve()
        assert len(watch.nodes) == node_watch.MAX_NODES


ODD_PARTS = (
    b'"curve": 5', b'"curve": {"start": "ab"}', b'"curve": {"start": [1]}', b'"curve": {"start": [-5], "reward": [1]}',
    b'"held_out": {"start": [1], "reward": [1], "time_s": [1, 2]}', b'"curve": {"start": [1e999], "reward": [1]}',
    b'"curve": {"start": [1], "reward": [1], "time_s": ["now"]}', b'"curve": {"start": [1], "reward": ["1"]}',
    b'"round": "1"', b'"held_out": {"start": [1]}', b'"exchange": [{}]',
    b'"exchange": [{"peer_id": "a", "groups_admitted": -1}]',
    b'"exchange": [' + b",".join([b'{"peer_id": "a"}'] * 65) + b"]", b'"reward": [1]',
    b'"tokens_per_s": true', b'"peers": {}', b'"started_at": "now"', b'"phase": null',
)  # fmt: skip
"""Of a node's summary: each would stop the page in the middle of drawing all nodes, or spoil their sums."""


async def test_dead_silent_and_odd_nodes_are_shown_as_such_and_cost_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch, "TIMEOUT_S", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        refusing = Target("127.0.0.1", taken.getsockname()[1])
        async with contextlib.AsyncExitStack() as stack:
            _, url = await stack.enter_async_context(one_node(tmp_path, "brave-otter"))
            odd = [
                await stack.enter_async_context(odd_server(serve))
                for serve in (
                    silent, answering(b"x" * 200_000), answering(b"[1]"), answering(b"{\xff"), answering(b"[" * 60_000),
                    answering(b'{"name": ["<b>"]}'),
                    *(answering(b'{"name": "x", ' + part + b"}") for part in ODD_PARTS),
                )
            ]  # fmt: skip
            targets = [parse_target(url), refusing, *odd]
            async with overview_of(*targets) as (overview, _):
                told = {node["address"]: node for node in overview.watch.listed()}
                alive = [node for node in told.values() if node["is_alive"]]
                assert [node["summary"]["name"] for node in alive] == ["brave-otter"]
                assert len(told) == len(targets)
                assert all(node["error"] for node in told.values() if not node["is_alive"])
                assert "no answer within" in told[f"127.0.0.1:{odd[0].port}"]["error"]


async def test_a_node_that_dies_keeps_its_last_numbers_and_says_since_when(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        _, url = await stack.enter_async_context(one_node(tmp_path, "brave-otter"))
        async with overview_of(parse_target(url)) as (overview, _):
            (node,) = overview.watch.nodes.values()
            seen_at = node.seen_at
            await stack.aclose()
            await overview.watch.poll()
            assert node.error and node.summary["round"] == 7 and node.seen_at == seen_at


async def test_folders_are_nodes_too_and_one_that_has_ended_is_shown_from_its_files(tmp_path: Path) -> None:
    rows = [evaluation_row(0, "start", 0.25), *(round_row(n, random.Random(0)) for n in range(1, 4))]
    rows.append(evaluation_row(3, "end", 0.75))
    for name, more in (
        ("node-2", {"contribution": {"advice": [f"line {n}" for n in range(5)]}}),
        ("node-10", {"peers": [{"peer_id": "12D", "groups_admitted": 5, "bodies_taken": 2}]}),
    ):
        folder = tmp_path / "testbed" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        told = status(0, rows[-2]) | {"pid": 2**22 + 1, "addresses": [], "written_at": 1000.0, "phase": "ended"} | more
        (folder / "status.json").write_text(json.dumps(told))
    async with contextlib.AsyncExitStack() as stack:
        _, url = await stack.enter_async_context(one_node(tmp_path / "testbed" / "node-3", "brave-otter"))
        port = parse_target(url).port
        told = status(1, rows[-2]) | {"pid": os.getpid(), "addresses": [], "http_port": port, "written_at": time.time()}
        (tmp_path / "testbed" / "node-3" / "status.json").write_text(json.dumps(told))
        overview, base = await stack.enter_async_context(overview_of(tmp_path / "testbed"))
        listed = {node["label"]: node for node in overview.watch.listed()}
        assert list(listed) == ["node-2", "node-3", "node-10"]
        assert listed["node-3"]["is_alive"] and listed["node-3"]["address"] == f"127.0.0.1:{port}"
        assert listed["node-2"]["summary"]["advice"] == ["line 0", "line 1", "line 2"]
        ended = listed["node-10"]
        assert not ended["is_alive"] and ended["address"] == "" and "it ended after round 3" in ended["error"]
        assert ended["summary"]["held_out"] == {"start": [0, 3], "time_s": [1000.0, 1003.0], "reward": [0.25, 0.75]}
        assert ended["summary"]["curve"]["time_s"] == pytest.approx([row["time_s"] for row in rows[1:-1]], abs=0.5)
        assert ended["summary"]["exchange"] == [{"peer_id": "12D", "groups_admitted": 5, "bodies_taken": 2}]
        assert len(ended["summary"]["curve"]["start"]) == 3 and ended["summary"]["verdict"] == "not running"
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        there = f"{base}node/{ended['key']}/"
        state = (await client.get(f"{there}api/state")).json()
        assert state["is_ended"] and state["status"]["verdict"] == "not running"
        assert state["series"]["start"] == [1, 2, 3] and state["evaluations"]["mean"] == [0.25, 0.75]
        assert not state["status"].keys() & {"pid", "failure"} and state["peers"][0]["peer_id"] == "12D"
        for what in ("rollouts", "config", "events", "summary"):
            assert (await client.get(f"{there}api/{what}")).status_code == 404
        assert (await client.get(f"{there}api/series?x=round&from=2&to=9")).json()["start"] == [1, 2, 3]
        running = f"{base}node/{listed['node-3']['key']}/api/series"
        assert (await client.get(f"{running}?x=round&from=2&to=9")).json()["start"] == [7]
        for address in (f"{there}api/series", f"{running}?x=round&from=b&to=1"):
            assert (await client.get(address)).status_code == 400
        assert "settings" in (await client.get(f"{base}node/{listed['node-3']['key']}/api/config")).json()
        for number in (2, 10):
            (tmp_path / "testbed" / f"node-{number}" / "logs").mkdir()
            line = "2026-11-25 03:55:47,123 INFO    swarm.x: <b>ended</b> at 10.0.0.2\n"
            (tmp_path / "testbed" / f"node-{number}" / "logs" / "run-0001.log").write_text(line)
        assert (await client.get(f"{there}api/logs")).status_code == 401  # nothing says that it is of no silo
        for number, settings in ((2, '[swarm]\nsilo_owner = "x"\n'), (10, '[swarm]\nname = "x"\n')):
            (tmp_path / "testbed" / f"node-{number}" / "config.toml").write_text(settings)
        (one,) = (await client.get(f"{there}api/logs?level=info&find=%3Cb")).json()["records"]
        assert one["message"] == "<b>ended</b> at …"
        assert (await client.get(f"{base}node/{listed['node-2']['key']}/api/logs")).status_code == 401
        (tmp_path / "testbed" / "node-10" / "status.json").write_text("{}")
        overview._ended._readings._tasks.clear()
        assert (await client.get(f"{there}api/state")).status_code == 503
        kept = overview.watch.nodes[ended["key"]]
        await overview.watch.resolve()
        assert overview.watch.nodes[ended["key"]] is kept  # its files are read once


async def test_a_folder_whose_page_is_elsewhere_is_told_and_never_asked(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    told = status(0, {}) | {"pid": os.getpid(), "addresses": [], "http_port": 80, "written_at": time.time()}
    (folder / "status.json").write_text(json.dumps(told))
    (folder / "config.toml").write_text('[observability]\nhttp_host = "198.51.100.7"\n')
    async with overview_of(folder) as (overview, _):
        (node,) = overview.watch.listed()
        assert node["address"] == "" and "must be an address of this machine" in node["error"]


async def test_a_search_is_passed_on_to_the_node(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        page, url = await stack.enter_async_context(one_node(tmp_path, "brave-otter"))
        page.rollouts.own([group("a needle", "hay"), group("hay", "straw")])
        _, base = await stack.enter_async_context(overview_of(parse_target(url)))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        (node,) = (await client.get(f"{base}api/nodes")).json()["nodes"]
        there = f"{base}node/{node['key']}/api"
        for find, found in (("NEEDLE", 1), ("hay", 2), ("a&kind=refused", 0)):
            told = (await client.get(f"{there}/rollouts", params={"find": find, "kind": "own"})).json()
            assert told["found"] == found
        assert len((await client.get(f"{there}/config")).json()["settings"]) > 100


async def test_a_nodes_page_is_reached_through_the_overview_and_nothing_can_be_changed_there(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        page, url = await stack.enter_async_context(one_node(tmp_path, "brave-otter"))
        page.rollouts.own([group()])
        _, base = await stack.enter_async_context(overview_of(parse_target(url)))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        (node,) = (await client.get(f"{base}api/nodes")).json()["nodes"]
        there = f"{base}node/{node['key']}/"
        assert 'data-mode="viewed"' in (await client.get(there)).text
        assert (await client.get(f"{there}static/node.js")).status_code == 200
        assert (await client.get(f"{there}api/state")).json()["status"]["peer_name"] == "brave-otter"
        assert len((await client.get(f"{there}api/rollouts")).json()["groups"]) == 1
        token = {TOKEN_HEADER: read_token(tmp_path)}
        assert (await client.post(f"{there}api/control/pause-training", headers=token)).status_code in (404, 405)
        for path in ("api/control", "api/..%2fmetrics", "metrics", "api/summary"):
            assert (await client.get(there + path)).status_code == 404
        assert (await client.get(f"{base}node/10.0.0.1-80/api/state")).status_code == 404  # only nodes that are watched
        async with client.stream("GET", f"{there}api/events") as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            page._take_row({"time_s": 0.0, **round_row(8, random.Random(0))})
            while not (await anext(lines)).startswith("event: round"):
                pass


async def test_what_a_node_answers_is_data_never_a_page_of_its_own(tmp_path: Path) -> None:
    summary = b'{"name": "x", "curve": {"start": [], "reward": []}}'
    async with contextlib.AsyncExitStack() as stack:
        odd = await stack.enter_async_context(odd_server(answering(summary, b"text/html")))
        _, base = await stack.enter_async_context(overview_of(odd))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        told = await client.get(f"{base}node/127.0.0.1-{odd.port}/api/state")
        assert told.headers["content-type"] == "application/json"
        assert told.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("value", [b"[]", b"1", b'{"a":0}', b"[[]]"])
async def test_an_answer_of_millions_of_small_values_is_refused_before_it_is_parsed(value: bytes) -> None:
    """Eight MiB of them would take 450 MiB, and four seconds in which the overview answers nobody."""
    many = b'{"name": "x", "some": [' + b",".join([value] * ((7 << 20) // (len(value) + 1))) + b"]}"
    few = b'{"name": "x", "some": [' + b",".join([value] * 1000) + b', "' + b"," * 200_000 + b'"]}'
    async with contextlib.AsyncExitStack() as stack:
        odd = await stack.enter_async_context(odd_server(answering(many)))
        plain = await stack.enter_async_context(odd_server(answering(few)))
        _, base = await stack.enter_async_context(overview_of(odd, plain))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        started = time.process_time()
        assert (await client.get(f"{base}node/127.0.0.1-{odd.port}/api/state")).status_code == 502
        assert (await client.get(f"{base}node/127.0.0.1-{plain.port}/api/state")).status_code == 200
        assert time.process_time() - started < 1.5


@pytest.mark.parametrize("kind", ["zstd", "gzip", "deflate", "br", "gzip, zstd"])
async def test_a_packed_answer_is_refused_before_it_is_unpacked(kind: str) -> None:
    """Sixty-four KiB of zstd unpack to gigabytes."""
    packed = zstandard.compress(bytes(256 << 20))
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: {kind}\r\nConnection: close\r\n\r\n"
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(head.encode() + packed)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    tracemalloc.start()
    try:
        async with odd_server(serve) as target, overview_of(target) as (overview, url), httpx.AsyncClient() as client:
            (node,) = overview.watch.nodes.values()
            assert "must not be packed" in node.error
            assert (await client.get(f"{url}node/{node.key}/api/state")).status_code == 502
            assert (await client.get(f"{url}node/{node.key}/api/events")).content == b""
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20
    assert asked and all(b"accept-encoding: identity\r\n" in one.lower() for one in asked)


async def test_an_answer_nested_without_end_is_no_node() -> None:
    for text in (b"[" * 60_000, b"[" * 900 + b"]" * 900):
        async with odd_server(answering(text)) as target, overview_of(target) as (overview, _):
            (node,) = overview.watch.nodes.values()
            assert "nested at most" in node.error


def test_the_command_serves_a_page_over_the_nodes_of_a_folder_until_it_is_told_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "node-1"
    folder.mkdir()
    told = status(0, round_row(1, random.Random(0))) | {"pid": 2**22 + 1, "addresses": [], "phase": "ended"}
    (folder / "status.json").write_text(json.dumps(told))
    command = [sys.executable, "-m", "swarm.cli.main", "dashboard", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        address = re.fullmatch(r"all nodes on (http://127\.0\.0\.1:\d+/); Ctrl-C ends it\n", serving.stdout.readline())
        assert address is not None
        until = time.monotonic() + 30
        while not (nodes := httpx.get(f"{address[1]}api/nodes", trust_env=False).json()["nodes"]):
            assert time.monotonic() < until
        serving.terminate()
        assert serving.wait(30) == 0
    assert [(node["label"], node["is_alive"]) for node in nodes] == [("node-1", False)]

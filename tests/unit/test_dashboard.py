"""The parts of a node's page that need no browser: curves, history, events, token, who may ask, what is shown."""

import asyncio
import json
import math
import random
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from swarm.config import Config
from swarm.dashboard import recent_rollouts
from swarm.dashboard.feed import MAX_STREAMS, MAX_WAITING, EventPlaces, EventResponse, Feed
from swarm.dashboard.node_page import TOKEN_HEADER, NodePage
from swarm.dashboard.recent_rollouts import MAX_CHARS, MAX_GROUPS, PAGE_GROUPS, RecentRollouts
from swarm.dashboard.series import MAX_EVALUATIONS, MAX_MEMBERS, MAX_MERGES, Evaluations, MergeLog, Series
from swarm.dashboard.shown import MAX_LOG_BYTES, MAX_LOG_RECORDS, WORDS, read_logs, shown, without_places
from swarm.dashboard.static_files import is_token, make_token, read_token
from swarm.errors import NodeNotRunningError
from swarm.node.controls import ACTIONS, NodeControls
from swarm.observability.http_server import Guard
from swarm.observability.metrics import last_rows
from swarm.records.identity import peer_name
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.totals import SharingPause
from swarm.types import TaskRef, Turn
from tests.unit.experience_factory import Clock, body_and_header, group
from tests.unit.page_factory import merge_entries, round_row, served, status


def row(number: int, reward: float | None, **more: Any) -> dict[str, Any]:
    return {"kind": "round", "round": number, "rollout/reward_mean": reward, **more}


class TestSeries:
    def test_while_there_is_room_every_round_is_a_point(self) -> None:
        series = Series(max_buckets=4)
        for number in range(1, 5):
            series.add(row(number, number / 10))
        points = series.points()
        assert (points["width"], points["start"], points["reward"]["mean"]) == (1, [1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4])

    def test_beyond_it_buckets_double_and_keep_mean_least_and_greatest(self) -> None:
        series = Series(max_buckets=4)
        for number in range(10):
            series.add(row(number, float(number)))
        points = series.points()
        assert (points["width"], points["start"]) == (4, [0, 4, 8])
        assert points["reward"] == {"mean": [1.5, 5.5, 8.5], "min": [0, 4, 8], "max": [3, 7, 9]}

    def test_a_hundred_thousand_rounds_keep_their_bound_and_their_mean(self) -> None:
        rng, series, total = random.Random(0), Series(max_buckets=100), 0.0
        for number in range(100_000):
            value = rng.random()
            total += value
            series.add(row(number, value))
        points = series.points()
        assert 50 < len(points["start"]) <= 100
        sizes = [min(points["width"], 100_000 - start) for start in points["start"]]
        mean = sum(size * value for size, value in zip(sizes, points["reward"]["mean"], strict=True)) / 100_000
        assert mean == pytest.approx(total / 100_000, abs=1e-4)
        assert len(series.rewards(10)["start"]) <= 10

    def test_a_restart_from_a_checkpoint_undoes_the_rounds_after_it(self) -> None:
        series = Series(max_buckets=10)
        for number in (1, 2, 3, 4, 3):
            series.add(row(number, 0.1 * number + (0.5 if number == 3 else 0)))
        series.add(row(3, 0.9))
        assert series.points()["start"] == [1, 2, 3]
        assert series.points()["reward"]["mean"] == [0.1, 0.2, 0.9]

    @pytest.mark.parametrize("value", [None, math.nan, math.inf, "0.5", 1e301])
    def test_what_is_no_number_leaves_a_gap(self, value: Any) -> None:
        series = Series()
        series.add(row(1, value, **{"train/entropy": 1.0}))
        assert series.points()["reward"]["mean"] == [None]
        assert series.points()["entropy"]["mean"] == [1.0]
        for number in (-1, None, "7", 1.5):
            series.add({"kind": "round", "round": number})
        assert series.points()["start"] == [1]

    def test_the_last_point_is_what_a_page_needs_to_go_on(self) -> None:
        series = Series(max_buckets=4)
        for number in range(10):
            series.add(row(number, float(number)))
        assert series.last_point()["start"] == [8]
        assert series.last_point()["reward"]["max"] == [9]

    def test_each_point_says_when_its_last_round_ended(self) -> None:
        series = Series(max_buckets=4)
        for number in range(10):
            series.add(row(number, 0.5, time_s=100.0 + number))
        points = series.points()
        assert points["start"] == [0, 4, 8] and points["time_s"] == [103.0, 107.0, 109.0]
        series.add(row(10, 0.5, time_s="soon"))
        assert series.last_point()["time_s"] == [109.0]

    def test_rewards_by_source_and_signal_have_curves_of_their_own_in_bounds(self) -> None:
        series = Series(max_buckets=4)
        series.add(row(1, 0.5, **{"rollout/reward_by_source": {"sums": 0.25}, "reward/correct": 0.75}))
        series.add(row(2, 0.5, **{"rollout/reward_by_source": {"sums": 0.5, "lcm": 1.0}, "reward/correct": None}))
        points = series.points()
        assert points["sources"] == {"sums": [0.25, 0.5], "lcm": [None, 1.0]}
        assert points["signals"] == {"correct": [0.75, None]}
        for number in range(3, 300):
            series.add(row(number, 0.5, **{"rollout/reward_by_source": {f"s{number}": 0.5}, f"reward/r{number}": 0.5}))
        series.add(row(300, 0.5, **{"rollout/reward_by_source": [1]}))
        points = series.points()
        assert len(points["sources"]) == len(points["signals"]) == MAX_MEMBERS
        assert points["sources"]["sums"][0] == 0.375  # joined with the bucket beside it

    def test_a_part_of_a_long_run_has_more_detail_within_the_same_bound(self) -> None:
        series = Series(max_buckets=100)
        for number in range(1, 100_001):
            more = {"time_s": 1e9 + 2.0 * number, "train/loss": None if number % 2 else -1.0}
            series.add(row(number, number / 1e5, **more, **{"rollout/reward_by_source": {"sums": 0.5}}))
        assert series.points()["width"] == 1024
        part = series.part("round", 50_000, 50_079)
        assert part["width"] == 1 and part["start"] == list(range(49_999, 50_081))  # and one on either side
        assert part["reward"]["mean"][1] == 0.5 and part["time_s"][1] == 1e9 + 100_000
        assert part["loss"]["mean"][:3] == [None, -1.0, None] and part["sources"] == {"sums": [0.5] * 82}
        assert series.part("time", 1e9 + 100_000, 1e9 + 100_158) == part
        assert part["kl"] == {kind: [None] * 82 for kind in ("mean", "min", "max")}
        part = series.part("round", 2_000, 3_000)
        assert part["width"] == 16 and part["start"][0] == 1984 and len(part["start"]) <= 104
        first = part["start"].index(2000)
        assert [part["reward"][kind][first] for kind in ("min", "mean", "max")] == [0.02, 0.020075, 0.02015]
        for kind, first, last in (("round", 0, 1e12), ("time", 0, 1e12), ("round", 1e6, 2e6), ("time", 1, 2)):
            assert len(series.part(kind, first, last)["start"]) <= 104
        json.dumps(series.part("round", 99_990, 1e12), allow_nan=False)
        assert Series().part("time", 1, 2)["start"] == []

    def test_the_oldest_rounds_are_forgotten_one_by_one_and_a_restart_undoes_them_too(self) -> None:
        series = Series(max_buckets=8, max_rounds=64)
        for number in range(200):
            series.add(row(number, number / 200, time_s=float(number)))
        assert series.part("round", 10, 13)["width"] == series.points()["width"] == 32
        assert series.part("round", 10, 13)["start"] == [0, 32]
        assert series.part("round", 190, 195)["start"] == list(range(189, 197))
        series.add(row(192, 9e299, time_s=1.0))
        assert series.part("round", 190, 195)["start"] == [189, 190, 191, 192]
        assert 9e37 < series.part("round", 190, 195)["reward"]["mean"][-1] < 1e39


class TestEvaluations:
    def test_held_out_rewards_by_task_and_what_a_restart_undoes(self) -> None:
        held_out = Evaluations()
        for number, mean, by_source in ((0, 0.2, {"a": 0.1, "b": 0.3}), (10, 0.5, {"a": 0.5}), (20, 0.6, {"a": 0.6})):
            held_out.add({"round": number, "time_s": 60.0 + number, "accuracy_mean": mean, "accuracy": by_source})
        held_out.add({"round": 20, "accuracy_mean": 0.7, "accuracy": {"a": 0.7}})  # at the end, after the same round
        for odd in (math.nan, None, "1"):
            held_out.add({"round": 30, "accuracy_mean": odd, "accuracy": {}})
        sources = {"a": [0.1, 0.5, 0.7], "b": [0.3, None, None]}
        places = {"start": [0, 10, 20], "time_s": [60.0, 70.0, None]}  # the last one does not say when
        assert held_out.points() == {**places, "mean": [0.2, 0.5, 0.7], "sources": sources}
        held_out.undo(15)
        assert held_out.points()["start"] == [0, 10]

    def test_they_are_bounded_and_the_first_and_the_last_stay(self) -> None:
        held_out = Evaluations()
        for number in range(5000):
            held_out.add({"round": number, "accuracy_mean": 0.5, "accuracy": {f"s{number}": 0.5}})
        points = held_out.points()
        assert len(points["start"]) <= MAX_EVALUATIONS and (points["start"][0], points["start"][-1]) == (0, 4999)
        assert len(points["sources"]) == MAX_MEMBERS
        assert len(held_out.means(10)["start"]) <= 10 and held_out.means(10)["start"][-1] == 4999


class TestHistory:
    def test_the_newest_rows_are_read_within_the_bound_and_torn_ones_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        lines = [json.dumps({"round": number}) for number in range(100)]
        path.write_text("\n".join([*lines[:50], "{broken", "[1]", *lines[50:]]) + '\n{"round": 10')
        assert [one["round"] for one in last_rows(path)] == list(range(100))
        some = [one["round"] for one in last_rows(path, max_bytes=200)]
        assert some and some == list(range(100 - len(some), 100))

    def test_a_row_of_millions_of_small_values_is_left_out(self, tmp_path: Path) -> None:
        many = {"kind": "round", "round": 1, "more": [[]] * 500_000}
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in (row(0, 0.5), many, row(2, 0.5))))
        assert [one["round"] for one in last_rows(path)] == [0, 2]

    def test_the_older_file_fills_what_room_is_left(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        (tmp_path / "metrics.jsonl.1").write_text('{"round": 1}\n{"round": 2}\n')
        path.write_text('{"round": 3}\n')
        assert [one["round"] for one in last_rows(path)] == [1, 2, 3]
        assert [one["round"] for one in last_rows(path, max_bytes=13)] == [3]
        assert [one["round"] for one in last_rows(path, max_bytes=30)] == [2, 3]
        assert list(last_rows(tmp_path / "missing")) == []


def test_a_merge_is_told_once_and_the_log_is_bounded() -> None:
    log = MergeLog()
    assert log.add(row(1, 0.5), 1.0) is None
    for number in range(2, 200):
        told = log.add(row(number, 0.5, **merge_entries(number, f"peer {number // 2}", number // 2)), float(number))
        assert (told is not None) == (number % 2 == 0)
    newest = log.newest_first()
    assert len(newest) == MAX_MERGES
    assert (newest[0]["partner"], newest[0]["round"], newest[0]["share"]) == ("peer 99", 198, 0.5)


def test_shown_values_are_strict_json_and_their_text_hides_nothing() -> None:
    hostile = "\x1b[2J\u202eevil\u2066 \x00<b>"
    value = {"a": math.nan, "b": [math.inf, 1.5, True, None], hostile: hostile, "c": object(), "d": "x" * 9000}
    told = shown(value)
    json.dumps(told, allow_nan=False)
    (key,) = [name for name in told if "evil" in name]
    assert key == told[key] == "\\x1b[2J\\u202eevil\\u2066 \\x00<b>"
    assert told["a"] is None and told["b"] == [None, 1.5, True, None] and told["c"] == "object"
    assert len(told["d"]) < 4100
    deep: Any = "end"
    for _ in range(100):
        deep = [deep]
    assert len(json.dumps(shown(deep))) < 100


RECORDS = [
    (
        "INFO",
        "listening on /ip4/10.1.2.3/tcp/4001/p2p/12D3KooWMMMMv7sg9v4zVraj77Wvvww7wuDMKWET4fSLxDU9Wy9x",
        "listening on …",
    ),
    ("INFO", "the page on http://u:pw@10.0.0.2:80/x?a=1, it is open", "the page on …, it is open"),
    ("INFO", "node a in runs/mine/node-7 and /srv/al/node-7/x.json", "node a in … and …"),
    ("INFO", "[Errno 2] No such file: '/home/my user/x y.txt'", "[Errno 2] No such file: '…'"),
    ("INFO", "peer at 10.0.0.2:80, fe80::1ff:fe23:4567:890a and al@host.org", "peer at …, … and …"),
    ("INFO", "token=abc, then api_key: x and hf_abcdefghijklmnop1", "… then … and …"),
    ("INFO", "from ~/x/y, ./base, C:\\Users\\al", "from …, …, …"),
    ("INFO", "round 7: reward 0.19, 17 tokens/s at 03:55:47, Qwen/Qwen2.5-0.5B", None),
    ("WARNING", "node 12D3KooWMMMMv7sg9v4zVraj77Wvvww7wuDMKWET4fSLxDU9Wy9x of 5e1b509398ea (merging.enabled)", None),
]


def write_log(folder: Path, records: list[tuple[str, str]], run: int = 1) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lines = [
        f"2026-11-25 03:55:{n % 60:02},123 {level:<7} swarm.x: {text}\n" for n, (level, text) in enumerate(records)
    ]
    (folder / "logs" / f"run-{run:04}.log").write_text("".join(lines))


class TestLogs:
    def test_everybody_sees_lines_without_addresses_folders_and_secrets_and_the_token_shows_all(
        self, tmp_path: Path
    ) -> None:
        folder = tmp_path / "node-7"
        write_log(folder, [(level, text) for level, text, _ in RECORDS])
        told = read_logs(folder)
        assert not told["is_whole"]
        assert [one["message"] for one in told["records"]] == [seen or text for _, text, seen in RECORDS]
        whole = read_logs(folder, is_whole=True)
        assert [one["message"] for one in whole["records"]] == [text for _, text, _ in RECORDS]
        assert read_logs(folder, find="10.1.2.3")["records"] == []  # what is hidden cannot be guessed by a search
        assert len(read_logs(folder, find="10.1.2.3", is_whole=True)["records"]) == 1
        assert [one["level"] for one in read_logs(folder, "warning")["records"]] == ["WARNING"]

    def test_of_a_traceback_everybody_sees_the_last_line(self, tmp_path: Path) -> None:
        write_log(tmp_path, [("ERROR", "a step failed\n  Traceback:\n    secret()\n  ValueError: it is 7")])
        (one,) = read_logs(tmp_path)["records"]
        assert one["message"] == "a step failed\n  3 lines, the last one: ValueError: it is 7"
        (one,) = read_logs(tmp_path, is_whole=True)["records"]
        assert "secret()" in one["message"]

    def test_the_newest_lines_of_the_last_runs_are_read_within_bounds(self, tmp_path: Path) -> None:
        assert read_logs(tmp_path) == {"records": [], "is_whole": False}
        for run in range(1, 6):
            write_log(tmp_path, [("INFO", f"of run {run}")] * 20, run)
        seen = [one["message"] for one in read_logs(tmp_path)["records"]]
        assert seen == [f"of run {run}" for run in (3, 4, 5) for _ in range(20)]
        write_log(tmp_path, [("INFO", f"{number} " + "x" * 10_000) for number in range(1000)], 6)
        seen = [one["message"] for one in read_logs(tmp_path, find="xx")["records"]]
        assert seen[-1].startswith("999 ") and all(len(one) < MAX_CHARS + 40 for one in seen)
        assert len(seen) <= MAX_LOG_BYTES / 10_000
        write_log(tmp_path, [("INFO", str(number)) for number in range(2000)], 7)
        seen = [one["message"] for one in read_logs(tmp_path)["records"]]
        assert seen == [str(number) for number in range(2000 - MAX_LOG_RECORDS, 2000)]

    @pytest.mark.parametrize("text", ["a.", "a:", "::", "/", "'/", "1.", "a-1", "a/", "/node-", "token ", "@"])
    def test_no_text_of_a_stranger_takes_long(self, text: str) -> None:
        begin = time.process_time()
        without_places(text * 20_000, "node-7")
        assert time.process_time() - begin < 2.0

    async def test_a_silo_shows_logs_for_the_token_only_and_others_the_rest_of_them(
        self, tmp_path: Path, client: httpx.AsyncClient
    ) -> None:
        write_log(tmp_path, [("INFO", "at /ip4/10.1.2.3/tcp/4001")])
        page, _ = node_page(tmp_path)
        async with served(page) as url:
            (one,) = (await client.get(f"{url}api/logs?level=nonsense")).json()["records"]
            assert one["message"] == "at …"
            headers = {TOKEN_HEADER: read_token(tmp_path)}
            (one,) = (await client.get(f"{url}api/logs", headers=headers)).json()["records"]
            assert one["message"] == "at /ip4/10.1.2.3/tcp/4001"
            assert (await client.get(f"{url}api/logs?level=error&find=x")).json()["records"] == []
        page._is_private = True
        async with served(page) as url:
            assert (await client.get(f"{url}api/logs")).status_code == 401
            assert (await client.get(f"{url}api/logs", headers={TOKEN_HEADER: read_token(tmp_path)})).status_code == 200


class TestFeed:
    async def test_events_come_in_order_and_a_client_that_comes_back_misses_nothing(self) -> None:
        feed = Feed()
        feed.publish("round", {"n": 1})
        stream = feed.stream(None)
        assert await anext(stream) == b"retry: 2000\n\n"
        feed.publish("round", {"n": 2})
        line = await anext(stream)
        assert line.endswith(b'event: round\ndata: {"n": 2}\n\n')
        seen = line.split(b"\n")[0].removeprefix(b"id: ").decode()
        await stream.aclose()
        assert feed.num_clients == 0
        feed.publish("round", {"n": 3})
        again = feed.stream(seen)
        assert await anext(again) == b"retry: 2000\n\n"
        assert b'"n": 3' in await anext(again)
        await again.aclose()

    @pytest.mark.parametrize("last_id", ["dead-3", "3", "-1", "x" * 500, "run-\u0663", "a-9999999999999999999999"])
    async def test_who_comes_back_with_what_is_not_known_is_told_to_begin_anew(self, last_id: str) -> None:
        feed = Feed()
        feed.publish("round", {"n": 1})
        stream = feed.stream(last_id)
        assert b"event: reset" in await anext(stream)
        await stream.aclose()

    async def test_who_was_away_for_too_long_begins_anew_and_what_is_kept_is_bounded(self) -> None:
        feed = Feed()
        feed.publish("round", {"n": 0})
        first = feed.last_id
        for _ in range(300):
            feed.publish("peers", {"text": "x" * 20_000})
        assert sum(len(line) for _, line in feed._kept) <= 1 << 20
        stream = feed.stream(first)
        assert b"event: reset" in await anext(stream)
        await stream.aclose()

    async def test_a_client_that_does_not_take_its_events_is_dropped_and_others_are_not(self) -> None:
        feed = Feed()
        slow, quick = feed.stream(None), feed.stream(None)
        await anext(slow)
        await anext(quick)
        for number in range(MAX_WAITING + 5):
            feed.publish("round", {"n": number})
            assert f'"n": {number}'.encode() in await anext(quick)
        assert (feed.num_clients, feed.num_dropped) == (1, 1)
        assert [line async for line in slow] == []  # ended, with nothing left in memory
        await quick.aclose()

    async def test_a_closed_feed_ends_its_streams_and_begins_no_other(self) -> None:
        feed = Feed()
        streams = [feed.stream(None) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        feed.close()
        for stream in (*streams, feed.stream(None)):
            assert [line async for line in stream] == []

    async def test_silence_is_broken_by_heartbeats(self) -> None:
        stream = Feed(heartbeat_s=0.01).stream(None)
        await anext(stream)
        assert (await anext(stream)).startswith(b":")
        await stream.aclose()

    async def test_a_response_ends_when_nothing_is_taken_or_the_client_is_gone(self) -> None:
        async def never_sent(message: Any) -> None:
            await asyncio.Event().wait()

        async def stays() -> Any:
            await asyncio.Event().wait()

        feed = Feed()
        unread = EventResponse(feed.stream(None), EventPlaces(), send_timeout_s=0.01)
        started: list[Any] = []

        async def send(message: Any) -> None:
            started.append(message)
            if message["type"] == "http.response.body":
                await never_sent(message)

        await unread({"type": "http"}, stays, send)
        assert feed.num_clients == 0 and started[0]["status"] == 200

        async def leaves() -> Any:
            return {"type": "http.disconnect"}

        await EventResponse(feed.stream(None), EventPlaces())({"type": "http"}, leaves, send)
        assert feed.num_clients == 0


class TestToken:
    def test_it_is_kept_and_only_its_owner_can_read_it(self, tmp_path: Path) -> None:
        token = make_token(tmp_path)
        path = tmp_path / "page.token"
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(token) >= 43 and make_token(tmp_path) == token == read_token(tmp_path)
        assert is_token(token, token) and not is_token(token[:-1], token) and not is_token("é", token)

    def test_one_that_others_could_have_read_is_replaced(self, tmp_path: Path) -> None:
        token = make_token(tmp_path)
        (tmp_path / "page.token").chmod(0o644)
        assert make_token(tmp_path) != token
        assert (tmp_path / "page.token").stat().st_mode & 0o777 == 0o600

    def test_a_link_in_its_place_is_not_written_through(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_text("")
        (tmp_path / "page.token").symlink_to(victim)
        make_token(tmp_path)
        assert victim.read_text() == "" and not (tmp_path / "page.token").is_symlink()

    def test_a_folder_without_one_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(NodeNotRunningError, match=r"page\.token"):
            read_token(tmp_path)


def guarded(names: tuple[str, ...] = ()) -> httpx.AsyncClient:
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("ok")

    routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/", "/metrics", "/api/state")]
    app = Starlette(routes=routes, middleware=[Middleware(Guard, names=names)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000")


class TestGuard:
    @pytest.mark.parametrize(
        "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:80", "10.1.2.3", "page.example:7"]
    )
    async def test_addresses_localhost_and_configured_names_are_served(self, host: str) -> None:
        async with guarded(("Page.example",)) as client:
            assert (await client.get("/", headers={"host": host})).status_code == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1x", "1"]
    )
    async def test_any_other_name_is_refused_whatever_it_resolves_to(self, host: str) -> None:
        async with guarded() as client:
            for path in ("/", "/metrics", "/api/state"):
                assert (await client.get(path, headers={"host": host})).status_code == 421

    @pytest.mark.parametrize(
        ("headers", "status_code"),
        [
            ({}, 200),
            ({"origin": "http://127.0.0.1:8000"}, 200),
            ({"origin": "http://127.0.0.1:9000"}, 403),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-site"}, 403),
            ({"sec-fetch-site": "same-origin"}, 200),
        ],
    )
    async def test_other_sites_cannot_post(self, headers: dict[str, str], status_code: int) -> None:
        async with guarded() as client:
            assert (await client.post("/", headers=headers)).status_code == status_code
            assert (await client.get("/", headers=headers)).status_code == status_code

    @pytest.mark.parametrize(
        ("path", "site", "mode", "status_code"),
        [
            ("/", "cross-site", "no-cors", 403),
            ("/", "same-site", "cors", 403),
            ("/", "cross-site", "navigate", 200),
            ("/", "none", "navigate", 200),
            ("/api/state", "cross-site", "navigate", 403),
            ("/api/state", "cross-site", "no-cors", 403),
            ("/api/state", "same-origin", "cors", 200),
            ("/metrics", "cross-site", "no-cors", 403),
        ],
    )
    async def test_other_sites_may_link_to_a_page_and_ask_for_nothing(
        self, path: str, site: str, mode: str, status_code: int
    ) -> None:
        async with guarded() as client:
            told = await client.get(path, headers={"sec-fetch-site": site, "sec-fetch-mode": mode})
            assert told.status_code == status_code

    async def test_every_answer_forbids_foreign_scripts_frames_and_guesses(self) -> None:
        async with guarded() as client:
            for answer in (await client.get("/"), await client.get("/", headers={"host": "evil.example"})):
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
                assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert "access-control-allow-origin" not in answer.headers


def everything(recent: RecentRollouts) -> list[dict[str, Any]]:
    """The groups of all pages."""
    return [one for page in range(recent.page()["pages"]) for one in recent.page(page=page)["groups"]]


def texts_of(group: dict[str, Any]) -> list[str]:
    return [text for answer in group["answers"] for _, text in answer["parts"]]


class TestRecentRollouts:
    def test_each_kind_has_a_ring_of_its_own(self) -> None:
        recent = RecentRollouts(Clock())
        recent.own([group(index=1)])
        recent.admitted([group(index=2), group("wrong", "wrong", index=3)])
        _, header = body_and_header()
        for _ in range(1000):
            recent.refused(header, InvalidRecord(Rejection.UNAVAILABLE, "at nobody"), None)
        kinds = [one["kind"] for one in everything(recent)]
        assert (kinds.count("own"), kinds.count("admitted"), kinds.count("refused")) == (1, 1, MAX_GROUPS)
        assert recent.last_number == 1003

    def test_a_group_is_shown_with_prompt_answers_rewards_and_why_not(self) -> None:
        recent = RecentRollouts(Clock())
        recent.explain(lambda ref: f"prompt {ref.index}\x1b")
        recent.admitted([group("wrong", "wrong", index=3)])
        (one,) = everything(recent)
        assert (one["kind"], one["reason"], one["prompt"]) == ("refused", "no_signal", "prompt 3\\x1b")
        answer = {
            "parts": (("policy", "wrong"),),
            "reward": 0.0,
            "signals": {},
            "final": None,
            "tokens": 6,
            "is_cut": False,
        }
        assert one["answers"] == [answer] * 2

    def test_texts_answers_and_their_number_are_cut(self) -> None:
        recent = RecentRollouts(Clock())
        recent.own([group(*["a" * 50_000] * 100)])
        (one,) = everything(recent)
        assert len(one["answers"]) == 8 and one["num_answers"] == 100
        assert len(texts_of(one)[0]) < 1300

    def test_the_end_of_a_long_answer_is_kept_and_its_final_answer_found_in_all_of_it(self) -> None:
        recent = RecentRollouts(Clock())
        recent.explain(lambda ref: None, lambda source, text: text[20_000:20_005])
        recent.own([group("b" * 20_000 + "right" + "c" * 20_000 + "end", "wrong")])
        answers = everything(recent)[0]["answers"]
        assert [answer["final"] for answer in answers] == ["right", ""]
        assert answers[0]["parts"][0][1].startswith("bbb") and answers[0]["parts"][0][1].endswith("cend")

    def test_an_episode_is_shown_turn_by_turn_with_its_signals(self) -> None:
        recent = RecentRollouts(Clock())
        one = group("right", "wrong")
        turns = tuple(Turn(f"guess {n}", f"reply {n}", "tool" if n else "user", n, n + 1) for n in range(20))
        short, long = (
            replace(one.rollouts[0], turns=some, signals=(("correct", 1.0),), finished=False)
            for some in (turns[:2], turns)
        )
        recent.own([replace(one, rollouts=(short, long))])
        first, second = everything(recent)[0]["answers"]
        assert first["parts"] == (
            ("policy", "guess 0"), ("user", "reply 0"), ("policy", "guess 1"), ("tool", "reply 1"), ("policy", "right"),
        )  # fmt: skip
        assert (first["signals"], first["is_cut"]) == ({"correct": 1.0}, True)
        assert len(second["parts"]) == 13 and second["parts"][6] == ("left out", "29 turns")
        assert second["parts"][-1] == ("policy", "right")

    def test_texts_prompts_sources_and_names_are_searched_in_pages(self) -> None:
        recent = RecentRollouts(Clock())
        recent.explain(lambda ref: f"What is {ref.index}?")
        recent.own([group("Apple", "pear", index=number) for number in range(50)])
        recent.admitted([group("right", "wrong", index=77, author="12D3KooWsomebody")])
        first = recent.page()
        assert (len(first["groups"]), first["found"], first["pages"], first["unread"]) == (PAGE_GROUPS, 51, 3, 0)
        assert [len(recent.page(page=page)["groups"]) for page in (1, 2, 99)] == [20, 11, 11]
        for find, kind, found in (
            ("apple", "", 50), ("APPLE", "own", 50), ("apple", "admitted", 0), ("what is 77", "", 1), ("spelling", "", 51),
            ("12d3koowsome", "", 1), (peer_name("12D3KooWsomebody"), "", 1), ("nowhere", "", 0), ("", "refused", 0),
        ):  # fmt: skip
            assert recent.page(kind, find)["found"] == found, (find, kind)

    def test_a_search_builds_prompts_for_a_second_and_says_what_it_has_not_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 0.0

        def slow(ref: TaskRef) -> str:
            nonlocal now
            now += 0.3
            return f"prompt {ref.index}"

        monkeypatch.setattr(recent_rollouts.time, "monotonic", lambda: now)
        recent = RecentRollouts(Clock())
        recent.explain(slow)
        recent.own([group("a", "b", index=number) for number in range(10)])
        told = [recent.page(find="prompt") for _ in range(4)]
        assert [(one["found"], one["unread"]) for one in told] == [(4, 6), (8, 2), (10, 0), (10, 0)]

    def test_what_is_kept_is_bounded_in_characters(self) -> None:
        recent = RecentRollouts(Clock())
        for number in range(300):
            recent.own([group(*["\0" * 1200] * 8, index=number)])  # written out, they are four times as long
        kept = recent._rings["own"]
        assert 0 < sum(one.num_chars for one in kept) <= MAX_CHARS
        assert recent._chars["own"] == sum(one.num_chars for one in kept)

    def test_a_refused_body_is_opened_where_it_can_be_but_not_in_a_flood(self) -> None:
        clock = Clock()
        recent = RecentRollouts(clock)
        body, header = body_and_header(group("mine", "yours"))
        error = InvalidRecord(Rejection.REWARD_MISMATCH, "claims 1.0, is 0.0")
        recent.refused(header, error, body)
        recent.refused(header, error, body)
        clock.now += 2
        recent.refused(header, error, b"garbage")
        assert [texts_of(one) for one in everything(recent)] == [[], [], ["mine", "yours"]]
        assert everything(recent)[0]["detail"] == "claims 1.0, is 0.0"

    def test_threads_may_tell_and_read_at_once(self) -> None:
        recent = RecentRollouts()
        threads = [threading.Thread(target=lambda: [recent.own([group()]) for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            recent.page(find="wrong")
        assert recent.last_number == 800


def test_every_reason_has_its_plain_words() -> None:
    assert set(WORDS) == set(Rejection)
    assert len(set(WORDS.values())) == len(WORDS)


def node_page(folder: Path, **sections: Any) -> tuple[NodePage, NodeControls]:
    controls = NodeControls(SharingPause())
    return NodePage(Config.model_validate(sections), folder, controls), controls


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as one:
        yield one


class TestNodePage:
    async def test_controls_need_the_token_in_their_header(self, tmp_path: Path, client: httpx.AsyncClient) -> None:
        page, controls = node_page(tmp_path)
        async with served(page) as url:
            token = read_token(tmp_path)
            asked = f"{url}api/control/pause-training"
            for headers in ({}, {TOKEN_HEADER: ""}, {TOKEN_HEADER: token[:-1]}, {"authorization": token}):
                assert (await client.post(asked, headers=headers)).status_code == 401
            assert (await client.post(f"{asked}?token={token}")).status_code == 401
            assert (await client.get(asked, headers={TOKEN_HEADER: token})).status_code == 405
            assert not controls.state()["training_paused"]
            told = await client.post(asked, headers={TOKEN_HEADER: token})
            assert told.json()["controls"]["training_paused"] and controls.state()["training_paused"]
            foreign = {TOKEN_HEADER: token, "origin": "http://evil.example"}
            assert (await client.post(f"{url}api/control/resume-training", headers=foreign)).status_code == 403
            assert (await client.post(f"{url}api/control/shutdown", headers={TOKEN_HEADER: token})).status_code == 404
            assert controls.state()["training_paused"]

    async def test_state_holds_history_of_before_and_rows_that_came_while_it_was_read(
        self, tmp_path: Path, client: httpx.AsyncClient
    ) -> None:
        rng = random.Random(0)
        rows = [round_row(number, rng, **merge_entries(number, "12D3x", number // 100)) for number in range(1, 1001)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        page, _ = node_page(tmp_path)
        async with served(page) as url:
            page.show_row(round_row(1001, rng))
            assert page._loading is not None
            await page._loading
            told = status(3, rows[-1], phase="learning")
            page.show_status(told | {"last_round": {**rows[-1], "train/kl": math.nan}})
            state = (await client.get(f"{url}api/state")).json()
        assert state["series"]["width"] == 4 and state["series"]["start"][-1] == 1000
        assert len(state["series"]["start"]) <= 400
        assert [one["round"] for one in state["merges"]] == list(range(1000, 0, -100))
        assert [one["name"] for one in state["peers"]] == [one["name"] for one in told["peers"]]
        assert state["status"]["last_round"]["train/kl"] is None and "pid" not in state["status"]

    async def test_a_part_of_the_curves_is_told_for_a_range_that_can_be(
        self, tmp_path: Path, client: httpx.AsyncClient
    ) -> None:
        rows = [round_row(number, random.Random(0)) for number in range(1, 1001)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        page, _ = node_page(tmp_path)
        async with served(page) as url:
            assert page._loading is not None
            await page._loading
            part = (await client.get(f"{url}api/series?x=round&from=100&to=200")).json()
            assert part["width"] == 1 and part["start"] == list(range(99, 202))
            odd_ranges = (("1", ""), ("9", "9"), ("-1", "5"), ("nan", "2"), ("0", "inf"), ("0", "1e13"), ("0", "[]"))
            for first, last in odd_ranges:
                answer = await client.get(f"{url}api/series?x=time&from={first}&to={last}")
                assert answer.status_code == 400
            for odd in ("", "x=round&from=1", "x=a&from=1&to=2"):
                answer = await client.get(f"{url}api/series?{odd}")
                assert answer.status_code == 400 and "such as ?x=round&from=0&to=99" in answer.json()["error"]

    async def test_what_happens_is_streamed(self, tmp_path: Path, client: httpx.AsyncClient) -> None:
        page, _ = node_page(tmp_path)
        async with served(page) as url, client.stream("GET", f"{url}api/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            await anext(lines)
            page.show_row(round_row(1, random.Random(0)))
            page.show_status(status(2, {}))
            seen: set[str] = set()
            while not {"round", "status", "peers"} <= seen:
                line = await anext(lines)
                seen |= {line.removeprefix("event: ")} if line.startswith("event: ") else set()

    async def test_a_stop_ends_open_streams_at_once(self, tmp_path: Path, client: httpx.AsyncClient) -> None:
        page, _ = node_page(tmp_path)
        async with asyncio.timeout(5):
            async with served(page) as url, client.stream("GET", f"{url}api/events") as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                await page.stop()
                assert len([line async for line in lines if line.startswith("data")]) <= 1, (
                    "none of those after the stop"
                )

    @pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
    async def test_no_address_keeps_others_or_itself_from_events(self, source: str, tmp_path: Path) -> None:
        """Programs of one machine share an address: one that holds all streams must not keep the operator's page out."""
        page, _ = node_page(tmp_path)
        here = httpx.AsyncHTTPTransport(local_address=source, limits=httpx.Limits(max_connections=1))
        request = b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        async with asyncio.timeout(20), served(page) as url, httpx.AsyncClient(transport=here) as own:
            address = httpx.URL(url)
            held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
            for _ in range(MAX_STREAMS):
                reader, writer = await asyncio.open_connection(address.host, address.port, local_addr=("127.0.0.1", 0))
                writer.write(request)
                await reader.readuntil(b"retry: 2000\n\n")
                held.append((reader, writer))
            async with own.stream("GET", f"{url}api/events") as answer:
                assert answer.status_code == 200
                assert await anext(answer.aiter_lines()) == "retry: 2000"
                assert await held[0][0].readuntil(b"0\r\n\r\n"), "the oldest ends in order"
                assert page._feed.num_clients == MAX_STREAMS
            for _, writer in held:
                writer.close()

    async def test_a_client_that_stops_reading_is_dropped_and_the_node_goes_on(self, tmp_path: Path) -> None:
        page, _ = node_page(tmp_path)
        async with served(page) as url:
            address = httpx.URL(url)
            unread = socket.socket()
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.setblocking(False)
            await asyncio.get_running_loop().sock_connect(unread, (address.host, address.port))
            await asyncio.get_running_loop().sock_sendall(
                unread, b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            )
            while not page._feed.num_clients:
                await asyncio.sleep(0)
            while page._feed.num_clients:
                page._feed.publish("peers", {"text": "x" * 50_000})
                await asyncio.sleep(0)
            assert page._feed.num_dropped == 1
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            unread.close()

    async def test_without_a_token_there_is_a_page_and_no_control(
        self, tmp_path: Path, client: httpx.AsyncClient
    ) -> None:
        (tmp_path / "page.token").mkdir()  # as unwritable as a full disk
        page, controls = node_page(tmp_path)
        async with served(page) as url:
            assert (await client.get(f"{url}api/state")).status_code == 200
            for token in ("", "None"):
                asked = await client.post(f"{url}api/control/pause-training", headers={TOKEN_HEADER: token})
                assert asked.status_code == 401
        assert not controls.state()["training_paused"]

    async def test_only_files_of_the_package_are_served(self, tmp_path: Path, client: httpx.AsyncClient) -> None:
        page, _ = node_page(tmp_path)
        async with served(page) as url:
            assert "Recent rollouts" in (await client.get(url)).text
            assert (await client.get(f"{url}static/page.css")).headers["content-type"].startswith("text/css")
            for path in ("static/..%2fnode_page.py", "static/%2e%2e/page.token", "static/nothing", "page.token"):
                assert (await client.get(url + path)).status_code == 404

    async def test_however_many_ask_for_rollouts_one_thread_reads_them_and_each_prompt_is_built_once(
        self, tmp_path: Path
    ) -> None:
        page, _ = node_page(tmp_path)
        goes_on, built = threading.Event(), list[int]()

        def build(ref: TaskRef) -> str:
            assert goes_on.wait(20)
            built.append(ref.index)
            return "a prompt"

        page.rollouts.explain(build)
        page.rollouts.own([group(index=number) for number in range(3)])
        async with served(page) as url:
            host, port = urlsplit(url).hostname, urlsplit(url).port
            request = f"GET /api/rollouts HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
            lines = [await asyncio.open_connection(host, port) for _ in range(64)]
            for _, writer in lines:
                writer.write(request)
            async with asyncio.timeout(5):
                async with httpx.AsyncClient(trust_env=False) as client:
                    await client.get(f"{url}api/state")  # asked later: the others have been heard
                await asyncio.to_thread(goes_on.set)  # there is a thread left for the node
                for reader, writer in lines:
                    assert b"200 OK" in await reader.readline()
                    writer.close()
            assert sorted(built) == [0, 1, 2]
            page.rollouts.own([group(index=3)])
            async with httpx.AsyncClient(trust_env=False) as client:
                assert len((await client.get(f"{url}api/rollouts")).json()["groups"]) == 4
            assert sorted(built) == [0, 1, 2, 3]

    async def test_searches_wait_in_turn_and_more_than_a_few_are_refused(
        self, tmp_path: Path, client: httpx.AsyncClient
    ) -> None:
        page, _ = node_page(tmp_path)
        goes_on, running, most = threading.Event(), 0, 0

        def build(ref: TaskRef) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            assert goes_on.wait(20)
            running -= 1
            return "a prompt"

        page.rollouts.explain(build)
        page.rollouts.own([group()])
        async with served(page) as url:
            asked = [asyncio.create_task(client.get(f"{url}api/rollouts?find={number}")) for number in range(12)]
            done, _ = await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert done and all(one.result().status_code == 503 for one in done)
            goes_on.set()
            codes = sorted([(await one).status_code for one in asked])
            assert codes == [200] * 4 + [503] * 8 and most == 1
            found = (
                await client.get(f"{url}api/rollouts", params={"find": "A PROMPT", "page": "-1", "kind": "no"})
            ).json()
            assert (found["found"], found["page"]) == (1, 0)

    async def test_settings_are_told_with_their_origin_and_without_what_is_private(
        self, tmp_path: Path, client: httpx.AsyncClient
    ) -> None:
        secret = "/ip4/10.9.8.7/tcp/4001/p2p/12D3KooWSecret"
        config = Config.model_validate({"training": {"lr": 0.5}, "network": {"initial_peers": [secret]}})
        sources = {("training", "lr"): "/home/somebody/secret-folder/mine.toml", ("node", "dir"): "--node.dir"}
        page = NodePage(
            config, tmp_path, NodeControls(SharingPause()), origin=lambda place: sources.get(tuple(map(str, place)))
        )
        async with served(page) as url:
            answer = await client.get(f"{url}api/config")
        told = {one["key"]: one for one in answer.json()["settings"]}
        assert told["training.lr"] == {
            "key": "training.lr", "value": "0.5", "default": "0.001", "is_default": False, "origin": "mine.toml"
        }  # fmt: skip
        assert told["node.dir"]["origin"] == "--node.dir" and told["training.max_grad_norm"]["is_default"]
        assert not told["network.initial_peers"]["is_default"]
        assert "10.9.8.7" not in answer.text and "somebody" not in answer.text

    async def test_in_a_silo_rollouts_need_the_token(self, tmp_path: Path, client: httpx.AsyncClient) -> None:
        page, _ = node_page(tmp_path, swarm={"silo_owner": "1" * 44})
        page.rollouts.own([group()])
        async with served(page) as url:
            assert (await client.get(f"{url}api/rollouts")).status_code == 401
            assert (await client.get(f"{url}api/config")).status_code == 401
            told = await client.get(f"{url}api/rollouts", headers={TOKEN_HEADER: read_token(tmp_path)})
            assert len(told.json()["groups"]) == 1

    async def test_a_summary_is_small_however_long_the_run(self, tmp_path: Path, client: httpx.AsyncClient) -> None:
        page, _ = node_page(tmp_path)
        rng = random.Random(0)
        async with served(page) as url:
            assert page._loading is not None
            await page._loading
            for number in range(1, 3000):
                page._take_row(round_row(number, rng))
            page.show_status(status(200, round_row(2999, rng)))
            answer = await client.get(f"{url}api/summary")
            assert len(answer.content) < 8000
            assert answer.json()["round"] == 2999 and len(answer.json()["curve"]["start"]) <= 100


class TestControls:
    def test_a_paused_run_waits_without_looking_and_goes_on_when_asked(self) -> None:
        controls = NodeControls(SharingPause())
        controls.act("pause-training")
        passed = threading.Event()
        thread = threading.Thread(target=lambda: (controls.between_rounds(lambda on_saved: None), passed.set()))
        thread.start()
        assert not passed.wait(0.05)
        assert controls.phase("learning") == "training paused"
        controls.act("resume-training")
        assert passed.wait(10)
        assert controls.phase("learning") == "learning"
        thread.join()

    def test_a_checkpoint_is_saved_in_the_middle_of_a_pause_and_once(self) -> None:
        controls = NodeControls(SharingPause())
        controls.act("pause-training")
        saved: list[int] = []
        was_saved, passed = threading.Event(), threading.Event()

        def save(on_saved: Callable[[int], None]) -> None:
            saved.append(17)
            on_saved(17)
            was_saved.set()

        thread = threading.Thread(target=lambda: (controls.between_rounds(save), passed.set()))
        thread.start()
        controls.act("checkpoint")
        assert was_saved.wait(10) and not passed.is_set()
        controls.end()
        assert passed.wait(10)
        assert saved == [17] and controls.state()["saved_round"] == 17
        thread.join()

    def test_a_checkpoint_that_failed_leaves_the_last_one_named(self) -> None:
        controls = NodeControls(SharingPause())
        controls.act("checkpoint")
        controls.between_rounds(lambda on_saved: on_saved(4))
        controls.act("checkpoint")
        controls.between_rounds(lambda on_saved: None)
        assert controls.state()["saved_round"] == 4

    def test_after_the_end_nobody_waits(self) -> None:
        controls = NodeControls(SharingPause())
        controls.act("pause-training")
        controls.end()
        controls.between_rounds(lambda on_saved: None)

    def test_sharing_is_told_at_once_and_the_phase_says_what_is_paused(self) -> None:
        pause = SharingPause()
        controls = NodeControls(pause)
        for action in ("pause-sharing", "pause-training"):
            controls.act(action)
        assert pause.is_paused
        assert controls.phase("learning") == "paused" and controls.phase("evaluating") == "evaluating"
        controls.act("resume-training")
        assert controls.phase("learning") == "sharing paused"
        controls.act("resume-sharing")
        assert not pause.is_paused and pause.num_pauses == 1 and set(ACTIONS) >= {"checkpoint"}

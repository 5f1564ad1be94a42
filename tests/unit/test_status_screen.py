"""`swarm status`, `top` and `peers`: the verdict, one screen, and nothing of a stranger that moves the cursor."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.node.status import why_unwritten
from swarm.cli.node.top import Order, View
from swarm.config import parse
from swarm.machine.node_folder import NodeFolder
from swarm.node.report import NodeReport
from swarm.node.watchdog import Watchdog
from swarm.observability.plain_text import counted, for_how_long, size
from swarm.observability.status_file import NodeStatus, Word, judge, read_status
from swarm.records.identity import Identity
from tests import swarm_process
from tests.unit.fake_node import evaluation_row, round_row

NOW = time.time()
PEER = {
    "peer_id": "12D3KooWHuyjSeqdBGJ8bD2DEXiSyP8jJwtbgpQpXBr3UiD3nwMe", "name": "lively-badger-1c", "lineage": "ab" * 16,
    "weight": 0.86, "banned_until": 0.0, "groups_admitted": 48, "records_rejected": 2, "last_seen_at": NOW - 90,
    "reward_mean": 0.325, "policy_version": 24,
}  # fmt: skip
ROW: dict[str, Any] = {
    "rollout/reward_mean": 0.5, "rollout/tokens_per_s": 10.0, "time/round_s": 1.0, "network/peers": 2,
    "train/own_groups_total": 7, "train/swarm_groups_total": 9, "exchange/records_published": 3,
}  # fmt: skip


def status_of(now: float = NOW, **changes: Any) -> NodeStatus:
    fields: dict[str, Any] = {
        "peer_id": "12D3x", "peer_name": "brave-otter-3f", "pid": os.getpid(), "started_at": now, "phase": "learning",
        "round": 5, "last_round": ROW, "last_round_at": now - 2, "written_at": now - 1, "num_connected": 1, "peers": [PEER],
        "contribution": {"last_taken_at": now - 12, "last_taken_by": PEER["peer_id"], "bodies_taken": 4, "reward_rank": 2,
                         "reward_rank_of": 3, "advice": []},
    }  # fmt: skip
    return NodeStatus(**(fields | changes))


UNTAKEN = {"last_taken_at": None, "last_taken_by": None, "bodies_taken": 0, "advice": []}
LEFT = UNTAKEN | {"last_taken_at": NOW - 90, "last_taken_by": "x"}


@pytest.mark.parametrize(
    ("changes", "word", "told"),
    [
        ({}, Word.contributing, "lively-badger-1c fetched our rollouts 12 s ago"),
        ({"contribution": UNTAKEN}, Word.learning_alone, "no peer has fetched our rollouts yet"),
        ({"contribution": UNTAKEN, "num_connected": 0}, Word.learning_alone, "no peer is connected"),
        ({"num_connected": 0}, Word.contributing, "12 s ago"),  # connections come and go
        ({"num_connected": 0, "contribution": LEFT}, Word.learning_alone, "no peer is connected any more"),
        ({"contribution": UNTAKEN, "num_connected": None}, Word.learning_alone, "network is off"),
        ({"contribution": UNTAKEN, "last_round": ROW | {"exchange/records_published": 0}}, Word.learning_alone, "shared"),
        ({"contribution": UNTAKEN | {"last_taken_at": NOW - 3600}}, Word.learning_alone, "for 60 min"),
        ({"stuck": ["compute: no round for 300 s"]}, Word.stalled, "compute: no round for 300 s"),
        ({"last_round_at": NOW - 700}, Word.stalled, "no round has ended for 12 min"),
        ({"last_round_at": NOW - 700, "last_round": ROW | {"time/round_s": 60.0}}, Word.contributing, "12 s ago"),
        ({"phase": "starting", "last_round": {}}, Word.starting, "loading the policy"),
        ({"phase": "starting", "last_round": {}, "started_at": NOW, "written_at": NOW - 400}, Word.starting, "loading"),
        ({"phase": "evaluating", "last_round": {}}, Word.starting, "evaluating"),
        ({"phase": "ended"}, Word.not_running, "ended after round 5"),
        ({"phase": "failed", "failure": "lr must be > 0"}, Word.not_running, ": lr must be > 0"),
        ({"pid": 2**22 + 1}, Word.not_running, "was killed or crashed after round 5"),
        ({"phase": "ended", "command": "bootstrap"}, Word.not_running, "it ended, 1 s ago"),
        ({"phase": "serving"}, Word.serving, "for others"),
        ({"phase": "sharing paused"}, Word.paused, "sharing paused until somebody resumes"),
        ({"phase": "paused"}, Word.paused, "training and sharing wait"),
    ],
)  # fmt: skip
def test_the_verdict_names_what_a_person_wants_to_know_first(changes: dict[str, Any], word: Word, told: str) -> None:
    verdict = judge(status_of(**changes), NOW)
    assert verdict.word is word
    assert told in verdict.why


def test_a_resumed_node_names_the_round_of_its_checkpoint_until_a_round_ends(tmp_path: Path) -> None:
    config = parse({"node": {"dir": str(tmp_path)}, "network": {"backend": "off"}, "observability": {"http": False}})
    folder = NodeFolder(config.node.dir)
    report = NodeReport(config, folder, Identity(b"n" * 32), network=None, watchdog=Watchdog(time.monotonic))
    report.resume(507, 797)
    report.write_status()
    assert (resumed := read_status(folder.status)).round == 507
    assert resumed.policy_version == 797
    report.record(round_row(508, 0.5) | {"policy_version": 798, "train/own_groups": 1, "train/swarm_groups": 0})
    report.write_status()
    assert (learning := read_status(folder.status)).round == 508
    assert learning.policy_version == 798


def test_a_process_that_writes_no_more_is_stalled_and_one_with_a_reused_number_is_gone() -> None:
    now = time.time()
    assert judge(status_of(now, started_at=now, written_at=now - 40), now).word is Word.stalled
    long_gone = status_of(now, started_at=1000.0, written_at=now - 40)  # before this very process began
    assert judge(long_gone, now).word is Word.not_running
    assert long_gone.is_alive is False


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "2 h"), (86400, "24 h"), (200_000, "2 d"), (-3, "0 s")],
)  # fmt: skip
def test_durations_are_written_as_people_do(seconds: float, text: str) -> None:
    assert for_how_long(seconds) == text


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(count, "peer") for count in (0, 1, 2)] == ["0 peers", "1 peer", "2 peers"]


def test_sizes_are_written_as_people_do() -> None:
    assert [size(n) for n in (0, 999, 1500, 3 << 20, 5 << 30)] == ["0 B", "999 B", "1 KiB", "3 MiB", "5.0 GiB"]


def swarm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return swarm_process.swarm(*arguments, COLUMNS="80", LINES="24")


def test_the_fullest_status_fits_on_one_screen(tmp_path: Path) -> None:
    now = time.time()
    row = ROW | {
        "exchange/rejected": dict.fromkeys(("replay", "tokens", "stale", "banned", "rate"), 7), "merge/merges_total": 4,
        "merge/reasons": {"merged": 4, "nobody": 2}, "merge/partner": PEER["peer_id"], "merge/partner_share": 0.25,
    }  # fmt: skip
    advice = [
        "no peer for 5 min: `swarm doctor` tells whether the initial peers answer",
        "x " * 120,
        "disk nearly full",
        "4",
    ]
    full = status_of(
        now, last_round=row, addresses=(f"/ip4/192.168.1.100/tcp/28000/p2p/{PEER['peer_id']}",) * 3, http_port=9000,
        final_merge={"final/places": 4, "final/replicas": 3, "final/is_taken": 1},
        contribution=status_of(now).contribution | {"advice": advice}, written_at=now + 600,  # however slow this machine is
    )  # fmt: skip
    full.write(tmp_path / "status.json")
    (tmp_path / "crash-20260131-120000.txt").write_text("x")
    told = swarm("status", str(tmp_path))
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert re.fullmatch(r"contributing: lively-badger-1c fetched our rollouts \d+ s ago", lines[0])
    assert len(lines) <= 23 and max(map(len, lines)) <= 80, told.stdout
    for text in ("rank 2 of 3", "4 times by peers", "crash-2026", "others 14", "! disk nearly full", "free"):
        assert text in told.stdout, text
    assert "! 4" not in told.stdout
    facts = json.loads(swarm("status", str(tmp_path), "--json").stdout)
    assert (facts["verdict"], facts["running"], len(facts["addresses"])) == ("contributing", True, 3)
    assert facts["last_crash"].endswith("crash-20260131-120000.txt") and facts["disk_bytes"] > 100


def test_a_stalled_node_is_told_what_to_do_next(tmp_path: Path) -> None:
    status_of(time.time(), stuck=["compute: no round for 300 s"]).write(tmp_path / "status.json")
    told = swarm("status", str(tmp_path)).stdout
    assert told.startswith("stalled: compute: no round for 300 s\n! `swarm logs")
    assert why_unwritten(tmp_path) == ""
    assert "full, so what is shown may be old" in why_unwritten(Path("/proc")), "which has room for nothing"


def test_nothing_that_a_peer_chose_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    evil = "\x1b[2J\r\nall is well\x07"
    peer = PEER | {"name": evil, "lineage": evil, "peer_id": evil}
    row = ROW | {"merge/merges_total": 1, "merge/reasons": {evil: 1}, "merge/partner": evil, "merge/partner_share": 0.5,
                 "exchange/rejected": {evil: 3}}  # fmt: skip
    contribution = {"last_taken_at": time.time(), "last_taken_by": evil, "bodies_taken": 1, "advice": [evil]}
    status = status_of(
        time.time(), peers=[peer], last_round=row, contribution=contribution, addresses=(evil,), stuck=[evil]
    )
    status.write(tmp_path / "status.json")
    for command in ("status", "peers", "top"):
        told = swarm(command, str(tmp_path))
        assert told.returncode == 0, told.stderr
        assert not set(told.stdout) & {"\x1b", "\r", "\x07"}, command
        assert r"\x1b[2J" in told.stdout, "it is shown, as what it is"


def test_peers_are_listed_and_given_as_json(tmp_path: Path) -> None:
    now = time.time()
    banned = PEER | {"name": "liar", "banned_until": now + 300, "reward_mean": None, "policy_version": None}
    status_of(now, peers=[PEER | {"last_seen_at": now - 90}, banned]).write(tmp_path / "status.json")
    told = swarm("peers", str(tmp_path))
    header, first, second = told.stdout.splitlines()
    assert header.split()[:3] == ["name", "seen", "weight"] and len(header) <= 80
    assert first.split()[:8] == ["lively-badger-1c", "2", "min", "0.86", "48", "2", "0.325", "24"]
    assert "banned" in second
    assert json.loads(swarm("peers", str(tmp_path), "--json").stdout)[1]["name"] == "liar"
    status_of(now, peers=[]).write(tmp_path / "status.json")
    assert "no peer is known yet" in swarm("peers", str(tmp_path)).stdout
    assert swarm("peers", str(tmp_path / "none")).returncode == 9


def test_top_prints_all_nodes_of_a_testbed_once_where_nobody_watches(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        folder = tmp_path / f"node-{number}"
        folder.mkdir()
        fresh = {"written_at": time.time() + 600}  # however slow this machine is
        status_of(time.time(), round=number, **fresh).write(folder / "status.json")
    told = swarm("top", str(tmp_path))
    assert told.returncode == 0, told.stderr
    assert "3 nodes, 3 running" in told.stdout
    rows = [line.split() for line in told.stdout.splitlines() if line.startswith("node-")]
    assert [(row[0], row[1], row[2]) for row in rows] == [(f"node-{n}", "contributing", str(n)) for n in (1, 2, 10)]
    facts = [json.loads(line) for line in swarm("top", "--json", str(tmp_path)).stdout.splitlines()]
    assert [one["round"] for one in facts] == [1, 2, 10]
    assert swarm("top", str(tmp_path / "none")).returncode == 9
    some = swarm("top", str(tmp_path / "node-1"), str(tmp_path / "none"))
    assert "1 node, 1 running" in some.stdout
    assert "none: no node is there" in " ".join(some.stdout.split()), "lines are broken where the terminal ends"
    assert "none: no node is there" in swarm("top", "--json", str(tmp_path / "node-1"), str(tmp_path / "none")).stderr


@pytest.mark.parametrize("command", ["status", "peers"])
def test_the_folder_of_a_testbed_is_told_from_that_of_a_node(tmp_path: Path, command: str) -> None:
    for name in ("long-name", "b", "node-10", "node-2"):
        (tmp_path / name).mkdir()
        status_of(time.time()).write(tmp_path / name / "status.json")
    told = swarm(command, str(tmp_path))
    assert told.returncode == 9
    assert "4 nodes inside it: b, long-name, node-2, node-10;" in told.stderr
    assert f"`swarm top {tmp_path}`" in told.stderr


def node_with_rewards(folder: Path, rewards: list[Any], tokens_per_s: float = 10.0) -> None:
    folder.mkdir()
    row = ROW | {"rollout/reward_mean": rewards[-1], "rollout/tokens_per_s": tokens_per_s}
    status_of(time.time(), last_round=row).write(folder / "status.json")
    rows = [round_row(number, reward) for number, reward in enumerate(rewards, 1)]
    rows += [evaluation_row(len(rewards), "interval", 0.75)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_top_smooths_rewards_draws_their_trend_and_sorts_by_what_is_asked_for(tmp_path: Path) -> None:
    node_with_rewards(tmp_path / "node-1", [0.0] * 10 + [1.0, 0.0] * 5, 30.0)
    node_with_rewards(tmp_path / "node-2", [0.9] * 20, 10.0)
    node_with_rewards(tmp_path / "node-3", ["x", 1e400, [], -5, 0.25], 20.0)  # by somebody else
    status_of(time.time(), last_round={}).write(tmp_path / "node-2" / "status.json")

    def order(*options: str) -> list[str]:
        told = swarm("top", str(tmp_path), *options)
        assert told.returncode == 0, told.stderr
        assert all(len(line) <= 80 for line in told.stdout.splitlines())
        return [line.split()[0] for line in told.stdout.splitlines() if line.startswith("node-")]

    assert order() == ["node-1", "node-2", "node-3"]
    assert order("--sort", "reward") == ["node-2", "node-1", "node-3"]
    assert order("--sort", "tok/s") == ["node-1", "node-3", "node-2"]  # the one without a value last
    lines = swarm("top", str(tmp_path)).stdout.splitlines()
    (first,) = [line for line in lines if line.startswith("node-1")]
    assert first.split()[3:6] == ["0.750", "0.500", "▁▁▁▁▁▅▅▅▅▅"]
    facts = json.loads(swarm("top", "--json", str(tmp_path / "node-1")).stdout)
    assert (facts["smoothed_reward"], facts["held_out_reward"], facts["reward_mean"]) == (0.5, 0.75, 0.0)


def test_top_shows_what_was_learned_and_why_a_node_is_down(tmp_path: Path) -> None:
    for name in ("node-1", "node-2", "node-3"):
        node_with_rewards(tmp_path / name, [0.5] * 20, 30.0)
    metrics = tmp_path / "node-1" / "metrics.jsonl"
    metrics.write_text(json.dumps(evaluation_row(0, "start", 0.25)) + "\n" + metrics.read_text())
    for name, phase in (("node-2", "failed"), ("node-3", "ended")):
        told = status_of(time.time(), last_round=ROW, pid=2**22 + 1, phase=phase, failure="out of memory")
        told.write(tmp_path / name / "status.json")
    lines = swarm("top", str(tmp_path)).stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    (first,) = [line for line in lines if line.startswith("node-1")]
    assert "0.25→0.75" in first
    (down,) = [line for line in lines if line.startswith("node-2:")]
    assert "it ended with an error after round" in down
    assert not [line for line in lines if line.startswith("node-3:")]  # it ended in order
    assert json.loads(swarm("top", "--json", str(tmp_path / "node-1")).stdout)["held_out_start"] == 0.25


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", View(Order.node)), ("s", View(Order.state)), ("ssssss", View(Order.node)), ("r", View(Order.node, reverse=True)),
        ("jj", View(Order.node, skip=2)), ("jjjjjjkx", View(Order.node, skip=1)), ("k", View(Order.node)),
        ("p", View(Order.node, is_paused=True)), ("js", View(Order.state)), ("pq", None), ("\x04", None),
    ],
)  # fmt: skip
def test_keys_change_what_top_shows(keys: str, expected: View | None) -> None:
    view: View | None = View(Order.node)
    for key in keys:
        assert view is not None
        view = view.after(key, 3)
    assert view == expected


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_until(terminal: int, *texts: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + 60
    while not all(text in seen for text in texts):
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65536)
    return seen


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_top_leaves_the_terminal_as_it_was(tmp_path: Path, terminal: tuple[int, int], ending: signal.Signals) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    status_of(time.time()).write(tmp_path / "status.json")
    command = [sys.executable, "-m", "swarm.cli.main", "top", str(tmp_path), "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    watching = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    shown = read_until(ours, b"contributing")
    assert b"\x1b[?1049h" in shown, "it has a screen of its own"
    status_of(time.time(), round=77).write(tmp_path / "status.json")
    read_until(ours, b"77")
    watching.send_signal(ending)
    read_until(ours, b"\x1b[?25h", b"\x1b[?1049l")  # cursor and screen are back
    assert watching.wait(60) == 0
    assert termios.tcgetattr(theirs) == before


def test_top_obeys_keys_and_gives_the_terminal_back_at_q(tmp_path: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    for name, reward in (("node-1", 0.1), ("node-2", 0.9)):
        node_with_rewards(tmp_path / name, [reward] * 3)
    command = [
        sys.executable,
        "-m",
        "swarm.cli.main",
        "top",
        str(tmp_path),
        "--interval",
        "60",
    ]  # keys do not wait for it
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    watching = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    read_until(ours, b"node\xe2\x86\x93", b"q quit")
    os.write(ours, b"ssss")
    shown = read_until(ours, "reward↓".encode()).rpartition("reward↓".encode())[2]
    shown += read_until(ours, b"node-1") if b"node-1" not in shown else b""
    assert shown.index(b"node-2") < shown.index(b"node-1")
    os.write(ours, b"\x1b[B")
    read_until(ours, b"1 of 2 nodes")
    os.write(ours, b"q")
    read_until(ours, b"\x1b[?25h", b"\x1b[?1049l")
    assert watching.wait(60) == 0
    assert termios.tcgetattr(theirs) == before


def test_top_without_a_keyboard_shows_all_the_same_until_it_is_interrupted(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    ours, theirs = terminal
    status_of(time.time()).write(tmp_path / "status.json")
    command = [sys.executable, "-m", "swarm.cli.main", "top", str(tmp_path), "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    watching = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment)
    read_until(ours, b"contributing")
    watching.send_signal(signal.SIGTERM)
    read_until(ours, b"\x1b[?1049l")
    assert watching.wait(60) == 0

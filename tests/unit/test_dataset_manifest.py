"""A data set in a manifest: pinned by its founder, compared before anybody trains, and no way into a joiner's files."""

import json
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.swarm.preflight import task_findings
from swarm.config import TaskSourceSection, TasksSection, load
from swarm.errors import ConfigError, ManifestError, TaskError
from swarm.manifest.files import read_manifest
from swarm.manifest.joining import check_tasks, compose
from swarm.manifest.manifest import Manifest, changed, changes, create, dump, parse
from swarm.records.codec import PROTOCOL_VERSION
from swarm.records.identity import Identity
from swarm.tasks.data_sets import hub as hub_data_set
from tests import swarm_process

FOUNDER = Identity(b"f" * 32)
SHA256, COMMIT = "ab" * 32, "0123456789abcdef0123456789abcdef01234567"
OWN = {"kind": "dataset", "name": "sums", "sha256": SHA256, "columns": {"prompt": "question"}}
OF_HUB = OWN | {
    "hub": "owner/sums",
    "revision": COMMIT,
    "subset": "main",
    "held_out_split": "test",
    "verifier": "numeric",
}


def make(*tasks: dict[str, Any]) -> Manifest:
    return create(FOUNDER, "friends", PROTOCOL_VERSION, 1.8e9, tasks=tasks, bases=["bundled"])


def test_a_data_set_in_a_manifest_survives_the_file_and_tells_everything() -> None:
    manifest = make(OWN, OF_HUB | {"label": "hub"})
    text = dump(manifest, FOUNDER)
    assert parse(text.encode()) == manifest
    assert "skip_invalid" not in text and "expected" not in text, "defaults are left out"
    own, of_hub = manifest.tasks
    assert own.settings == f'dataset sums, sha256 {SHA256}, verifier exact, columns {{"prompt": "question"}}, weight 1'
    for fact in ("owner/sums", COMMIT, 'subset "main"', 'held_out_split "test"', "verifier numeric"):
        assert fact in of_hub.settings
    for setting in (
        {"columns": {"prompt": "q"}},
        {"split": "x"},
        {"skip_invalid": True},
        {"expected": "boxed"},
        {"sha256": "cd" * 32},
    ):
        (line,) = changes(make(OWN), changed(make(OWN), tasks=[OWN | setting]))
        assert "→" in line


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"sha256": ""}, "sha256"),
        ({"path": "/etc/passwd"}, "path"),
        ({"hub": "../../etc"}, "hub"),
        ({"hub": "owner/sums"}, "commit of 40 hex digits, got none"),
        ({"hub": "owner/sums", "revision": "main"}, "commit of 40 hex digits, got main"),
        ({"revision": COMMIT}, "revision belongs to hub"),
        ({"subset": "../x"}, "subset"),
        ({"split": "/etc"}, "split"),
        ({"parameters": {"trust_remote_code": 1}}, "has no parameters"),
        ({"columns": {"prompt": "x" * 1025}}, "columns"),
        ({"columns": {"prompt": ["x"]}}, "columns"),
        ({"kind": "jsonl"}, "belongs to dataset sources"),
    ],
)
def test_a_founder_names_no_file_and_no_moving_revision(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ManifestError, match=rule):
        make(OWN | change)


def test_the_operator_says_where_a_copy_is(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=f"needs the data set whose tasks have SHA-256 {SHA256}; give --task-file sums=PATH"
    ):
        compose(make(OWN), {}, {}, {})
    (own,) = compose(make(OWN), {}, {}, {"sums": tmp_path}).tasks.sources
    assert (own.path, own.sha256) == (tmp_path, SHA256)
    (of_hub,) = compose(make(OF_HUB), {}, {}, {}).tasks.sources
    assert (of_hub.path, of_hub.hub, of_hub.revision, of_hub.sha256) == (None, "owner/sums", COMMIT, SHA256)
    (copy,) = compose(make(OF_HUB), {}, {}, {"sums": tmp_path}).tasks.sources
    assert (copy.path, copy.sha256) == (tmp_path, SHA256)
    with pytest.raises(ConfigError, match=r"tasks\.sources is decided by the manifest"):
        compose(make(OF_HUB), {}, {"tasks": {"sources": [OWN | {"path": str(tmp_path)}]}}, {})


def test_a_preflight_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_data_set, "_info", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.setattr(hub_data_set, "_snapshot", lambda *_, **__: pytest.fail("asked the hub"))
    sources = (TaskSourceSection.model_validate(OF_HUB), TaskSourceSection(name="lcm"))
    data, tasks = task_findings(TasksSection(sources=sources))
    assert (data.name, data.level) == ("data sums", "note")
    assert (
        "owner/sums is not here and is downloaded at the start, at most 5 GiB for all data sets" in data.text
        and SHA256 in data.text
    )
    assert (tasks.level, tasks.text) == ("ok", "the other 1 work here")


def swarm(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return swarm_process.swarm(*arguments, cwd=cwd, COLUMNS="300")


@pytest.mark.extra("datasets")
def test_who_has_other_rows_finds_out_before_training(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + {n}?", "answer": f"{2 * n}"} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "swarm.toml").write_text(
        '[[tasks.sources]]\nkind = "dataset"\nname = "sums"\npath = "sums.jsonl"\ncolumns = { prompt = "question" }\n'
    )
    made = swarm("create", "friends", "swarm.toml", "--key", "key", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    manifest = tmp_path / "friends.swarm.toml"
    (task,) = read_manifest(str(manifest)).tasks
    assert len(task.sha256) == 64
    assert str(tmp_path) not in manifest.read_text(), "no path of the founder's"
    asked = ("join", "friends.swarm.toml", "--network.listen", '["/ip4/127.0.0.1/tcp/0"]')
    told = swarm(*asked, cwd=tmp_path)
    assert told.returncode == 6 and "--task-file sums=PATH" in told.stderr
    csv = tmp_path / "copy.csv"
    csv.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    checked = swarm(*asked, "--task-file", "sums=copy.csv", "--check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    csv.write_text(csv.read_text().replace("38", "39"))
    for arguments, code in (((), 6), (("--check",), 13)):
        told = swarm(*asked, "--task-file", "sums=copy.csv", *arguments, cwd=tmp_path)
        assert told.returncode == code, told.stdout + told.stderr
        said = told.stdout + told.stderr
        assert f"must have SHA-256 {task.sha256}, got " in " ".join(said.split())
        assert "get the files that the founder has" in " ".join(said.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.extra("datasets")
def test_a_configuration_of_a_joined_node_compares_the_rows_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 12)
    (tmp_path / "node.toml").write_text(
        '[[tasks.sources]]\nkind = "dataset"\nname = "sums"\npath = "a.jsonl"\ncolumns = { prompt = "question" }\n'
        f'sha256 = "{SHA256}"\n'
    )
    with pytest.raises(TaskError, match=f"must have SHA-256 {SHA256}, got [0-9a-f]{{64}} of "):
        check_tasks(load([tmp_path / "node.toml"]).tasks)


KINDS = (("dataset", "set"), ("jsonl", "file"))


@pytest.mark.extra("datasets")
def test_show_prompt_says_what_is_held_out(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{n}?", "answer": f"{n}"}) for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    both = ", ".join(f'{{kind = "{kind}", name = "{name}", path = "a.jsonl"}}' for kind, name in KINDS)
    sources = f'[{both}, {{name = "lcm"}}]'
    shown = swarm("sample", "--tasks.sources", sources, "--show-prompt", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "── set: 18 rows of split train for training, every tenth row held out (2 rows); SHA-256 " in shown.stdout
    assert "── file: every tenth line held out (2)" in shown.stdout
    assert "── lcm: every" not in shown.stdout
    dry = swarm("run", "--tasks.sources", sources, "--dry-run", cwd=tmp_path)
    assert dry.stderr == shown.stdout


@pytest.mark.extra("datasets")
def test_the_example_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^    [^\n]*\n)+", page, re.M)]
    settings, table, commands, shown = blocks[:4]
    _, shown_command = commands.splitlines()
    (tmp_path / "sums.toml").write_text(settings)
    (tmp_path / "sums.csv").write_text(table)
    ended = swarm(*shown_command.split()[1:], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(shown.partition("…")[0])

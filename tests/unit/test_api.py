"""The Python interface without a node process: settings, records, rows as they come."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import swarm
from swarm.api.node import _Rows
from swarm.errors import ConfigError, PolicyError, SwarmError, error_of_exit_code


def row(number: int, kind: str = "round") -> str:
    return json.dumps({"kind": kind, "round": number}) + "\n"


def test_settings_come_from_files_and_sections_over_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.toml").write_text("[training]\nlr = 1e-3\nclip_high = 0.3\n[node]\ndir = 'mine'\n")
    node = swarm.Node.from_config("node.toml", training={"lr": 1e-5}, rollouts={"group_size": 4})
    assert (node.config.training.lr, node.config.rollouts.group_size, node.config.training.clip_high) == (1e-5, 4, 0.3)
    monkeypatch.chdir("/")
    assert node.folder == tmp_path / "mine" == node.config.node.dir and not node.folder.exists()
    assert swarm.Node.from_config().config.policy.base == "bundled"


def test_paths_in_sections_are_those_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = {"kind": "dataset", "name": "mine", "path": Path("mine.csv"), "signals": [{"function": "mine.py:score"}]}
    given = {"sources": [source]}
    for name, text in (("mine.csv", "prompt,answer\na,b\n"), ("mine.py", "def score(task, answer):\n    return 1.0\n")):
        (tmp_path / name).write_text(text)
    (found,) = swarm.Node.from_config(tasks=given).config.tasks.sources
    assert found.path == tmp_path / "mine.csv" and found.signals[0].function == f"{tmp_path}/mine.py:score"
    assert source["path"] == Path("mine.csv"), "what was given stays as it is"


def test_wrong_settings_name_rule_value_and_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollouts\.group_size.* got 1; set rollouts\.group_size to at least 2"):
        swarm.Node.from_config(rollouts={"group_size": 1})
    with pytest.raises(ConfigError, match="did you mean"):
        swarm.Node.from_config(training={"learning_rate": 1})
    with pytest.raises(ConfigError, match=r"none\.toml"):
        swarm.Node.from_config(tmp_path / "none.toml")
    with pytest.raises(SwarmError, match="rounds must be at least 1, got 0"):
        swarm.Node.from_config(node={"dir": str(tmp_path)}).run(rounds=0)


def test_records_leave_out_what_a_restart_has_undone(tmp_path: Path) -> None:
    node = swarm.Node.from_config(node={"dir": str(tmp_path)})
    assert node.metrics() == [] and node.num_rounds == 0
    lines = [row(1), row(1, "evaluation"), row(2), row(3), row(2), row(3), row(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"kind": "rou')
    assert [one["round"] for one in node.metrics()] == [1, 2, 3, 4] and node.num_rounds == 4


def test_rows_come_once_and_whole_and_from_a_new_file_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    nothing_yet = _Rows(path, at_end=True)
    assert list(nothing_yet.new()) == []
    path.write_text(row(1) + row(2)[:9])
    rows = _Rows(path, at_end=False)
    assert [one["round"] for one in nothing_yet.new()] == [one["round"] for one in rows.new()] == [1]
    with path.open("a") as file:
        file.write(row(2)[9:] + row(2, "evaluation") + row(3))
    assert [one["round"] for one in rows.new()] == [2, 3] and list(rows.new()) == []
    later = _Rows(path, at_end=True)
    path.rename(tmp_path / "metrics.jsonl.1")
    path.write_text("".join(map(row, range(1, 50))))
    assert [one["round"] for one in later.new()] == [*range(1, 50)], "although it is longer than the old one"


def test_each_exit_code_is_the_error_that_it_stands_for() -> None:
    assert type(error_of_exit_code(5, "no model")) is PolicyError
    assert type(error_of_exit_code(-9, "killed")) is SwarmError and str(error_of_exit_code(-9, "killed")) == "killed"


def test_the_package_is_imported_at_once_and_names_what_it_has() -> None:
    script = (
        "import sys, time\nbegun = time.process_time()\nimport swarm\nassert time.process_time() - begun < 0.2\n"
        "assert {*swarm.__all__} <= {*dir(swarm)}\n"
        "assert not {'pydantic', 'torch', 'rich'} & set(sys.modules)\n"
        "assert swarm.Node.__name__ == 'Node' and 'torch' not in sys.modules\n"
        "assert all(getattr(swarm, one).__doc__ for one in swarm.__all__) and 'torch' not in sys.modules\n"
        "try:\n    swarm.Nodes\nexcept AttributeError as error:\n    print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "module 'swarm' has no attribute 'Nodes'\n"

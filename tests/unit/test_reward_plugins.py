"""Reward functions of other packages: a small real distribution on the path, found by its entry points."""

import socket
import sys
import textwrap
import time
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import REWARDS
from swarm.tasks import signalled_source
from swarm.tasks.rewards import reward_plugin
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import TaskFailure, assess

MODULE = """
    import os, time

    calls = 0

    def politeness(prompt, expected, answer, word="please"):
        print("noise on stdout")
        return float(word in answer)

    def sees(prompt, expected, answer):
        return float((prompt, expected) == ("p1", "7"))

    def moody(prompt, expected, answer):
        global calls
        calls += 1
        if answer == "crash": raise KeyError(answer)
        if answer == "die": os._exit(3)
        if answer == "hang":
            while True: pass
        if answer == "count": return calls / 100
        return {"nan": float("nan"), "two": 2.0, "text": "x", "none": None}.get(answer, 1.0)

    def reaches(prompt, expected, answer):
        import socket
        socket.create_connection(("127.0.0.1", int(answer)), 5).close()
        return float("HF_TOKEN" not in os.environ)

    def eats(prompt, expected, answer):
        return float(len(bytearray(3 << 30)) > 0)

    not_callable = 5
"""
ENTRIES = """
    [swarm.rewards]
    politeness = nice_rewards:politeness
    sees = nice_rewards:sees
    moody = nice_rewards:moody
    reaches = nice_rewards:reaches
    eats = nice_rewards:eats
    constant = nice_rewards:not_callable
    missing = nice_rewards:nothing
    [other.group]
    elsewhere = nice_rewards:politeness
"""


def install(folder: Path, version: str = "1.2", name: str = "nice-rewards") -> Path:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(ENTRIES))
    (folder / "nice_rewards.py").write_text(textwrap.dedent(MODULE))
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = install(tmp_path / "site")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    invalidate_caches()
    return folder


def mixture_of(folder: Path, *signals: dict[str, Any], **settings: Any) -> TaskMixture:
    path = folder / "tasks.jsonl"
    path.write_text('{"prompt": "p0", "answer": 7}\n{"prompt": "p1", "answer": 7}\n')
    section = TaskSourceSection.model_validate({"kind": "jsonl", "name": "mine", "path": path, "signals": signals})
    return TaskMixture(TasksSection(sources=(section,), **settings))


def test_a_function_of_an_installed_package_makes_up_the_reward(installed: Path, tmp_path: Path) -> None:
    polite = {"name": "politeness", "weight": 1, "parameters": {"word": "bitte"}}
    mixture = mixture_of(tmp_path, {"name": "correct", "weight": 3}, polite, {"name": "sees", "weight": 1})
    task = mixture.sources["mine"].task(16, 0)
    assert assess(task, "7").signals == (("correct", 1.0), ("politeness", 0.0), ("sees", 1.0))
    assert assess(task, "7 bitte").reward == pytest.approx(2 / 5)
    assert assess(task, "bitte" + "x" * reward_plugin.MAX_ANSWER_CHARS).reward == 0.0  # long answers are not looked at


def test_package_and_version_are_part_of_the_digest(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = mixture_of(tmp_path, {"name": "politeness"}).sources["mine"].config_digest
    monkeypatch.setattr(sys, "path", [*sys.path[:-1], str(install(tmp_path / "newer", "1.3"))])
    invalidate_caches()
    assert mixture_of(tmp_path, {"name": "politeness"}).sources["mine"].config_digest != digest


def test_an_unknown_name_lists_the_known_ones(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"must be one of constant, correct, .*format, length, .*politeness.*got 'elsewhere'"
    ):
        mixture_of(tmp_path, {"name": "elsewhere"})


@pytest.mark.parametrize(("name", "told"), [("constant", "no function"), ("missing", "AttributeError")])
def test_a_function_that_cannot_be_loaded_is_told_at_once(
    installed: Path, tmp_path: Path, name: str, told: str
) -> None:
    with pytest.raises(TaskError, match=f"{name} of nice-rewards==1.2 must be loadable.*{told}"):
        mixture_of(tmp_path, {"name": name})


def test_two_packages_with_one_name_are_told(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(install(tmp_path / "twin", name="twin"))])
    invalidate_caches()
    with pytest.raises(TaskError, match=r"must come from one package, got .* of nice-rewards==1.2 and twin==1.2"):
        REWARDS.installed()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("crash", "reward function moody: KeyError: 'crash'"),
        ("die", "reward function moody: ended"),
        ("hang", "reward function moody: took longer than 0.5 s"),
        ("nan", "signal moody must be in"),
        ("two", "signal moody must be in .0, 1., got 2"),
        ("text", "ValueError"),
        ("none", "TypeError"),
    ],
)
def test_a_function_that_fails_costs_its_task_and_works_again(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, told: str
) -> None:
    monkeypatch.setattr(signalled_source, "TIME_BUDGET_S", 0.5)
    task = mixture_of(tmp_path, {"name": "moody"}).sources["mine"].task(16, 0)
    started = time.monotonic()
    with pytest.raises(TaskFailure, match=told):
        assess(task, answer)
    assert assess(task, "fine").reward == 1.0
    assert time.monotonic() - started < 20


def test_a_function_is_loaded_once(installed: Path, tmp_path: Path) -> None:
    task = mixture_of(tmp_path, {"name": "moody"}).sources["mine"].task(16, 0)
    assert [assess(task, "count").reward for _ in range(3)] == [0.01, 0.02, 0.03]


def test_a_function_reaches_the_network_only_where_the_operator_names_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        fenced = mixture_of(tmp_path, {"name": "reaches"}).sources["mine"].task(16, 0)
        with pytest.raises(TaskFailure, match="PermissionError"):
            assess(fenced, port)
        task = mixture_of(tmp_path, {"name": "reaches"}, unsandboxed_rewards=("reaches",)).sources["mine"].task(16, 0)
        assert assess(task, port).reward == 1.0, "with the network, and still without the node's environment"


def test_memory_of_a_function_is_bounded(installed: Path, tmp_path: Path) -> None:
    task = mixture_of(tmp_path, {"name": "eats"}).sources["mine"].task(16, 0)
    with pytest.raises(TaskFailure, match="MemoryError"):
        assess(task, "")

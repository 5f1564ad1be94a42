"""The mixture of sources and the cursor: what breaks, what is counted, what repeats."""

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import TaskSourceSection, TasksSection, load
from swarm.errors import PolicyError, TaskError
from swarm.machine.node_folder import NodeFolder
from swarm.node.process import run_node
from swarm.records import identity as identities
from swarm.tasks.held_out import HeldOut
from swarm.tasks.task_cursor import MAX_CONSECUTIVE_FAILURES, TaskCursor
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.tasks.task_source import (
    EVALUATION_SEED,
    FIRST_TRAINING_SEED,
    INDEX_SPAN,
    MAX_SEED,
    TaskFailure,
    TaskSource,
    UnknownTask,
    score,
)
from swarm.types import Task, TaskRef

SUMS = TaskSourceSection(name="chain_sum", label="sums", weight=3.0, parameters={"max_terms": 3})
GCD = TaskSourceSection(name="gcd")


class FailingSource:
    """Builds a task only where `works` says so."""

    config_digest = "0" * 16
    num_held_out = INDEX_SPAN

    def __init__(self, name: str, works: Callable[[int], bool]) -> None:
        self.name = name
        self._works = works

    def task(self, seed: int, index: int) -> Task:
        if not self._works(index):
            raise TaskFailure(self.name, f"task {index}")
        return Task(TaskRef(self.name, self.config_digest, seed, index), f"{self.name} {index}", float)

    def answer(self, seed: int, index: int) -> str:
        return "1"


@pytest.fixture
def mixture() -> TaskMixture:
    return TaskMixture(TasksSection(sources=(SUMS, GCD)))


def with_source(mixture: TaskMixture, source: TaskSource, *, alone: bool = False) -> TaskMixture:
    if alone:
        mixture.sources.clear()
    mixture.sources[source.name] = source
    mixture.weights[source.name] = 1.0
    return mixture


def task_scoring(value: object) -> Task:
    def verify(text: str) -> float:
        if isinstance(value, Exception):
            raise value
        return value  # type: ignore[return-value]

    return Task(TaskRef("source", "0" * 16, 16, 0), "prompt", verify)


def test_a_task_is_rebuilt_from_its_reference(mixture: TaskMixture) -> None:
    task = mixture.sources["sums"].task(1234, 5)
    again = TaskMixture(TasksSection(sources=(SUMS,))).rebuild(task.ref)
    assert (again.ref, again.prompt) == (task.ref, task.prompt)
    assert score(again, mixture.sources["sums"].answer(1234, 5)) == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"source": "lcm"},
        {"source": "x" * 10_000},
        {"config_digest": "0" * 16},
        {"seed": -1},
        {"seed": MAX_SEED + 1},
        {"seed": 2**4000},
        {"seed": True},
        {"seed": 16.0},
        {"index": -1},
        {"index": INDEX_SPAN},
        {"index": "0"},
        {"index": None},
    ],
)
def test_hostile_references_are_unknown_tasks(mixture: TaskMixture, change: dict[str, object]) -> None:
    ref = mixture.sources["sums"].task(16, 0).ref
    with pytest.raises(UnknownTask) as caught:
        mixture.rebuild(replace(ref, **change))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_a_broken_source_is_left_out_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mixture = TaskMixture(TasksSection(sources=(TaskSourceSection(name="gdc"), SUMS)))
    assert list(mixture.sources) == ["sums"]
    assert "did you mean gcd?" in mixture.broken["gdc"]
    assert "gdc" in caplog.text


@pytest.mark.parametrize(
    ("swarm_id", "kind", "told"),
    [("", TaskError, "must work, got .*did you mean gcd"), ("ab" * 16, PolicyError, "no-model")],
)
def test_a_node_ends_over_its_own_broken_source_and_bears_one_of_a_manifest(
    tmp_path: Path, swarm_id: str, kind: type[Exception], told: str
) -> None:
    sources = '[{name = "gdc"}, {name = "gcd"}]'
    chosen = {"swarm.id": swarm_id, "tasks.sources": sources, "policy.base": str(tmp_path / "no-model")}
    config = load([], {"node.dir": str(tmp_path / "node"), "network.backend": "off", **chosen})
    identities.load_or_create(NodeFolder(config.node.dir).identity, None)  # a first start would look at the base first
    with pytest.raises(kind, match=told):
        run_node(config)


@pytest.mark.parametrize(("setting", "value"), [("policy.base", "./no-model"), ("node.device", "cuda")])
def test_a_base_or_device_that_cannot_be_had_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = load([], {"node.dir": str(tmp_path / "node"), "network.backend": "off", setting: value})
    with pytest.raises(PolicyError, match=f"got {value}"):
        run_node(config)
    assert not (tmp_path / "node").exists()


def test_no_working_source_is_an_error_that_names_every_reason(tmp_path: Path) -> None:
    missing = TaskSourceSection(kind="jsonl", name="mine", path=tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match=r"gdc.*none\.jsonl"):
        TaskMixture(TasksSection(sources=(TaskSourceSection(name="gdc"), missing)))


def test_held_out_tasks_are_of_the_evaluation_stream_and_failures_are_counted(mixture: TaskMixture) -> None:
    odd = FailingSource("odd", lambda index: index % 2 == 1)
    tasks = TaskMixture(TasksSection(sources=(SUMS, GCD), held_out_share=0)).held_out(4)
    assert [(task.ref.source, task.ref.index) for task in tasks[4:]] == [("gcd", index) for index in range(4)]
    assert {task.ref.seed for task in [*tasks, *mixture.held_out(4)]} == {EVALUATION_SEED}
    failures: list[str] = []
    held_out = HeldOut(odd, 0.25, lambda failure: failures.append(failure.source))
    assert [task.ref.index % 2 for task in held_out.tasks(4)] == [1] * 4
    assert set(failures) == {"odd"} and len(failures) > 4


@pytest.mark.parametrize(("value", "reward"), [(0, 0.0), (True, 1.0), (0.5, 0.5), (1 + 1e-9, 1.0), (-1e-9, 0.0)])
def test_scores_are_clamped_of_float_noise(value: float, reward: float) -> None:
    assert score(task_scoring(value), "text") == reward


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 1.1, -0.1, None, "x", ValueError("bad"), RecursionError(), MemoryError()]
)
def test_a_verifier_that_fails_costs_the_task(value: object) -> None:
    with pytest.raises(TaskFailure) as caught:
        score(task_scoring(value), "text")
    assert caught.value.source == "source"


@given(st.text(max_size=80), st.integers(0, 2**31 - 1))
def test_training_streams_are_in_range_and_bound_to_identity_and_seed(peer_id: str, node_seed: int) -> None:
    stream = training_seed(peer_id, node_seed)
    assert FIRST_TRAINING_SEED <= stream <= MAX_SEED
    assert stream == training_seed(peer_id, node_seed)
    assert stream != training_seed(peer_id + "x", node_seed)


def test_draws_follow_the_weights_and_each_stream_in_order(mixture: TaskMixture) -> None:
    tasks = TaskCursor(mixture, 77, random.Random(0)).draw(400)
    of_sums = [task.ref.index for task in tasks if task.ref.source == "sums"]
    assert of_sums == sorted(set(of_sums)) and of_sums[-1] < 1.15 * len(of_sums)  # but for those that are held out
    assert 270 < len(of_sums) < 330  # 3 : 1
    assert {task.ref.seed for task in tasks} == {77}


def test_a_restored_cursor_draws_what_the_first_would_have_drawn(mixture: TaskMixture) -> None:
    cursor = TaskCursor(mixture, 77, random.Random(0))
    cursor.draw(13)
    state = json.loads(json.dumps(cursor.state()))
    expected = [task.ref for task in cursor.draw(50)]
    other = TaskCursor(mixture, 78, random.Random(9))
    other.draw(5)
    other.restore(state)
    assert [task.ref for task in other.draw(50)] == expected


def test_failing_tasks_are_skipped_and_counted(mixture: TaskMixture) -> None:
    cursor = TaskCursor(
        with_source(mixture, FailingSource("odd", lambda index: index % 2 == 1), alone=True), 16, random.Random(0)
    )
    assert [task.ref.index for task in cursor.draw(3)] == [1, 3, 5]
    assert cursor.failures == {"odd": 3}


def test_a_source_that_keeps_failing_is_set_aside_and_the_others_go_on(mixture: TaskMixture) -> None:
    cursor = TaskCursor(with_source(mixture, FailingSource("dead", lambda index: False)), 16, random.Random(0))
    tasks = cursor.draw(300)
    assert "dead" not in {task.ref.source for task in tasks}
    assert cursor.failures == {"dead": MAX_CONSECUTIVE_FAILURES}


def test_a_mixture_of_which_nothing_works_is_an_error(mixture: TaskMixture) -> None:
    cursor = TaskCursor(
        with_source(mixture, FailingSource("dead", lambda index: False), alone=True), 16, random.Random(0)
    )
    with pytest.raises(TaskError, match="every task source failed"):
        cursor.draw(1)

"""Several reward signals per task: their values, the reward they make, and their way to the trainer."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.admission.reward_verifier import BURST_S, PER_S, RewardVerifier, VerificationBudget
from swarm.config import Config, RewardSignalSection, TaskSourceSection, TasksSection, TrainingSection, parse
from swarm.errors import ConfigError, TaskError
from swarm.extensions.points import REWARDS
from swarm.manifest.manifest import create, dump
from swarm.manifest.manifest import parse as parse_manifest
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import Policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.tasks.signalled_source import RewardSignal, brevity, tagged
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import TaskFailure, assess, prompt_digest
from swarm.training.advantages import batch_advantages
from swarm.training.experience import TrainingGroup
from swarm.types import Lineage, Rollout, RolloutGroup, Task, TaskRef

MakePolicy = Callable[..., Policy]
SIGNALS = [
    {"name": "correct", "weight": 6},
    {"name": "format", "weight": 3, "parameters": {"tags": ["answer"]}},
    {"name": "length", "weight": 1, "parameters": {"max_chars": 40, "buffer_chars": 20}},
]


def build_signal(name: str, parameters: dict[str, Any], source: str) -> RewardSignal:
    made: RewardSignal = REWARDS.make(name, parameters, f"tasks.sources.signals of {source!r}")
    return made


def mixture_of(path: Path, signals: list[dict[str, Any]] | None = None, **more: Any) -> TaskMixture:
    """Twelve tasks whose answer is 7, by regular expression."""
    path.write_text(
        "\n".join(json.dumps({"prompt": f"p{i}", "answer": ".*7.*", "verifier": "regex"}) for i in range(12))
    )
    chosen = SIGNALS if signals is None else signals
    section = TaskSourceSection.model_validate(
        {"kind": "jsonl", "name": "mine", "path": path, "signals": chosen, **more}
    )
    return TaskMixture(TasksSection(sources=(section,)))


@pytest.fixture
def mixture(tmp_path: Path) -> TaskMixture:
    return mixture_of(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("num_chars", "value"),
    [(0, 1.0), (10, 1.0), (20, 1.0), (25, 0.75), (30, 0.5), (39, 0.05), (40, 0.0), (41, 0.0), (10**6, 0.0)],
)
def test_length_falls_over_the_buffer(num_chars: int, value: float) -> None:
    length = build_signal("length", {"max_chars": 40, "buffer_chars": 20}, "mine")
    assert length.value("é" * num_chars) == pytest.approx(value)  # characters, not bytes


@pytest.mark.parametrize(("num_chars", "value"), [(0, 1.0), (9, 1.0), (10, 0.0), (11, 0.0)])
def test_length_without_a_buffer_is_a_bound(num_chars: int, value: float) -> None:
    assert brevity(10, 0, num_chars) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n</think>\n<answer></answer>\n", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>.", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0.0),
        ("</think><think>a</think><answer>b</answer>", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_come_once_and_in_order(text: str, value: float) -> None:
    assert tagged(("think", "answer"), text) == value


def test_a_pattern_matches_long_texts_where_that_is_set() -> None:
    pattern, text = r"(?s).*</think>\s*<answer>.*</answer>", "so " * 9000 + "</think> <answer>7</answer>"
    assert build_signal("format", {"pattern": pattern}, "mine").value(text) == 0.0
    assert build_signal("format", {"pattern": pattern, "max_chars": 100_000}, "mine").value(text) == 1.0


def test_form_is_checked_in_bounded_time() -> None:
    started = time.process_time()
    by_tags = build_signal("format", {"tags": ["a", "b"]}, "mine")
    by_pattern = build_signal("format", {"pattern": r"(?s).*<a>.*</a>.*"}, "mine")
    for text in ("<a>" * 10**5, "<a></a>" * 10**5, " " * 10**6, "<a>" * 80 + "!"):
        assert by_tags.value(text) == 0.0
        by_pattern.value(text)
    assert by_pattern.value("so <a>1</a>") == 1.0
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("name", "parameters", "told"),
    [
        ("format", {"pattern": r"(a)\1"}, "RE2"),
        ("format", {"pattern": "("}, "valid pattern"),
        ("format", {}, "pattern or tags"),
        ("format", {"tags": ["a"], "pattern": "a"}, "not both"),
        ("format", {"tags": ["<a>"]}, "tags"),
        ("length", {}, "max_chars"),
        ("length", {"max_chars": 10, "buffer_chars": 11}, "buffer_chars"),
        ("length", {"max_chars": 10, "tokens": 1}, "tokens"),
    ],
)
def test_wrong_parameters_are_told(name: str, parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told) as caught:
        build_signal(name, parameters, "mine")
    assert "tasks.sources.signals of 'mine'" in str(caught.value) and "\n" not in str(caught.value)


def test_the_reward_is_the_weighted_sum(mixture: TaskMixture) -> None:
    task = mixture.sources["mine"].task(16, 0)
    cases = {"<answer>7</answer>": (1, 1, 1), "7": (1, 0, 1), "<answer>8</answer>": (0, 1, 1), "7" * 30: (1, 0, 0.5)}
    for text, values in cases.items():
        worth = assess(task, text)
        assert worth.signals == tuple(zip(("correct", "format", "length"), values, strict=True))
        assert worth.reward == pytest.approx(0.6 * values[0] + 0.3 * values[1] + 0.1 * values[2])


def test_a_source_without_signals_is_as_it_was(tmp_path: Path) -> None:
    plain = mixture_of(tmp_path / "t.jsonl", signals=[]).sources["mine"]
    worth = assess(plain.task(16, 0), "7")
    assert (worth.reward, worth.signals) == (1.0, ())
    assert plain.task(16, 0).weights == ()


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 5},
        {"name": "length", "parameters": {"max_chars": 9}},
        {"parameters": {"tags": ["reply"]}},
        {"parameters": {"pattern": "a"}},
    ],
)
def test_other_signals_are_another_source_to_others(tmp_path: Path, change: dict[str, Any]) -> None:
    """Name, weight and parameters are in the digest, so nobody compares rewards that differ."""
    signals = [SIGNALS[0], SIGNALS[1]]
    digest = mixture_of(tmp_path / "t", signals).sources["mine"].config_digest
    assert mixture_of(tmp_path / "t", signals).sources["mine"].config_digest == digest
    assert mixture_of(tmp_path / "t", [SIGNALS[0], SIGNALS[1] | change]).sources["mine"].config_digest != digest
    assert mixture_of(tmp_path / "t", []).sources["mine"].config_digest != digest


def test_mistakes_in_the_list_of_signals_are_told(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"correct, format, length.*got 'formt'"):
        mixture_of(tmp_path / "t", [{"name": "formt"}])
    with pytest.raises(TaskError, match="correct takes no parameters"):
        mixture_of(tmp_path / "t", [{"name": "correct", "parameters": {"a": 1}}])
    with pytest.raises(ConfigError, match="different names"):
        parse({"tasks": {"sources": [{"name": "gcd", "signals": [{"name": "correct"}] * 2}]}})


@pytest.mark.parametrize("value", [float("nan"), 1.2, -0.5])
def test_a_signal_outside_its_range_costs_the_task_and_is_named(value: float) -> None:
    task = Task(TaskRef("s", "0" * 16, 16, 0), "p", lambda text: {"correct": 1.0, "odd": value}, (("odd", 1.0),))
    with pytest.raises(TaskFailure, match="signal odd must be in"):
        assess(task, "")


def test_signals_travel_in_the_manifest() -> None:
    identity = Identity(b"f" * 32)
    tasks = [{"name": "gcd", "signals": SIGNALS}, {"kind": "code", "name": "list_functions"}]
    manifest = parse_manifest(dump(create(identity, "ours", 1, 1e9, tasks=tasks), identity).encode())
    assert manifest.tasks[0].signals == tuple(map(RewardSignalSection.model_validate, SIGNALS))
    assert manifest.tasks[1].kind == "code" and manifest.tasks[1].sha256 == ""


# --- others' answers


def foreign_group(mixture: TaskMixture, *texts: str, index: int = 0) -> RolloutGroup:
    task = mixture.sources["mine"].task(99, index)
    rollouts = tuple(Rollout(t, (5, 6), (-1.0, -1.0), True, assess(task, t).reward) for t in texts)
    return RolloutGroup(task.ref, prompt_digest(task.prompt), rollouts, "alice", Lineage("1" * 32, "2" * 32), 1)


def test_a_receiver_recomputes_the_same_reward(mixture: TaskMixture, tmp_path: Path) -> None:
    group = foreign_group(mixture, "<answer>7</answer>", "7", "8" * 33)
    elsewhere = mixture_of(tmp_path / "copy.jsonl")
    assert RewardVerifier(elsewhere, sandboxed=None).rewards(group) == tuple(r.reward for r in group.rollouts)
    with pytest.raises(InvalidRecord) as caught:
        RewardVerifier(mixture_of(tmp_path / "other.jsonl", []), sandboxed=None).rewards(group)
    assert caught.value.reason is Rejection.UNKNOWN_TASK


def test_an_author_gets_so_much_time_for_its_answers(mixture: TaskMixture) -> None:
    now = 0.0

    def slow(text: str) -> float:
        nonlocal now
        now += 8.0
        return 1.0

    class Slow(TaskMixture):
        def rebuild(self, ref: TaskRef) -> Task:
            return replace(super().rebuild(ref), verify=slow, weights=())

    mixture.__class__ = Slow
    judge = RewardVerifier(mixture, lambda: now, sandboxed=None)
    group = foreign_group(mixture, "7", "8", "9", "0", "1", "2", "3", "4")
    with pytest.raises(InvalidRecord) as caught:
        judge.rewards(group)
    assert caught.value.reason is Rejection.TOO_SLOW
    assert now == 40.0  # seconds: 30 at once and a quarter of the time that passed are overdrawn by the fifth answer
    assert judge.rewards(replace(group, author="bob", rollouts=group.rollouts[:2])) == (1.0, 1.0)


def test_an_authors_time_comes_back() -> None:
    now = 0.0
    budget = VerificationBudget(lambda: now)
    budget.spend("alice", BURST_S + 1)
    with pytest.raises(InvalidRecord):
        budget.check("alice")
    budget.check("bob")
    now = 1 / PER_S + 0.1
    budget.check("alice")
    budget = VerificationBudget(lambda: now)
    for number in range(5000):
        budget.spend(f"peer {number}", 1.0)
    assert len(budget._authors) <= 1024


# --- to the trainer


def test_gdpo_takes_the_weights_of_the_task_unless_told_otherwise() -> None:
    def advantages(weights: tuple[tuple[str, float], ...], config: TrainingSection) -> list[float]:
        values = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.9)]
        rollouts = tuple(
            Rollout("a", (i,), (-1.0,), True, 0.1 * i, (("correct", c), ("format", f)))
            for i, (c, f) in enumerate(values)
        )
        group = RolloutGroup(TaskRef("s", "0" * 16, 16, 0), "0" * 16, rollouts, "me", Lineage("", ""), 0)
        item = TrainingGroup((1,), group, usable_logprobs=True, is_own=True, signal_weights=weights)
        return [value or 0.0 for value in batch_advantages([item], config)]

    equal = TrainingSection(advantage="gdpo")
    by_task = advantages((("correct", 0.9), ("format", 0.1)), equal)
    assert by_task == pytest.approx(advantages((), TrainingSection(advantage="gdpo", signal_weights={"correct": 9.0})))
    assert by_task != pytest.approx(advantages((), equal))
    over = TrainingSection(advantage="gdpo", signal_weights={"correct": 1.0, "format": 1.0})
    assert advantages((("correct", 0.9), ("format", 0.1)), over) == pytest.approx(advantages((), equal))


@pytest.fixture
def config() -> Config:
    return parse(
        {
            "rollouts": {"groups_per_round": 2, "group_size": 8, "max_new_tokens": 8, "temperature": 1.5},
            "training": {"advantage": "gdpo"},
            "sharing": {"swarm_groups": 2, "own_groups": 2, "likelihood_floor_quantile": 0.0},
        }
    )


def test_signals_of_own_and_foreign_groups_reach_the_trainer(
    make_policy: MakePolicy, mixture: TaskMixture, config: Config
) -> None:
    policy = make_policy()
    pool = ExperiencePool(":memory:", config.sharing, time.time)
    backend = local_backend(config, policy, "me")
    learner = Learner(config, backend, mixture=mixture, pool=pool, peer_id="me", ports=SwarmPorts())
    texts = ("<answer>7</answer>", "7", "8", "<answer>")
    pool.add(b"h" * 32, time.time() + 60, time.time(), [foreign_group(mixture, *texts)])
    (drawn,) = pool.draw(1, learner._rng)
    assert all(not rollout.signals for rollout in drawn.rollouts)  # they are not sent, and not in the pool
    (item,) = learner._batches._foreign([drawn])
    assert dict(item.signal_weights) == pytest.approx({"correct": 0.6, "format": 0.3, "length": 0.1})
    signals = [dict(rollout.signals) for rollout in item.group.rollouts]
    assert [s["correct"] for s in signals] == [1.0, 1.0, 0.0, 0.0] and [s["format"] for s in signals] == [1.0, 0, 0, 0]
    row = learner.run_round()
    assert {"reward/correct", "reward/format", "reward/length"} <= row.keys()
    assert 0.0 <= row["reward/length"] <= 1.0 and row["rollout/failed_tasks"] == 0

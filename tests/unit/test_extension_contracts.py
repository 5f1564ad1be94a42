"""What every implementation of an extension point must do: each test runs over all that are registered, and an example package.

A new implementation is tested from the line in `swarm/extensions/points.py` on. Where its parameters have no defaults it needs
an entry in `PARAMETERS` or `SECTIONS`.
"""

import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import TaskSourceSection, TasksSection, TrainingSection
from swarm.errors import SwarmError
from swarm.extensions import points
from swarm.extensions.registry import Isolation, Registry
from swarm.tasks.environments.episodes import scored
from swarm.tasks.environments.tool import Tool, ToolError
from swarm.tasks.environments.tool_source import tools_of
from swarm.tasks.signalled_source import RewardSignal
from swarm.tasks.task_cursor import DifficultyTable, TaskChoice
from swarm.tasks.task_mixture import TaskMixture, owns_stream, training_seed
from swarm.tasks.task_source import (
    EVALUATION_SEED,
    INDEX_SPAN,
    MAX_SEED,
    MAX_TEXT_CHARS,
    TaskFailure,
    UnknownTask,
    assess,
)
from swarm.tasks.verifiers import MAX_ANSWER_CHARS, Verifier
from swarm.training.advantages import Advantage, GroupRewards
from swarm.training.corrections import Correction, OffPolicyTokens
from swarm.types import Rollout, Task, TaskRef

EXAMPLE_KIND, EXAMPLE_ENVIRONMENT, EXAMPLE_ADVANTAGE = "near_sums", "stones", "rank"
SECTIONS: dict[str, dict[str, Any]] = {
    "reasoning_gym": {"name": "chain_sum"},
    "jsonl": {"name": "mine", "path": "tasks.jsonl"},
    "dataset": {"name": "rows", "path": "tasks.jsonl"},
    "code": {"name": "list_functions"},
    "game": {"name": "guess_number"},
}
"""Sections of sources that need more than a name; `path` is a file of the test's."""
PARAMETERS: dict[str, dict[str, Any]] = {"format": {"tags": ["a"]}, "length": {"max_chars": 9, "buffer_chars": 3}}
"""Parameters of what has some without a default."""
HOSTILE_TEXTS = ("", " ", "7", "\ud800", "nan", "1e999999999", "__import__('os')", "(" * 9999, "٣", "9" * 100_000, "\0")
REGISTRIES: dict[str, Registry] = {name: one for name, one in vars(points).items() if isinstance(one, Registry)}


@pytest.mark.parametrize("registry", REGISTRIES.values(), ids=list(REGISTRIES))
def test_every_line_of_the_list_names_an_implementation_that_says_what_it_is(registry: Registry) -> None:
    for name in registry.names:
        made = registry.load(name)
        assert made.__doc__
        assert f"{name}: " in registry.summary


# --- advantages


@pytest.fixture(params=[*points.ADVANTAGES.names, EXAMPLE_ADVANTAGE])
def advantage(request: pytest.FixtureRequest, example_extension: Path) -> Advantage:
    made: Advantage = points.ADVANTAGES.make(request.param, PARAMETERS.get(request.param, {}), "")
    return made


def group_of(rewards: list[float]) -> GroupRewards:
    """With two signals, the rewards and their squares."""
    values = torch.tensor(rewards, dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    return GroupRewards(values, torch.stack([values, values**2]), weights, tuple((n,) for n in range(len(rewards))))


GROUPS = ([1.0, 0.0], [1.0, 0.0, 0.0, 0.5], [0.1] * 7 + [1.0], [0.0, 0.25, 0.5, 0.75, 1.0], [0.3, 0.3, 0.30000001])


@pytest.mark.parametrize("rewards", GROUPS)
def test_an_advantage_is_one_number_per_answer_and_prefers_better_answers(
    advantage: Advantage, rewards: list[float]
) -> None:
    values = advantage.of_batch(advantage.of_group(group_of(rewards)))
    kept = values[~values.isnan()]
    assert values.shape == (len(rewards),)
    assert len(kept) >= len(rewards) - 1, "one answer at most takes no part"
    assert torch.isfinite(kept).all() and kept.abs().max() < 20
    best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
    assert values[best] > values[worst] or values[[best, worst]].isnan().any()
    if advantage.is_centred:
        assert kept.sum().item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 1.0])
def test_equal_rewards_have_no_advantage(advantage: Advantage, reward: float) -> None:
    values = advantage.of_batch(advantage.of_group(group_of([reward] * 5)))
    assert values.nan_to_num(0.0).abs().max().item() < 1e-9


def test_the_order_of_siblings_does_not_matter(advantage: Advantage) -> None:
    group, order = group_of([0.0, 1.0, 0.5, 0.0, 0.25]), torch.tensor([3, 0, 4, 2, 1])
    tokens = tuple(group.token_ids[place] for place in order.tolist())
    other = GroupRewards(group.rewards[order], group.signals[:, order], group.signal_weights, tokens)
    assert torch.allclose(advantage.of_group(other), advantage.of_group(group)[order], rtol=1e-12, equal_nan=True)


# --- corrections


@pytest.fixture(params=points.CORRECTIONS.names)
def correction(request: pytest.FixtureRequest) -> tuple[str, Correction]:
    return request.param, points.CORRECTIONS.make(request.param, PARAMETERS.get(request.param, {}), "")


def off_policy(spread: float, seed: int = 0) -> OffPolicyTokens:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(6, 9, generator=generator) < 0.8).double()
    log_weights, to_sampler = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64) * spread * mask
    return OffPolicyTokens(log_weights, to_sampler, mask, torch.randn(6, 1, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_factors_of_a_correction_are_within_bounds(correction: tuple[str, Correction], spread: float) -> None:
    config, tokens = TrainingSection(correction_cap=2.0), off_policy(spread)
    factors = correction[1].factors(tokens, config)
    assert factors.shape == tokens.mask.shape
    assert torch.isfinite(factors).all()
    assert factors.min() >= 0 and factors.max() <= config.correction_cap
    weighs = points.CORRECTIONS.has_trait(correction[0], points.WEIGHS)
    assert weighs == (not set(factors[tokens.mask > 0].tolist()) <= {0.0, 1.0}), (
        "its line says whether it multiplies by w"
    )


def test_on_policy_tokens_are_not_corrected(correction: tuple[str, Correction]) -> None:
    assert correction[1].factors(off_policy(0.0), TrainingSection()).unique().tolist() == [1.0]


def test_what_is_masked_changes_no_factor_of_other_tokens(correction: tuple[str, Correction]) -> None:
    tokens, config = off_policy(1.0, seed=3), TrainingSection()
    log_weights, to_sampler, mask = (torch.nn.functional.pad(one, (0, 4)) for one in tokens[:3])
    wider = OffPolicyTokens(log_weights, to_sampler, mask, tokens.advantages)
    assert torch.equal(correction[1].factors(wider, config)[:, :9], correction[1].factors(tokens, config))


# --- task sources


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1, "verifier": "numeric"}) for n in range(20)]
    (made / "tasks.jsonl").write_text("\n".join(lines))
    return made


NEEDS = {"dataset": pytest.mark.extra("datasets")}


@pytest.fixture(
    params=[
        pytest.param(kind, marks=NEEDS.get(kind, ()))
        for kind in (*points.TASK_SOURCES.names, EXAMPLE_KIND, EXAMPLE_ENVIRONMENT)
    ]
)
def section(request: pytest.FixtureRequest, folder: Path, example_extension: Path) -> TaskSourceSection:
    facts = {"name": request.param, **SECTIONS.get(request.param, {}), "kind": request.param}
    return TaskSourceSection.model_validate(facts | ({"path": folder / facts["path"]} if "path" in facts else {}))


@pytest.fixture
def mixtures(section: TaskSourceSection) -> Iterator[tuple[TaskMixture, TaskMixture]]:
    """Two nodes that have the source."""
    made = TaskMixture(TasksSection(sources=(section,))), TaskMixture(TasksSection(sources=(section,)))
    yield made
    for one in made:
        one.close()


def test_a_task_source_keeps_its_contract(
    mixtures: tuple[TaskMixture, TaskMixture], section: TaskSourceSection
) -> None:
    here, there = mixtures
    source, name, stream = here.sources[section.source_name], section.source_name, training_seed("me", 0)
    assert owns_stream("me", stream) and 0 < source.num_held_out <= INDEX_SPAN
    for seed, index in ((stream, 0), (stream, 1), (stream, INDEX_SPAN - 1), (MAX_SEED, 5), (EVALUATION_SEED, 0)):
        task, right = source.task(seed, index), source.answer(seed, index)
        assert task.ref == TaskRef(name, source.config_digest, seed, index)
        again = there.rebuild(task.ref)
        assert again.prompt == task.prompt == source.task(seed, index).prompt
        assert 0 < len(task.prompt) <= MAX_TEXT_CHARS
        assert worth(task, right) == 1.0 or section.kind == EXAMPLE_ENVIRONMENT  # whose answers are moves
        for text in HOSTILE_TEXTS:
            assert 0 <= worth(task, text) <= 1 and worth(again, text) == worth(task, text)
    if section.kind != "game":  # it keeps its number to itself
        assert len({source.task(stream, index).prompt for index in range(9)}) > 1
    _check_hostile_references(here, TaskRef(name, source.config_digest, stream, 0))


def worth(task: Task, text: str) -> float:
    """The reward of one answer, where it ends the episode or not."""
    return scored(task, Rollout(text, (1,), (0.0,), finished=True, reward=0.0)).reward


def _check_hostile_references(mixture: TaskMixture, good: TaskRef) -> None:
    numbers: tuple[Any, ...] = (-1, MAX_SEED + 1, 1 << 70, 1.5, True, "1", None)
    bad = [TaskRef(good.source, good.config_digest, number, 0) for number in numbers]
    bad += [TaskRef(good.source, good.config_digest, good.seed, number) for number in numbers]
    bad += [TaskRef("os", good.config_digest, 16, 0), TaskRef(good.source, "0" * 16, 16, 0)]
    for ref in bad:
        with pytest.raises(UnknownTask):
            mixture.rebuild(ref)


def test_other_parameters_are_another_source_or_refused(section: TaskSourceSection) -> None:
    """Whoever misspells a parameter must not get the tasks of the default."""
    wrong = section.model_copy(update={"parameters": {"no_such_parameter": 1}})
    if section.kind in ("jsonl", EXAMPLE_ENVIRONMENT):
        return  # jsonl has no parameters, and a manifest refuses them
    with pytest.raises(SwarmError, match="no_such_parameter"):
        TaskMixture(TasksSection(sources=(wrong,)))


# --- tools


@pytest.fixture(scope="module", params=points.TOOLS.names)
def tool(request: pytest.FixtureRequest, folder: Path) -> Tool:
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("Seven is a number.")
    facts = {"name": "chain_sum", "tools": [{"name": request.param}], "search_folder": folder / "texts"}
    section = TaskSourceSection.model_validate(facts)
    (made,) = tools_of(section, TasksSection(sources=(section,)))
    return made


def test_a_tool_answers_or_says_why_not_and_the_same_each_time(tool: Tool) -> None:
    assert tool.name in points.TOOLS.names and tool.description.endswith(".") and tool.argument.isidentifier()
    assert isinstance(tool.rules, str) and tool.rules
    for text in HOSTILE_TEXTS:
        results: list[str] = []
        for _ in range(2):
            try:
                results.append(tool.run(text[:16_384]))
            except ToolError as error:
                results.append(f"error: {error}")
        assert results[0] == results[1] and len(results[0]) < 10_000


# --- verifiers and reward signals


@pytest.mark.parametrize("name", points.VERIFIERS.names)
@given(text=st.text(max_size=200) | st.sampled_from(HOSTILE_TEXTS))
@settings(max_examples=50, deadline=None)
def test_a_verifier_gives_any_text_the_same_reward_within_bounds(name: str, text: str) -> None:
    verifier: Verifier = points.VERIFIERS.load(name)
    verifier.check("12")
    assert verifier.isolation is not Isolation.PROCESS, "lines of files are scored in the node"
    try:
        assert 0 <= verifier.score("12", text) <= 1
        assert verifier.score("12", text) == verifier.score("12", text)
    except TaskFailure:  # processor time that may differ elsewhere
        assert verifier.isolation is Isolation.OWN_SANDBOX
    assert verifier.score("12", "12") == 1


@pytest.mark.parametrize("name", points.VERIFIERS.names)
def test_a_verifier_is_quick_whatever_the_text(name: str) -> None:
    verifier: Verifier = points.VERIFIERS.load(name)
    started = time.process_time()
    for text in ("1" * 10**6, "12 " * 10**6, "[" * 10**6, "\n" * 10**6, "x" * MAX_ANSWER_CHARS):
        verifier.score("12", text)
    assert time.process_time() - started < 1
    with pytest.raises(ValueError, match="at most"):
        verifier.check("1" * (MAX_ANSWER_CHARS + 1))


@pytest.mark.parametrize("name", points.REWARDS.names)
def test_a_reward_signal_values_any_text_within_bounds_and_quickly(name: str) -> None:
    signal: RewardSignal = points.REWARDS.make(name, PARAMETERS.get(name, {}), "")
    started = time.process_time()
    for text in (*HOSTILE_TEXTS, "<a>" * 10**5, "<a>1</a>", "x" * 10**6):
        assert 0 <= signal.value(text) <= 1 and signal.value(text) == signal.value(text)
    assert time.process_time() - started < 1
    with pytest.raises(SwarmError, match="no_such_parameter"):
        points.REWARDS.make(name, {"no_such_parameter": 1}, "")


def test_a_reward_of_a_package_is_part_of_the_reward(example_extension: Path, folder: Path) -> None:
    signals = [{"name": "correct", "weight": 3}, {"name": "few_words", "parameters": {"max_words": 1}}]
    facts = {"kind": "jsonl", "name": "mine", "path": folder / "tasks.jsonl", "signals": signals}
    mixture = TaskMixture(TasksSection(sources=(TaskSourceSection.model_validate(facts),)))
    task, right = mixture.sources["mine"].task(16, 0), mixture.sources["mine"].answer(16, 0)
    assert assess(task, right).reward == 1.0
    assert assess(task, f"it is {right}").reward == 0.75


# --- task choices


@pytest.mark.parametrize("name", points.TASK_CHOICES.names)
def test_a_task_choice_takes_every_source_in_time_and_the_same_for_the_same_seed(name: str) -> None:
    choice: TaskChoice = points.TASK_CHOICES.make(name, PARAMETERS.get(name, {}), "")
    weights = {"solved": 1.0, "open": 2.0, "hopeless": 1.0}
    table = DifficultyTable(weights, memory=0.9, default_tokens=9)
    for source, reward in (("solved", 1.0), ("open", 0.5), ("hopeless", 0.0)):
        table.observe(source, [reward] * 4, [5] * 4)
    before = table.state()

    def drawn(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [choice.choose(table, weights, rng) for _ in range(2000)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert set(drawn(1)) == set(weights), "no source is left out for good"
    assert table.state() == before, "it reads the difficulty, and the round writes it"
    assert math.isclose(sum(weights.values()), 4.0)
    assert choice.choose(table, {"open": 1.0}, random.Random(0)) == "open", "only sources that work are offered"

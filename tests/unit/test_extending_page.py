"""The examples of docs/extending.md run, are where their lines say, and keep the contracts of what they add.

That of the attack is beside the other attacks, in `test_attacks_experiment.py`.
"""

import random
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from swarm.config import TaskSourceSection, TasksSection, parse
from swarm.extensions import points
from swarm.extensions.registry import BuiltIn, Isolation, Registry
from swarm.tasks.environments.tool import ToolError
from swarm.tasks.final_answers import FinalAnswerRule, final_answer
from swarm.tasks.task_cursor import DifficultyTable
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import score
from swarm.training.advantages import Advantage
from swarm.training.corrections import Correction
from tests.unit.test_extension_contracts import group_of

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n    BuiltIn\(\"([^\"]+)\", \"([^\"]+)\", \"([^\"]+)\"", PAGE, re.S)


def load_examples(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """{name: implementation} of all examples, each loaded by its line."""
    found: dict[str, Any] = {}
    for code, name, target, summary in EXAMPLES:
        module = ModuleType(target.partition(":")[0])
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, f"docs/extending.md: {name}", "exec"), vars(module))
        registry = Registry("an example", [BuiltIn(name, target, summary)])
        found[name] = registry.load(name)
    return found


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return load_examples(monkeypatch)


def test_every_extension_point_has_a_worked_example_that_is_short() -> None:
    assert len(re.findall("```python", PAGE)) == len(EXAMPLES), "each is followed by its line"
    registries = {name for name, one in vars(points).items() if isinstance(one, Registry)}
    assert set(re.findall(r"^\| \[.*?\| `([A-Z_]+)`", PAGE, re.M)) <= registries
    assert {name for name in registries if f"`{name}`" in PAGE} == registries
    assert len(EXAMPLES) == len(registries)
    for code, name, _, _ in EXAMPLES:
        assert 8 <= len([line for line in code.splitlines() if line.strip()]) <= 35, name


def test_advantage_and_correction_keep_their_contracts(added: dict[str, Any]) -> None:
    advantage: Advantage = added["soft_rank"](added["soft_rank"].Parameters(scale=2.0))
    assert advantage.of_group(group_of([0.0, 1.0, 0.9])).tolist() == [-2.0, 2.0, 0.0]
    assert issubclass(added["faded"], Correction) and torch.is_tensor(torch.zeros(1))


def test_task_source_and_choice_keep_their_contracts(added: dict[str, Any]) -> None:
    assert added["doubling"].isolation is Isolation.PROCESS
    section = TaskSourceSection.model_construct(kind="doubling", name="twice", parameters={"largest": 9})
    source = added["doubling"](section, TasksSection())
    task = source.task(16, 3)
    assert score(task, source.answer(16, 3)) == 1.0 and score(task, "?") == 0.0
    assert source.task(16, 3).prompt == task.prompt != source.task(16, 4).prompt
    table = DifficultyTable(["solved", "open"], memory=0.9, default_tokens=9)
    table.observe("solved", [1.0] * 50, [1] * 50)
    rng = random.Random(0)
    drawn = [added["half_solved"]().choose(table, {"solved": 1.0, "open": 1.0}, rng) for _ in range(300)]
    assert 0 < drawn.count("solved") < 60


def test_a_tool_keeps_its_contract(added: dict[str, Any]) -> None:
    tool = added["count_letters"](added["count_letters"].Parameters(), None, None)
    assert tool.run("r, strawberry") == "3"
    with pytest.raises(ToolError, match="write a letter"):
        tool.run("strawberry")


def test_a_rule_for_final_answers_keeps_its_contract(added: dict[str, Any]) -> None:
    rule: FinalAnswerRule = added["after_mark"]()
    assert [final_answer(rule, text) for text in ("#### 1 #### 2", "####", "", "#" * 10**6)] == ["2", None, None, None]


def test_the_settings_of_the_package_work_where_it_is_installed(example_extension: Path) -> None:
    entry_points, settings = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    metadata = Path(__file__).parents[1] / "example_extension" / "pyproject.toml"
    project = tomllib.loads(metadata.read_text())["project"]
    assert tomllib.loads(entry_points)["project"]["entry-points"] == project["entry-points"]
    config = parse(tomllib.loads(settings))
    mixture = TaskMixture(config.tasks)
    task = mixture.sources["sums"].task(16, 0)
    assert score(task, mixture.sources["sums"].answer(16, 0)) == 1.0
    mixture.close()

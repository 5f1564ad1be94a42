"""The steps from which the reasoning policy learns: right without bad habits, and wrong in the ways that the habits say."""

import random
from collections.abc import Iterator

import pytest

from swarm.assets.reasoning_recipe import Habits, StepWriter
from swarm.config import REASONING_TASKS, TaskSourceSection, TasksSection
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import score
from swarm.types import Task

SUMS, PRODUCTS, CHAINS, SORTING, LEGS = REASONING_TASKS


@pytest.fixture(scope="module")
def mixture() -> Iterator[TaskMixture]:
    mixture = TaskMixture(TasksSection(sources=REASONING_TASKS))
    yield mixture
    mixture.close()


def tasks(mixture: TaskMixture, section: TaskSourceSection, count: int = 200) -> list[Task]:
    return [mixture.sources[section.source_name].task(7, index) for index in range(count)]


@pytest.mark.parametrize("section", REASONING_TASKS, ids=lambda section: section.source_name)
def test_steps_lead_to_the_right_answer(mixture: TaskMixture, section: TaskSourceSection) -> None:
    writer = StepWriter(random.Random(0))
    assert {score(task, writer.write(section.name, task.prompt)) for task in tasks(mixture, section)} == {1.0}


@pytest.mark.parametrize("section", REASONING_TASKS, ids=lambda section: section.source_name)
@pytest.mark.parametrize("habits", [Habits(slip=0.2), Habits(careless=1.0)], ids=["slip", "careless"])
def test_bad_habits_make_wrong_answers(mixture: TaskMixture, section: TaskSourceSection, habits: Habits) -> None:
    writer = StepWriter(random.Random(0), habits)
    wrong = sum(score(task, writer.write(section.name, task.prompt)) < 1 for task in tasks(mixture, section))
    assert 40 <= wrong <= 199


def test_an_answer_without_steps_has_an_answer_all_the_same() -> None:
    assert StepWriter(random.Random(0), Habits(skip=1.0)).write("chain_sum", "4 + 38 =") == (
        "<think></think><answer>42</answer>"
    )


@pytest.mark.parametrize(
    ("kind", "prompt", "steps", "answer"),
    [
        ("chain_sum", "7468 + 1791 =", "8+1=9→9\n6+9=15→59\n4+7+1=12→259\n7+1+1=9→9259", "9259"),
        ("chain_sum", "12 - 305 =", "12<305, so -(305-12)\n5-2=3→3\n0-1=-1→93\n3-0-1=2→293", "-293"),
        ("products", "47 * 3.", "47*3\n7*3=21→1\n4*3+2=14→41", "141"),
        ("basic_arithmetic", "Calculate 3 - ( 4 + 5 * 2 ).", "5*2=10→3-(4+10)\n4+10=14→3-14\n3-14=-11", "-11"),
        ("basic_arithmetic", "Calculate ( 4 ) - -2.", "4--2=6", "6"),
        ("number_sorting", "in descending order: 5.0, 80.0, 7.0", "80→5, 7\n7→5\n5", "[80, 7, 5]"),
        (
            "leg_counting",
            "if you have 2 crabs, 1 praying mantiss?",
            "crabs 10*2=20, 0+20=20\npraying mantiss 6*1=6, 20+6=26",
            "26",
        ),
    ],
)
def test_steps_as_written(kind: str, prompt: str, steps: str, answer: str) -> None:
    text = StepWriter(random.Random(0)).write(kind, prompt)
    assert text == f"<think>{steps}</think><answer>{answer}</answer>"


def test_a_prompt_of_another_form_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must match .* the data set has changed"):
        StepWriter(random.Random(0)).write("products", "What is three times four?")

"""The nine tasks of the SAPO paper (2509.08721, section 5), easy enough for a tiny policy, and the policy that begins on them.

Parameters were chosen before any arm was run: the easiest that reasoning-gym takes where the bundled policy otherwise never earns
anything. Still it earns .04 a sampled answer there, and that by luck. So the experiment begins from one that had lessons in them
and was made unsure again (`sapo/policy.py`); its RECIPE.json has what it was left with, task by task. Two of the nine stay out of
reach: programs of bf are too long to be traced in its head, and propositional_logic does not tell its answers, so there is
nothing to give lessons from.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from swarm.config import TaskSourceSection

NINE_TASKS = "nine-tasks"
"""Name of the policy made for them, as `policy.base` of the experiment."""
POLICY_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "sapo_policy"

Mix = Literal["shared", "split"]
"""shared: every node draws all nine alike, as in the paper's control. split: each node draws mostly three of them."""

SAPO_TASKS = (
    TaskSourceSection(
        name="base_conversion", parameters={"min_base": 2, "max_base": 16, "min_value": 0, "max_value": 15}
    ),
    TaskSourceSection(
        name="basic_arithmetic",
        parameters={
            "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1,
            "allow_parentheses": False, "allow_negation": False,
        },
    ),
    TaskSourceSection(name="arc_1d", parameters={"min_size": 8, "max_size": 8, "num_train": 1}),
    TaskSourceSection(name="bf", parameters={"difficulty": 1}),
    TaskSourceSection(
        name="propositional_logic",
        parameters={
            "min_vars": 2, "max_vars": 2, "min_statements": 1, "max_statements": 1,
            "min_complexity": 1, "max_complexity": 1,
        },
    ),
    TaskSourceSection(
        name="fraction_simplification",
        parameters={"min_value": 1, "max_value": 3, "min_factor": 2, "max_factor": 2, "styles": ["plain"]},
    ),
    TaskSourceSection(
        name="decimal_arithmetic",
        parameters={
            "min_num_decimal_places": 1, "max_num_decimal_places": 1, "min_terms": 2, "max_terms": 2, "precision": 3,
        },
    ),
    TaskSourceSection(name="calendar_arithmetic", parameters={"tasks": ["count_days"]}),
    TaskSourceSection(name="binary_matrix", parameters={"min_n": 1, "max_n": 2}),
)  # fmt: skip

_SPECIALITIES = 3
_OUTSIDE_WEIGHT = 0.1
"""Of a task outside a node's specialities, where 1 is one of them."""


def node_sources(mix: Mix, node: int) -> tuple[TaskSourceSection, ...]:
    """The sources of node number `node`. All nodes know all tasks, else they could not check each other's answers."""
    if mix == "shared":
        return SAPO_TASKS
    own = {(node + offset * 3) % len(SAPO_TASKS) for offset in range(_SPECIALITIES)}
    return tuple(
        task.model_copy(update={"weight": 1.0 if number in own else _OUTSIDE_WEIGHT})
        for number, task in enumerate(SAPO_TASKS)
    )


def task_names() -> Sequence[str]:
    return [task.source_name for task in SAPO_TASKS]

"""Rules that take the final answer out of a text: what they find, in which time, and what it is worth."""

import itertools
import json
import textwrap
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from swarm.admission.reward_verifier import RewardVerifier
from swarm.config import TaskSourceSection, TasksSection, parse
from swarm.errors import ConfigError, TaskError
from swarm.extensions.points import FINAL_ANSWERS
from swarm.tasks.final_answers import FinalAnswerRule, answer_rule, final_answer
from swarm.tasks.reasoning_gym_source import import_library
from swarm.tasks.sandboxed_verifier import SandboxedVerifier
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import TaskFailure, assess, prompt_digest, score
from swarm.types import Lineage, Rollout, RolloutGroup


def rule(name: str, **parameters: Any) -> FinalAnswerRule:
    return answer_rule(TaskSourceSection(name="gcd", answer=name, answer_parameters=parameters))


@pytest.mark.parametrize(
    ("name", "parameters", "text", "expected"),
    [
        ("whole", {}, " a\n", " a\n"),
        ("whole", {}, "", ""),
        ("last_line", {}, "so\n the answer \n\n \n", "the answer"),
        ("last_line", {}, " \n ", None),
        ("last_number", {}, "so the answer is 42", "42"),
        ("last_number", {}, "7 apples, or 1,000.5.", "1,000.5"),
        ("last_number", {}, "it is 3/4.", "3/4"),
        ("last_number", {}, "none", None),
        ("last_number", {}, "v7", None),
        ("tag", {}, "<think>because</think><answer>15</answer>", "15"),
        ("tag", {}, "<answer>1</answer> no, <answer>\n2 </answer>.", "2"),
        ("tag", {}, "<answer>1</answer> no, <answer>2", "1"),
        ("tag", {}, "<answer></answer>", None),
        ("tag", {}, "15</answer>", None),
        ("tag", {"tag": "final"}, "<answer>1</answer><final>2</final>", "2"),
        ("boxed", {}, r"so $\boxed{15}$", "15"),
        ("boxed", {}, r"\boxed{1} or \boxed {\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", {}, r"\boxed{a \boxed{b} c}", "b"),
        ("boxed", {}, r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", {}, r"\boxed{[1, 2\}}", r"[1, 2\}"),
        ("boxed", {}, r"\boxed{5} and \boxed{6", "5"),
        ("boxed", {}, r"\boxed{6", None),
        ("boxed", {}, r"}} \boxed{7}", "7"),
        ("boxed", {}, "boxed{7}", None),
        ("boxed", {}, r"\boxed{}", None),
        ("after_think", {}, "<think>a</think> b</think>\nc ", "c"),
        ("after_think", {}, "</think> \n", None),
        ("after_think", {}, "c", None),
        ("pattern", {"pattern": r"#### (-?[0-9.,]+)"}, "#### 1 no #### 42\n", "42"),
        ("pattern", {"pattern": r"(?i)the ANSWER is (.+)"}, "The answer is 4\nthe answer is 42\n", "42"),
        ("pattern", {"pattern": r"(?m)^A: (.*)$"}, "A: 1\nA: 2\nB: 3", "2"),
        ("pattern", {"pattern": r"a(b)?"}, "ab a", None),
        ("pattern", {"pattern": r"(x)|y"}, "none", None),
        ("pattern", {"pattern": r"(.)"}, "\ud800", None),
    ],
)
def test_what_a_rule_finds(name: str, parameters: dict[str, Any], text: str, expected: str | None) -> None:
    assert final_answer(rule(name, **parameters), text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<answer> 5 </answer>",
        "<answer><answer>5</answer></answer>",
        "<answer>1</answer><answer>2</answer>",
        "<answer>1</answer><answer>2",
        "</answer><answer>\n\n3</answer>",
        "5",
        "<answer>a\nb</answer>",
    ],
)
def test_tags_are_read_as_reasoning_gym_reads_them(text: str) -> None:
    assert rule("tag").find(text) == import_library().utils.extract_answer(text)


_MIB = 1 << 20
_HOSTILE = {
    "boxed": ["\\boxed{" * (_MIB // 7), "\\boxed{" * (_MIB // 8) + "}" * (_MIB // 8), "\\boxed   " * (_MIB // 9), "{}" * _MIB],
    "tag": ["<answer>" * (_MIB // 8), "</answer>" * (_MIB // 9), "<answer></answer>" * (_MIB // 17)],
    "last_number": ["1," * (_MIB // 2), "<" * _MIB + "1", "1" * _MIB],
    "last_line": ["\n" * _MIB, " \n" * (_MIB // 2)],
    "after_think": ["</think>" * (_MIB // 8)],
    "pattern": ["a" * _MIB, "ab" * (_MIB // 2), "a\n" * (_MIB // 2)],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(FINAL_ANSWERS.names) - {"whole"}))
def test_a_long_text_costs_time_in_proportion(name: str) -> None:
    found = rule(name, **({"pattern": "a(a|b)*(?:c|$)"} if name == "pattern" else {}))
    for text in (*_HOSTILE[name], "x" * _MIB):
        started = time.process_time()
        final_answer(found, text)
        assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("name", "parameters", "told"),
    [
        ("pattern", {}, "pattern: Field required"),
        ("pattern", {"pattern": "("}, "valid pattern of RE2"),
        ("pattern", {"pattern": r"(a)\1"}, "valid pattern of RE2"),
        ("pattern", {"pattern": "a"}, "exactly one group, got 0"),
        ("pattern", {"pattern": "(a)(b)"}, "exactly one group, got 2"),
        ("pattern", {"pattern": r"(a)\Qb"}, "valid pattern of RE2"),
        ("pattern", {"pattern": "a)|(b"}, "valid pattern of RE2"),
        ("tag", {"tag": "<a>"}, "tag:"),
        ("boxed", {"tag": "a"}, "takes no parameters"),
        ("whole", {"tag": "a"}, "takes no parameters"),
    ],
)
def test_wrong_parameters_are_reported_with_the_setting(name: str, parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError) as caught:
        TaskMixture(TasksSection(sources=(TaskSourceSection(name="gcd", answer=name, answer_parameters=parameters),)))
    assert told in str(caught.value) and "answer_parameters of 'gcd'" in str(caught.value)


def test_an_unknown_rule_is_one_mistake_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"tasks": {"sources": [{"name": "gcd", "answer": "taag"}]}})
    assert "set tasks.sources.0.answer to 'tag'" in str(caught.value) and "at least 1 item" not in str(caught.value)


def products(**settings: Any) -> TaskSourceSection:
    return TaskSourceSection.model_validate({"name": "products", **settings})


DOCUMENTED = {
    "answer": "tag",
    "signals": [
        {"name": "correct", "weight": 8},
        {"name": "format", "weight": 1, "parameters": {"tags": ["think", "answer"]}},
        {"name": "length", "weight": 1, "parameters": {"max_tokens": 40, "buffer_tokens": 10}},
    ],
}


def test_the_documented_think_and_answer_form_earns_the_full_reward() -> None:
    source = TaskMixture(TasksSection(sources=(products(**DOCUMENTED),))).sources["products"]
    task, right = source.task(16, 0), source.answer(16, 0)
    tagged = f"<think>because</think><answer>{right}</answer>"
    assert assess(task, tagged, 30).reward == pytest.approx(1.0)
    assert assess(task, tagged, 35).signals == (("correct", 1.0), ("format", 1.0), ("length", 0.5))
    assert assess(task, "x" * 10**6 + tagged, 30).signals == (("correct", 1.0), ("format", 0.0), ("length", 1.0))
    assert assess(task, right, 30).signals == (("correct", 0.0), ("format", 0.0), ("length", 1.0)), "no tag, no answer"
    with pytest.raises(TaskFailure, match="measured in tokens"):
        assess(task, tagged)


def test_the_example_of_several_signals_is_what_it_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    section = page.split("## Several signals\n\n", 1)[1]
    lines = itertools.takewhile(lambda line: not line or line.startswith("    "), section.splitlines())
    config = parse(tomllib.loads(textwrap.dedent("\n".join(lines))))
    source = TaskMixture(config.tasks).sources["chain_sum"]
    right = source.answer(16, 0)
    assert score(source.task(16, 0), f"<think>because</think><answer>{right}</answer>") == pytest.approx(1.0)
    assert score(source.task(16, 0), right) == pytest.approx(0.1), "short, and no more"


def test_a_text_may_be_long_and_its_answer_may_not(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"prompt": "p", "answer": "7"}) for _ in range(4)))
    config = TaskSourceSection(
        kind="jsonl", name="mine", path=tmp_path / "t.jsonl", verifier="numeric", answer="last_line"
    )
    task = TaskMixture(TasksSection(sources=(config,))).sources["mine"].task(16, 0)
    assert score(task, "long " * 10_000 + "\n it is 7") == 1.0
    assert score(task, "\n" + "long " * 1_000 + "it is 7") == 0.0, "over 4096 characters in the last line"


def test_code_after_reasoning_with_an_open_fence_is_found() -> None:
    section = TaskSourceSection(kind="code", name="list_functions", answer="after_think")
    source = TaskMixture(TasksSection(sources=(section,), run_code_unsandboxed=True)).sources["list_functions"]
    task, right = source.task(20, 0), source.answer(20, 0)
    assert assess(task, f"<think>```\nfoo</think>\n```python\n{right}```").reward == 1.0
    assert task.verify(right) == {"correct": 0.0, "tests": 0.0}, "no </think>: no answer"


def test_a_receiver_computes_the_same_in_its_process() -> None:
    config = TasksSection(sources=(products(**DOCUMENTED, prompt_template="{question}?"),))
    mixture, fence = TaskMixture(config), SandboxedVerifier(config)
    try:
        task = mixture.sources["products"].task(99, 0)
        right = mixture.sources["products"].answer(99, 0)
        texts = [f"<think>a</think><answer>{right}</answer>", right, ""]
        lengths = (30, 38, 41)
        rollouts = tuple(
            Rollout(text, (5,) * num, (-1.0,) * num, True, assess(task, text, num).reward)
            for text, num in zip(texts, lengths, strict=True)
        )
        group = RolloutGroup(task.ref, prompt_digest(task.prompt), rollouts, "alice", Lineage("1" * 32, "2" * 32), 1)
        expected = tuple(rollout.reward for rollout in rollouts)
        assert expected == pytest.approx((1.0, 0.02, 0.0))
        assert RewardVerifier(mixture, sandboxed=fence).rewards(group) == expected
        assert RewardVerifier(mixture, sandboxed=None).rewards(group) == expected
    finally:
        fence.close()
        mixture.close()

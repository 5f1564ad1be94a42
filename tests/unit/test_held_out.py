"""Held out means held out: no training draw, no admitted record and no example has a prompt of evaluation."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.admission.reward_verifier import RewardVerifier
from swarm.cli.swarm.create import manifest_content
from swarm.config import TaskSourceSection, TasksSection, parse
from swarm.errors import ConfigError, ManifestError
from swarm.manifest import manifest
from swarm.manifest.joining import compose
from swarm.records.codec import PROTOCOL_VERSION
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.tasks.held_out import HeldOut, repeated
from swarm.tasks.task_cursor import TaskCursor
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.tasks.task_source import EVALUATION_SEED, INDEX_SPAN, TaskFailure, prompt_digest
from swarm.types import Lineage, Rollout, RolloutGroup, Task, TaskRef

FEW = TaskSourceSection(name="products", parameters={"min_digits": 1, "max_digits": 1})
MANY = TaskSourceSection(name="chain_sum", parameters={"min_terms": 3, "max_terms": 3})
GAME = TaskSourceSection(kind="game", name="guess_number", parameters={"highest": 9})


def mixture_of(*sources: TaskSourceSection, **settings: Any) -> TaskMixture:
    return TaskMixture(TasksSection(sources=sources, **settings))


class Numbered:
    """A source with so many different prompts; what is drawn is counted."""

    name, config_digest = "numbered", "0" * 16

    def __init__(self, num_prompts: int, num_held_out: int = INDEX_SPAN) -> None:
        self.num_held_out, self.num_drawn = num_held_out, 0
        self._num_prompts = num_prompts

    def task(self, seed: int, index: int) -> Task:
        self.num_drawn += 1
        prompt = random.Random(f"{seed}/{index}").randrange(self._num_prompts)
        return Task(TaskRef(self.name, self.config_digest, seed, index), f"prompt {prompt}", float)

    def answer(self, seed: int, index: int) -> str:
        raise TaskFailure(self.name, "none")


def rule(source: Numbered, share: float = 1 / 16) -> HeldOut:
    return HeldOut(source, share, lambda failure: None)


def test_training_and_evaluation_have_no_prompt_in_common() -> None:
    mixture = mixture_of(FEW, MANY)
    held_out = {task.prompt for task in mixture.held_out(32)}
    cursor = TaskCursor(mixture, training_seed("peer", 0), random.Random(0))
    drawn = {task.prompt for task in cursor.draw(1500)}
    assert len(held_out) > 32 and len(drawn) > 700
    assert not held_out & drawn


def test_without_a_share_they_have() -> None:
    mixture = mixture_of(FEW, held_out_share=0)
    held_out = mixture.held_out(32)
    cursor = TaskCursor(mixture, training_seed("peer", 0), random.Random(0))
    assert [task.ref.index for task in held_out] == list(range(32)), (
        "the beginning of the stream, as older software has it"
    )
    assert {task.prompt for task in held_out} <= {task.prompt for task in cursor.draw(1500)}


def test_a_sixteenth_of_many_prompts_is_held_out_and_every_node_holds_out_the_same() -> None:
    source = Numbered(100_000)
    held = [rule(source).holds(prompt_digest(f"prompt {number}")) for number in range(4000)]
    assert 200 < sum(held) < 300
    tasks = rule(source).tasks(32)
    assert [task.ref for task in tasks] == [task.ref for task in rule(Numbered(100_000)).tasks(32)]
    assert len({task.prompt for task in tasks}) == 32 and all(task.ref.seed == EVALUATION_SEED for task in tasks)


def test_a_single_task_is_found_where_there_are_many_prompts() -> None:
    assert all(len(rule(Numbered(100_000 + number)).tasks(1)) == 1 for number in range(50))


def test_a_source_with_few_prompts_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    source = Numbered(60)
    tasks = rule(source).tasks(32)
    assert 1 <= len(tasks) < 10 and len({task.prompt for task in tasks}) == len(tasks)
    assert (
        f"numbered has 60 different prompts in {source.num_drawn - 16} tasks, and {len(tasks)} of them held out"
        in caplog.text
    )
    assert source.num_drawn < 3000, "the search gives up"


def test_a_share_for_which_evaluation_would_search_for_hours_is_refused() -> None:
    for share in (1e-9, 0.015, 0.3, -0.1):
        with pytest.raises(ConfigError, match="held_out_share"):
            parse({"tasks": {"held_out_share": share}})
        with pytest.raises(ManifestError, match="held_out_share"):
            manifest.create(
                Identity(bytes(32)),
                "friends",
                PROTOCOL_VERSION,
                1.8e9,
                **manifest_content(parse({})) | {"held_out_share": share},
            )
    source = Numbered(10**9)
    assert len(rule(source, 1 / 64).tasks(32)) == 32 and source.num_drawn < 4 * 64 * 32


def test_a_source_that_always_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    mixture = mixture_of(MANY)

    class Failing(Numbered):
        def task(self, seed: int, index: int) -> Task:
            self.num_drawn += 1
            raise TaskFailure("chain_sum", "never")

    failing = Failing(1)
    mixture._held_out["chain_sum"] = HeldOut(failing, 1 / 64, mixture._leave_out)
    assert mixture.held_out(32) == [] and failing.num_drawn <= 4 * 64 * 32 + 16
    assert mixture.held_out_failures["chain_sum"] == failing.num_drawn and caplog.text.count("never") == 1


def test_a_source_of_which_nothing_can_be_held_out_is_not_evaluated(caplog: pytest.LogCaptureFixture) -> None:
    (digest,) = {prompt_digest(task.prompt) for task in [Numbered(1).task(0, 0)]}
    assert rule(Numbered(2), 1 / 64).tasks(8) == ()
    assert "has 2 different prompts" in caplog.text and "none of them held out" in caplog.text
    assert "it is not evaluated" in caplog.text
    assert not rule(Numbered(1), 0.25).holds(digest)


def test_tasks_with_one_prompt_are_trained_on_and_evaluated_by_their_streams(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    mixture = mixture_of(GAME, held_out_share=0.25)
    assert len(mixture.held_out(12)) == 12
    assert "source guess_number has one prompt for all tasks" in caplog.text
    assert not any(mixture.is_held_out(task) for task in mixture.held_out(12))
    assert len(TaskCursor(mixture, 99, random.Random(0)).draw(20)) == 20


def test_held_out_rows_of_a_file_are_not_trained_on_where_they_occur_twice(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    prompts = [
        f"question {number // 2}" for number in range(40)
    ]  # each twice, so every held-out one is a training row, too
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    mixture = mixture_of(TaskSourceSection(kind="jsonl", name="mine", path=path))
    held_out = {task.prompt for task in mixture.held_out(100)}
    drawn = {task.prompt for task in TaskCursor(mixture, 99, random.Random(0)).draw(200)}
    assert held_out == {"question 0", "question 5", "question 10", "question 15"}
    assert drawn == {f"question {number}" for number in range(20)} - held_out


def test_a_source_whose_prompts_are_all_held_out_is_left_out_with_the_reason(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "tasks.jsonl"
    prompts = ["one", "two"] * 10 + ["one"] * 20  # the rows 0, 10, 20 and 30 are held out
    prompts[10] = "two"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    mixture = mixture_of(TaskSourceSection(kind="jsonl", name="mine", path=path), MANY)
    tasks = TaskCursor(mixture, 99, random.Random(0)).draw(60)
    assert {task.ref.source for task in tasks} == {"chain_sum"}
    assert "100 tasks in a row are held out" in caplog.text


def test_a_file_with_one_prompt_is_trained_on_and_evaluated(tmp_path: Path) -> None:
    """As with a reward function that judges the style of any answer."""
    path = tmp_path / "tasks.jsonl"
    path.write_text((json.dumps({"prompt": "Write a haiku.", "answer": "1"}) + "\n") * 20)
    mixture = mixture_of(TaskSourceSection(kind="jsonl", name="mine", path=path))
    assert len(mixture.held_out(2)) == len(TaskCursor(mixture, 99, random.Random(0)).draw(2)) == 2


def test_few_tasks_are_answered_several_times() -> None:
    mixture = mixture_of(FEW, MANY)
    tasks = mixture.held_out(32)
    few = [task for task in tasks if task.ref.source == "products"]
    answered = [task.ref for task in repeated(tasks, 32)]
    assert 1 < len(few) < 16 and 16 < sum(ref.source == "products" for ref in answered) <= 32
    assert [ref for ref in answered if ref.source == "chain_sum"] == [
        t.ref for t in tasks if t.ref.source == "chain_sum"
    ]
    assert {*answered} == {task.ref for task in tasks} and repeated([], 4) == []


def group_of(task: Task) -> RolloutGroup:
    rollout = Rollout(text="1", token_ids=(1,), logprobs=(0.0,), reward=0.0, finished=True)
    return RolloutGroup(
        task=task.ref, author="a", lineage=Lineage("p", "t"), policy_version=0, rollouts=(rollout, rollout),
        prompt_digest=prompt_digest(task.prompt),
    )  # fmt: skip


def test_no_record_of_a_held_out_prompt_is_admitted() -> None:
    mixture = mixture_of(FEW)
    source = mixture.sources["products"]
    stream = [source.task(training_seed("stranger", 0), index) for index in range(200)]
    held, others = [[task for task in stream if mixture.is_held_out(task) is wanted] for wanted in (True, False)]
    verifier = RewardVerifier(mixture, sandboxed=None)
    assert held and len(verifier.rewards(group_of(others[0]))) == 2
    for task in held:
        with pytest.raises(InvalidRecord) as refusal:
            verifier.rewards(group_of(task))
        assert refusal.value.reason is Rejection.HELD_OUT_TASK
    # nor under the name of another prompt
    with pytest.raises(InvalidRecord) as refusal:
        verifier.rewards(replace(group_of(held[0]), prompt_digest=prompt_digest(others[0].prompt)))
    assert refusal.value.reason is Rejection.TASK_MISMATCH


def test_settings_that_were_joined_before_hold_nothing_out() -> None:
    """A manifest of older software says nothing of prompts, and its other members publish records about all of them."""
    assert parse({"tasks": {"sandboxed": True}}).tasks.held_out_share == 0
    assert parse({"tasks": {"sandboxed": True, "held_out_share": 0.125}}).tasks.held_out_share == 0.125
    assert parse({}).tasks.held_out_share == 1 / 16


def test_the_manifest_states_the_share_and_an_older_one_means_none() -> None:
    content = manifest_content(parse({"tasks": {"held_out_share": 0.125}})) | {"bases": ["bundled"]}
    founder = Identity(bytes(32))
    for stated, share in ((content, 0.125), ({k: v for k, v in content.items() if k != "held_out_share"}, 0.0)):
        made = manifest.parse(
            manifest.dump(manifest.create(founder, "friends", PROTOCOL_VERSION, 1.8e9, **stated), founder).encode()
        )
        assert compose(made, {}, {"swarm": {"name": "friends"}}, {}).tasks.held_out_share == share
    later = manifest.changed(made, held_out_share=0.2)
    assert manifest.changes(made, later) == ["held_out_share: not set → 0.2"]


def test_the_rule_of_several_threads_is_one() -> None:
    source = Numbered(1000)
    one = rule(source)
    assert all(one.tasks(count) == one.tasks(count) for count in itertools.chain(range(1, 5), range(1, 5)))

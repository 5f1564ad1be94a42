"""Answers of strangers are scored in a process that can be stopped; nothing that they make it do reaches the node."""

import json
import os
import threading
import time
from dataclasses import replace
from importlib import invalidate_caches
from pathlib import Path
from queue import Queue

import psutil
import pytest

from swarm.admission.reward_verifier import RewardVerifier, VerificationBudget
from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.tasks import sandboxed_verifier as fenced_verifier
from swarm.tasks.sandboxed_verifier import Overrun, SandboxedVerifier
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.tasks.task_source import TaskFailure, UnknownTask, prompt_digest, score
from swarm.types import Lineage, Rollout, RolloutGroup, TaskRef
from tests.unit.test_reward_plugins import install

SUMS = TasksSection(sources=(TaskSourceSection(name="chain_sum"),))
SEED = training_seed("alice", 0)
SPOILED = """
from swarm.tasks.reasoning_gym_source import import_data_sets
import_data_sets(["chain_sum"])
import reasoning_gym.arithmetic.chain_sum as sums

def score_answer(self, answer, entry):
    while answer == "hang":
        pass
    if answer == "eat":
        return float(len(bytearray(64 << 30)))
    if answer == "die":
        import os
        os._exit(3)
    return float(answer == entry["answer"])

sums.ChainSumDataset.score_answer = score_answer
"""
"""Read by every Python that starts with its folder on the path."""


@pytest.fixture
def spoiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOILED, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def ref_of(mixture: TaskMixture, index: int = 0) -> TaskRef:
    return TaskRef("chain_sum", mixture.sources["chain_sum"].config_digest, SEED, index)


def group_of(mixture: TaskMixture, *texts: str) -> RolloutGroup:
    ref = ref_of(mixture)
    rollouts = tuple(Rollout(text, (1,), (-1.0,), True, 0.0) for text in texts)
    return RolloutGroup(ref, prompt_digest(mixture.rebuild(ref).prompt), rollouts, "alice", Lineage("a", "b"), 0)


def test_it_scores_as_the_node_itself_does_and_knows_the_same_tasks() -> None:
    signals = TaskSourceSection.model_validate(
        {"name": "spell_backward", "signals": [{"name": "correct"}, {"name": "length", "parameters": {"max_chars": 9}}]}
    )
    config = TasksSection(sources=(SUMS.sources[0], signals))
    mixture, fence = TaskMixture(config), SandboxedVerifier(config)
    for source in mixture.sources.values():
        for index in range(3):
            ref = TaskRef(source.name, source.config_digest, SEED, index)
            task = mixture.rebuild(ref)
            texts = [source.answer(SEED, index), "7", "", "no\u2028number\N{SNOWMAN}", "9" * 20_000]
            assert fence.rewards(ref, texts) == (prompt_digest(task.prompt), tuple(score(task, t) for t in texts))
    with pytest.raises(UnknownTask):
        fence.rewards(replace(ref, index=2**21), ["7"])


@pytest.mark.usefixtures("spoiled")
def test_a_verifier_that_hangs_eats_memory_or_dies_costs_its_group_and_the_next_is_scored() -> None:
    mixture, fence = TaskMixture(SUMS), SandboxedVerifier(SUMS, time_budget_s=1.0)
    ref, right = ref_of(mixture), mixture.sources["chain_sum"].answer(SEED, 0)
    before = psutil.Process().memory_info().rss
    with pytest.raises(Overrun, match="MemoryError"):
        fence.rewards(ref, ["eat"])
    assert fence.rewards(ref, [right])[1] == (1.0,), "by a new process"
    with pytest.raises(Overrun, match="took longer"):
        fence.rewards(ref, ["7", "hang"])
    with pytest.raises(Overrun, match="ended with"):
        fence.rewards(ref, ["die"])
    assert fence.rewards(ref, ["7", right])[1] == (0.0, 1.0), "as does a new one"
    assert psutil.Process().memory_info().rss - before < 100 << 20


@pytest.mark.usefixtures("spoiled")
@pytest.mark.parametrize("text", ["hang", "eat", "die"])
def test_the_judge_blames_the_author_for_a_text_that_spoils_its_verifier(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it alone: the time until there is a new process is the time of that author."""
    mixture = TaskMixture(SUMS)
    judge = RewardVerifier(mixture, sandboxed=SandboxedVerifier(SUMS, time_budget_s=1.0))
    right = mixture.sources["chain_sum"].answer(SEED, 0)
    assert judge.rewards(group_of(mixture, right, "7")) == (1.0, 0.0)
    spent_s: dict[str, float] = {}
    monkeypatch.setattr(judge._budget, "spend", spent_s.__setitem__)
    with pytest.raises(InvalidRecord) as caught:
        judge.rewards(group_of(mixture, text, "7"))
    assert caught.value.reason is Rejection.TOO_SLOW
    assert judge.rewards(replace(group_of(mixture, right, "7"), author="bob")) == (1.0, 0.0)
    assert spent_s["bob"] < 0.5 * spent_s["alice"]
    with pytest.raises(InvalidRecord) as caught:
        judge.rewards(replace(group_of(mixture, right, "7"), prompt_digest="f" * 16))
    assert caught.value.reason is Rejection.TASK_MISMATCH


def test_the_process_ends_with_the_fence_and_is_not_started_without_need(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n', encoding="utf-8")
    config = TasksSection(sources=(TaskSourceSection(kind="jsonl", name="mine", path=path), SUMS.sources[0]))
    fence = SandboxedVerifier(config)
    assert not fence.holds("mine") and fence.holds("chain_sum")
    children = set(psutil.Process(os.getpid()).children())
    fence.rewards(ref_of(TaskMixture(SUMS)), ["7"])
    (keeper,) = set(psutil.Process(os.getpid()).children()) - children
    (service,) = keeper.children()
    assert keeper.memory_info().rss < 32 << 20 and service.memory_info().rss < 300 << 20
    assert os.getpgid(keeper.pid) != os.getpgid(0), "Ctrl-C is for the node"
    fence.close()
    assert not keeper.is_running()
    service.wait(10)
    with pytest.raises(TaskFailure, match="closed"):
        fence.rewards(ref_of(TaskMixture(SUMS)), ["7"])


@pytest.mark.usefixtures("spoiled")
def test_beside_reward_functions_of_packages_the_verifier_is_sandboxed_too(tmp_path: Path) -> None:
    """The node itself never runs it, for its own answers neither."""
    install(tmp_path)
    invalidate_caches()
    section = TaskSourceSection.model_validate(
        {"name": "chain_sum", "signals": [{"name": "correct"}, {"name": "politeness"}]}
    )
    mixture = TaskMixture(TasksSection(sources=(section,)))
    task, right = mixture.sources["chain_sum"].task(SEED, 0), mixture.sources["chain_sum"].answer(SEED, 0)
    assert score(task, right) == 0.5
    with pytest.raises(TaskFailure, match="MemoryError"):
        score(task, "eat")
    assert score(task, right) == 0.5


@pytest.mark.parametrize(
    "reply",
    [
        "{}",
        '{"prompt_digest": "x", "rewards": []}',
        '{"prompt_digest": "x", "rewards": [NaN]}',
        '{"prompt_digest": "x", "rewards": [1e999]}',
        '{"prompt_digest": "x", "rewards": ["1"]}',
        '{"prompt_digest": "x", "rewards": [true]}',
        '{"prompt_digest": "x", "rewards": {"0": 1}}',
        '{"prompt_digest": 5, "rewards": [1]}',
    ],
)
def test_what_the_process_says_is_checked_like_a_strangers_word(reply: str) -> None:
    """A text that has taken over the process may let it say anything."""
    ref = TaskRef("chain_sum", "0" * 16, SEED, 0)
    with pytest.raises(TaskFailure, match="verifier process: "):
        fenced_verifier._checked(ref, json.loads(reply), 1)


@pytest.mark.parametrize(
    "reply",
    [{}, {"prompts": []}, {"prompts": [1]}, {"prompts": ["a", "b", "c"]}, {"prompts": ["a" * 65_537]}, {"answer": 7}],
)
def test_prompts_and_answers_of_the_process_are_checked_too(
    reply: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, ref = SandboxedVerifier(SUMS), TaskRef("chain_sum", "0" * 16, SEED, 0)
    monkeypatch.setattr(fence._processes["chain_sum"][0], "ask", lambda question, time_budget_s: reply)
    with pytest.raises(TaskFailure, match="verifier process: a reply must have"):
        fence.prompts(ref, 2)
    with pytest.raises(TaskFailure, match="verifier process: a reply must have"):
        fence.answer(ref)
    with pytest.raises(TaskError, match="gave no answer"):
        fence.open("chain_sum")


def test_a_kind_of_source_that_nobody_has_listed_as_bounded_is_sandboxed() -> None:
    section = SUMS.sources[0].model_copy(update={"kind": "new"})
    assert SandboxedVerifier(TasksSection.model_construct(sources=(section,))).holds("chain_sum")


@pytest.mark.usefixtures("spoiled")
def test_closing_ends_an_answer_at_once_and_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fence, mixture, outcome = SandboxedVerifier(SUMS, time_budget_s=60.0), TaskMixture(SUMS), Queue[Exception | None]()
    fence.rewards(ref_of(mixture), ["7"])

    def ask() -> None:
        try:
            fence.rewards(ref_of(mixture), ["hang"])
        except TaskFailure as failure:
            outcome.put(failure)

    asking = threading.Thread(target=ask)
    asking.start()
    (child,) = psutil.Process(fence._processes["chain_sum"][0]._process.pid).children()  # type: ignore[union-attr]
    before = child.cpu_times().user
    while child.cpu_times().user - before < 0.2:  # it sends no event when it hangs
        time.sleep(0.02)
    fence.close()
    assert isinstance(outcome.get(timeout=10), TaskFailure)
    asking.join()
    with pytest.raises(TaskFailure, match="closed"):
        fence.rewards(ref_of(mixture), ["7"])
    assert not caplog.records


def test_it_can_be_started_before_the_first_question() -> None:
    fence = SandboxedVerifier(SUMS)
    fence.start()
    process = fence._processes["chain_sum"][0]._process
    assert process is not None and process.poll() is None
    mixture = TaskMixture(SUMS)
    assert fence.rewards(ref_of(mixture), [mixture.sources["chain_sum"].answer(SEED, 0)])[1] == (1.0,)
    assert fence._processes["chain_sum"][0]._process is process
    fence.close()
    fence.start()
    assert process.poll() is not None and fence._processes["chain_sum"][0]._process is None


def test_an_author_does_not_pay_for_waiting_for_others_or_for_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now, has_begun, charged = [0.0], threading.Event(), []

    def clock() -> float:
        has_begun.set()
        return now[0]

    monkeypatch.setattr(VerificationBudget, "spend", lambda self, author, duration_s: charged.append(duration_s))
    mixture, sandboxed = TaskMixture(SUMS), SandboxedVerifier(SUMS)
    verifier = RewardVerifier(mixture, clock, sandboxed=sandboxed)
    group = group_of(mixture, "1")
    has_begun.clear()
    asking = threading.Thread(target=verifier.rewards, args=(group,))
    with sandboxed.reserved("chain_sum"):
        asking.start()
        assert has_begun.wait(60)
        now[0] = 100.0
    asking.join()
    sandboxed.close()
    assert charged == [0.0]

"""Episodes of several turns: sampled, sent, replayed by a reader, and trained on."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarm.admission.admission import Admission
from swarm.admission.reward_verifier import RewardVerifier
from swarm.config import (
    PolicySection,
    RolloutsSection,
    SharingSection,
    TaskSourceSection,
    TasksSection,
    TrainingSection,
)
from swarm.engine import slot_run
from swarm.engine.engine import AnswerRequest, Completion, Engine, converse
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.engine.transformers_engine import TransformersEngine
from swarm.errors import ConfigError, TaskError
from swarm.extensions.points import ADVANTAGES
from swarm.node.policy_backend import vocabulary_of
from swarm.policy.policy import Policy, load_policy
from swarm.records.codec import encode_body
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.rollouts.worker import RolloutWorker
from swarm.tasks.environments.episodes import Play, check_repeatable, replayed, scored, with_scores
from swarm.tasks.sandboxed_verifier import Overrun, SandboxedVerifier
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import ForgedEpisode, TaskFailure, prompt_digest
from swarm.training.advantages import Advantage, GroupRewards, batch_advantages, turn_advantages
from swarm.training.experience import RolloutConverter, TrainingGroup
from swarm.training.micro_batch import micro_batches, training_sequences
from swarm.types import Lineage, Rollout, RolloutGroup, Step, Task, TaskRef, Turn
from tests.unit.experience_factory import ALICE, context_of, header_of

GAME = TaskSourceSection(kind="game", name="guess_number", parameters={"highest": 9, "max_turns": 4})
TOOLS = TaskSourceSection(
    name="chain_sum",
    label="sums",
    parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    tools=({"name": "calculator"},),  # type: ignore[arg-type]
    max_turns=3,
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(PolicySection(), device="cpu")


@pytest.fixture(scope="module")
def mixture() -> TaskMixture:
    return TaskMixture(TasksSection(sources=(GAME, TOOLS)))


@pytest.fixture(scope="module")
def group(policy: Policy, mixture: TaskMixture) -> RolloutGroup:
    """Six games of the bundled policy, which does not know how to play."""
    config = RolloutsSection(group_size=6, max_new_tokens=120)
    worker = RolloutWorker(config, policy, make_engine(policy, config), author=ALICE.peer_id)
    (sampled,) = worker.rollout([mixture.sources["guess_number"].task(77, 1)], seed=3).groups
    return sampled


class Scripted:
    """An environment that says `replies` in turn, and then gives a reward."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)

    def step(self, answer: str) -> Step:
        return Step(self._replies.pop(0), 0.0, is_done=False) if self._replies else Step("", 1.0, is_done=True)


def scripted(*replies: str, number: int = 0) -> Task:
    ref = TaskRef("scripted", "00" * 8, 20, number)
    return Task(ref, "What is 2 + 3?", lambda text: 0.0, begin=lambda: Scripted(*replies), max_turns=len(replies) + 1)


def test_tokens_of_an_episode_are_those_that_were_sampled_and_the_environments(
    policy: Policy, mixture: TaskMixture, group: RolloutGroup
) -> None:
    task = mixture.rebuild(group.task)
    assert any(rollout.turns for rollout in group.rollouts)
    for rollout in group.rollouts:
        start = 0
        for turn in rollout.turns:
            assert policy.decode(rollout.token_ids[start : turn.start]) == turn.text
            reply = rollout.token_ids[turn.start : turn.stop]
            assert turn.reply in policy.tokenizer.decode(reply)
            assert set(rollout.logprobs[turn.start : turn.stop]) == {0.0}
            start = turn.stop
        assert policy.decode(rollout.token_ids[start:]) == rollout.text
        assert sum(rollout.written) == len(rollout.token_ids) - sum(turn.stop - turn.start for turn in rollout.turns)
        assert scored(task, rollout).reward == rollout.reward
        prompt = policy.encode_prompt(task.prompt, task.context)
        with torch.no_grad():
            passed = policy.token_logprobs([(prompt, rollout.token_ids)]).logprobs[0].tolist()
        for is_own, logprob, expected in zip(rollout.written, rollout.logprobs, passed, strict=True):
            assert not is_own or logprob == pytest.approx(expected, abs=1e-4)


class Rounds:
    """`Turns` that reply with given tokens for a number of turns. Replies are taken in the order of the keys that wait."""

    def __init__(self, reply: Sequence[int], num_turns: int) -> None:
        self.reply = reply
        self.left: dict[tuple[int, int], int] = {}
        self.num_turns = num_turns
        self.waiting: list[tuple[int, int]] = []

    def ended(self, key: tuple[int, int], completion: Completion) -> bool:
        if completion.end == "limit":
            return False
        self.waiting.append(key)
        return True

    def replies(self, *, wait: bool) -> list[tuple[tuple[int, int], Sequence[int]]]:
        found: list[tuple[tuple[int, int], Sequence[int]]] = []
        for key in self.waiting:
            self.left[key] = self.left.get(key, self.num_turns) - 1
            found.append((key, self.reply if self.left[key] >= 0 else ()))
        self.waiting = []
        return found


def slots(policy: Policy) -> Engine:
    return make_engine(policy, RolloutsSection(max_batch_sequences=3))


@pytest.mark.parametrize("make", [slots, lambda policy: TransformersEngine(policy, 4)], ids=["slots", "batches"])
@pytest.mark.parametrize("keeps", [False, True], ids=["computed again", "kept"])
def test_every_engine_goes_on_after_replies(
    policy: Policy, make: Callable[[Policy], Engine], keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kept keys and values, with a shared prompt, and from the beginning, the log-probs are those of a whole pass."""
    if keeps:
        monkeypatch.setattr(slot_run, "_SHARED_TOKENS", 4)
    prompts = [policy.encode_prompt("What is 2 + 3?"), policy.encode_prompt("Spell table backward.")]
    reply = policy.encode_reply("Again.", "user", after_eos=True)
    groups = converse(
        make(policy), [AnswerRequest(prompt, 4, 200) for prompt in prompts], Sampling(), Rounds(reply, 2), seed=1
    )
    for prompt, answers in zip(prompts, groups, strict=True):
        for answer in answers:
            text = policy.tokenizer.decode(answer.token_ids)
            assert text.count("Again.") == 2 and answer.end == "eos"
            with torch.no_grad():
                passed = policy.token_logprobs([(prompt, answer.token_ids)]).logprobs[0].tolist()
            own = [p for logprob, p in zip(answer.logprobs, passed, strict=True) if logprob]
            assert [logprob for logprob in answer.logprobs if logprob] == pytest.approx(own, abs=1e-4)
            assert len(own) == len(passed) - 2 * len(reply)


def test_a_slow_environment_holds_up_nobody(policy: Policy) -> None:
    """Its one episode waits until all others have ended."""
    others_done, count = threading.Event(), 0

    class Slow(Scripted):
        def step(self, answer: str) -> Step:
            assert others_done.wait(60)
            return super().step(answer)

    class Quick(Scripted):
        def step(self, answer: str) -> Step:
            nonlocal count
            step = super().step(answer)
            count += step.is_done
            if count == 7:
                others_done.set()
            return step

    class Episodes:
        def __init__(self) -> None:
            self.number = 0

        def __call__(self) -> Scripted:
            self.number += 1
            return Slow("wait") if self.number == 1 else Quick("go on")

    begin = Episodes()
    task = replace(scripted("x"), begin=begin)
    config = RolloutsSection(group_size=8, max_new_tokens=200, max_batch_sequences=2)
    worker = RolloutWorker(config, policy, make_engine(policy, config), author="me")
    batch = worker.rollout([task], seed=1)
    assert [len(rollout.turns) for rollout in batch.groups[0].rollouts] == [1] * 8
    assert batch.num_tokens == sum(sum(rollout.written) for rollout in batch.groups[0].rollouts)


@pytest.mark.parametrize("seed", [1, 3])
def test_episodes_do_not_depend_on_the_number_of_slots(policy: Policy, seed: int) -> None:
    """An answer that is begun several times has more tokens each time, whatever was computed for it before."""

    def tokens(num_slots: int) -> list[list[tuple[int, ...]]]:
        config = RolloutsSection(group_size=4, max_new_tokens=96, max_batch_sequences=num_slots)
        worker = RolloutWorker(config, policy, make_engine(policy, config), author="me")
        tasks = [replace(scripted(*["higher"] * 3, number=n), prompt=f"What is {n} + 3?") for n in range(6)]
        groups = worker.rollout(tasks, seed=seed).groups
        return [[rollout.token_ids for rollout in group.rollouts] for group in groups]

    assert tokens(5) == tokens(64)


def test_an_episode_without_room_for_a_reply_is_cut(policy: Policy) -> None:
    config = RolloutsSection(group_size=4, max_new_tokens=60)
    worker = RolloutWorker(config, policy, make_engine(policy, config), author="me")
    batch = worker.rollout([scripted("Please tell me more about it.", "x" * 100)], seed=1)
    for rollout in batch.groups[0].rollouts:
        assert len(rollout.turns) <= 1 and not rollout.finished and rollout.reward == 0
        assert rollout.token_ids[-1] not in policy.eos_token_ids
        assert len(rollout.token_ids) <= 60


def test_an_episode_that_is_cut_after_a_stop_string_is_left_out_like_any_other(policy: Policy) -> None:
    stop = tuple("aeio0123456789")
    config = RolloutsSection(group_size=4, max_new_tokens=60, stop=stop)
    worker = RolloutWorker(config, policy, make_engine(policy, config), author="me")
    task = scripted("x" * 100)
    (group,) = worker.rollout([task], seed=1).groups
    stopped = [rollout for rollout in group.rollouts if any(string in rollout.text for string in stop)]
    assert stopped and all(rollout.is_cut and not rollout.finished for rollout in stopped)
    assert all(with_scores(task, replace(rollout, is_cut=False)).is_cut for rollout in stopped)
    whole = replace(stopped[0], reward=1.0, is_cut=False)
    mixed = TrainingGroup((1,), replace(group, rollouts=(*stopped, whole)), True, True)
    (sequence,) = training_sequences([mixed], TrainingSection(), 60, stop)
    assert sequence.answer_ids == whole.token_ids and sequence.advantage is not None and sequence.advantage > 0


def test_an_environment_that_fails_costs_its_group_alone(policy: Policy) -> None:
    class Broken:
        def step(self, answer: str) -> Step:
            raise ZeroDivisionError("oops")

    tasks = [replace(scripted(), begin=Broken, max_turns=2), scripted("go on", number=1)]
    config = RolloutsSection(group_size=2, max_new_tokens=120)
    worker = RolloutWorker(config, policy, make_engine(policy, config), author="me")
    batch = worker.rollout(tasks, seed=1)
    assert batch.failures == {"scripted": 1}
    assert [group.task.index for group in batch.groups] == [1]
    assert worker.evaluate(tasks, temperature=0.0, seed=1) == {"scripted": [1.0]}


@pytest.mark.parametrize(
    "step",
    [Step("x" * 70_000, 0.0, is_done=False), Step("x", 2.0, is_done=False), Step("x", float("nan"), is_done=True)],
    ids=["long", "too much", "no number"],
)
def test_a_step_outside_the_contract_is_a_failure_of_the_task(step: Step) -> None:
    class Odd:
        def step(self, answer: str) -> Step:
            return step

    rollout = Rollout("a", (1,), (0.0,), finished=True, reward=0.0)
    with pytest.raises(TaskFailure):
        replayed(replace(scripted("x"), begin=Odd), rollout)


# what a reader does with episodes of others


def reader(policy: Policy, mixture: TaskMixture) -> Admission:
    verifier = RewardVerifier(mixture, sandboxed=None)
    config = SharingSection(max_answer_tokens=200)
    return Admission(config, context_of(), verifier=verifier, vocabulary=vocabulary_of(policy, mixture))


def admitted(door: Admission, group: RolloutGroup) -> RolloutGroup:
    body = encode_body([group])
    (found,) = door.admit_body(header_of([group], body, lineage=group.lineage, policy_version=0), body)
    return found


def test_an_honest_episode_is_admitted_by_replay(policy: Policy, mixture: TaskMixture, group: RolloutGroup) -> None:
    found = admitted(reader(policy, mixture), group)
    assert [rollout.turns for rollout in found.rollouts] == [rollout.turns for rollout in group.rollouts]
    assert [rollout.reward for rollout in found.rollouts] == [rollout.reward for rollout in group.rollouts]


def forged(group: RolloutGroup, policy: Policy) -> dict[str, tuple[RolloutGroup, Rejection]]:
    """Lies of an author about the first episode that has turns."""
    place = next(place for place, rollout in enumerate(group.rollouts) if rollout.turns)
    honest = group.rollouts[place]
    turn, *rest = honest.turns

    def lie(rollout: Rollout) -> RolloutGroup:
        return replace(group, rollouts=(*group.rollouts[:place], rollout, *group.rollouts[place + 1 :]))

    def with_reply(text: str) -> Rollout:
        ids = policy.encode_reply(text, "user", after_eos=True)
        shift = len(ids) - (turn.stop - turn.start)
        tokens = (*honest.token_ids[: turn.start], *ids, *honest.token_ids[turn.stop :])
        zeros = (0.0,) * len(ids)
        logprobs = (*honest.logprobs[: turn.start], *zeros, *honest.logprobs[turn.stop :])
        moved = [replace(one, start=one.start + shift, stop=one.stop + shift) for one in rest]
        turns = (replace(turn, reply=text, stop=turn.stop + shift), *moved)
        return replace(honest, token_ids=tokens, logprobs=logprobs, turns=turns)

    added = (*honest.token_ids, *policy.encode_reply("higher", "user", after_eos=True), *honest.token_ids[-2:])
    return {
        "another reply": (lie(with_reply("higher and higher")), Rejection.FORGED_EPISODE),
        "a reply of other tokens": (lie(replace(honest, turns=(replace(turn, reply="no"), *rest))), Rejection.TOKENS),
        "another role": (lie(replace(honest, turns=(replace(turn, role="tool"), *rest))), Rejection.FORGED_EPISODE),
        "a turn left out": (lie(replace(honest, turns=())), Rejection.TOKENS),
        "another answer": (lie(replace(honest, turns=(replace(turn, text="5"), *rest))), Rejection.TOKENS),
        "a turn after the end": (
            lie(
                replace(
                    honest,
                    token_ids=added,
                    logprobs=(0.0,) * len(added),
                    turns=(
                        *honest.turns,
                        replace(turn, text=honest.text, reply="higher", start=len(honest.token_ids), stop=len(added) - 2),
                    ),
                    text=policy.decode(added[-2:]),
                )
            ),
            Rejection.FORGED_EPISODE,
        ),
        "a higher reward": (lie(replace(honest, reward=1.0 - honest.reward)), Rejection.REWARD_MISMATCH),
    }  # fmt: skip


def test_forged_episodes_are_refused_with_their_reason(
    policy: Policy, mixture: TaskMixture, group: RolloutGroup
) -> None:
    door = reader(policy, mixture)
    for name, (lie, reason) in forged(group, policy).items():
        with pytest.raises(InvalidRecord) as caught:
            admitted(door, lie)
        assert caught.value.reason is reason, name


def test_a_reply_that_machines_may_differ_in_is_nobodys_lie() -> None:
    class Clock:
        def step(self, answer: str) -> Step:
            return Step("12:00", 0.0, is_done=False, is_exact=False)

    task = replace(scripted("x"), begin=Clock)
    honest = replayed(task, Rollout("a", (1,), (0.0,), finished=True, reward=0.0))
    assert honest.steps[0].reply == "12:00"
    told = Rollout("a", (1,) * 5, (0.0,) * 5, finished=True, reward=0.0, turns=(Turn("a", "12:01", "user", 1, 2),))
    with pytest.raises(TaskFailure, match="may differ between machines"):
        replayed(task, told)


def test_more_turns_than_the_task_has_are_a_lie(mixture: TaskMixture, group: RolloutGroup) -> None:
    task = mixture.rebuild(group.task)
    rollout = next(rollout for rollout in group.rollouts if rollout.turns)
    with pytest.raises(ForgedEpisode, match="turns, bound 4"):
        replayed(task, replace(rollout, turns=rollout.turns[:1] * 4))
    with pytest.raises(ForgedEpisode, match="turns, bound 1"):
        replayed(replace(task, begin=None), rollout)


# training


def test_only_the_policys_own_tokens_are_trained_on(policy: Policy, group: RolloutGroup) -> None:
    rewarded = replace(group, rollouts=(*group.rollouts[:-1], replace(group.rollouts[-1], reward=0.5)))
    ready = TrainingGroup((1, 2), rewarded, usable_logprobs=True, is_own=True)
    config = TrainingSection(mask_truncated=False)
    sequences = training_sequences([ready], config, 200)
    assert [sequence.is_trained for sequence in sequences] == [rollout.written for rollout in group.rollouts]
    assert sequences[0].scale == pytest.approx(1 / sum(sum(rollout.written) for rollout in group.rollouts))
    (part,) = micro_batches(sequences, torch.device("cpu"), max_sequences=64, max_tokens=100_000)
    assert part.is_trained.sum().item() == sum(sum(rollout.written) for rollout in group.rollouts)
    assert part.is_trained.shape == part.behaviour.shape


def test_an_episode_of_another_tokenizer_is_encoded_turn_by_turn(policy: Policy, group: RolloutGroup) -> None:
    converter = RolloutConverter(policy, 0.0, 200)
    best = max(range(len(group.rollouts)), key=lambda place: len(group.rollouts[place].turns))
    rollouts = tuple(
        replace(rollout, reward=float(place == best)) for place, rollout in enumerate(group.rollouts)
    )  # fmt: skip
    stranger = replace(group, rollouts=rollouts, lineage=Lineage("1" * 32, "2" * 32))
    found = converter.foreign("prompt", stranger)
    assert found is not None
    for original, read in zip(group.rollouts, found.group.rollouts, strict=True):
        assert [turn.text for turn in read.turns] == [turn.text for turn in original.turns]
        assert read.written.count(True) > 0
        start = 0
        for turn in read.turns:
            assert policy.decode(read.token_ids[start : turn.start]) == turn.text
            start = turn.stop


def test_settings_that_need_tasks_of_one_answer_are_refused(policy: Policy, mixture: TaskMixture) -> None:
    from swarm.config import Config
    from swarm.rollouts.prompt_check import check_prompts

    config = Config.model_validate({"rollouts": {"prune": True}, "tasks": {"sources": [GAME.model_dump()]}})
    with pytest.raises(ConfigError, match=r"rollouts.prune = true works for tasks of one answer, got environments"):
        check_prompts(config, mixture, policy.prompts, policy.base_folder)


# environments of packages run in a process of their own


def test_an_environment_of_a_package_is_played_and_replayed_in_its_process(
    example_extension: Path, policy: Policy
) -> None:
    sandboxed = TasksSection(sources=(TaskSourceSection(kind="stones", name="stones"),))
    mixture = TaskMixture(sandboxed)
    verifier = SandboxedVerifier(sandboxed, time_budget_s=3.0)
    try:
        assert mixture.episodic == ["stones"]
        source = mixture.sources["stones"]
        index = next(
            index for index in range(99) if " 7 stones" in source.task(20, index).prompt
        )  # 7: take 1, then win
        task = source.task(20, index)
        plays = [Play.of(task) for _ in range(2)]
        for answer in ("1", "2"):
            for play in plays:  # in turns: the process may keep one of them only
                play.step(answer)
        assert plays[0].steps == plays[1].steps
        assert plays[0].steps[0].reply == "I take 1, 5 are left."
        turns = tuple(Turn(a, s.reply, "user", 0, 0) for a, s in zip("12", plays[0].steps, strict=True))
        honest = Rollout("2", (1,), (0.0,), finished=True, reward=1.0, turns=turns)
        digest, rewards = verifier.rewards_of(task.ref, [honest, replace(honest, text="5")])
        assert rewards == (1.0, 0.0)
        assert digest == prompt_digest(task.prompt)
        with pytest.raises(ForgedEpisode, match="replied otherwise in turn 1"):
            verifier.rewards_of(task.ref, [replace(honest, turns=(replace(turns[0], reply="no"), turns[1]))])
        with pytest.raises(Overrun):
            verifier.step(task.ref, ["hang"])
        assert verifier.step(task.ref, ["1"]) == plays[0].steps[0]
    finally:
        mixture.close()
        verifier.close()


def test_an_environment_that_chance_decides_is_refused() -> None:
    class Dice:
        name, config_digest, num_held_out, max_turns = "dice", "00" * 8, 4, 3

        def task(self, seed: int, index: int) -> Task:
            return replace(scripted("x"), begin=lambda: Scripted(str(random.random()), "x"), max_turns=3)

        def answer(self, seed: int, index: int) -> str:
            return "1"

    with pytest.raises(TaskError, match="must give equal steps for equal answers"):
        check_repeatable(Dice())
    Dice.task = lambda self, seed, index: scripted("x", "y")  # type: ignore[method-assign,assignment]
    check_repeatable(Dice())


# credit over turns


def test_gigpo_compares_turns_that_began_in_the_same_state() -> None:
    """γ = ½: returns (½, 1) and (0, 0). From s0 both began: ±¼ over a deviation of ½/√2. From a and b one each: 0."""
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    group = GroupRewards(
        rewards, rewards[None], torch.ones(1), ((1,), (2,)), ((0.0, 1.0), (0.0, 0.0)), (("s0", "a"), ("s0", "b"))
    )
    form: Advantage = ADVANTAGES.make("gigpo", {"discount": 0.5, "step_weight": 2.0}, "")
    root = 0.5**0.5
    assert form.of_group(group).tolist() == pytest.approx([root, -root], rel=1e-5)
    first, second = form.of_turns(group)
    assert first.tolist() == pytest.approx([2 * root, 0.0], rel=1e-5)
    assert second.tolist() == pytest.approx([-2 * root, 0.0], rel=1e-5)


def test_turns_of_a_batch_get_their_own_advantages_and_a_cut_one_is_masked() -> None:
    def episode(rewards: tuple[float, ...], *, finished: bool = True) -> Rollout:
        turn = Turn("a", "r", "user", 2, 4)
        return Rollout(
            "b", tuple(range(6)), (0.0,) * 6, finished, sum(rewards), turns=(turn,), turn_rewards=rewards, states=("s", "t")
        )  # fmt: skip

    ref = TaskRef("x", "00" * 8, 20, 0)
    rollouts = (episode((0.0, 1.0)), episode((0.5, 0.0)), episode((0.0, 0.0), finished=False))
    group = RolloutGroup(ref, "00" * 8, rollouts, "me", Lineage("1" * 32, "2" * 32), 0)
    ready = TrainingGroup((1, 2), group, usable_logprobs=True, is_own=True)
    config = TrainingSection(advantage="gigpo")
    sequences = training_sequences([ready], config, 24)
    values = batch_advantages([ready], config)
    by_turn = turn_advantages([ready], config, values)
    assert len(sequences) == 3 and all(len(turns) == 2 for turns in by_turn)
    assert [sum(one.is_trained) for one in sequences] == [4, 4, 2]
    (part,) = micro_batches(sequences, torch.device("cpu"), max_sequences=8, max_tokens=1000)
    assert part.advantages.shape == (3, 6)
    assert part.advantages[0].tolist() == pytest.approx([by_turn[0][0]] * 4 + [by_turn[0][1]] * 2)
    stranger = replace(ready, success_level=0.9, is_own=False)
    for rollout, turns in zip(rollouts, turn_advantages([stranger], config, values), strict=True):
        assert rollout.reward >= 0.9 or all(value <= 0 for value in turns)
    whole = training_sequences([ready], TrainingSection(), 24)
    assert [one.by_turn for one in whole] == [(), ()]  # the cut episode is left out as a whole

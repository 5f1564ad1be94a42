"""Hints: own answers that begin with a part of a peer's right answer, from the pool to the gradient."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.adapters.adapter_state import read_adapter
from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config, RolloutsSection, TrainingSection, parse
from swarm.engine.engine import Engine
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.engine.transformers_engine import TransformersEngine
from swarm.errors import ConfigError
from swarm.experiments.sharing.arms import ARMS
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import Policy, load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.codec import encode_body
from swarm.rollouts.hints import Hint, HintChooser, RightAnswer, hint_tokens
from swarm.rollouts.worker import RolloutWorker
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import prompt_digest
from swarm.training.experience import TrainingGroup
from swarm.training.micro_batch import training_sequences
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from swarm.types import Episode, Lineage, Rollout, RolloutGroup, Task, TaskRef
from tests.unit.experience_factory import ALICE, MALLORY, NOW, Clock, group
from tests.unit.tiny_models import requests

MakePolicy = Callable[..., Policy]
REF = TaskRef("letters", "0" * 16, 16, 0)
SAMPLER = {"ratio_reference": "sampler", "correction": "none"}


class GradientTap(LocalOptimizer):
    """Keeps the gradient of the last applied step."""

    gradient: Tensor

    def apply(self, lr: float) -> None:
        self.gradient = torch.cat([p.grad.flatten() for p in self._parameters.values() if p.grad is not None])
        super().apply(lr)


def step_on(policy: Policy, groups: list[TrainingGroup], **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    """The gradient and the report of one step."""
    config = TrainingSection.model_validate({"warmup_steps": 0, "max_grad_norm": 1e6, "kl_coef": 0.1, **settings})
    steps = GradientTap(config, policy)
    report = Trainer(config, policy, steps, temperature=1.0, max_new_tokens=12).step(groups)
    assert not report.skipped
    row = {name: value for name, value in report.row().items() if not isinstance(value, str)}
    return steps.gradient, {**row, "num_tokens": report.num_tokens}


def hinted_and_plain(policy: Policy, change: Callable[[float], float] = lambda given: given) -> list[TrainingGroup]:
    """One group twice: its answers begin with a hint of three tokens, or these end the prompt."""
    prompt, hint = tuple(policy.encode_prompt("What is 2 + 3?")), tuple(policy.encode_answer("abc"))
    (answers,) = SlotEngine(policy, 8).generate(requests([(*prompt, *hint)], 4, 6), Sampling(), seed=1)
    plain = [
        Rollout(policy.decode(one.token_ids), one.token_ids, one.logprobs, True, float(place == 0))
        for place, one in enumerate(answers)
    ]
    given = tuple(map(change, (0.0,) * len(hint)))
    hinted = [
        replace(one, token_ids=(*hint, *one.token_ids), logprobs=(*given, *one.logprobs), num_given=3) for one in plain
    ]
    made = [RolloutGroup(REF, "0" * 16, tuple(one), "me", policy.lineage, 0) for one in (hinted, plain)]
    prompts = [prompt, (*prompt, *hint)]
    return [TrainingGroup(ids, one, usable_logprobs=True, is_own=True) for ids, one in zip(prompts, made, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"aggregation": "grpo"}, {"aggregation": "dr_grpo"}, {"ratio": "minpro", **SAMPLER},
     {"ratio": "sequence", **SAMPLER}, {"correction": "sequence_mask+opsm"}],
)  # fmt: skip
def test_a_hint_is_to_the_loss_what_the_end_of_the_prompt_is(make_policy: MakePolicy, settings: dict[str, Any]) -> None:
    """Loss, KL, effective sample size, entropy and counts of tokens are those of the node's own tokens alone."""
    policy = make_policy()
    policy.version = 0
    hinted, plain = hinted_and_plain(policy)
    (gradient, report), (expected, of_plain) = (
        step_on(one_policy, [one], **settings) for one_policy, one in ((make_policy(), hinted), (make_policy(), plain))
    )
    assert report == pytest.approx(of_plain, rel=1e-4, abs=1e-6)
    assert (gradient - expected).norm() < 1e-5 * expected.norm() and expected.norm() > 0
    assert report["num_tokens"] == sum(len(one.token_ids) for one in plain.group.rollouts)
    assert report["train/staleness_max"] == 0


def test_the_versions_of_an_answer_are_those_of_its_own_tokens(make_policy: MakePolicy) -> None:
    """Staleness is a mean over own tokens, and ESS takes the weight 1 for fresh ones, which begin behind the hint."""
    hinted, plain = hinted_and_plain(make_policy())
    found, expected = (training_sequences([one], TrainingSection(), 12, policy_version=0) for one in (hinted, plain))
    assert [one.segments for one in found] == [one.segments for one in expected]
    assert [one.fresh_from for one in found] == [3] * 4 and [one.fresh_from for one in expected] == [0] * 4


def test_log_probs_at_the_tokens_of_a_hint_change_nothing(make_policy: MakePolicy) -> None:
    """Whoever wrote the hint: neither its likelihood here nor what stands in its place reaches the step."""
    policy = make_policy()
    steps = [step_on(make_policy(), [hinted_and_plain(policy, change)[0]]) for change in (float, lambda _: -50.0)]
    assert torch.equal(steps[0][0], steps[1][0]) and steps[0][1] == steps[1][1]


@pytest.mark.parametrize(
    ("num_tokens", "success_rate", "draw", "longest", "expected"),
    [
        (100, 0.2, 0.0, 200, 75),  # f = .8, of which 3/4 of the answer are allowed
        (100, 0.2, 0.5, 200, 40),  # f = .4
        (100, 0.4, 0.5, 200, 30),  # the better the node is, the less it is given
        (100, 0.2, 0.999, 200, 1),
        (100, 0.2, 0.0, 30, 29),  # room for one own token
        (2, 0.1, 0.0, 24, 1),
        (1, 0.1, 0.0, 24, 0),
        (9, 0.1, 0.0, 1, 0),
    ],
)
def test_length_of_a_hint_by_hand(
    num_tokens: int, success_rate: float, draw: float, longest: int, expected: int
) -> None:
    assert hint_tokens(num_tokens, success_rate, draw, longest) == expected


def test_a_hint_is_never_the_whole_answer() -> None:
    rng = random.Random(0)
    for num_tokens in range(1, 200):
        for _ in range(20):
            found = hint_tokens(num_tokens, rng.uniform(0, 0.5), rng.random(), longest := rng.randint(1, 200))
            assert 0 <= found <= min(0.75 * num_tokens, longest - 1) and (found or num_tokens == 1 or longest == 1)


def task(verify: Callable[[str], float] = lambda text: float(text == "abcdefgh"), **fields: Any) -> Task:
    return Task(REF, "Write.", verify, **fields)


def right_answer(policy: Policy, one: Task | None = None, author: str = "", text: str = "abcdefgh") -> RightAnswer:
    ids = (*policy.encode_answer(text), policy.eos_token_ids[0])
    return RightAnswer(one or task(), Rollout(text, ids, (-0.5,) * len(ids), True, 1.0), author)


def chosen(
    policy: Policy, answers: Sequence[RightAnswer], rate: float = 0.1, seed: int = 0, **settings: object
) -> list[Hint]:
    config = RolloutsSection.model_validate({"hints": 2, "max_new_tokens": 12, **settings})
    return HintChooser(config, policy, lambda source: rate).choose(answers, random.Random(seed))


def test_hints_are_beginnings_of_the_answer_and_differ_in_length(make_policy: MakePolicy) -> None:
    policy = make_policy()
    found = [hint for seed in range(50) for hint in chosen(policy, [right_answer(policy)], seed=seed)]
    texts = {policy.decode(hint.token_ids) for hint in found}
    assert len(found) == 50 and texts == {"abcdefgh"[:length] for length in range(1, 7)}
    assert not any(set(hint.token_ids) & set(policy.eos_token_ids) for hint in found)
    assert chosen(policy, [right_answer(policy)], seed=3) == chosen(policy, [right_answer(policy)], seed=3)


def test_there_are_no_more_hints_than_asked_for_and_none_where_they_are_off(make_policy: MakePolicy) -> None:
    policy = make_policy()
    answers = [right_answer(policy, author=name) for name in "abcde"]
    assert [len(chosen(policy, answers, hints=number)) for number in (0, 1, 3)] == [0, 1, 3]


def test_an_author_gives_one_hint_at_most_and_its_next_answer_serves_where_the_first_gives_none(
    make_policy: MakePolicy,
) -> None:
    policy = make_policy()
    long, short = (right_answer(policy, author="a", text=text) for text in ("abcdefgh", "b"))
    assert len(chosen(policy, [long, long, long])) == len(chosen(policy, [short, long])) == 1
    assert chosen(policy, [short, short]) == []
    assert len(chosen(policy, [long, long, right_answer(policy, author="b")])) == 2


def test_what_the_node_can_do_alone_gets_no_hint(make_policy: MakePolicy) -> None:
    policy = make_policy()
    assert [len(chosen(policy, [right_answer(policy)], rate=rate)) for rate in (0.49, 0.5, 1.0)] == [1, 0, 0]


def test_tasks_with_an_environment_get_no_hint(make_policy: MakePolicy) -> None:
    def begin() -> Episode:
        raise AssertionError("nobody begins an episode")

    policy = make_policy()
    assert chosen(policy, [right_answer(policy, task(begin=begin, max_turns=2))]) == []


def test_a_part_that_is_right_by_itself_or_cannot_be_judged_is_no_hint(make_policy: MakePolicy) -> None:
    """Every answer after it would be rewarded, whatever the node writes."""

    def broken(text: str) -> float:
        raise ZeroDivisionError(text)

    policy = make_policy()
    for verify in (lambda text: float(text.startswith("a")), broken):
        assert not any(chosen(policy, [right_answer(policy, task(verify))], seed=seed) for seed in range(20))


def test_a_hint_neither_contains_nor_cuts_a_stop_string(make_policy: MakePolicy) -> None:
    """The engine looks for stop strings behind the hint only."""
    policy = make_policy()
    for seed in range(50):
        (hint,) = chosen(policy, [right_answer(policy)], seed=seed, stop=["def"])
        assert policy.decode(hint.token_ids) in ("a", "ab", "abc")


@pytest.mark.parametrize("kind", [SlotEngine, TransformersEngine])
def test_every_engine_continues_hints(make_policy: MakePolicy, kind: Callable[..., Engine]) -> None:
    policy = make_policy()
    policy.version = 5
    config = RolloutsSection.model_validate({"group_size": 4, "max_new_tokens": 8})
    worker = RolloutWorker(config, policy, kind(policy, 16), author="me")
    given = [tuple(policy.encode_answer(text)) for text in ("abc", "x")]
    share_of_b = task(lambda text: text.count("b") / max(len(text), 1))
    batch = worker.follow([Hint(share_of_b, ids) for ids in given], seed=1)
    assert batch == worker.follow([Hint(share_of_b, ids) for ids in given], seed=1)
    assert batch != worker.follow([Hint(share_of_b, ids) for ids in given], seed=2)
    prompt = policy.encode_prompt("Write.")
    for ids, found in zip(given, batch.groups, strict=True):
        assert len(found.rollouts) == 4 and found.policy_version == 5
        for one in found.rollouts:
            assert one.token_ids[: len(ids)] == ids and len(ids) < len(one.token_ids) <= 8
            assert one.text == policy.decode(one.token_ids) and one.reward == one.text.count("b") / len(one.text)
            assert one.written == (False,) * len(ids) + (True,) * (len(one.token_ids) - len(ids))
            expected = worker._engine.score([*prompt, *ids], one.token_ids[len(ids) :])
            assert one.logprobs == pytest.approx([*(0.0,) * len(ids), *expected], abs=1e-4)
    assert batch.num_tokens == sum(sum(one.written) for found in batch.groups for one in found.rollouts)
    assert [len(one) for one in batch.likelihoods] == [sum(one.written) for g in batch.groups for one in g.rollouts]
    assert worker.follow([], seed=1).groups == []


def test_a_look_at_the_pool_uses_nothing_up_and_gives_an_author_one_ticket() -> None:
    pool = ExperiencePool(":memory:", parse({}).sharing, Clock())
    other = Lineage("33" * 16, "44" * 16)
    groups = [
        *(group(index=number) for number in range(6)),
        group(index=6, author=MALLORY.peer_id),
        group(index=7, author="stranger", lineage=other),
        replace(group(index=8, author="nobody"), task=replace(group().task, source="solved")),
    ]
    for number, one in enumerate(groups):
        pool.add(bytes([number]) * 32, NOW + 600, NOW, [one])

    def look(count: int, seed: int = 0) -> list[RolloutGroup]:
        return pool.look("22" * 16, count, random.Random(seed), lambda one: float(one.source == "spelling"))

    assert {one.task.index for one in look(9)} == set(range(7)) and len(look(9)) == 7
    assert look(9) == look(9) and len(look(1)) == 1 and look(0) == []
    firsts = [look(1, seed)[0].author for seed in range(200)]
    assert 60 < firsts.count(MALLORY.peer_id) < 140, "six groups gain no more than one"
    assert pool.num_fresh() == 9 and len(pool.draw(9, random.Random(0))) == 9


def config_of(hints: int = 2, sharing: Mapping[str, object] = {}, **sections: Any) -> Config:
    torch.set_num_threads(1)
    return parse(
        {
            "rollouts": {"groups_per_round": 6, "group_size": 8, "max_new_tokens": 12, "cache_mib": 64, "hints": hints},
            "sharing": {"own_groups": 3, "swarm_groups": 3, "success_quantile": 0.0, **sharing},
            **sections,
        }
    )


def make_learner(
    config: Config,
    published: list[RolloutGroup] | None = None,
    shown: list[RolloutGroup] | None = None,
    *,
    sandboxed: bool = True,
) -> Learner:
    policy = load_policy(config.policy, device="cpu")

    class Observer:
        def own(self, groups: Sequence[RolloutGroup]) -> None:
            (shown if shown is not None else []).extend(groups)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    ports = SwarmPorts(publish=(published if published is not None else []).extend, observer=Observer())  # type: ignore[arg-type]
    pool = ExperiencePool(":memory:", config.sharing, Clock())
    backend, mixture = (
        local_backend(config, policy, "me"),
        TaskMixture(config.tasks.model_copy(update={"sandboxed": sandboxed})),
    )
    return Learner(config, backend, mixture=mixture, pool=pool, peer_id="me", ports=ports)


def peers_group(learner: Learner, number: int, author: str, text: str = "") -> RolloutGroup:
    """A group of a peer to a task of the first source: one right answer, or `text` with the reward of one, and a wrong one."""
    source = next(iter(learner._mixture.sources.values()))
    tasks = (source.task(40, index) for index in range(number * 50, 1 << 20))
    one = next(each for each in tasks if not learner._mixture.is_held_out(each))
    right = source.answer(one.ref.seed, one.ref.index)

    def answer(written: str, reward: float) -> Rollout:
        ids = (*learner.policy.encode_answer(written), learner.policy.eos_token_ids[0])
        return Rollout(written, ids, (-0.5,) * len(ids), True, reward)

    answers = (answer(text or right, 1.0), answer("-1", 0.0))
    return RolloutGroup(one.ref, prompt_digest(one.prompt), answers, author, learner.policy.lineage, 0)


def fill(learner: Learner, *groups: RolloutGroup) -> None:
    for one in groups:
        learner._pool.add(random.Random(repr(one.task) + one.author).randbytes(32), NOW + 600, NOW, [one])


def with_longer_answers(learner: Learner) -> list[RolloutGroup]:
    """Groups of five peers; answers of one digit have no beginning."""
    found = [peers_group(learner, number, f"peer-{number % 5}") for number in range(30)]
    return [one for one in found if len(one.rollouts[0].token_ids) > 2]


def make_hard(learner: Learner) -> None:
    """As after rounds without a success at any source."""
    for source in learner._mixture.sources:
        learner._difficulty.observe(source, [0.0] * 200, [3] * 200)


def test_hinted_groups_are_nobody_elses_business_and_count_in_nothing_that_measures_the_node() -> None:
    """With and without hints the round before training is the same to everybody and everything else."""
    published: list[list[RolloutGroup]] = [[], []]
    shown: list[list[RolloutGroup]] = [[], []]
    plain, hinted = (
        make_learner(config_of(hints, training={"replay_groups": 2}), published[place], shown[place])
        for place, hints in enumerate((0, 2))
    )
    rows = []
    for learner in (plain, hinted):
        fill(learner, *with_longer_answers(learner))
        make_hard(learner)
        rows.append(learner.run_round())
    assert published[0] == published[1] == shown[0] == shown[1] and len(published[0]) == 6
    assert plain._difficulty.state() == hinted._difficulty.state()
    assert plain._converter.state() == hinted._converter.state()
    assert plain._batches.successes.state() == hinted._batches.successes.state()
    assert plain._batches.state() == hinted._batches.state()
    for name in ("reward_mean", "groups", "answers", "groups_with_signal"):
        assert rows[0][f"rollout/{name}"] == rows[1][f"rollout/{name}"]
    assert rows[0]["train/dropped_groups"] == rows[1]["train/dropped_groups"]
    assert "rollout/hinted_groups" not in rows[0]
    assert rows[1]["rollout/hinted_groups"] == 2 and 0 <= rows[1]["rollout/hinted_reward_mean"] <= 1
    assert rows[1]["rollout/tokens"] > rows[0]["rollout/tokens"], "the node pays for them"
    num_trained = rows[1]["rollout/hinted_groups_with_signal"]
    assert rows[1]["train/own_groups"] == rows[0]["train/own_groups"] + num_trained
    assert (
        rows[1]["train/swarm_groups"] == rows[0]["train/swarm_groups"]
        and rows[1]["pool/groups"] == rows[0]["pool/groups"]
    )


def test_hinted_groups_with_signal_join_the_batch_on_top_of_all_others() -> None:
    learner = make_learner(config_of())
    learner._learn_what_to_expect(rollouts := learner._rollouts.run(1))
    fill(learner, *with_longer_answers(learner))
    make_hard(learner)
    hinted = learner._follow_hints()
    assert len(hinted.groups) == 2
    first, second = hinted.groups
    flat = replace(second, rollouts=tuple(replace(one, reward=0.0) for one in second.rollouts))
    varied = replace(first, rollouts=tuple(replace(one, reward=float(i == 0)) for i, one in enumerate(first.rollouts)))
    of_hints = learner._batches.hinted_groups(replace(hinted, groups=[varied, flat]))
    assert [one.group for one in of_hints] == [varied] and of_hints[0].is_own and of_hints[0].usable_logprobs
    own, rng = learner._batches.own_groups(rollouts, 0), random.Random(0)
    batch = learner._batches.compose(own, [], 0, rng, of_hints)
    assert batch[-1] is of_hints[0] and len(batch) == min(len(own.converted), 6) + 1
    assert not any(one.num_given for kept in learner._batches._replay._groups for one in kept.rollouts)


def test_groups_of_one_author_give_one_hint_and_junk_gives_none() -> None:
    """Junk that earns the reward is below the likelihood floor, and its author is reported when it is trained on, not here."""
    learner = make_learner(config_of(hints=8))
    assert list(learner._batches.right_answers(random.Random(0))) == []
    of_alice = [
        one
        for number in range(20)
        if len((one := peers_group(learner, number, ALICE.peer_id)).rollouts[0].token_ids) > 2
    ]
    junk = peers_group(learner, 21, MALLORY.peer_id, "+ x + = 7 ?")
    make_hard(learner)
    fill(learner, *of_alice, junk)
    assert list(learner._batches.right_answers(random.Random(0))) == [], "there is no floor yet"
    learner._learn_what_to_expect(learner._rollouts.run(1))
    make_hard(learner)
    found = list(learner._batches.right_answers(random.Random(0)))
    assert {one.task.ref for one in found} == {one.task for one in of_alice} and len(found) > 3
    assert {one.author for one in found} == {ALICE.peer_id} and all(one.rollout.reward == 1.0 for one in found)
    assert learner._converter.num_answers_below_floor == 0 and not learner._batches.dropped
    assert len(learner._follow_hints().groups) == 1


def test_groups_without_a_full_success_of_unknown_tasks_and_of_solved_sources_give_no_hint() -> None:
    learner = make_learner(config_of(sharing={"likelihood_floor_quantile": 0.0}))
    one = peers_group(learner, 1, ALICE.peer_id)
    half = replace(one, rollouts=tuple(replace(r, reward=r.reward / 2) for r in one.rollouts))
    fill(learner, replace(half, author="half"), replace(one, author="gone", task=replace(one.task, source="gone")))
    make_hard(learner)
    assert list(learner._batches.right_answers(random.Random(0))) == []
    fill(learner, one)
    assert len(list(learner._batches.right_answers(random.Random(0)))) == 1
    learner._difficulty.observe(one.task.source, [1.0] * 2000, [3] * 2000)
    assert list(learner._batches.right_answers(random.Random(0))) == []


def test_a_verifier_that_needs_a_process_and_has_none_gets_no_part_of_a_strangers_answer() -> None:
    """What admission scored in a process was the whole answer; a part of it is another text."""
    counts = []
    for sandboxed in (True, False):
        learner = make_learner(config_of(sharing={"likelihood_floor_quantile": 0.0}), sandboxed=sandboxed)
        fill(learner, *with_longer_answers(learner))
        make_hard(learner)
        counts.append(len(list(learner._batches.right_answers(random.Random(0)))))
    assert counts[0] > 0 == counts[1]


def test_episodes_give_no_hint() -> None:
    game = {"kind": "game", "name": "guess_number", "parameters": {"highest": 9, "max_turns": 4}}
    config = config_of(sharing={"likelihood_floor_quantile": 0.0}, tasks={"sources": [{"name": "chain_sum"}, game]})
    learner = make_learner(config)
    make_hard(learner)
    one = peers_group(learner, 1, ALICE.peer_id)
    found = learner._mixture.sources["guess_number"].task(40, 1)
    assert found.begin is not None
    fill(learner, replace(one, task=found.ref, prompt_digest=prompt_digest(found.prompt), author="player"))
    assert list(learner._batches.right_answers(random.Random(0))) == []
    fill(learner, one)
    assert len(list(learner._batches.right_answers(random.Random(0)))) == 1


def test_a_run_that_was_killed_and_resumed_follows_the_same_hints(tmp_path: Path) -> None:
    config = config_of()
    whole, store = make_learner(config), CheckpointStore(tmp_path, 2)
    make_hard(whole)
    whole.run_round()
    whole.save(store)
    resumed = make_learner(config)
    assert resumed.resume(store)
    rows = []
    for learner in (whole, resumed):
        fill(learner, *with_longer_answers(learner))
        rows.append([learner.run_round() for _ in range(2)])
    for one, other in zip(*rows, strict=True):
        assert one["rollout/hinted_groups"] == 2
        names = ("rollout/hinted_reward_mean", "rollout/tokens", "train/loss", "train/own_groups")
        assert [one[name] for name in names] == [other[name] for name in names]
    ends = [read_adapter(learner.policy.model) for learner in (whole, resumed)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_no_record_holds_a_hinted_answer() -> None:
    """It would claim tokens of another author as the sender's own."""
    one = group()
    hinted = replace(one, rollouts=tuple(replace(rollout, num_given=1) for rollout in one.rollouts))
    assert encode_body([one])
    with pytest.raises(ValueError, match="must stay private"):
        encode_body([hinted])


def test_hints_need_groups_of_others_and_a_policy_on_one_machine() -> None:
    with pytest.raises(ConfigError, match=r"rollouts\.hints must be 0 with sharing\.swarm_groups = 0, got 2"):
        config_of(sharing={"swarm_groups": 0})
    pipeline = {"pipeline": {"driver": MALLORY.peer_id, "machines": [ALICE.peer_id]}}
    with pytest.raises(
        ConfigError, match=r"a pipelined policy goes without .* rollouts\.hints, .* set them to false, 1, 0, false"
    ):
        config_of(policy=pipeline)
    assert config_of(hints=0, policy=pipeline).policy.pipeline.is_on
    assert config_of(hints=0, sharing={"swarm_groups": 0}).max_shared_groups == 3
    assert config_of().max_shared_groups == 6


def test_the_arm_with_hints_samples_as_many_groups_and_other_arms_keep_their_settings() -> None:
    settings = ARMS["8/all, hints"].node_settings(8, 8)
    assert settings["rollouts"] == {"groups_per_round": 6, "hints": 2}
    assert settings["sharing"] == {"own_groups": 6, "swarm_groups": 42, "publish": True}
    assert ARMS["8/all"].node_settings(8, 8)["rollouts"] == {"groups_per_round": 8}
    assert ARMS["8/all, hints"].node_settings(2, 2)["rollouts"] == {"groups_per_round": 2}

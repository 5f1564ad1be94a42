"""Answers that are dropped early: by what rule, with what left, and the same ones however they were batched."""

import json
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import safetensors.torch
import torch
from torch import Tensor

from swarm.config import Config, LoraSection, RolloutsSection, parse
from swarm.engine.engine import Completion
from swarm.engine.make_engine import make_engine
from swarm.engine.pruning import PruneCall, Pruning, Reliability, SuccessHead
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.engine.slot_pruning import hidden_size
from swarm.errors import ConfigError
from swarm.policy.policy import Policy
from swarm.rollouts.worker import RolloutWorker, prune_report
from tests.unit.test_rollout_worker import task
from tests.unit.tiny_models import ARCHITECTURES, RAGGED_PROMPTS, requests

MakePolicy = Callable[..., Policy]
SAMPLING = Sampling(temperature=0.9)


class GivenChances(SuccessHead):
    """Says what it is told to: a number, or a function of the states."""

    def __init__(self, chances: float | Callable[[Tensor], Tensor]) -> None:
        self._chances = chances

    def chances(self, states: Tensor) -> Tensor:
        return self._chances(states) if callable(self._chances) else torch.full((len(states),), self._chances)


def by_first_number(states: Tensor) -> Tensor:
    return (4 * states[:, 0]).sigmoid()


def settings(**changes: object) -> RolloutsSection:
    return RolloutsSection.model_validate(
        {"prune": True, "prune_interval_tokens": 2, "prune_certainty": 0.7, **changes}
    )


def call_of(
    chances: float | Callable[[Tensor], Tensor],
    sizes: Sequence[int],
    *,
    seed: int = 1,
    drops: bool = True,
    **changes: object,
) -> PruneCall:
    return PruneCall(GivenChances(chances), settings(**changes), sizes, seed, drops=drops)


def generate(policy: Policy, call: PruneCall, size: int, num_slots: int = 5) -> list[list[Completion]]:
    prompts = [policy.encode_prompt(prompt) for prompt in RAGGED_PROMPTS]
    return SlotEngine(policy, num_slots).generate_and_prune(requests(prompts, size, 12), SAMPLING, call, seed=3)


def plain(policy: Policy, size: int) -> list[list[Completion]]:
    prompts = [policy.encode_prompt(prompt) for prompt in RAGGED_PROMPTS]
    return SlotEngine(policy, 5).generate(requests(prompts, size, 12), SAMPLING, seed=3)


def tokens(groups: list[list[Completion]]) -> list[list[tuple[tuple[int, ...], str]]]:
    return [[(completion.token_ids, completion.end) for completion in group] for group in groups]


def toy(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """States whose first number decides, of an uneven scale that must not matter."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_rows, 24, generator=generator)
    successes = (states[:, 0] > 0).float()
    return states * torch.rand(num_rows, 1, generator=generator) * 100, successes


def test_head_learns_a_separable_problem_and_is_even_before() -> None:
    head = SuccessHead(24, seed=0)
    states, successes = toy(256, seed=99)
    assert head.chances(states).eq(0.5).all()
    for seed in range(60):
        head.learn(*toy(128, seed), torch.ones(128))
    assert ((head.chances(states) > 0.5).float() == successes).float().mean() > 0.93


def test_heavy_answers_count_as_often_as_their_weight_says() -> None:
    one, other = SuccessHead(24, seed=0), SuccessHead(24, seed=0)
    states, successes = toy(8, seed=1)
    one.learn(states, successes, torch.tensor([3.0] + [1.0] * 7))
    other.learn(
        torch.cat([states[:1], states[:1], states]), torch.cat([successes[:1]] * 2 + [successes]), torch.ones(10)
    )
    assert torch.allclose(one.chances(states), other.chances(states), atol=1e-6)


def test_reliability_by_hand() -> None:
    reliability = Reliability()
    assert (reliability.calibration_error, reliability.brier, reliability.skill) == (1.0, 1.0, 0.0)
    reliability.observe([0.25, 0.25, 0.75, 1.0], [0, 1, 1, 1], [1, 1, 1, 3])
    assert reliability.calibration_error == pytest.approx((0.5 + 0.25 + 0) / 6)
    assert reliability.brier == pytest.approx((0.25**2 + 0.75**2 + 0.25**2) / 6)
    assert reliability.skill == pytest.approx(1 - reliability.brier / (5 / 6 * 1 / 6))


@pytest.mark.parametrize(("chance", "num_left"), [(0.25, 4), (0.1, 3), (0.75, 4), (0.01, 3), (0.99, 3), (0.5, 12)])
def test_as_many_of_the_majority_are_left_as_the_minority_has(
    make_policy: MakePolicy, chance: float, num_left: int
) -> None:
    """12 · min(p, 1 − p) / max(p, 1 − p), but half of smallest_group at least; all are sure to end like their group."""
    call = call_of(chance, [12] * len(RAGGED_PROMPTS), smallest_group=6)
    groups = generate(make_policy(), call, 12)
    for prompt, group in enumerate(groups):
        dropped = [completion for completion in group if completion.end == "pruned"]
        ended_before = [c for c in group if c.end != "pruned" and len(c.token_ids) <= 2]
        assert all(len(completion.token_ids) == 2 for completion in dropped)
        assert num_left <= len(group) - len(dropped) <= num_left + len(ended_before)
        weights = {call.weight((prompt, i)) for i, c in enumerate(group) if c.end != "pruned"}
        assert weights <= {1.0, 12 / num_left}


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_no_group_loses_all_or_becomes_too_small(make_policy: MakePolicy, size: int) -> None:
    for chance in (0.001, 0.999):
        call = call_of(chance, [size] * len(RAGGED_PROMPTS), prune_interval_tokens=1)
        groups = generate(make_policy(), call, size)
        assert all(sum(c.end != "pruned" for c in group) >= 2 for group in groups)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma2"])
def test_head_sees_the_last_hidden_states_of_prompt_and_answer(make_policy: MakePolicy, name: str) -> None:
    policy = make_policy(name)
    call = call_of(0.5, [3] * len(RAGGED_PROMPTS), drops=False)
    groups = generate(policy, call, 3)
    for prompt, group in enumerate(groups):
        before = policy.encode_prompt(RAGGED_PROMPTS[prompt])
        for sample, completion in enumerate(group):
            with torch.no_grad():
                ids = torch.tensor([[*before, *completion.token_ids]])
                expected = policy.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            states, chances = call.looks((prompt, sample))
            places = [len(before) + num - 1 for num in range(0, len(completion.token_ids), 2)]
            assert len(chances) == len(states) == len(places)
            for state, place in zip(states, places, strict=True):
                assert torch.allclose(state, expected[place], atol=1e-3)


def test_dropped_answers_are_the_same_however_they_are_batched_and_change_no_other(make_policy: MakePolicy) -> None:
    policy = make_policy()
    sizes = [4] * len(RAGGED_PROMPTS)
    calls = {num_slots: call_of(by_first_number, sizes) for num_slots in (2, 5, 16)}
    groups = {num_slots: generate(policy, call, 4, num_slots) for num_slots, call in calls.items()}
    assert tokens(groups[2]) == tokens(groups[5]) == tokens(groups[16])
    pruned = [c for group in groups[5] for c in group if c.end == "pruned"]
    assert 2 <= len(pruned) <= 8  # half of each group is safe
    keys = [(prompt, sample) for prompt in range(len(sizes)) for sample in range(4)]
    assert all(calls[2].weight(key) == calls[16].weight(key) for key in keys)
    for group, whole in zip(groups[5], plain(policy, 4), strict=True):
        for completion, full in zip(group, whole, strict=True):
            num = len(completion.token_ids)
            assert completion.token_ids == full.token_ids[:num]
            assert completion.policy_logprobs == pytest.approx(full.policy_logprobs[:num], abs=1e-5)
            assert completion.end in ("pruned", full.end)


def test_nothing_dropped_is_bit_for_bit_what_generate_gives(make_policy: MakePolicy) -> None:
    policy = make_policy()
    call = call_of(0.001, [3] * len(RAGGED_PROMPTS), drops=False)
    assert generate(policy, call, 3) == plain(policy, 3)


def test_weights_make_up_for_what_was_dropped() -> None:
    """Over all lots the weighted sum of rewards is that of all answers; here in exact numbers for one group of four."""
    total, num_seeds = Fraction(0), 3000
    for seed in range(num_seeds):
        call = call_of(lambda states: states[:, 0], [4], seed=seed)
        call.saw_prompts([0], torch.tensor([[0.2]]))
        is_dropped = call.dropped([(0, i) for i in range(4)], torch.tensor([[0.1], [0.1], [0.1], [0.6]]))
        assert is_dropped.count(True) in (1, 2) and not is_dropped[3]
        total += sum(Fraction(call.weight((0, i))) * i for i in range(4) if not is_dropped[i])
    assert float(total / num_seeds) == pytest.approx(0 + 1 + 2 + 3, abs=0.12)


def test_report_by_hand() -> None:
    call = call_of(0.1, [4])
    call.saw_prompts([0], torch.zeros(1, 1))
    is_dropped = call.dropped([(0, i) for i in range(4)], torch.zeros(4, 1))
    first, second = (i for i in range(4) if not is_dropped[i])
    ends = ["pruned" if dropped else "eos" for dropped in is_dropped]
    lengths = {first: 5, second: 7}
    answers = [
        Completion((9,) * (num := lengths.get(i, 2)), (0.0,) * num, (0.0,) * num, end)  # type: ignore[arg-type]
        for i, end in enumerate(ends)
    ]
    report = prune_report([answers], call, {(0, first): 1.0, (0, second): 0.0})
    assert (report.num_pruned, report.saved_tokens, report.reward_mean) == (2, 2 * (3 + 5) / 2, 0.5)
    assert (report.reward_sum, report.weight_sum) == (2.0, 4.0)


def test_of_a_large_call_a_bounded_part_is_kept_and_learned_from() -> None:
    sizes = [50] * 40
    call = call_of(0.3, sizes, drops=False)
    call.saw_prompts(range(40), torch.zeros(40, 24))
    keys = [(prompt, sample) for prompt in range(40) for sample in range(50)]
    call.dropped(keys, torch.ones(len(keys), 24))
    assert sum(len(call.looks(key)[0]) > 1 for key in keys) <= 256
    pruning = Pruning(settings(), 24, seed=0)
    pruning.learn(call, dict.fromkeys(keys, 1.0))
    assert 200 < pruning.state()[1]["num_answers"] <= 256


def ready(policy: Policy, config: RolloutsSection, *, num_answers: int = 1000) -> Pruning:
    """One that has learned something and is trusted."""
    pruning = Pruning(config, hidden_size(policy), seed=0)
    good = Reliability()
    good.observe([0.1, 0.9], [0.1, 0.9], [1, 1])
    tensors, _ = pruning.state()
    generator = torch.Generator().manual_seed(1)
    tensors["outer.weight"] = torch.randn(tensors["outer.weight"].shape, generator=generator)
    pruning.restore(tensors, {"num_answers": num_answers, "reliability": good.state()})
    return pruning


def worker_of(policy: Policy, pruning: Pruning, config: RolloutsSection) -> RolloutWorker:
    return RolloutWorker(config, policy, SlotEngine(policy, 16), "me", pruning)


def test_what_is_dropped_is_in_no_group_and_is_counted(make_policy: MakePolicy) -> None:
    policy, config = make_policy(), settings(group_size=8, max_new_tokens=12, prune_certainty=0.51)
    tasks = [task(i, prompt=prompt) for i, prompt in enumerate(RAGGED_PROMPTS)]
    batch = worker_of(policy, ready(policy, config), config).rollout(tasks, seed=1)
    num_left = sum(len(group.rollouts) for group in batch.groups)
    assert 0 < batch.pruned.num_pruned == 8 * len(tasks) - num_left
    assert all(len(group.rollouts) >= 2 for group in batch.groups)
    assert len(batch.likelihoods) == num_left
    num_kept_tokens = sum(len(r.token_ids) for group in batch.groups for r in group.rollouts)
    assert num_kept_tokens + 2 * batch.pruned.num_pruned <= batch.num_tokens
    assert num_left < batch.pruned.weight_sum
    evaluated = worker_of(policy, ready(policy, config), config).evaluate(tasks, temperature=1.0, seed=1)
    assert len(evaluated["letters"]) == len(tasks)


def test_nothing_is_dropped_by_a_head_that_is_new_or_wrong(make_policy: MakePolicy) -> None:
    policy, config = make_policy(), settings()
    assert ready(policy, config).drops
    assert not ready(policy, config, num_answers=10).drops
    wrong = ready(policy, config)
    wrong.reliability.observe([0.9] * 8, [0] * 8, [1] * 8)
    assert not wrong.drops
    ignorant = Pruning(config, hidden_size(policy), seed=0)
    ignorant.restore(ignorant.state()[0], {"num_answers": 1000, "reliability": Reliability().state()})
    ignorant.reliability.observe([0.25] * 4, [0, 0, 0, 1], [1] * 4)  # right in the mean, and of no use
    assert ignorant.reliability.calibration_error == 0
    assert not ignorant.drops


def test_a_restart_goes_on_bit_for_bit(make_policy: MakePolicy) -> None:
    policy, config = make_policy(), settings(group_size=8, max_new_tokens=12, prune_certainty=0.51)
    tasks = [task(i, prompt=prompt) for i, prompt in enumerate(RAGGED_PROMPTS)]
    one = ready(policy, config)
    worker_of(policy, one, config).rollout(tasks, seed=1)
    tensors, state = one.state()
    other = Pruning(config, hidden_size(policy), seed=5)
    other.restore(safetensors.torch.load(safetensors.torch.save(tensors)), json.loads(json.dumps(state)))
    batches = [worker_of(policy, pruning, config).rollout(tasks, seed=2) for pruning in (one, other)]
    assert batches[0] == batches[1]
    (left, left_state), (right, right_state) = one.state(), other.state()
    assert left_state == right_state and left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert not torch.equal(left["inner.weight"], tensors["inner.weight"])  # it learned in between


def test_state_of_another_size_or_none_is_a_new_start() -> None:
    tensors, _ = Pruning(settings(), 24, seed=0).state()
    pruning = Pruning(settings(), 32, seed=0)
    pruning.restore(tensors, {"num_answers": 5, "reliability": Reliability().state()})
    pruning.restore({}, {})
    assert pruning.state()[1]["num_answers"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollouts": {"prune": True, "over_provision": 2.0}}, "prune goes with over_provision = 1.0 only"),
        ({"rollouts": {"prune": True, "extra_rollouts": "hard"}}, "prune goes with extra_rollouts = off only"),
        ({"rollouts": {"prune": True, "group_size": 9}, "training": {"advantage": "median"}}, "groups of an odd size"),
    ],
)
def test_settings_that_it_would_mislead_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(change)
    assert not Config().rollouts.prune


def test_an_engine_that_cannot_drop_answers_refuses(make_policy: MakePolicy) -> None:
    recurrent = make_policy("falcon_h1", lora=LoraSection(rank=4, alpha=8, targets=("q_proj", "o_proj")))
    with pytest.raises(ConfigError, match=r"rollouts.prune needs an engine that drops answers in the middle"):
        make_engine(make_policy(), settings(engine="transformers"))
    with pytest.raises(ConfigError, match=r"rollouts.prune needs an engine that drops answers in the middle"):
        make_engine(recurrent, settings())
    assert isinstance(make_engine(make_policy(), settings()), SlotEngine)

"""Sampling at length: memory of keys and values that follows the tokens in use, shared prompts, and scarce memory."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from swarm.engine.engine import (
    AnswerRequest,
    Completion,
    SamplingCall,
    capacity_of,
    longest_first,
    open_rows,
)
from swarm.engine.sampling import Sampling
from swarm.engine.slot_attention import attend, hidden_columns
from swarm.engine.slot_engine import SlotEngine
from swarm.engine.slot_model import PIECE_TOKENS, SlotModel
from swarm.engine.slot_run import SlotRun
from swarm.engine.transformers_engine import TransformersEngine
from swarm.errors import MemoryBudgetError
from swarm.policy.policy import Policy
from tests.unit.test_engine_contract import full_pass
from tests.unit.test_pruning import by_first_number, call_of
from tests.unit.tiny_models import ARCHITECTURES, requests

MakePolicy = Callable[..., Policy]
LENGTHS = (300, 270, 90, 20)
"""Tokens of the prompts: the first two are shared."""


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    numbers = random.Random(1)
    return [[numbers.randrange(4, 99) for _ in range(length)] for length in lengths]


def tokens_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def wanted(limits: Sequence[int] = (140, 30, 60, 120)) -> list[AnswerRequest]:
    return requests(prompts(), 3, limits)


def run_of(model: SlotModel, policy: Policy, wanted: Sequence[AnswerRequest], num_slots: int, places: int) -> SlotRun:
    call = SamplingCall(policy, Sampling(), 3, stop=())
    rows = longest_first(wanted, open_rows(wanted))
    return SlotRun(model, wanted, rows, call=call, cache=model.cache(num_slots, places))


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral", "gemma2"])
def test_logprobs_of_long_answers_equal_unpadded_passes(make_policy: MakePolicy, name: str) -> None:
    policy = make_policy(name)
    policy.eos_token_ids = (-1,)
    # three slots: answers are of different length at any time, and some outgrow their first buffers
    groups = SlotEngine(policy, 3).generate(requests(prompts(), 2, (150, 20, 140, 30)), Sampling(), seed=3)
    for prompt, group in zip(prompts(), groups, strict=True):
        for completion in group:
            expected = full_pass(policy, prompt, completion.token_ids)
            assert completion.policy_logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_answers_do_not_depend_on_memory_or_slots(make_policy: MakePolicy, name: str) -> None:
    policy = make_policy(name)
    policy.eos_token_ids = (*range(10, 13),)  # so that answers of every length occur
    expected = tokens_of(TransformersEngine(policy, 12).generate(wanted(), Sampling(), seed=3))
    one_answer = SlotEngine(policy, 1).answer_bytes(capacity_of(wanted()))
    for slots, budget in ((5, None), (12, one_answer), (12, 2 * one_answer)):
        assert tokens_of(SlotEngine(policy, slots, budget).generate(wanted(), Sampling(), seed=3)) == expected


def test_memory_that_does_not_hold_one_answer_is_refused_with_the_size_that_would(make_policy: MakePolicy) -> None:
    policy = make_policy()
    one_answer = SlotEngine(policy, 1).answer_bytes(capacity_of(wanted()))
    with pytest.raises(MemoryBudgetError, match=r"must fit into 0\.1 MiB, got 0\.1 MiB; set rollouts\.cache_mib = 1,"):
        SlotEngine(policy, 12, one_answer - 1).generate(wanted(), Sampling(), seed=3)


@pytest.mark.parametrize("places", [10**6, 900, 500])
def test_memory_follows_the_tokens_in_use(make_policy: MakePolicy, places: int) -> None:
    policy = make_policy()
    policy.eos_token_ids = (*range(10, 13),)
    model, limits = SlotModel(policy), (200, 40, 190, 200)
    run = run_of(model, policy, requests(prompts(), 8, limits), 12, places)
    most = num_active = num_used = 0
    while run.is_going():
        is_plenty = places == 10**6  # then nothing is given back before the end of the call
        num_active = max(len(run.cache.answers), num_active * is_plenty)
        num_used = max(run.num_used_places, num_used * is_plenty)
        held = run.num_bytes // model.token_bytes
        # a bucket is a third wider than its shortest answer needs, with 64 or 1/8 of spare columns, 256 at least
        assert held <= 2 * num_used + 256 * num_active + 300 * bool(run.num_queued)
        assert held <= places + 300
        most = max(most, held)
        run.step()
    assert sum(run.num_missing.values()) == 0
    assert run.num_bytes <= 64 * model.token_bytes * 200
    assert most < 12 * 500 / 2  # what slots of the longest answer's length would take


def test_a_group_holds_its_long_prompt_once(make_policy: MakePolicy) -> None:
    policy = make_policy()
    model = SlotModel(policy)
    run = run_of(model, policy, requests(prompts([400]), 8, 10), 8, 10**6)
    assert run.is_going()
    assert run.num_bytes == (400 + 8 * 10) * model.token_bytes


@pytest.mark.essential
def test_a_second_call_with_prompts_of_unlike_lengths_keeps_them_apart(make_policy: MakePolicy) -> None:
    policy = make_policy()
    engine = SlotEngine(policy, 64)
    engine.generate([AnswerRequest(prompt, 16, 8) for prompt in prompts([240] * 4)], Sampling(), seed=1)
    unlike = [AnswerRequest(prompt, 2, 90) for prompt in prompts([240, 12, 20])]
    expected = SlotEngine(policy, 64).generate(unlike, Sampling(), seed=2)
    assert tokens_of(engine.generate(unlike, Sampling(), seed=2)) == tokens_of(expected)


@pytest.mark.parametrize("seed", range(2))
def test_answers_do_not_depend_on_earlier_calls(make_policy: MakePolicy, seed: int) -> None:
    policy, drawn = make_policy(), random.Random(seed)
    engine = SlotEngine(policy, 16)
    for call in range(5):
        lengths = drawn.choices([12, 90, 130, 200, 240, 300], k=drawn.randint(1, 6))
        asked = [AnswerRequest(prompt, drawn.randint(1, 6), drawn.choice([4, 40, 140])) for prompt in prompts(lengths)]
        expected = SlotEngine(policy, 16).generate(asked, Sampling(), seed=call)
        assert tokens_of(engine.generate(asked, Sampling(), seed=call)) == tokens_of(expected)


def test_scarce_memory_is_given_back_as_answers_end(make_policy: MakePolicy) -> None:
    policy = make_policy()
    policy.eos_token_ids = (-1,)
    model = SlotModel(policy)
    run = run_of(model, policy, requests(prompts([20] * 8), 1, [200, *[30] * 7]), 8, 1500)
    held: list[int] = []
    while run.is_going():
        held.append(run.num_bytes // model.token_bytes)
        run.step()
    assert held[0] == 8 * 128
    assert held[31] == 128  # seven have ended
    assert held[-1] == 220
    assert {len(answer.token_ids) for answer in run.completions.values()} == {30, 200}


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral", "gemma2"])
def test_a_prompt_computed_in_pieces_is_the_same_as_in_one(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = SlotModel(make_policy(name))
    both = prompts([PIECE_TOKENS + 60, PIECE_TOKENS // 3])
    cache, logits = model.prepare(both)
    monkeypatch.setattr("swarm.engine.slot_model.PIECE_TOKENS", 10**6)
    whole, expected = model.prepare(both)
    assert torch.allclose(logits, expected, atol=1e-4)
    for layer, other in zip(cache.layers, whole.layers, strict=True):
        assert torch.allclose(layer.keys, other.keys, atol=1e-4)  # type: ignore[arg-type]


def test_pieces_bound_the_tokens_of_a_forward_pass(make_policy: MakePolicy) -> None:
    policy = make_policy()
    sizes: list[int] = []
    policy.model.get_base_model().model.layers[0].register_forward_pre_hook(
        lambda _, arguments: sizes.append(arguments[0].shape[0] * arguments[0].shape[1])
    )
    SlotEngine(policy, 8).generate(requests(prompts([1300, 700, *[600] * 6]), 1, 1), Sampling(), seed=0)
    assert sum(sizes) >= 1300 + 700 + 6 * 600
    assert max(sizes) <= 3 * PIECE_TOKENS


def test_scarce_memory_does_not_change_what_is_pruned(make_policy: MakePolicy) -> None:
    policy = make_policy()
    policy.eos_token_ids = (-1,)
    fresh = requests(prompts(), 3, (60, 30, 90, 90))
    one_answer = SlotEngine(policy, 1).answer_bytes(capacity_of(fresh))

    def pruned(budget: int | None) -> list[list[tuple[tuple[int, ...], str]]]:
        call = call_of(by_first_number, [3] * 4, prune_interval_tokens=7)
        groups = SlotEngine(policy, 12, budget).generate_and_prune(fresh, Sampling(), call, seed=3)
        return [[(completion.token_ids, completion.end) for completion in group] for group in groups]

    expected = pruned(None)
    assert {"pruned", "limit"} == {end for group in expected for _, end in group}
    assert pruned(one_answer) == pruned(2 * one_answer) == expected


def test_begun_answers_read_the_prompt_of_their_group(make_policy: MakePolicy) -> None:
    policy = make_policy()
    engine = SlotEngine(policy, 4)
    fresh = requests(prompts(), 3, 60)
    first = engine.resume(fresh, Sampling(), enough=2, seed=3)
    assert any(completion.end == "open" and completion.token_ids for group in first for completion in group)
    continued = [AnswerRequest(one.prompt, 3, 60, tuple(group)) for one, group in zip(fresh, first, strict=True)]
    whole = engine.generate(fresh, Sampling(), seed=3)
    assert tokens_of(engine.resume(continued, Sampling(), enough=4, seed=3)) == tokens_of(whole)


@pytest.mark.parametrize(("name", "splits"), [(name, name != "gemma2") for name in (*ARCHITECTURES, "gemma2")])
def test_attention_in_parts_is_tried_before_it_is_used(make_policy: MakePolicy, name: str, splits: bool) -> None:
    policy = make_policy(name)
    assert SlotModel(policy).splits_attention is splits
    assert policy.model.config._attn_implementation == ("sdpa" if splits else "eager")


@pytest.mark.parametrize(
    "value_size", [16, 8]
)  # the CPU's kernel wants equal sizes; otherwise, and on a GPU, plain products
def test_attention_over_parts_merges_to_that_over_all(value_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, 5, 16, generator=generator)
    keys = torch.randn(3, 2, 40, 16, generator=generator)
    values = torch.randn(3, 2, 40, value_size, generator=generator)
    mask = hidden_columns(torch.tensor([[39], [20], [12]]), 40, 10, dtype=torch.float32)
    expected = ((query @ keys.mT) * 0.25 + mask).softmax(-1) @ values
    first, first_lse = attend(query, keys[:, :, :8], values[:, :, :8], mask[..., :8], 0.25)
    rest, rest_lse = attend(query, keys[:, :, 8:], values[:, :, 8:], mask[..., 8:], 0.25)
    merged = torch.lerp(rest, first, (first_lse - rest_lse).sigmoid()[..., None])
    assert torch.allclose(merged, expected, atol=1e-5)
    assert torch.equal(merged[0], rest[0])  # the first part is outside of its window


def test_scores_of_16_bits_are_as_exact_as_those_of_the_kernel_that_trains() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = (15 * torch.randn(2, 2, 1, 16, generator=generator) for _ in range(2))
    query, keys = (
        query.bfloat16(),
        torch.cat([keys] * 8, 2).bfloat16() + torch.randn(2, 2, 8, 16, generator=generator).bfloat16(),
    )
    values = torch.randn(2, 2, 8, 8, generator=generator).bfloat16()
    scores = query.double() @ keys.double().mT * 0.25
    assert scores.abs().max() > 100
    _, lse = attend(query, keys, values, None, 0.25)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-3)

"""Every engine against model.generate and against unpadded forward passes."""

from collections.abc import Callable, Sequence

import pytest
import torch

from swarm.config import LoraSection, RolloutsSection
from swarm.engine.engine import Completion, Engine
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.engine.slot_model import supports_slots
from swarm.engine.transformers_engine import TransformersEngine
from swarm.errors import MemoryBudgetError, TrainingError
from swarm.policy.policy import Policy
from tests.unit.tiny_models import ARCHITECTURES, RAGGED_PROMPTS, requests

MakePolicy = Callable[..., Policy]
MakeEngine = Callable[..., Engine]
MODELS = [
    *((name, {}) for name in (*ARCHITECTURES, "mistral", "gemma2")),
    ("llama", {"quantization": "4bit"}),
]

each_engine = pytest.mark.parametrize("kind", [SlotEngine, TransformersEngine])
each_model = pytest.mark.parametrize(("name", "settings"), MODELS, ids=lambda value: str(value))


def generate(
    policy: Policy,
    kind: MakeEngine = SlotEngine,
    *,
    batch: int = 64,
    group_size: int | Sequence[int] = 4,
    sampling: Sampling = Sampling(),
    seed: int = 3,
    tokens: int | Sequence[int] = 12,
    stop: Sequence[str] = (),
) -> list[list[Completion]]:
    prompts = [policy.encode_prompt(prompt) for prompt in RAGGED_PROMPTS]
    engine = kind(policy, batch)
    return engine.generate(requests(prompts, group_size, tokens), sampling, seed=seed, stop=stop)


def tokens_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def unpadded_logprobs(policy: Policy, prompt: list[int], answer: Sequence[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return [logprobs[len(prompt) - 1 + t, token].item() for t, token in enumerate(answer)]


@each_engine
@each_model
def test_logprobs_as_sampled_and_of_the_policy_equal_unpadded_passes(
    make_policy: MakePolicy, kind: MakeEngine, name: str, settings: dict[str, object]
):
    policy = make_policy(name, **settings)
    # three slots: most answers start in one that another has left, next to others that are further
    groups = generate(policy, kind, batch=3, sampling=Sampling(temperature=0.8), tokens=[3, 12, 7, 12])
    for prompt, group in zip(RAGGED_PROMPTS, groups, strict=True):
        for completion in group:
            ids = policy.encode_prompt(prompt)
            expected = unpadded_logprobs(policy, ids, completion.token_ids, 0.8)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
            expected = unpadded_logprobs(policy, ids, completion.token_ids, 1.0)
            assert completion.policy_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.essential
@each_engine
@each_model
def test_greedy_answers_equal_generate_token_by_token(
    make_policy: MakePolicy, kind: MakeEngine, name: str, settings: dict[str, object]
):
    policy = make_policy(name, **settings)
    groups = generate(policy, kind, batch=3, group_size=1, sampling=Sampling(temperature=0), tokens=24)
    for prompt, (completion,) in zip(RAGGED_PROMPTS, groups, strict=True):
        ids = torch.tensor([policy.encode_prompt(prompt)])
        expected = policy.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert completion.token_ids == tuple(expected[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_second_call_in_the_buffers_of_the_first_is_as_good(make_policy: MakePolicy, name: str):
    policy = make_policy(name)
    engine = SlotEngine(policy, 8)
    prompts = [policy.encode_prompt(prompt) for prompt in RAGGED_PROMPTS]
    expected = generate(policy, tokens=5)
    for tokens in (40, 5):
        groups = engine.generate(requests(prompts, 4, tokens), Sampling(), seed=3)
    assert tokens_of(groups) == tokens_of(expected)


@each_engine
def test_greedy_logprobs_are_those_of_the_plain_policy(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    (completion,) = generate(policy, kind, group_size=1, sampling=Sampling(temperature=0))[1]
    expected = unpadded_logprobs(policy, policy.encode_prompt(RAGGED_PROMPTS[1]), completion.token_ids, 1.0)
    assert completion.logprobs == completion.policy_logprobs == pytest.approx(expected, abs=1e-4)


def test_answers_depend_neither_on_the_engine_nor_on_the_number_of_slots(make_policy: MakePolicy):
    policy = make_policy()
    policy.eos_token_ids = (2, 40, 41, 42, 43)  # so that answers of every length occur
    expected = tokens_of(generate(policy, group_size=16))
    for batch in (1, 2, 3, 7, 16, 33):
        assert tokens_of(generate(policy, batch=batch, group_size=16)) == expected
        assert tokens_of(generate(policy, TransformersEngine, batch=batch, group_size=16)) == expected


@each_engine
def test_answers_do_not_depend_on_what_else_is_sampled(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    groups = generate(policy, kind, group_size=8)
    fewer = generate(policy, kind, group_size=[3, 0, 1, 2], tokens=[12, 12, 5, 12])
    assert [len(group) for group in fewer] == [3, 0, 1, 2]
    for some, group in zip(fewer, groups, strict=True):
        for completion, full in zip(some, group, strict=False):
            assert completion.token_ids == full.token_ids[: len(completion.token_ids)]


@each_engine
def test_each_prompt_has_its_own_limit(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    policy.eos_token_ids = (-1,)
    groups = generate(policy, kind, batch=2, tokens=[1, 9, 4, 30])
    assert [{len(c.token_ids) for c in group} for group in groups] == [{1}, {9}, {4}, {30}]
    assert {c.end for group in groups for c in group} == {"limit"}


@each_engine
def test_the_seed_decides(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    torch.manual_seed(1)
    first = generate(policy, kind, seed=1)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert generate(policy, kind, seed=1) == first
    assert generate(policy, kind, seed=2) != first
    assert torch.equal(torch.random.get_rng_state(), before)


@each_engine
def test_siblings_and_equal_prompts_get_different_answers(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    prompt = policy.encode_prompt("Hi")
    groups = kind(policy, 64).generate(requests([prompt, prompt], 4, 12), Sampling(), seed=0)
    assert len({completion.token_ids for group in groups for completion in group}) == 8


@each_engine
def test_an_answer_ends_with_the_first_end_token(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    policy.eos_token_ids = (2, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50)
    groups = generate(policy, kind, group_size=16)
    completions = [completion for group in groups for completion in group]
    assert {"eos", "limit"} == {completion.end for completion in completions}
    for completion in completions:
        *inner, last = completion.token_ids
        assert not set(inner) & set(policy.eos_token_ids)
        assert completion.finished == (last in policy.eos_token_ids)
        assert completion.finished or len(completion.token_ids) == 12
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.policy_logprobs)


@each_engine
def test_an_answer_ends_with_the_first_stop_string_and_keeps_it(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    free = [c.token_ids for group in generate(policy, kind, group_size=16, tokens=24) for c in group]
    stops = ("e", "Q\n", "7")
    stopped = [c for group in generate(policy, kind, group_size=16, tokens=24, stop=stops) for c in group]
    assert {"stop", "limit"} <= {completion.end for completion in stopped}
    for ids, completion in zip(free, stopped, strict=True):
        lengths = [n for n in range(1, len(ids) + 1) if any(stop in policy.decode(ids[:n]) for stop in stops)]
        wanted = ids[: lengths[0]] if lengths else ids
        assert completion.token_ids == wanted
        assert (completion.end == "stop") == bool(lengths)
        assert completion.finished == (not lengths and ids[-1] in policy.eos_token_ids)


@each_engine
def test_score_equals_an_unpadded_forward_pass(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy("qwen2")
    prompt, answer = policy.encode_prompt("What is 7 + 5?"), (*policy.encode_answer("twelve"), 2)
    got = kind(policy, 4).score(prompt, answer)
    assert got == pytest.approx(unpadded_logprobs(policy, prompt, answer, 1.0), abs=1e-4)


@each_engine
def test_nothing_to_sample_gives_no_answers(make_policy: MakePolicy, kind: MakeEngine):
    engine = kind(make_policy(), 4)
    assert engine.generate(requests([], 4, 3), Sampling(), seed=0) == []
    assert engine.generate(requests([[5], [6]], 0, 3), Sampling(), seed=0) == [[], []]


@each_engine
def test_a_broken_policy_is_named_instead_of_sampled(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    with torch.no_grad():
        next(p for n, p in policy.model.named_parameters() if "down_proj.lora_B" in n).fill_(float("nan"))
    with pytest.raises(TrainingError, match="finite probabilities"):
        generate(policy, kind)


def test_an_engine_goes_on_after_a_broken_policy_was_mended(make_policy: MakePolicy):
    policy = make_policy()
    engine = SlotEngine(policy, 8)
    prompts, factor = [policy.encode_prompt("Hi")], next(p for n, p in policy.model.named_parameters() if "lora_B" in n)
    expected = engine.generate(requests(prompts, 4, 6), Sampling(), seed=0)
    sound = factor.detach().clone()
    with torch.no_grad():
        factor.fill_(float("nan"))
        with pytest.raises(TrainingError):
            engine.generate(requests(prompts, 4, 6), Sampling(), seed=0)
        factor.copy_(sound)
    assert engine.generate(requests(prompts, 4, 6), Sampling(), seed=0) == expected


def test_folding_leaves_the_model_as_it_was(make_policy: MakePolicy):
    policy = make_policy()
    modules = dict(policy.model.named_modules())
    state = {name: value.clone() for name, value in policy.model.state_dict().items()}
    engine = SlotEngine(policy, 8)
    assert engine.held_bytes > 0
    engine.score([5, 6], [7, 8])
    assert dict(policy.model.named_modules()) == modules
    assert all(torch.equal(value, state[name]) for name, value in policy.model.state_dict().items())
    assert SlotEngine(make_policy(quantization="4bit"), 8).held_bytes == 0  # would not be exact


@pytest.mark.parametrize("kind", [SlotEngine, TransformersEngine])
def test_fewer_answers_at_once_where_the_cache_is_small(make_policy: MakePolicy, kind: MakeEngine):
    policy = make_policy()
    expected = generate(policy, kind)
    longest = len(policy.encode_prompt(RAGGED_PROMPTS[2])) + 12
    prompts = [policy.encode_prompt(prompt) for prompt in RAGGED_PROMPTS]
    each = kind(policy, 64).answer_bytes(longest)
    small = kind(policy, 64, each * 3)
    assert tokens_of(small.generate(requests(prompts, 4, 12), Sampling(), seed=3)) == tokens_of(expected)
    with pytest.raises(MemoryBudgetError, match=r"set rollouts\.cache_mib = 1, or lower"):
        kind(policy, 64, each - 1).generate(requests(prompts, 4, 12), Sampling(), seed=3)


def test_answer_bytes_are_those_of_the_slots(make_policy: MakePolicy):
    # keys and values · layers · key/value heads · head width · float32
    assert SlotEngine(make_policy(), 1).answer_bytes(10) == 2 * 2 * 2 * 8 * 4 * 10


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral", "gemma2"])
def test_slots_are_the_first_choice(make_policy: MakePolicy, name: str):
    policy = make_policy(name)
    assert supports_slots(policy)
    assert policy.model.config._attn_implementation == ("eager" if name == "gemma2" else "sdpa")
    assert isinstance(make_engine(policy, RolloutsSection()), SlotEngine)


def test_a_recurrent_model_gets_an_engine_too(make_policy: MakePolicy):
    policy = make_policy("falcon_h1", lora=LoraSection(rank=4, alpha=8, targets=("q_proj", "o_proj")))
    engine = make_engine(policy, RolloutsSection())
    assert isinstance(engine, TransformersEngine)
    prompt = policy.encode_prompt("What is 7 + 5?")
    (group,) = engine.generate(requests([prompt], 3, 8), Sampling(), seed=0)
    for completion in group:
        expected = unpadded_logprobs(policy, prompt, completion.token_ids, 1.0)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)

"""The decode loop against model.generate and against unpadded forward passes."""

from collections.abc import Callable

import pytest
import torch

from swarm.engine.engine import Completion
from swarm.engine.sampling import sample_tokens
from swarm.engine.transformers_engine import TransformersEngine
from swarm.errors import TrainingError
from swarm.policy.counter_noise import uniform
from swarm.policy.policy import Policy
from tests.unit.tiny_models import ARCHITECTURES, RAGGED_PROMPTS

MakePolicy = Callable[..., Policy]


def generate(
    policy: Policy, *, batch: int = 64, group_size: int = 4, temperature: float = 1.0, seed: int = 3, tokens: int = 12
) -> list[list[Completion]]:
    prompts = [policy.encode_prompt(prompt) for prompt in RAGGED_PROMPTS]
    engine = TransformersEngine(policy, batch)
    return engine.generate(prompts, group_size, max_new_tokens=tokens, temperature=temperature, seed=seed)


def unpadded_logprobs(policy: Policy, prompt: list[int], answer: tuple[int, ...], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return [logprobs[len(prompt) - 1 + t, token].item() for t, token in enumerate(answer)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in (*ARCHITECTURES, "mistral")), ("llama", {"quantization": "4bit"})],
)
def test_sampled_logprobs_equal_an_unpadded_forward_pass(
    make_policy: MakePolicy, name: str, settings: dict[str, object]
):
    policy = make_policy(name, **settings)
    for prompt, group in zip(RAGGED_PROMPTS, generate(policy, temperature=0.8), strict=True):
        for completion in group:
            expected = unpadded_logprobs(policy, policy.encode_prompt(prompt), completion.token_ids, 0.8)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral"])
def test_greedy_answers_equal_generate_token_by_token(make_policy: MakePolicy, name: str):
    policy = make_policy(name)
    for prompt, (completion,) in zip(RAGGED_PROMPTS, generate(policy, group_size=1, temperature=0.0), strict=True):
        ids = torch.tensor([policy.encode_prompt(prompt)])
        expected = policy.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert completion.token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_greedy_logprobs_are_those_of_the_plain_policy(make_policy: MakePolicy):
    policy = make_policy()
    (completion,) = generate(policy, group_size=1, temperature=0.0)[1]
    expected = unpadded_logprobs(policy, policy.encode_prompt(RAGGED_PROMPTS[1]), completion.token_ids, 1.0)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_answers_do_not_depend_on_the_batch(make_policy: MakePolicy, batch: int):
    policy = make_policy()
    assert [[c.token_ids for c in group] for group in generate(policy, batch=batch)] == [
        [c.token_ids for c in group] for group in generate(policy, batch=64)
    ]


def test_the_seed_decides(make_policy: MakePolicy):
    policy = make_policy()
    torch.manual_seed(1)
    first = generate(policy, seed=1)
    torch.manual_seed(2)
    assert generate(policy, seed=1) == first
    assert generate(policy, seed=2) != first


def test_sampling_leaves_torchs_random_state_alone(make_policy: MakePolicy):
    policy = make_policy()
    before = torch.random.get_rng_state()
    generate(policy)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_siblings_and_equal_prompts_get_different_answers(make_policy: MakePolicy):
    policy = make_policy()
    prompt = policy.encode_prompt("Hi")
    groups = TransformersEngine(policy, 64).generate([prompt, prompt], 4, max_new_tokens=12, temperature=1.0, seed=0)
    answers = [completion.token_ids for group in groups for completion in group]
    assert len(set(answers)) == 8


def test_an_answer_ends_with_the_first_end_token(make_policy: MakePolicy):
    policy = make_policy()
    policy.eos_token_ids = (2, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50)  # so that answers of every length occur
    completions = [completion for group in generate(policy, group_size=16) for completion in group]
    ended = [completion for completion in completions if completion.finished]
    assert {True, False} == {completion.finished for completion in completions}
    assert all(c.token_ids[-1] in policy.eos_token_ids for c in ended)
    assert not any(token in policy.eos_token_ids for c in ended for token in c.token_ids[:-1])
    assert all(len(c.token_ids) == 12 for c in completions if not c.finished)
    assert all(len(c.token_ids) == len(c.logprobs) for c in completions)
    # rows that ended left the batch; those that stayed are still right
    longest = max(ended, key=lambda c: len(c.token_ids))
    assert len(longest.token_ids) > 2
    prompt = next(p for p, g in zip(RAGGED_PROMPTS, generate(policy, group_size=16), strict=True) if longest in g)
    expected = unpadded_logprobs(policy, policy.encode_prompt(prompt), longest.token_ids, 1.0)
    assert longest.logprobs == pytest.approx(expected, abs=1e-4)


def test_score_equals_an_unpadded_forward_pass(make_policy: MakePolicy):
    policy = make_policy("qwen2")
    prompt, answer = policy.encode_prompt("What is 7 + 5?"), (*policy.encode_answer("twelve"), 2)
    got = TransformersEngine(policy, 4).score(prompt, answer)
    assert got == pytest.approx(unpadded_logprobs(policy, prompt, answer, 1.0), abs=1e-4)


def test_no_prompts_give_no_answers(make_policy: MakePolicy):
    assert TransformersEngine(make_policy(), 4).generate([], 4, max_new_tokens=3, temperature=1.0, seed=0) == []


def test_a_broken_policy_is_named_instead_of_sampled(make_policy: MakePolicy):
    policy = make_policy()
    with torch.no_grad():
        next(p for n, p in policy.model.named_parameters() if "down_proj.lora_B" in n).fill_(float("nan"))
    with pytest.raises(TrainingError, match="finite probabilities"):
        generate(policy)


def test_tokens_are_drawn_with_their_probabilities():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = 20_000
    noise = torch.from_numpy(uniform(draws, "test", 1))
    tokens, logprobs = sample_tokens(probabilities.log().expand(draws, 4), 1.0, noise)
    shares = torch.bincount(tokens, minlength=4) / draws
    assert shares.tolist() == pytest.approx(probabilities.tolist(), abs=0.012)  # 3.4 standard errors
    assert shares[1].item() == 0
    assert torch.allclose(logprobs, probabilities.log()[tokens], atol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-23])
def test_the_edges_of_the_noise_never_hit_an_impossible_token(noise: float):
    logits = torch.tensor([[float("-inf"), 1.0, -3.0, 0.5, float("-inf")]])
    token, _ = sample_tokens(logits, 1.0, torch.tensor([noise]))
    assert token.item() == (1 if noise == 0 else 3)


def test_temperature_sharpens():
    logits = torch.tensor([[1.0, 2.0]])
    _, logprob = sample_tokens(logits, 0.5, torch.tensor([0.999]))
    assert logprob.item() == pytest.approx(
        -torch.tensor(-2.0).exp().log1p().item()
    )  # log of the logistic function at 2


def test_noise_is_uniform_and_below_one():
    noise = uniform(50_000, "test", 2)
    assert noise.min() >= 0 and noise.max() <= 1 - 2.0**-23
    assert abs(noise.mean() - 0.5) < 0.005
    assert (uniform(5, "a", 1) != uniform(5, "a", 2)).any()
    assert (uniform(5, "a", 1) == uniform(10, "a", 1)[:5]).all()

"""Log-probs against the textbook: one unpadded forward pass per answer."""

from collections.abc import Callable

import pytest
import torch

from swarm.policy.logprobs import TokenSequence, token_logprobs
from swarm.policy.policy import Policy
from tests.unit.tiny_models import ARCHITECTURES, RAGGED_PROMPTS

MakePolicy = Callable[..., Policy]
ANSWERS = ("12", "", "smraws esaelp", "x", "seven", "a b c")


def ragged_sequences(policy: Policy) -> list[TokenSequence]:
    """Ragged prompts, some with several answers, in mixed order; every answer ends with EOS."""
    return [
        (
            policy.encode_prompt(RAGGED_PROMPTS[i % len(RAGGED_PROMPTS)]),
            [*policy.encode_answer(answer), policy.eos_token_ids[0]],
        )
        for i, answer in enumerate(ANSWERS)
    ]


def unpadded(policy: Policy, sequence: TokenSequence, temperature: float) -> list[float]:
    prompt, answer = sequence
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return [logprobs[len(prompt) - 1 + t, token].item() for t, token in enumerate(answer)]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral"])
def test_logprobs_equal_an_unpadded_forward_pass(make_policy: MakePolicy, name: str, share_prompts: bool):
    policy = make_policy(name)
    sequences = ragged_sequences(policy)
    got = token_logprobs(policy.model, sequences, policy.pad_token_id, 0.7, share_prompts=share_prompts)
    for row, sequence in enumerate(sequences):
        expected = unpadded(policy, sequence, 0.7)
        assert got.mask[row].sum().item() == len(expected)
        assert got.logprobs[row, : len(expected)].tolist() == pytest.approx(expected, abs=1e-4)
        assert got.logprobs[row, len(expected) :].abs().sum().item() == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharing_prompts_changes_no_gradient(make_policy: MakePolicy, name: str):
    policy = make_policy(name)
    policy.model.double()
    gradients = []
    for share_prompts in (True, False):
        policy.model.zero_grad()
        result = token_logprobs(
            policy.model, ragged_sequences(policy), policy.pad_token_id, share_prompts=share_prompts
        )
        result.logprobs.square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    # log-probs are float32 by contract, the rest of this comparison is float64
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_entropy_equals_the_definition(make_policy: MakePolicy):
    policy = make_policy()
    prompt, answer = policy.encode_prompt("Hi"), policy.encode_answer("abc")
    got = token_logprobs(policy.model, [(prompt, answer)], policy.pad_token_id, 1.5, with_entropy=True)
    with torch.no_grad():
        p = (policy.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double() / 1.5).softmax(-1)
    expected = [-(row * row.log()).sum().item() for row in p[len(prompt) - 1 : -1]]
    assert got.entropy is not None
    assert got.entropy[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_the_first_token_and_eos_are_scored(make_policy: MakePolicy):
    policy = make_policy()
    result = token_logprobs(
        policy.model, [(policy.encode_prompt("Hi"), [policy.eos_token_ids[0]])], policy.pad_token_id
    )
    assert result.logprobs.shape == (1, 1)
    assert result.logprobs.item() < 0


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral", "gemma2"])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_gradient_checkpointing_changes_no_gradient(make_policy: MakePolicy, name: str, share_prompts: bool):
    gradients = []
    for checkpointing in (False, True):
        policy = make_policy(name)
        result = token_logprobs(
            policy.model,
            ragged_sequences(policy),
            policy.pad_token_id,
            share_prompts=share_prompts,
            recompute_layers=checkpointing,
        )
        result.logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    assert gradients[0].norm() > 0
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)


def test_answers_share_their_prompt_under_gradient_checkpointing(make_policy: MakePolicy):
    """The prompt goes through the model once, and again in the backward pass."""
    policy = make_policy()
    token_logprobs(policy.model, [([5], [7])], policy.pad_token_id)  # the model's head is tried at the first call
    layer = policy.model.get_base_model().model.layers[0].mlp
    num_tokens: list[int] = []
    layer.register_forward_pre_hook(lambda _module, inputs: num_tokens.append(inputs[0].shape[:2].numel()))
    sequences = [([5] * 200, [7] * 20) for _ in range(16)]
    result = token_logprobs(policy.model, sequences, policy.pad_token_id, recompute_layers=True)
    assert num_tokens == [200, 16 * 19]
    result.logprobs.sum().backward()
    assert sorted(num_tokens) == [200, 200, 16 * 19, 16 * 19]


def test_a_recurrent_state_is_not_shared_under_gradient_checkpointing(make_policy: MakePolicy):
    policy = make_policy("falcon_h1", lora={"rank": 2, "targets": ["q_proj", "v_proj"]})
    sequences = ragged_sequences(policy)
    gradients = []
    for checkpointing in (False, True):
        policy.model.zero_grad()
        result = token_logprobs(policy.model, sequences, policy.pad_token_id, recompute_layers=checkpointing)
        result.logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)

"""Log-probs in chunks against the plain formula over all logits at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from swarm.policy import answer_head
from swarm.policy.answer_head import Head, decode, score_tokens
from swarm.policy.policy import Policy

MakePolicy = Callable[..., Policy]
TOKENS, HIDDEN, VOCAB, TEMPERATURE = 23, 12, 300, 0.7


def plain(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy from the definitions, in float64."""
    log_softmax = (logits.double() / TEMPERATURE).log_softmax(-1)
    return log_softmax[torch.arange(len(targets)), targets], -(log_softmax.exp() * log_softmax).sum(-1)


def random_case() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    hidden = torch.randn(TOKENS, HIDDEN)
    return head, hidden, torch.randint(VOCAB, (TOKENS,)), torch.randn(TOKENS)


@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("is_trained", [False, True])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens: int, is_trained: bool):
    linear, hidden, targets, weights = random_case()
    linear.requires_grad_(is_trained)
    hidden.requires_grad_()
    head = Head(linear, VOCAB, is_trained)
    logprobs, entropy = score_tokens(
        head, hidden, targets, temperature=TEMPERATURE, with_entropy=True, chunk_bytes=4 * VOCAB * chunk_tokens
    )
    expected, expected_entropy = plain(linear(hidden), targets)
    assert entropy is not None
    assert not entropy.requires_grad
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), expected_entropy, atol=1e-5)
    inputs = [hidden, *(linear.parameters() if is_trained else ())]
    # any function of the log-probs, as the losses are: its gradient reaches each token with another factor
    got = torch.autograd.grad((logprobs.exp() * weights).sum(), inputs, retain_graph=True)
    wanted = torch.autograd.grad((expected.exp() * weights).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_without_gradient_nothing_is_stored():
    linear, hidden, targets, _ = random_case()
    hidden.requires_grad_()
    with torch.no_grad():
        logprobs, entropy = score_tokens(Head(linear, VOCAB, is_trained=False), hidden, targets)
    assert not logprobs.requires_grad
    assert entropy is None


@pytest.mark.parametrize("is_trained", [False, True])
def test_no_more_than_a_chunk_of_logits_exists(is_trained: bool):
    linear, hidden, targets, _ = random_case()
    linear.requires_grad_(is_trained)
    sizes: list[int] = []

    def logits(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return linear(rows)

    head = Head(logits, VOCAB, is_trained)
    logprobs, _ = score_tokens(head, hidden.requires_grad_(), targets, chunk_bytes=4 * VOCAB * 6)
    forward = len(sizes)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        logprobs.sum().backward()
    assert max(sizes) == 6
    assert sum(sizes[:forward]) == TOKENS
    # a frozen head runs once; one that is trained runs again in the backward pass
    assert sum(sizes[forward:]) == (TOKENS if is_trained else 0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox", "mistral", "gemma2"])
def test_the_head_of_a_family_is_separated_with_its_scales_and_caps(make_policy: MakePolicy, name: str):
    policy = make_policy(name)
    causal = policy.model.get_base_model()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    hidden, head = decode(policy.model, lambda states: states[:, 1:].reshape(6, -1), input_ids=ids, use_cache=False)
    assert hidden.shape == (6, 32)
    assert not head.is_trained
    with torch.no_grad():
        expected = policy.model(input_ids=ids).logits[:, 1:].reshape(6, -1)
        assert torch.allclose(head.logits(hidden), expected, atol=1e-5)
    assert "forward" not in vars(causal.get_decoder())  # nothing is left behind


def test_a_head_that_is_trained_gets_its_gradient(make_policy: MakePolicy):
    policy = make_policy("gpt_neox")
    weight = policy.model.get_base_model().get_output_embeddings().weight.requires_grad_()
    ids, targets = torch.tensor([[5, 6, 7, 8]]), torch.tensor([6, 7, 8, 2])
    hidden, head = decode(policy.model, lambda states: states[0], input_ids=ids, use_cache=False)
    assert head.is_trained
    logprobs, _ = score_tokens(head, hidden, targets, chunk_bytes=4 * policy.vocab_size)
    (got,) = torch.autograd.grad(logprobs.sum(), [weight])
    logits = policy.model(input_ids=ids).logits[0]
    (wanted,) = torch.autograd.grad(logits.log_softmax(-1)[torch.arange(4), targets].sum(), [weight])
    assert torch.allclose(got, wanted, atol=1e-5)


def test_a_model_whose_decoder_cannot_be_separated_still_gives_its_logits(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
):
    policy = make_policy()
    causal = policy.model.get_base_model()
    forward = causal.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        if kwargs["input_ids"].shape[1] > 1:  # something that depends on the whole batch, which no head can know
            output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(causal, "forward", scaled)
    answer_head._separable.pop(causal, None)  # pyright: ignore[reportPrivateUsage]
    ids = torch.tensor([[5, 6, 7]])
    hidden, head = decode(policy.model, lambda states: states[0], input_ids=ids, use_cache=False)
    assert torch.allclose(head.logits(hidden), policy.model(input_ids=ids).logits[0])


def test_a_lack_of_memory_says_nothing_about_a_model(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch):
    causal = make_policy("llama").model.get_base_model()
    answer_head._separable.pop(causal, None)  # pyright: ignore[reportPrivateUsage]

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(answer_head, "_separated", fail)
        answer_head._is_separable(causal)  # pyright: ignore[reportPrivateUsage]
    assert answer_head._is_separable(causal), "it is tried again"  # pyright: ignore[reportPrivateUsage]

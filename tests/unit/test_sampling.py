"""Drawing tokens: probabilities, filters against those of transformers, the edges of the noise, stop strings."""

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm.engine.sampling import Sampling, StopStrings, sample_tokens
from swarm.policy.counter_noise import uniform


def noise(size: int) -> torch.Tensor:
    return torch.from_numpy(uniform(size, "test", 1))


def test_tokens_are_drawn_with_their_probabilities():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = 20_000
    tokens, logprobs, plain = sample_tokens(probabilities.log().expand(draws, 4), Sampling(), noise(draws))
    shares = torch.bincount(tokens, minlength=4) / draws
    assert shares.tolist() == pytest.approx(probabilities.tolist(), abs=0.012)  # 3.4 standard errors
    assert shares[1].item() == 0
    assert torch.allclose(logprobs, probabilities.log()[tokens], atol=1e-6)
    assert torch.equal(logprobs, plain)


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-23])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(top_k=2), Sampling(min_p=0.1)])
def test_the_edges_of_the_noise_never_hit_an_impossible_token(number: float, sampling: Sampling):
    logits = torch.tensor([[float("-inf"), 1.0, -9.0, 0.5, float("-inf")]])
    token, logprob, _ = sample_tokens(logits, sampling, torch.tensor([number]))
    assert token.item() == (1 if number == 0 else 3)
    assert logprob.isfinite()


def test_a_large_vocabulary_leaves_out_nothing_at_its_end():
    logits = torch.zeros(1, 150_000)
    tokens = [sample_tokens(logits, Sampling(), torch.tensor([u]))[0].item() for u in (0.0, 0.5, 1 - 2.0**-23)]
    assert tokens[0] == 0
    assert tokens[1] == pytest.approx(75_000, abs=20)
    assert tokens[2] == pytest.approx(149_999, abs=20)


def test_temperature_sharpens():
    logits = torch.tensor([[1.0, 2.0]])
    _, logprob, plain = sample_tokens(logits, Sampling(temperature=0.5), torch.tensor([0.999]))
    assert logprob.item() == pytest.approx(-torch.tensor(-2.0).exp().log1p().item())  # of the logistic function at 2
    assert plain.item() == pytest.approx(-torch.tensor(-1.0).exp().log1p().item())


def test_temperature_zero_takes_the_likeliest_whatever_the_filters():
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0))
    tokens, logprobs, plain = sample_tokens(logits, Sampling(temperature=0, top_k=3, min_p=0.1), noise(16))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logprobs, plain)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize(
    "filters",
    [{"top_k": 1}, {"top_k": 5}, {"top_k": 1000}, {"top_p": 0.3}, {"top_p": 0.95}, {"min_p": 0.2}, {"min_p": 0.01}],
    ids=str,
)
def test_filters_are_those_of_transformers(filters: dict[str, float], temperature: float):
    rows = 400
    logits = 3 * torch.randn(rows, 60, generator=torch.Generator().manual_seed(1))
    warped = TemperatureLogitsWarper(temperature)(torch.empty(0), logits) if temperature != 1 else logits
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    for name, value in filters.items():
        warped = warpers[name](min(value, 60) if name == "top_k" else value)(torch.empty(0), warped)
    expected = warped.log_softmax(-1)
    sampling = Sampling(temperature=temperature, **filters)  # type: ignore[arg-type]
    tokens, logprobs, plain = sample_tokens(logits, sampling, noise(rows))
    assert torch.allclose(logprobs, expected.gather(-1, tokens[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(plain, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0], atol=1e-5)


def test_combined_filters_draw_with_the_probabilities_that_are_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    # top_k leaves four, min_p 0.2 drops what is below .08 of those, top_p .6 of {4, 3, 2}/9 keeps the first two
    sampling, draws = Sampling(top_k=4, min_p=0.2, top_p=0.6), 20_000
    tokens, logprobs, plain = sample_tokens(logits.expand(draws, 5), sampling, noise(draws))
    shares = torch.bincount(tokens, minlength=5) / draws
    assert shares.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0, 0], abs=0.012)
    assert torch.allclose(logprobs, (torch.tensor([4.0, 3.0]) / 7).log()[tokens], atol=1e-5)
    assert torch.allclose(plain, logits[tokens], atol=1e-5)


def test_noise_is_uniform_and_below_one():
    numbers = uniform(50_000, "test", 2)
    assert numbers.min() >= 0 and numbers.max() <= 1 - 2.0**-23
    assert abs(numbers.mean() - 0.5) < 0.005
    assert (uniform(5, "a", 1) != uniform(5, "a", 2)).any()
    assert (uniform(5, "a", 1) == uniform(10, "a", 1)[:5]).all()


PIECES = ["a", "b</", "s>", "é", "\ufffd", " ", "<", "/s> and more"]


def spelled(ids: list[int]) -> str:
    """Like tokenizers that drop a blank at the edge, and join the two halves of a character."""
    return "".join(PIECES[i] for i in ids).replace("\ufffd\ufffd", "ü").strip()


@pytest.mark.parametrize(
    ("strings", "ids", "length"),
    [
        (["</s>"], [0, 1, 2, 0], 3),  # over the border of two tokens
        (["</s>"], [0, 6, 7], 3),  # with more behind it in the same token
        (["x", "é"], [0, 3], 2),
        (["ü"], [0, 4, 4, 0], 3),  # half a character completes nothing, both halves do
        (["a "], [0, 5, 0], 3),  # the blank shows once something follows
        (["z"], [0, 1, 2], None),
        ([], [0, 1, 2], None),
    ],
)
def test_stop_strings_are_found_as_soon_as_the_text_has_them(strings: list[str], ids: list[int], length: int | None):
    stop = StopStrings(lambda tokens: spelled(list(tokens)), strings)
    found = next((n for n in range(1, len(ids) + 1) if stop.are_in(ids[:n])), None)
    assert found == length
    assert bool(stop) == bool(strings)

"""Drawing one token per row from logits, on the device where they are."""

import torch
from torch import Tensor


def sample_tokens(logits: Tensor, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] from logits [B, V] and one uniform number per row [B] in [0, 1 - 2**-23].

    Inverts the cumulative distribution: one number per row costs less than one per token of the vocabulary, and makes a
    row's draw depend on nothing but its own number. At temperature 0 the likeliest token, with its plain log-prob.
    """
    if temperature == 0:
        logprobs = logits.float().log_softmax(-1)
        tokens = logprobs.argmax(-1)
    else:
        logprobs = (logits.float() / temperature).log_softmax(-1)
        cumulative = logprobs.exp().cumsum(-1)
        threshold = uniforms[:, None] * cumulative[:, -1:]
        # first token whose cumulative probability exceeds the threshold: never one of probability zero
        tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]

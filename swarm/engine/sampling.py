"""Drawing one token per row from logits, on their device, and stop strings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class StopStrings:
    """Finds stop strings. It decodes an answer only after a token that can complete one, since decoding is expensive."""

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> None:
        self._decode = decode
        self._strings = tuple(strings)
        self._last_characters = {string[-1] for string in self._strings}
        # some tokenizers drop blanks at the edge of a text, and the text of a single token then says nothing
        self._always_looks = any(character.isspace() for character in self._last_characters)
        self._can_complete: dict[int, bool] = {}  # by token, filled on demand

    def __bool__(self) -> bool:
        return bool(self._strings)

    def are_in(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of `token_ids` contains a stop string. All tokens but the last must have been checked before."""
        if not self._strings or not self._may_be_completed_by(token_ids[-1]):
            return False
        text = self._decode(token_ids)
        return any(string in text for string in self._strings)

    def _may_be_completed_by(self, token: int) -> bool:
        if self._always_looks:
            return True
        if token not in self._can_complete:
            text = self._decode([token])
            # U+FFFD stands for some bytes of a character; earlier tokens hold the others
            self._can_complete[token] = "\ufffd" in text or not self._last_characters.isdisjoint(text)
        return self._can_complete[token]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that tokens are drawn from: the policy's at a temperature, cut by the filters."""

    temperature: float = 1.0
    """0 chooses the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 allows all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability (nucleus, 1904.09751)."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the likeliest (2407.01082)."""

    @property
    def is_plain(self) -> bool:
        """Whether it is the policy's own distribution."""
        return self.temperature == 1 and not self.is_filtered

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def sample_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens [B] from logits [B, V] with uniforms [B]; returns them with their log-probs [B] as drawn and plain.

    One uniform number in [0, 1 - 2**-23] per row inverts the cumulative distribution. That costs less than one number per
    token of the vocabulary, and a row's token depends on its own number alone. Plain log-probs are those of the policy; a
    greedy token counts as drawn from it.
    """
    plain = logits.float().log_softmax(-1)
    if sampling.temperature == 0:
        tokens = plain.argmax(-1)
        chosen = plain.gather(-1, tokens[:, None])[:, 0]
        return tokens, chosen, chosen
    drawn_from = plain if sampling.is_plain else _filtered(logits.float() / sampling.temperature, sampling)
    cumulative = drawn_from.exp().cumsum(-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    # the first token whose cumulative probability exceeds the threshold never has probability zero
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], drawn_from.gather(-1, tokens)[:, 0], plain.gather(-1, tokens)[:, 0]


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probs [B, V] after the filters, in the order of vLLM. The likeliest token always stays."""
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.min_p > 0:
        logprobs = logits.log_softmax(-1)
        floor = logprobs.max(-1, keepdim=True).values + torch.tensor(sampling.min_p).log().item()
        logits = logits.masked_fill(logprobs < floor, -torch.inf)
    if sampling.top_p < 1:
        ordered, indices = logits.softmax(-1).sort(-1, descending=True)
        is_out = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(is_out).scatter(-1, indices, is_out), -torch.inf)
    return logits.log_softmax(-1)

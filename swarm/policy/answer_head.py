"""Log-probs and entropy of tokens from hidden states: the language-model head, a bounded number of logits at a time.

    hidden states [N, H] ─▶ chunks of C tokens ─▶ head ─▶ softmax ─┬▶ log-probs [C], entropy [C]
                                                                   └▶ ∂ log-prob / ∂ hidden state [C, H]

With a vocabulary of 150,000 the logits of 1,024 tokens take 600 MiB in float32; softmax and its backward pass take several
times that. Here only one chunk of logits exists at a time, with a few copies of it.

The log-prob of a token depends on its own hidden state alone, so its gradient is one vector [H] per token. Where the weights
of the head are frozen, this vector is computed with the chunk, and the backward pass only scales it: it neither stores nor
computes logits again. Where they are trained (LoRA on the head), each chunk is computed again in the backward pass.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
"""Size of the logits of one chunk in float32."""
CHUNK_COPIES = 5
"""Most tensors of that size that exist at once: logits, scaled logits, softmax, entropy, and the gradients of these."""
_WHOLE_SHARE = 4
"""Where all logits are a quarter of a chunk, they are kept for the backward pass, which takes less time."""
_MAX_DEVIATION = 0.02
"""Largest difference between the logits of a separated head and those of the whole model, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a language model, with all that the model does to its logits."""

    logits: Callable[[Tensor], Tensor]
    """Hidden states [n, H] → logits [n, V]."""
    vocab_size: int
    is_trained: bool
    """Whether the head has parameters that require gradients."""

    def chunk_size(self, chunk_bytes: int = CHUNK_BYTES) -> int:
        """Number of tokens whose logits in float32 take `chunk_bytes`, at least one."""
        return max(1, chunk_bytes // (4 * self.vocab_size))


def decode(model: Any, choose: Callable[[Tensor], Tensor], **inputs: Any) -> tuple[Tensor, Head]:
    """Run the decoder of a peft `model`. Returns the hidden states [n, H] that `choose` picks from [B, S, H], and the head.

    The head is the model's own code between decoder and logits, with the scale or the cap that some families have there.
    Where that code cannot be separated from the decoder, logits take the place of hidden states.
    """
    causal = model.get_base_model()
    if _is_separable(causal):
        return _separated(causal, choose, **inputs)
    vocab_size = causal.config.get_text_config().vocab_size
    return choose(causal(**inputs).logits), Head(lambda logits: logits, vocab_size, is_trained=False)


def score_tokens(
    head: Head, hidden: Tensor, targets: Tensor, *, temperature: float = 1.0, with_entropy: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return log-probs [N] of `targets` [N] under softmax(logits / temperature), and the entropy [N] in nats or None.

    `hidden` is [N, H]. Both results are float32. Log-probs are differentiable where grad is enabled, the entropy is not.
    """

    def score(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        return score_logits(head.logits(rows), wanted, temperature=temperature, with_entropy=with_entropy)

    has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.is_trained)
    logprobs: list[Tensor] = []
    entropies: list[Tensor | None] = []
    row_gradients: list[Tensor] = []
    size = head.chunk_size(chunk_bytes)
    if len(hidden) <= size // _WHOLE_SHARE:
        return score(hidden, targets)
    for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        if has_gradient and head.is_trained:
            logprob, entropy = checkpoint(score, rows, wanted, use_reentrant=False)
        elif has_gradient:
            leaf = rows.detach().requires_grad_()
            logprob, entropy = score(leaf, wanted)
            row_gradients += torch.autograd.grad(logprob.sum(), leaf)
            logprob = logprob.detach()
        else:
            with torch.no_grad():
                logprob, entropy = score(rows, wanted)
        logprobs.append(logprob)
        entropies.append(entropy)
    joined = torch.cat(logprobs)
    if row_gradients:
        joined = _WithRowGradients.apply(hidden, joined, torch.cat(row_gradients))
    return joined, torch.cat([one for one in entropies if one is not None]) if with_entropy else None


def score_logits(
    logits: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The same results from `logits` [n, V], without chunks."""
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    logprobs = -torch.nn.functional.cross_entropy(scaled, targets, reduction="none")
    if not with_entropy:
        return logprobs, None
    with torch.no_grad():
        log_softmax = scaled.log_softmax(-1)
        entropy = -log_softmax.exp().mul_(log_softmax).sum(-1)
    return logprobs, entropy


class _WithRowGradients(torch.autograd.Function):
    """Values [N] whose gradient with respect to row i of `hidden` [N, H] is `row_gradients[i]`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, values: Tensor, row_gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(row_gradients)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (row_gradients,) = ctx.saved_tensors
        return gradient[:, None].to(row_gradients.dtype) * row_gradients, None, None


def _separated(causal: Any, choose: Callable[[Tensor], Tensor], **inputs: Any) -> tuple[Tensor, Head]:
    """See `decode`. Raises whatever the model raises where its decoder is not called once, with hidden states first."""
    decoder = causal.get_decoder()
    if decoder is causal:
        raise ValueError("it names no part of it as its decoder")
    outputs: list[Any] = []

    def keep(_module: Any, _arguments: Any, output: Any) -> Any:
        outputs.append(output)
        return _with_hidden(output, output[0][:, -1:].detach())  # so that the head runs over one token of each row

    handle = decoder.register_forward_hook(keep)
    try:
        causal(**inputs)
    finally:
        handle.remove()
    (output,) = outputs
    hidden = choose(output[0])
    rest = _with_hidden(output, hidden[:0].detach())  # states of the tokens that were not chosen are needed no longer

    def logits(chunk: Tensor) -> Tensor:
        with _computing(decoder, lambda *_, **__: _with_hidden(rest, chunk[None])):
            return causal(input_ids=torch.zeros(1, 1, dtype=torch.long, device=chunk.device), use_cache=False).logits[0]

    in_decoder = {id(parameter) for parameter in decoder.parameters()}
    after_decoder = [one for one in causal.parameters() if id(one) not in in_decoder]
    tied = causal.get_output_embeddings().parameters()  # may be those of the embedding, in the decoder
    is_trained = any(one.requires_grad for one in (*after_decoder, *tied))
    return hidden, Head(logits, causal.config.get_text_config().vocab_size, is_trained)


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    changed = copy.copy(output)
    changed["last_hidden_state"] = hidden
    return changed


@contextmanager
def _computing(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Let `module` compute `forward`."""
    own = vars(module).get("forward")  # set by libraries that place layers on several devices
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


_separable = weakref.WeakKeyDictionary[Any, bool]()


@torch.no_grad()
def _is_separable(causal: Any) -> bool:
    """Whether decoder and head, one after the other, give the logits of the whole model. It is tried once for each model."""
    if causal not in _separable:
        ids = torch.tensor([[1, 0, 1]], device=next(causal.parameters()).device)
        expected = causal(input_ids=ids, use_cache=False).logits[0].float()
        try:
            hidden, head = _separated(causal, lambda states: states[0], input_ids=ids, use_cache=False)
            got = head.logits(hidden).float()
        except torch.OutOfMemoryError:
            raise  # says nothing about the model, and must not be remembered
        except Exception as error:  # a family's own code and kernels may fail in any way
            logger.warning("the head of %s runs over all tokens at once: %s", type(causal).__name__, error)
            _separable[causal] = False
        else:
            largest = (got - expected).abs().max() if got.shape == expected.shape else torch.inf
            _separable[causal] = bool(largest <= _MAX_DEVIATION * expected.abs().max())
    return _separable[causal]

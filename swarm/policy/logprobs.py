"""Log-probabilities of answers under the policy: the one function that training, canary and likelihood checks use.

For answer tokens a_1 … a_T (with EOS when it was sampled) of prompt p_1 … p_P the result holds log π(a_t | p, a_<t) for
t = 1 … T; the first comes from the logits of the last prompt token.

`PromptCache` computes a prompt once and continues it many times, in sampling and in training:

    prompts [D, P] left-padded ──start──▶ keys/values of D prompts ──select rows──▶ B continuations ──extend──▶ logits

Left padding keeps a prompt next to its answer, so sliding-window layers see the right neighbours. Padded columns are masked,
and positions count real tokens only.
"""

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from swarm.policy.answer_head import CHUNK_BYTES, Head, decode, score_tokens
from swarm.policy.micro_batch_size import Extent, TokenSequence
from swarm.policy.recomputed_layers import recomputed_layers

logger = logging.getLogger(__name__)


class PromptCache:
    """Keys and values of prompts and of their continuations. Differentiable where grad is enabled."""

    def __init__(self, model: Any, pad_token_id: int, compute: "Compute | None" = None) -> None:
        """`compute` runs the model; by default it gives logits."""
        base = model.get_base_model()
        self._model = model
        self._pad_token_id = pad_token_id
        self._compute = compute or logits_at
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        self._cache = DynamicCache(config=base.config)
        for layer in self._cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.update_recurrent_state = partial(_store_anew, layer)  # type: ignore[method-assign]
        self._mask = torch.empty(0, 0, dtype=torch.long)  # [B, tokens so far]
        self._next_position = torch.empty(0, 1, dtype=torch.long)  # [B, 1]

    def start(self, prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Compute `prompts`; returns the logits [D, V] of the token after each."""
        longest = max(len(prompt) for prompt in prompts)
        token_ids = torch.tensor([[self._pad_token_id] * (longest - len(p)) + list(p) for p in prompts], device=device)
        lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        self._mask = (torch.arange(longest, device=device) >= longest - lengths).long()
        self._next_position = lengths
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(token_ids, positions, lambda hidden: hidden[:, -1:])[:, 0]

    def select(self, rows: Tensor) -> None:
        """Keep, repeat and reorder rows: row i of the result continues row `rows[i]`."""
        for layer in self._cache.layers:
            if is_plain_layer(layer) and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = repeated_rows(layer.keys, rows), repeated_rows(layer.values, rows)
            else:
                layer.reorder_cache(rows)  # type: ignore[attr-defined]  # for beam search; selects recurrent states too
        self._mask = self._mask[rows]
        self._next_position = self._next_position[rows]

    def extend(self, token_ids: Tensor, choose: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Append `token_ids` [B, n] and return logits [B, n, V], or [.., V] at the positions that `choose` picks.

        Shorter rows are padded on the right: no real token follows the padding, so it needs no mask.
        """
        num_rows, num_new = token_ids.shape
        self._mask = torch.cat([self._mask, self._mask.new_ones(num_rows, num_new)], dim=1)
        positions = self._next_position + torch.arange(num_new, device=token_ids.device)
        self._next_position = self._next_position + num_new
        return self._forward(token_ids, positions, choose or (lambda hidden: hidden))

    @property
    def is_plain(self) -> bool:
        """Whether every layer stores keys and values and no recurrent state."""
        return all(is_plain_layer(layer) for layer in self._cache.layers)

    def num_bytes(self) -> int:
        """Memory of keys, values and recurrent states."""
        return sum(tensor.nbytes for layer in self._cache.layers for tensor in _states(layer))

    def _forward(self, token_ids: Tensor, positions: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        inputs = {"position_ids": positions} if self._takes_positions else {}
        return self._compute(
            self._model,
            choose,
            input_ids=token_ids,
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
            **inputs,
        )


def repeated_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Return `states` [D, ..] at `rows` [B], with gradients that add up in a fixed order, so that a step can be repeated.

    Plain indexing would add repeated rows with atomics on a GPU, in an order that varies from run to run. `index_select` is slow
    on a CPU where its gradient is not contiguous, as that of keys inside a longer cache.
    """
    repeated = states.index_select(0, rows)
    if repeated.requires_grad:
        repeated.register_hook(Tensor.contiguous)
    return repeated


def is_plain_layer(layer: Any) -> TypeGuard[DynamicLayer]:
    """Whether a cache layer stores keys and values and no recurrent state."""
    return isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)


def _store_anew(layer: Any, states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
    """Store a recurrent state in a tensor of its own: the backward pass needs the one before, which transformers overwrites."""
    layer.recurrent_states[state_idx] = states
    layer.is_recurrent_states_initialized[state_idx] = True
    return states


def _states(layer: Any) -> list[Tensor]:
    found = [getattr(layer, name, None) for name in ("keys", "values")]
    for name in ("conv_states", "recurrent_states"):
        found += getattr(layer, name, {}).values()
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


Compute = Callable[..., Tensor]
"""`logits_at`, or a function with its arguments that gives hidden states."""


def logits_at(model: Any, choose: Callable[[Tensor], Tensor], **inputs: Any) -> Tensor:
    """Return logits of the positions that `choose` picks from a [B, S, ...] tensor, as a tensor of three dimensions.

    The head gets only the chosen hidden states: with a vocabulary of 150,000 the logits of a whole batch are by far the
    largest tensor. Scaling or capping that a model applies after its head still happens.
    """
    head = model.get_base_model().get_output_embeddings()
    head_was_called = False

    def keep_chosen(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal head_was_called
        head_was_called = True
        return (choose(arguments[0]), *arguments[1:])

    handle = head.register_forward_pre_hook(keep_chosen)
    try:
        logits = model(**inputs).logits
    finally:
        handle.remove()
    return logits if head_was_called else choose(logits)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Results for B answers of at most T tokens, padded on the right."""

    logprobs: Tensor  # [B, T] float32, 0 at padding
    mask: Tensor  # [B, T] float32, 1 at answer tokens
    entropy: Tensor | None  # [B, T] float32 in nats, no gradient


def token_logprobs(
    model: Any,
    sequences: Sequence[TokenSequence],
    pad_id: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    *,
    share_prompts: bool = True,
    recompute_layers: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenLogprobs:
    """Compute log-probs of all answer tokens under softmax(logits / temperature), differentiable where grad is enabled.

    With `share_prompts` the common prompt of several answers is computed once, forward and backward, where that saves a
    fifth of the tokens: 3 to 4 times faster for groups of 8 with short answers. With `recompute_layers` the backward pass
    computes each layer again, which saves most of the memory for a third more time. `chunk_bytes` bounds the logits that
    exist at a time.
    """
    recomputes = recompute_layers and torch.is_grad_enabled()
    shares = share_prompts and Extent.of(sequences).shares_prompts
    if shares and not PromptCache(model, pad_id).is_plain:
        # a recurrent state is changed in place, so it is not there again where layers are computed again
        shares = not recomputes and _continues_states(model, pad_id)
    with recomputed_layers(model) if recomputes else nullcontext():
        return _answers(model, sequences, pad_id, temperature, with_entropy, shares=shares, chunk_bytes=chunk_bytes)


def _answers(
    model: Any,
    sequences: Sequence[TokenSequence],
    pad_id: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    *,
    shares: bool,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenLogprobs:
    device = next(model.parameters()).device
    answers = [list(answer) for _, answer in sequences]
    mask = _right_padded([[1.0] * len(answer) for answer in answers], 0.0, device)
    if shares:
        prompts = list(dict.fromkeys(tuple(prompt) for prompt, _ in sequences))
        hidden, head = _shared(model, prompts, sequences, mask=mask, pad_id=pad_id)
    else:
        hidden, head = _separate(model, sequences, mask, pad_id=pad_id)
    targets = torch.tensor([token for answer in answers for token in answer], device=device)
    return scored_answers(
        head, hidden, targets, mask, temperature=temperature, with_entropy=with_entropy, chunk_bytes=chunk_bytes
    )


_continuing = weakref.WeakKeyDictionary[Any, bool]()
_TRIED: tuple[list[TokenSequence], ...] = (
    [([1, 0, 1, 1, 0, 1], [0, 1, 1, 0]), ([0, 1, 0], [1, 1, 0, 1])],
    [([1, 0, 1, 1, 0, 1], [0, 1])],
)
_MAX_DEVIATION = 0.1
"""Largest distance from what separate prompts give, relative to its norm, that 16-bit numbers can explain."""


def _continues_states(model: Any, pad_id: int) -> bool:
    """Whether several tokens can continue the recurrent state of a prompt. It is tried once for each model.

    The code of some families, or the kernels that they use on a GPU, ignore the state then, or pass no gradient to it.
    """
    causal = model.get_base_model()
    if causal not in _continuing:
        try:
            with torch.inference_mode(mode=False), torch.enable_grad():
                pairs = list(zip(_tried(model, pad_id, shares=False), _tried(model, pad_id, shares=True), strict=True))
            agrees = all(bool((got - expected).norm() <= _MAX_DEVIATION * expected.norm()) for expected, got in pairs)
        except torch.OutOfMemoryError:
            raise  # says nothing about the model, and must not be remembered
        except Exception as error:  # a family's own code and kernels may fail in any way
            logger.warning("the state of a prompt of %s cannot be continued: %s", type(causal).__name__, error)
            pairs, agrees = [], False
        if len(pairs) == 1:
            return agrees  # without an adapter there is no gradient to compare
        logger.info(
            "answers of %s %s", type(causal).__name__, "share their prompt" if agrees else "each compute their prompt"
        )
        _continuing[causal] = agrees
    return _continuing[causal]


def _tried(model: Any, pad_id: int, *, shares: bool) -> list[Tensor]:
    """Return log-probs of `_TRIED` and, where they have one, their gradient."""
    logprobs = torch.cat([_answers(model, one, pad_id, shares=shares).logprobs.flatten() for one in _TRIED])
    if not logprobs.requires_grad:
        return [logprobs]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(logprobs.sum(), trained, allow_unused=True, materialize_grads=True)
    return [logprobs.detach(), torch.cat([gradient.flatten().float() for gradient in gradients])]


def scored_answers(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenLogprobs:
    """Compute log-probs of `targets` [N] from `hidden` [N, H] of all answer tokens, row by row of `mask` [B, T]."""
    logprobs, entropy = score_tokens(
        head, hidden, targets, temperature=temperature, with_entropy=with_entropy, chunk_bytes=chunk_bytes
    )
    return TokenLogprobs(_scatter(logprobs, mask), mask, None if entropy is None else _scatter(entropy, mask))


def _separate(model: Any, sequences: Sequence[TokenSequence], mask: Tensor, pad_id: int) -> tuple[Tensor, Head]:
    """Hidden states [N, H] of all answer tokens from one right-padded batch; causal attention never sees the padding."""
    full = [[*prompt, *answer[:-1]] for prompt, answer in sequences]
    token_ids = _right_padded(full, pad_id, mask.device)
    rows, steps = mask.nonzero(as_tuple=True)
    columns = torch.tensor([len(prompt) - 1 for prompt, _ in sequences], device=mask.device)[rows] + steps
    return decode(model, lambda hidden: hidden[rows, columns], input_ids=token_ids, use_cache=False)


def _shared(
    model: Any, prompts: list[tuple[int, ...]], sequences: Sequence[TokenSequence], mask: Tensor, pad_id: int
) -> tuple[Tensor, Head]:
    """The same hidden states, with every distinct prompt computed once and its keys and values repeated for its answers."""
    heads: list[Head] = []

    def compute(model: Any, choose: Callable[[Tensor], Tensor], **inputs: Any) -> Tensor:
        hidden, head = decode(model, choose, **inputs)
        heads.append(head)
        return hidden

    cache = PromptCache(model, pad_id, compute)
    index = {prompt: i for i, prompt in enumerate(prompts)}
    prompt_of = torch.tensor([index[tuple(prompt)] for prompt, _ in sequences], device=mask.device)
    first = repeated_rows(cache.start(prompts, mask.device), prompt_of)  # [B, H]
    rows, steps = mask[:, 1:].nonzero(as_tuple=True)
    if len(rows) == 0:
        return first, heads[-1]
    cache.select(prompt_of)
    token_ids = _right_padded([list(answer[:-1]) for _, answer in sequences], pad_id, mask.device)
    if token_ids.shape[1] == 1 and not cache.is_plain:
        # a single token is taken for a step of sampling, which overwrites states that the backward pass needs
        token_ids = torch.cat([token_ids, torch.full_like(token_ids, pad_id)], dim=1)
    later = cache.extend(token_ids, lambda hidden: hidden[rows, steps][None])[0]  # [N - B, H]
    is_first = mask.nonzero(as_tuple=True)[1] == 0
    order = torch.empty_like(is_first, dtype=torch.long)  # by answer: a_1 of row 0, its later tokens, a_1 of row 1, …
    order[is_first] = torch.arange(len(first), device=mask.device)
    order[~is_first] = torch.arange(len(first), len(order), device=mask.device)
    return torch.cat([first, later])[order], heads[-1]


def _scatter(flat: Tensor, mask: Tensor) -> Tensor:
    rows, steps = mask.nonzero(as_tuple=True)
    return torch.zeros_like(mask).index_put((rows, steps), flat)


def _right_padded(rows: list[list[Any]], fill: Any, device: torch.device) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows], device=device)

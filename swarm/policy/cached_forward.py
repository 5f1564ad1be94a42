"""Forward passes that compute a prompt once and continue it many times; shared by sampling and by training.

    prompts [D, P] left-padded ──start──▶ keys/values of D prompts ──select rows──▶ B continuations ──extend──▶ logits

Left padding keeps a prompt next to its answer, so sliding-window layers see the right neighbours; padded columns are
masked and positions count real tokens only.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin


class PromptCache:
    """Keys and values of prompts, and where each continuation of them stands. Differentiable where grad is enabled."""

    def __init__(self, model: Any, pad_token_id: int) -> None:
        base = model.get_base_model()
        self._model = model
        self._pad_token_id = pad_token_id
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        self._cache = DynamicCache(config=base.config)
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
                # not layer.batch_select_indices: the backward pass of plain indexing adds up repeated rows with
                # atomics, in an order that varies from run to run; that of index_select keeps the order, so a step can
                # be repeated
                layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
            else:
                layer.reorder_cache(rows)  # type: ignore[attr-defined]  # made for beams; selects recurrent states too
        self._mask = self._mask[rows]
        self._next_position = self._next_position[rows]

    def extend(self, token_ids: Tensor, choose: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Append `token_ids` [B, n] and return logits [B, n, V], or [.., V] at the positions that `choose` picks.

        Rows with fewer tokens are padded on the right: nothing real comes after padding, so it needs no mask.
        """
        num_rows, num_new = token_ids.shape
        self._mask = torch.cat([self._mask, self._mask.new_ones(num_rows, num_new)], dim=1)
        positions = self._next_position + torch.arange(num_new, device=token_ids.device)
        self._next_position = self._next_position + num_new
        return self._forward(token_ids, positions, choose or (lambda hidden: hidden))

    def num_bytes(self) -> int:
        """Memory of keys, values and recurrent states."""
        return sum(tensor.nbytes for layer in self._cache.layers for tensor in _states(layer))

    def _forward(self, token_ids: Tensor, positions: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        inputs = {"position_ids": positions} if self._takes_positions else {}
        return logits_at(
            self._model,
            choose,
            input_ids=token_ids,
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
            **inputs,
        )


def is_plain_layer(layer: Any) -> TypeGuard[DynamicLayer]:
    """Whether a cache layer keeps keys and values, and no recurrent state."""
    return isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)


def _states(layer: Any) -> list[Tensor]:
    found = [getattr(layer, name, None) for name in ("keys", "values")]
    for name in ("conv_states", "recurrent_states"):
        found += getattr(layer, name, {}).values()
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def logits_at(model: Any, choose: Callable[[Tensor], Tensor], **inputs: Any) -> Tensor:
    """Logits of the positions that `choose` picks from a [B, S, ...] tensor; it must return a tensor of three
    dimensions.

    The head gets only those hidden states: with a vocabulary of 150,000 the logits of a whole batch are the largest
    tensor by far. Scaling or capping that a model applies after its head still happens.
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

"""The model of continuous batching: passes over whole prompts, in pieces, and over one token of every active answer."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from swarm.engine.slot_attention import SplitAttention, hidden_columns
from swarm.engine.slot_cache import CachedAnswer, SlotCache, bytes_of
from swarm.policy.logprobs import is_plain_layer, logits_at
from swarm.policy.policy import Policy

PIECE_TOKENS = 512
"""Columns of prompts computed at a time. Shorter pieces make the products of matrices slower, longer ones take memory."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OWN_MASKS = {"gpt_neo"}
"""Model types whose attention hides tokens by the length of the cache, and not by the mask that it gets."""


class SlotModel:
    """Runs the policy's model on prompts and slots. It holds no weights."""

    def __init__(self, policy: Policy) -> None:
        self.device = policy.device
        self._policy = policy
        self._base = policy.model.get_base_model()
        self._config = self._base.config.get_text_config()
        window = getattr(self._config, "sliding_window", None)
        kinds = getattr(self._config, "layer_types", None)
        kinds = kinds or ["sliding_attention" if window else "full_attention"] * self._config.num_hidden_layers
        self._layer_windows = [window if kind == "sliding_attention" else None for kind in kinds]
        self._windows = dict(zip(kinds, self._layer_windows, strict=True))
        self._attention = SplitAttention(self._config)

    @cached_property
    def token_bytes(self) -> int:
        """Memory of the keys and values of one token."""
        return bytes_of(self._one_token)

    @cached_property
    def splits_attention(self) -> bool:
        """Whether the model leaves attention to the function that its configuration names: then it can be in parts."""
        if self._config._attn_implementation != "sdpa":
            return False  # soft caps and sinks
        cache = SlotCache(self._one_token, 1, 2, splits=True, windows=self._layer_windows)
        cache.add([CachedAnswer(1, 2)])
        cache.fill(0, self._one_token, row=0, start=0)
        cache.begin_step(in_parts=True)
        self._forward(cache, torch.tensor([self._policy.pad_token_id], device=self.device))
        return cache.num_split >= len(cache.slot_layers)

    def cache(self, num_slots: int, max_places: int) -> SlotCache:
        """Make an empty cache."""
        return SlotCache(
            self._one_token, num_slots, max_places, splits=self.splits_attention, windows=self._layer_windows
        )

    def prepare(
        self,
        prompts: Sequence[Sequence[int]],
        prefix: DynamicCache | None = None,
        *,
        saw_piece: Callable[[int], None] | None = None,
    ) -> tuple[DynamicCache, Tensor]:
        """Compute keys and values of prompts [D, P], padded on the right, and logits [D, V] of the token after each.

        `prefix` holds the tokens before a single prompt, and stays as it is; the result then begins with them. `saw_piece`
        gets the first position of each piece after its forward pass.
        """
        lengths = [len(prompt) for prompt in prompts]
        longest, pad = max(lengths), self._policy.pad_token_id
        token_ids = torch.tensor(
            [[*prompt, *[pad] * (longest - len(prompt))] for prompt in prompts], device=self.device
        )
        cache = DynamicCache()  # without the config, which would make it drop tokens outside a sliding window
        first = 0 if prefix is None else prefix.get_seq_length()
        for index, layer in enumerate(prefix.layers if prefix else ()):
            cache.update(layer.keys, layer.values, index)  # type: ignore[arg-type]
        found: dict[int, Tensor] = {}
        for start in range(0, longest, PIECE_TOKENS):
            piece = token_ids[:, start : start + PIECE_TOKENS]
            width = piece.shape[1]
            rows = [row for row, length in enumerate(lengths) if start < length <= start + width]
            columns = [lengths[row] - 1 - start for row in rows]
            logits = logits_at(
                self._policy.model,
                lambda hidden, rows=rows, columns=columns: hidden[rows, columns][:, None],
                input_ids=piece,
                position_ids=torch.arange(first + start, first + start + width, device=self.device)[None].expand(
                    len(prompts), -1
                ),
                past_key_values=cache,
                use_cache=True,
            )
            found |= dict(zip(rows, logits[:, 0], strict=True))
            if saw_piece is not None:
                saw_piece(first + start)
        return cache, torch.stack([found[row] for row in range(len(prompts))])

    def extend(self, cache: SlotCache, tokens: Tensor) -> Tensor:
        """Append one token [n] to each answer and return logits [n, V] of the next."""
        cache.begin_step()
        logits = self._forward(cache, tokens)
        cache.end_step()
        return logits

    @cached_property
    def _one_token(self) -> DynamicCache:
        """A cache of one token, which shows the shapes of the layers."""
        return self.prepare([[self._policy.pad_token_id]])[0]

    def _forward(self, cache: SlotCache, tokens: Tensor) -> Tensor:
        positions = cache.positions[: len(tokens), None]
        is_split = cache.step_layout is not None
        with self._attention if is_split else nullcontext():
            return self._base(
                input_ids=tokens[:, None],
                attention_mask=self._mask(positions, 1 if is_split else cache.width, cache.dtype),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]

    def _mask(self, positions: Tensor, width: int, dtype: torch.dtype) -> Any:
        """Return what is added to the attention scores, [n, 1, 1, width]; by kind of layer where the model has several."""
        masks = {kind: hidden_columns(positions, width, window, dtype=dtype) for kind, window in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


def is_plain(cache: DynamicCache) -> bool:
    """Whether every layer stores keys and values of all tokens, and nothing else."""
    return all(is_plain_layer(layer) for layer in cache.layers)


def supports_slots(policy: Policy) -> bool:
    """Whether every layer of the model attends to a cache of all tokens, at given positions."""
    base = policy.model.get_base_model()
    config = base.config.get_text_config()
    return (
        config.model_type not in _OWN_MASKS
        and not getattr(config, "alibi", False)  # biases by the columns of the mask, and not by positions
        and set(getattr(config, "layer_types", None) or ["full_attention"]) <= _LAYER_TYPES
        and is_plain(DynamicCache(config=base.config))
        and getattr(base.config, "_attn_implementation", None) in ("sdpa", "eager")
        and "position_ids" in inspect.signature(base.forward).parameters
    )

"""The model and cache of continuous batching: a pass over whole prompts, and one over a token of every active slot.

The cache holds keys and values of answers that start and end at different times, in buffers that are allocated once.

    slot s   [ prompt | answer so far | free ]        a token's column is its position, so no row needs padding

Slots 0 to n - 1 are active. When one ends, the next answer takes its place, or the last active slot moves there. A forward
pass therefore always uses the first n rows of each buffer, without gathering or growing anything.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from swarm.policy.logprobs import is_plain_layer, logits_at
from swarm.policy.policy import Policy


class SlotCache(Cache):
    """A transformers cache whose rows are at different positions."""

    def __init__(self, prepared: DynamicCache, num_slots: int, capacity: int) -> None:
        """Allocates buffers for `num_slots` rows of `capacity` tokens, with layers shaped as in `prepared`."""
        self.slot_layers = [_SlotLayer(self, layer, num_slots * capacity) for layer in prepared.layers]
        super().__init__(layers=list[Any](self.slot_layers))
        self.device = self.slot_layers[0].keys.device
        self.dtype = self.slot_layers[0].keys.dtype
        self._num_places = num_slots * capacity
        self.slots, self.positions = self._divide(num_slots, capacity)
        """Numbers [S] of the slots, and the column [S] of each slot's next token."""
        self.width = 0
        """Number of columns that the active slots use, with the next token's."""

    def resize(self, num_slots: int, capacity: int) -> bool:
        """Divide the same buffers into other slots, all free. Returns False, and does nothing, where they are too small."""
        if num_slots * capacity > self._num_places:
            return False
        self.slots, self.positions = self._divide(num_slots, capacity)
        self.width = 0
        return True

    def put(self, slot: int, prepared: DynamicCache, row: int, length: int) -> None:
        """Copy the first `length` tokens of a row of `prepared` into a slot."""
        for layer, source in zip(self.slot_layers, prepared.layers, strict=True):
            layer.keys[slot, :, :length] = source.keys[row, :, :length]  # type: ignore[index]
            layer.values[slot, :, :length] = source.values[row, :, :length]  # type: ignore[index]
        self.positions[slot] = length

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of slot `source` to slot `target`."""
        for layer in self.slot_layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]
        self.positions[target] = self.positions[source]

    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(layer.num_bytes() for layer in self.slot_layers)

    def _divide(self, num_slots: int, capacity: int) -> tuple[Tensor, Tensor]:
        for layer in self.slot_layers:
            layer.divide(num_slots, capacity)
        zeros = torch.zeros(num_slots, dtype=torch.long, device=self.device)
        return torch.arange(num_slots, device=self.device), zeros


class _SlotLayer(CacheLayerMixin):
    """The buffers [S, heads, capacity, head size] of one layer. `update` writes one token per active slot."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache, like: Any, num_places: int) -> None:
        super().__init__()
        self._cache = cache
        self._like = [(states.shape[1], states.shape[3]) for states in (like.keys, like.values)]  # heads, head size
        # zeros, because masked values are still multiplied by 0, and the product must not be NaN
        self._buffers = [
            states.new_zeros(num_places * heads * size)
            for states, (heads, size) in zip((like.keys, like.values), self._like, strict=True)
        ]
        self.divide(num_places, 1)
        self.is_initialized = True

    def divide(self, num_slots: int, capacity: int) -> None:
        self.keys, self.values = (
            buffer[: num_slots * capacity * heads * size].view(num_slots, heads, capacity, size)
            for buffer, (heads, size) in zip(self._buffers, self._like, strict=True)
        )

    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing; the buffers exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache, num_rows = self._cache, key_states.shape[0]
        rows, columns = cache.slots[:num_rows], cache.positions[:num_rows]
        self.keys[rows, :, columns] = key_states[:, :, 0]
        self.values[rows, :, columns] = value_states[:, :, 0]
        return self.keys[:num_rows, :, : cache.width], self.values[:num_rows, :, : cache.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        return self._cache.width - 1

    def get_max_length(self) -> int:
        return -1


def is_plain(cache: DynamicCache) -> bool:
    """Whether every layer stores keys and values of all tokens, and nothing else."""
    return all(is_plain_layer(layer) for layer in cache.layers)


_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OWN_MASKS = {"gpt_neo"}
"""Model types whose attention hides tokens by the length of the cache, and not by the mask that it gets."""


class SlotModel:
    """Runs the policy's model on prompts and slots. It holds no weights."""

    def __init__(self, policy: Policy) -> None:
        self.device = policy.device
        self._policy = policy
        self._base = policy.model.get_base_model()
        config = self._base.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(types)}

    def prepare(self, prompts: Sequence[Sequence[int]]) -> tuple[DynamicCache, Tensor]:
        """Compute keys and values of prompts [D, P], padded on the right, and logits [D, V] of the token after each."""
        device = self._policy.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = max(map(len, prompts))
        pad = self._policy.pad_token_id
        token_ids = torch.tensor([[*prompt, *[pad] * (longest - len(prompt))] for prompt in prompts], device=device)
        rows = torch.arange(len(prompts), device=device)
        cache = DynamicCache()  # without the config, which would make it drop tokens outside a sliding window
        logits = logits_at(
            self._policy.model,
            lambda hidden: hidden[rows, lengths - 1][:, None],
            input_ids=token_ids,
            position_ids=torch.arange(longest, device=device)[None].expand(len(prompts), -1),
            past_key_values=cache,
            use_cache=True,
        )
        return cache, logits[:, 0]

    def extend(self, cache: SlotCache, tokens: Tensor, width: int) -> Tensor:
        """Append one token [n] to each active slot and return logits [n, V] of the next. `width`: columns in use."""
        num_rows = len(tokens)
        cache.width = width
        positions = cache.positions[:num_rows, None]
        logits = self._base(
            input_ids=tokens[:, None],
            attention_mask=self._mask(positions, width, cache.dtype),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        cache.positions[:num_rows] += 1
        return logits

    def _mask(self, positions: Tensor, width: int, dtype: torch.dtype) -> Any:
        """Return what is added to the attention scores, [n, 1, 1, width]; by kind of layer where the model has several.

        It holds numbers, because every layer would convert booleans into numbers again.
        """
        columns = torch.arange(width, device=positions.device)
        masks: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            is_hidden = columns > positions
            if window is not None:
                is_hidden |= columns <= positions - window
            scores = torch.zeros(is_hidden.shape, dtype=dtype, device=positions.device)
            masks[kind] = scores.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))


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

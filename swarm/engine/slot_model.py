"""The two passes of continuous batching over a transformers model: whole prompts, and one token of every active slot."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from swarm.engine.slot_cache import SlotCache, is_plain
from swarm.policy.cached_forward import logits_at
from swarm.policy.policy import Policy

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class SlotModel:
    """The policy's model as the slots use it; holds no weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._base = policy.model.get_base_model()
        config = self._base.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(types)}

    def prepare(self, prompts: Sequence[Sequence[int]]) -> tuple[DynamicCache, Tensor]:
        """Keys and values of the prompts [D, P], right-padded, and the logits [D, V] of the token after each."""
        device = self._policy.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = max(map(len, prompts))
        pad = self._policy.pad_token_id
        token_ids = torch.tensor([[*prompt, *[pad] * (longest - len(prompt))] for prompt in prompts], device=device)
        rows = torch.arange(len(prompts), device=device)
        cache = DynamicCache()  # not made from the config: such a one would drop what is outside a sliding window
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
        """Append one token [n] to each active slot; returns the logits [n, V] of the one after. `width`: columns in use."""
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
        """What is added to the attention scores, [n, 1, 1, width]; by kind of layer where the model has several.

        Numbers, not booleans: every layer would turn those into numbers again.
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
    """Whether every layer of the model attends to a cache of all tokens, at positions that it is told."""
    base = policy.model.get_base_model()
    config = base.config.get_text_config()
    return (
        set(getattr(config, "layer_types", None) or ["full_attention"]) <= _LAYER_TYPES
        and is_plain(DynamicCache(config=base.config))
        and getattr(base.config, "_attn_implementation", None) in ("sdpa", "eager")
        and "position_ids" in inspect.signature(base.forward).parameters
    )

"""Gradient checkpointing: the layers of a model keep their input and are computed again in the backward pass.

transformers has a switch for it, which takes the cache from every layer, so that answers could not share the keys and values
of their prompt, and which works in train mode only. Here a layer that is computed again gets its part of the cache as it was.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputed_layers(model: Any) -> Iterator[None]:
    """Layers of `model` keep only their input for the backward pass, while this context lasts.

    The cache that they get must be made of plain keys and values. Random numbers of dropout are drawn alike both times.
    """
    layers = checkpointed_layers(model)
    own = [vars(layer).get("forward") for layer in layers]  # set by libraries that place layers on several devices
    for layer in layers:
        layer.forward = partial(_recomputed, layer, layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def checkpointed_layers(model: Any) -> list[Any]:
    """The layers that can be computed again, without those inside of another one; none for a few families."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():  # a layer comes before those inside of it
        if isinstance(module, GradientCheckpointingLayer) and not name.startswith(
            tuple(f"{outer}." for outer in found)
        ):
            found[name] = module
    return list(found.values())


def _recomputed(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if cache is None:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
    index = _layer_index(layer)
    before = cache.layers[index]
    after = copy.copy(before)
    first_run = [after]
    empty = copy.copy(cache)  # what the backward pass needs must not hold the keys and values of other layers
    empty.layers = [None] * len(cache.layers)  # type: ignore[list-item]

    def run(*args: Any, **kwargs: Any) -> Any:
        own = copy.copy(empty)
        own.layers = list(empty.layers)
        own.layers[index] = first_run.pop() if first_run else copy.copy(before)
        filled = {name: own if value is empty else value for name, value in kwargs.items()}
        return forward(*(own if value is empty else value for value in args), **filled)

    emptied = {name: empty if value is cache else value for name, value in kwargs.items()}
    positional = [empty if value is cache else value for value in args]
    result = checkpoint(partial(run, **emptied), *positional, use_reentrant=False)
    cache.layers[index] = after
    return result


def _layer_index(layer: Any) -> int:
    """Return the place of a layer's keys and values in the cache, which its attention holds under one of two names."""
    found = (vars(module).get(name) for module in layer.modules() for name in ("layer_idx", "layer_id"))
    return next(index for index in found if index is not None)

"""What a model's configuration tells without its weights: layers, sizes, and what its adapter will be attached to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from swarm.adapters.load_pretrained import load_pretrained
from swarm.config import LoraSection
from swarm.errors import PipelineError
from swarm.pipeline.architecture import Layout, layout_of
from swarm.policy.lora import resolve_targets


def adapter_targets(folder: Path, lora: LoraSection) -> list[tuple[str, int, int]]:
    """(name, inputs, outputs) of all adapted layers of the whole model, as its lineage counts them; reads no weights.

    Raises PolicyError for a target that names no linear layer, PipelineError for an unknown architecture.
    """
    config = read_config(folder)
    whole = on_meta(config, layout_of(config))
    modules = dict(whole.named_modules())
    names = resolve_targets(whole, lora.targets)
    return [(name, modules[name].in_features, modules[name].out_features) for name in names]


def model_modules(folder: Path) -> tuple[list[tuple[str, nn.Module]], nn.Module, nn.Module]:
    """(name and module of every layer, embedding, head) of the whole model, without weights. Raises PipelineError."""
    config = read_config(folder)
    layout = layout_of(config)
    whole = on_meta(config, layout)
    decoder = getattr(whole, layout.decoder)
    layers = [(f"{layout.layer_prefix}{i}", layer) for i, layer in enumerate(getattr(decoder, layout.layers))]
    return layers, getattr(decoder, layout.embedding), getattr(whole, layout.head)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What config.json says of a model's size."""

    num_layers: int
    hidden: int
    vocab: int


def model_shape(folder: Path) -> ModelShape:
    """Raises PipelineError for an unreadable configuration or an architecture that cannot be cut."""
    config = read_config(folder)
    layout_of(config)
    return ModelShape(config.num_hidden_layers, config.hidden_size, config.vocab_size)


def read_config(folder: Path) -> Any:
    """The transformers config. Raises PipelineError where there is none that can be read."""
    try:
        return load_pretrained(transformers.AutoConfig, folder)
    except (OSError, ValueError, KeyError) as error:
        raise PipelineError(
            f"a pipelined base must hold a valid config.json, got {folder}: {' '.join(str(error).split())[:200]}; "
            "fetch the model again"
        ) from None


def on_meta(config: Any, layout: Layout) -> Any:
    """A model without weights."""
    with torch.device("meta"):
        return getattr(transformers, layout.model_class)(config)

"""The structure of a base model, read from its configuration without its weights: layers, sizes, adapter targets, costs.

A `Layout` names attributes of the transformers class, which does all computing. A new architecture needs a row in `LAYOUTS`
and a place in the tests. It must be a plain stack: embedding, layers of one type that pass one tensor on, norm and head,
with nothing scaled or capped in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from swarm.adapters.load_pretrained import load_pretrained
from swarm.config import LoraSection
from swarm.errors import PipelineError
from swarm.pipeline.driver.assignment import ModelCost
from swarm.policy.lora import resolve_targets

if TYPE_CHECKING:
    from swarm.pipeline.stage.stage_host import BaseModel


@dataclass(frozen=True, slots=True)
class Layout:
    """Attribute names of one architecture: `decoder` and `head` belong to the model, the others to its decoder."""

    model_class: str
    decoder: str
    embedding: str
    norm: str
    layers: str = "layers"
    rotary: str = "rotary_emb"
    head: str = "lm_head"
    old_head: str = "lm_head"
    """Name of the head in weight files."""

    @property
    def layer_prefix(self) -> str:
        """Prefix of the layer number in the names of tensors."""
        return f"{self.decoder}.{self.layers}."


LAYOUTS: dict[str, Layout] = {
    "llama": Layout("LlamaForCausalLM", "model", "embed_tokens", norm="norm"),
    "qwen2": Layout("Qwen2ForCausalLM", "model", "embed_tokens", norm="norm"),
    "gpt_neox": Layout("GPTNeoXForCausalLM", "gpt_neox", "embed_in", norm="final_layer_norm", old_head="embed_out"),
}
"""Layouts by `model_type` of config.json."""


def layout_of(config: Any) -> Layout:
    """Return the layout for a transformers config. Raises PipelineError for an architecture that is not in the table."""
    if config.model_type not in LAYOUTS:
        raise PipelineError(
            f"a pipelined base must be one of {', '.join(LAYOUTS)}, got {config.model_type}; set policy.base"
        )
    return LAYOUTS[config.model_type]


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of the model that one stage holds: layers [start, stop), and the model's ends or replicas of them."""

    start: int
    stop: int
    has_embedding: bool
    has_head: bool
    """Final norm and head."""

    @property
    def num_layers(self) -> int:
        """Number of layers, at least one."""
        return self.stop - self.start

    def name_prefixes(self, layer_prefix: str) -> tuple[str, ...]:
        """Prefixes of the names of all tensors of its layers."""
        return tuple(f"{layer_prefix}{number}." for number in range(self.start, self.stop))


def stage_parts(sizes: Sequence[int], *, replicate_edges: bool = False) -> list[StagePart]:
    """Return the parts of stages with `sizes` layers each, in order. Raises PipelineError for an empty stage.

    With `replicate_edges` the second stage also holds the embedding, and the last but one also holds norm and head. Edge
    stages can then swap places, and a lost one can be rebuilt (CheckFree+, 2506.15461).
    """
    if not sizes or min(sizes) < 1:
        raise PipelineError(f"every stage must have at least one layer, got {list(sizes)}; use fewer stages")
    reach, last, start = 2 if replicate_edges else 1, len(sizes), 0
    parts: list[StagePart] = []
    for index, size in enumerate(sizes):
        parts.append(StagePart(start, start + size, index < reach, has_head=index >= last - reach))
        start += size
    return parts


def adapter_targets(folder: Path, lora: LoraSection) -> list[tuple[str, int, int]]:
    """Return (name, inputs, outputs) of all adapted layers of the whole model, as its lineage counts them.

    Reads no weights. Raises PolicyError for a target that names no linear layer, PipelineError for an unknown architecture.
    """
    config = read_config(folder)
    whole = on_meta(config, layout_of(config))
    modules = dict(whole.named_modules())
    names = resolve_targets(whole, lora.targets)
    return [(name, modules[name].in_features, modules[name].out_features) for name in names]


def model_modules(folder: Path) -> tuple[list[tuple[str, nn.Module]], nn.Module, nn.Module]:
    """Return (name and module of every layer, embedding, head) of the model without weights. Raises PipelineError."""
    config = read_config(folder)
    layout = layout_of(config)
    whole = on_meta(config, layout)
    decoder = getattr(whole, layout.decoder)
    layers = [(f"{layout.layer_prefix}{i}", layer) for i, layer in enumerate(getattr(decoder, layout.layers))]
    return layers, getattr(decoder, layout.embedding), getattr(whole, layout.head)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that its config.json states."""

    num_layers: int
    hidden: int
    vocab: int


def model_shape(folder: Path) -> ModelShape:
    """Read the sizes. Raises PipelineError for an unreadable configuration or an architecture that cannot be split."""
    config = read_config(folder)
    layout_of(config)
    return ModelShape(config.num_hidden_layers, config.hidden_size, config.vocab_size)


def read_config(folder: Path) -> Any:
    """Read the transformers config. Raises PipelineError where no readable one exists."""
    try:
        return load_pretrained(transformers.AutoConfig, folder)
    except (OSError, ValueError, KeyError) as error:
        raise PipelineError(
            f"a pipelined base must hold a valid config.json, got {folder}: {' '.join(str(error).split())[:200]}; "
            "fetch the model again"
        ) from None


def on_meta(config: Any, layout: Layout) -> Any:
    """Build a model without weights, on torch's meta device."""
    with torch.device("meta"):
        return getattr(transformers, layout.model_class)(config)


_ADAPTER_BYTES = 16
"""Bytes of one float32 adapter weight with its gradient and its two moments."""
_ROOM = 1.25
"""Factor for activations in flight and caches, which depend on the batch."""
_BACKWARD_SHARE = 3.0
"""Forward and backward of a frozen layer with an adapter take about three times its forward pass; the head does too."""


def model_cost(base: "BaseModel") -> ModelCost:
    """Compute memory and time costs. Raises PipelineError for an unknown architecture, PolicyError for unknown targets."""
    layers, embedding, head = model_modules(base.folder)
    prefix, adapters = layers[0][0].rpartition(".")[0], dict[int, int]()
    for name, inputs, outputs in adapter_targets(base.folder, base.lora):
        number = int(name[len(prefix) + 1 :].partition(".")[0])
        adapters[number] = adapters.get(number, 0) + base.lora.rank * (inputs + outputs)
    itemsize = base.dtype.itemsize
    layer_bytes = [
        int(_ROOM * (_count(layer) * itemsize + _ADAPTER_BYTES * adapters.get(number, 0)))
        for number, (_, layer) in enumerate(layers)
    ]
    return ModelCost(
        tuple(layer_bytes),
        embedding_bytes=_count(embedding) * itemsize,
        head_bytes=_count(head) * itemsize,
        head_layers=_count(head) / max(_count(layers[0][1]), 1) / _BACKWARD_SHARE,
    )


def least_bytes(cost: ModelCost, part: StagePart) -> int:
    """Return the memory of a stage without any batch. Loading it with less is pointless."""
    ends = cost.embedding_bytes * part.has_embedding + cost.head_bytes * part.has_head
    return int(sum(cost.layer_bytes[part.start : part.stop]) / _ROOM) + ends


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

"""Where the parts of a causal language model are, for each architecture that can be cut into stages.

A layout names attributes of the transformers class; the classes themselves do all computing. Another architecture needs a
row here and a place in the tests: it must be a plain stack, that is embedding, equal-typed layers that pass one tensor on,
a norm and a head, with nothing scaled or capped in between.

What a model's configuration tells without its weights: layers, sizes, and what its adapter will be attached to.

What layers and ends of a model take, from its configuration alone: what they are assigned by.
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
    """Attribute names; `decoder` and `head` of the model, the others of its decoder."""

    model_class: str
    decoder: str
    embedding: str
    norm: str
    layers: str = "layers"
    rotary: str = "rotary_emb"
    head: str = "lm_head"
    old_head: str = "lm_head"
    """What weight files call the head."""

    @property
    def layer_prefix(self) -> str:
        """What stands before the number of a layer in the name of a tensor."""
        return f"{self.decoder}.{self.layers}."


LAYOUTS: dict[str, Layout] = {
    "llama": Layout("LlamaForCausalLM", "model", "embed_tokens", "norm"),
    "qwen2": Layout("Qwen2ForCausalLM", "model", "embed_tokens", "norm"),
    "gpt_neox": Layout("GPTNeoXForCausalLM", "gpt_neox", "embed_in", "final_layer_norm", old_head="embed_out"),
}
"""By `model_type` of config.json."""


def layout_of(config: Any) -> Layout:
    """The layout for a transformers config. Raises PipelineError for an architecture that is not in the table."""
    if config.model_type not in LAYOUTS:
        raise PipelineError(
            f"a pipelined base must be one of {', '.join(LAYOUTS)}, got {config.model_type}; set policy.base"
        )
    return LAYOUTS[config.model_type]


@dataclass(frozen=True, slots=True)
class StagePart:
    """What one stage holds: layers [start, stop), and the ends of the model or replicas of them."""

    start: int
    stop: int
    has_embedding: bool
    has_head: bool
    """Final norm and head."""

    @property
    def num_layers(self) -> int:
        """At least one."""
        return self.stop - self.start


def stage_parts(sizes: Sequence[int], *, replicate_edges: bool = False) -> list[StagePart]:
    """Parts of stages with `sizes` layers each, in order.

    With `replicate_edges` the second stage holds the embedding too and the last but one norm and head, so that edge
    stages can swap places and can be lost (CheckFree+, 2506.15461). Raises PipelineError for an empty stage.
    """
    if not sizes or min(sizes) < 1:
        raise PipelineError(f"every stage must have at least one layer, got {list(sizes)}; use fewer stages")
    reach, last, start = 2 if replicate_edges else 1, len(sizes), 0
    parts: list[StagePart] = []
    for index, size in enumerate(sizes):
        parts.append(StagePart(start, start + size, index < reach, index >= last - reach))
        start += size
    return parts


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


_ADAPTER_BYTES = 16
"""A float32 weight of the adapter with its gradient and two moments."""
_ROOM = 1.25
"""For activations in flight and caches, which depend on the batch."""
_BACKWARD_SHARE = 3.0
"""Forward and backward of a frozen layer with an adapter take about three times its forward pass; so does the head."""


def model_cost(base: "BaseModel") -> ModelCost:
    """Reads no weights. Raises PipelineError for an unknown architecture, PolicyError for unknown adapter targets."""
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
    """What a stage takes without any batch: below that there is no point in loading it."""
    ends = cost.embedding_bytes * part.has_embedding + cost.head_bytes * part.has_head
    return int(sum(cost.layer_bytes[part.start : part.stop]) / _ROOM) + ends


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

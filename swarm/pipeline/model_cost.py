"""What layers and ends of a model take, from its configuration alone: what they are assigned by."""

from typing import TYPE_CHECKING

from torch import nn

from swarm.pipeline.architecture import StagePart
from swarm.pipeline.assignment import ModelCost
from swarm.pipeline.model_shape import adapter_targets, model_modules

if TYPE_CHECKING:
    from swarm.pipeline.stage_host import BaseModel

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

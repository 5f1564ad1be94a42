"""What a driver knows of a stage before the stage says anything: names and shapes, from the base's configuration.

All that a stage says of itself is compared with this, so a stage decides neither which parameters it holds nor how much
memory the driver takes to read a reply.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.adapters.adam_moments import moments_of
from swarm.config import LoraSection
from swarm.errors import StageReplyError
from swarm.pipeline.architecture import StagePart, layout_of
from swarm.pipeline.model_shape import adapter_targets, model_shape, read_config
from swarm.pipeline.orders import StageFacts
from swarm.pipeline.stage_optimizer import RECOVERED_LR_FACTOR

FRAME_BYTES = 4096
"""Most bytes of a reply without tensors, or of the fields beside tensors."""
STATE_TENSORS = 3
"""Weights and two moments of the same shape, for each parameter."""
_ENTRY_BYTES = 96
"""Most bytes that the head of a reply has for one tensor, beside its name."""
_FACTOR_SLACK = 1e-5
_HASH_CHARS = 64


@dataclass(frozen=True, slots=True)
class ExpectedStage:
    """One stage with an adapter on a frozen base, as the driver assigned it."""

    part: StagePart
    num_model_layers: int
    hidden: int
    vocab: int
    layer_prefix: str
    shapes: Mapping[str, tuple[int, ...]]
    """Of the adapter tensors of its layers."""

    @property
    def facts_bytes(self) -> int:
        """Most bytes of a description."""
        return FRAME_BYTES + sum(_ENTRY_BYTES + len(name) for name in self.shapes)

    def tensor_bytes(self, names: tuple[str, ...] | None = None) -> int:
        """Most bytes of a reply with one tensor for each of `names`; without names, for each parameter."""
        chosen = self.shapes if names is None else names
        return FRAME_BYTES + sum(_ENTRY_BYTES + len(name) + 4 * math.prod(self.shapes[name]) for name in chosen)

    @property
    def state_bytes(self) -> int:
        """Most bytes of a reply with weights and optimizer state."""
        return (1 + STATE_TENSORS) * self.tensor_bytes()  # heads of steps, too

    def check_facts(self, facts: StageFacts) -> None:
        """Raises StageReplyError unless a stage describes itself as it was assigned."""
        wanted = (self.part, self.num_model_layers, self.layer_prefix, dict(self.shapes))
        if (facts.part, facts.num_model_layers, facts.layer_prefix, facts.shapes) != wanted:
            raise StageReplyError(
                f"a stage must describe layers [{self.part.start}, {self.part.stop}) and the {len(self.shapes)} adapter "
                f"tensors of them, got [{facts.part.start}, {facts.part.stop}) and {len(facts.shapes)} tensors"
            )
        if len(facts.content_hash) != _HASH_CHARS or set(facts.content_hash) - set("0123456789abcdef"):
            raise StageReplyError("a stage must give the SHA-256 of its weights, got something else")

    def check_weights(self, weights: Mapping[str, Tensor], what: str = "weights") -> None:
        """Raises StageReplyError unless all tensors of the stage are there, in their shapes, finite, and no others."""
        if weights.keys() != self.shapes.keys():
            odd = sorted(weights.keys() ^ self.shapes.keys())[0]
            raise StageReplyError(f"{what} of a stage must be those of its layers, got a difference at {odd[:80]!r}")
        for name, value in weights.items():
            _check_finite(name, value, self.shapes[name])

    def check_state(self, tensors: Mapping[str, Mapping[str, Tensor]], lr_factor: float) -> None:
        """Raises StageReplyError unless it is a state that AdamW can have over the parameters of the stage."""
        self.check_weights(tensors["adapter"])
        try:
            moments_of(tensors["optimizer"], self.shapes)
        except ValueError as error:
            raise StageReplyError(str(error)) from None
        if min(abs(lr_factor - 1.0), abs(lr_factor - RECOVERED_LR_FACTOR)) > _FACTOR_SLACK:
            raise StageReplyError(f"the learning rate factor must be 1 or {RECOVERED_LR_FACTOR}, got {lr_factor}")


def expected_stages(folder: Path, lora: LoraSection, parts: Sequence[StagePart]) -> list[ExpectedStage]:
    """What honest stages with `parts` say of themselves. Reads no weights. Raises PipelineError and PolicyError."""
    prefix, shape = layout_of(read_config(folder)).layer_prefix, model_shape(folder)
    targets = adapter_targets(folder, lora)
    found: list[ExpectedStage] = []
    for part in parts:
        own = tuple(f"{prefix}{number}." for number in range(part.start, part.stop))
        shapes: dict[str, tuple[int, ...]] = {}
        for name, inputs, outputs in targets:
            if name.startswith(own):
                shapes |= {f"{name}.lora_A": (lora.rank, inputs), f"{name}.lora_B": (outputs, lora.rank)}
        found.append(ExpectedStage(part, shape.num_layers, shape.hidden, shape.vocab, prefix, shapes))
    return found


def _check_finite(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.dtype != torch.float32 or tuple(value.shape) != shape or not bool(torch.isfinite(value).all()):
        raise StageReplyError(f"{name[:80]!r} must be finite float32 of shape {shape}, got another tensor")

"""Where the parts of a causal language model are, for each architecture that can be cut into stages.

A layout names attributes of the transformers class; the classes themselves do all computing. Another architecture needs a
row here and a place in the tests: it must be a plain stack, that is embedding, equal-typed layers that pass one tensor on,
a norm and a head, with nothing scaled or capped in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm.errors import PipelineError


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

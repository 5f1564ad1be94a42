"""How adapters are merged with those of others."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from swarm.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


def largest_stable_beta(alpha: float) -> float:
    """2(1 − α²), the published bound of NoLoCo. It is on the safe side here: outer steps overshoot from 2(1 + α) on."""
    return 2 * (1 - alpha * alpha)


class MergingSection(Section):
    """Merging adapters with partners of the same lineage while training, without an all-reduce (NoLoCo, 2506.10911)."""

    enabled: bool = False
    """Merge with partners. Off: only experience is shared."""
    inner_steps: PositiveInt = 32
    """H: optimizer steps between two outer steps."""
    interval_s: Annotated[float, Field(ge=0)] = 0.0
    """Take outer steps at multiples of so many seconds of the swarm's clock, whatever inner steps were taken; 0: by inner_steps.
    Nodes of unlike speed then meet, and the fast ones need not wait for the slow ones."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Outer momentum."""
    beta: PositiveFloat = 0.7
    """Outer learning rate of the own training; below 2(1 - alpha^2), well before outer steps overshoot."""
    precision: Literal["bf16", "int8", "int4"] = "bf16"
    """Of the weights that are sent. int8 halves the bytes, int4 quarters them; see benchmarks.md for what they cost."""
    schedule: Literal["fixed", "late"] = "fixed"
    """fixed: every inner_steps. late: of those one in five, and all in the last quarter of node.max_rounds."""
    clip_factor: PositiveFloat = 4.0
    """A partner's tensor may lie so many times the median of our own last changes of it away from ours; the rest is cut off."""
    strangers_factor: Annotated[float, Field(ge=0)] = 1.0
    """All strangers together may move a tensor, over 16 outer steps or in one final merge, so many times as far as our own
    training moved it. A stranger is a peer of which fewer than four bodies were admitted; 0 takes nothing from strangers."""
    gate_tasks: NonNegativeInt = 24
    """Private tasks on which a merge must do no harm before it is taken; 0 trusts the partner. They cannot show what an adapter
    does on a prompt that only its author knows: that is what strangers_factor bounds."""
    drift_threshold: PositiveFloat = 1.0
    """Layers whose factors average to more than this error, relative to their products, are merged as products instead. Up to .6
    averaging was no worse where measured."""
    search_timeout_s: PositiveFloat = 30.0
    """Longest search for a partner. About as long as an outer round nearly all find one; training goes on meanwhile."""
    request_timeout_s: PositiveFloat = 10.0
    """For one small request to a partner; a piece of an adapter gets more, by its size."""
    min_bytes_per_s: PositiveFloat = 131072.0
    """A partner whose adapter comes in more slowly than this is left. One megabit by default."""
    final: bool = False
    """With enabled: end with a merge of all nodes of the lineage that end at the same time, at node.max_rounds or final_at."""
    final_at: Annotated[float, Field(ge=0)] = 0.0
    """Swarm time (seconds since 1970) at which training ends for the final merge, if not before; 0: at node.max_rounds only.
    Best a multiple of final_interval_s: then all whose round in flight ends within nine tenths of it are in one merge."""
    final_interval_s: Annotated[float, Field(gt=0, le=1200)] = 120.0
    """Final merges begin at multiples of so many seconds of the swarm's clock. The same on all nodes."""
    final_tries: PositiveInt = 2
    """Final merges that a node waits for while it is the only one there: others may end a little later."""
    final_window_s: PositiveFloat = 60.0
    """Longest time of one of its log2 N + 2 exchanges, the gate's of the one before included. The same on all nodes."""
    final_export: bool = False
    """Write the adapter to final-adapter/round-N in the node's folder after it, in peft format. Not for a pipelined policy."""

    @model_validator(mode="after")
    def _settings_have_an_effect_and_replicas_stay_together(self) -> "MergingSection":
        if not self.enabled and (self.final or self.final_at):
            name = "merging.final" if self.final else "merging.final_at"
            raise ValueError(f"{name} needs merging.enabled = true, got false; set that too, or remove {name}")
        if self.final_at and not self.final:
            raise ValueError("merging.final_at needs merging.final = true, got false; set that too, or remove final_at")
        bound = largest_stable_beta(self.alpha)
        if self.beta >= bound:
            raise ValueError(
                f"merging.beta must be below 2(1 - alpha^2) = {bound:.3g} with merging.alpha {self.alpha:g}, got "
                f"{self.beta:g}: outer steps would overshoot; lower merging.alpha or merging.beta"
            )
        return self

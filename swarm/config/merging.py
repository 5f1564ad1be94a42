"""Settings of merging adapters with partners."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from swarm.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


def largest_stable_beta(alpha: float) -> float:
    """2(1 − α²), the published bound of NoLoCo. It is on the safe side here: outer steps overshoot from 2(1 + α) on."""
    return 2 * (1 - alpha * alpha)


class MergingSection(Section):
    """Merging adapters with partners of the same lineage during training, without an all-reduce (NoLoCo, 2506.10911)."""

    enabled: bool = False
    """Merge adapters with partners. Off: only experience is shared. Where measured, nodes that merge end above every silo, for
    the least processor time. Nodes that share need fewer samples, and merging adds little to that. Merging alone bears a larger
    training.lr than a node on its own: twice with long answers, four times with short ones (benchmarks.md)."""
    inner_steps: PositiveInt = 4
    """Optimizer steps between two outer steps (H), which come after a round, so at most one of them in each. With 16 or
    more, nodes that merge were measured to learn no faster than a silo; with 2 and 4 much faster, and nearly alike. An outer step
    sends and receives one adapter: on a slow line set more steps, or a smaller precision."""
    interval_s: Annotated[float, Field(ge=0)] = 0.0
    """Take outer steps at multiples of this many seconds of the swarm's clock, whatever the number of inner steps. Nodes of
    different speed then meet without waiting for each other. 0: by inner_steps."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Momentum of the outer step."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of the outer step. It makes training beta/(1 - alpha) times as long, as a larger training.lr would. 0: 1 -
    alpha, which leaves training as it is. It must be below 2(1 - alpha^2), which is safely below the value at which outer steps
    overshoot."""
    precision: Literal["bf16", "int8", "int4"] = "bf16"
    """Number format in which weights are sent. int8 halves the bytes of bf16, int4 quarters them. For the cost see
    benchmarks.md."""
    schedule: Literal["fixed", "late"] = "fixed"
    """When outer steps are taken. fixed: every inner_steps. late: every fifth of those, and all in the last quarter of
    node.max_rounds."""
    clip_factor: PositiveFloat = 4.0
    """Largest distance of a partner's tensor from ours, as a multiple of the median of our own last changes of that tensor.
    What exceeds it is clipped."""
    strangers_factor: Annotated[float, Field(ge=0)] = 1.0
    """Largest distance by which all strangers together may move a tensor within 16 outer steps or one final merge, as a
    multiple of the distance of our own training. A stranger is a peer with fewer than four admitted bodies. 0: strangers
    change nothing."""
    gate_tasks: NonNegativeInt = 24
    """Number of private tasks on which a merge that is tried must not lower the reward to be applied. They cannot show a hidden
    response to a prompt that only the partner knows: strangers_factor bounds that. 0: no test."""
    gate_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Number of answers that trying merges takes, as a fraction of those that the node samples for its rounds. Chance decides
    which merges are tried, so that no partner can know; merges with a partner that was refused lately are always tried, beyond
    this number. 1: all of them, whatever it takes."""
    drift_threshold: PositiveFloat = 1.0
    """Layers are merged as products instead of factors if averaging the factors has a larger relative error than this. Up
    to 0.6, averaging was no worse where measured."""
    search_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """Longest search for a partner, in seconds. Training continues meanwhile. Nodes meet only while both search. 0: nine tenths
    of the time between the last two offers, at least 30 s and at most 50 minutes, so that nearly all find one."""
    request_timeout_s: PositiveFloat = 10.0
    """Longest wait for a small request to a partner, in seconds. A part of an adapter gets more time by its size."""
    min_bytes_per_s: PositiveFloat = 131072.0
    """A partner that sends its adapter more slowly than this is given up. The default is one megabit per second."""
    final: bool = False
    """End with one merge of all nodes of the lineage that end at the same time, at node.max_rounds or final_at. Needs
    enabled."""
    final_at: Annotated[float, Field(ge=0)] = 0.0
    """Time of the swarm's clock, in seconds since 1970, at which training ends for the final merge. Best a multiple of
    final_interval_s: nodes whose last round ends within nine tenths of that interval then share one merge. 0: only at
    node.max_rounds."""
    final_interval_s: Annotated[float, Field(gt=0, le=1200)] = 120.0
    """Final merges begin at multiples of this many seconds of the swarm's clock. All nodes need the same value."""
    final_tries: PositiveInt = 2
    """How many final merges a node waits for while it is the only node there, as others may end a little later."""
    final_window_s: PositiveFloat = 60.0
    """Longest duration of one of the log2 N + 2 exchanges of a final merge, in seconds. All nodes need the same value."""
    final_export: bool = False
    """Write the adapter to final-adapter/round-N in the node's folder after the final merge, in peft format. Not for a
    pipeline."""

    @property
    def outer_lr(self) -> float:
        """Learning rate of the outer step."""
        return self.beta or 1 - self.alpha

    @model_validator(mode="after")
    def _settings_have_an_effect_and_replicas_stay_together(self) -> "MergingSection":
        if not self.enabled and (self.final or self.final_at):
            name = "merging.final" if self.final else "merging.final_at"
            raise ValueError(f"{name} needs merging.enabled = true, got false; set that too, or remove {name}")
        if self.final_at and not self.final:
            raise ValueError("merging.final_at needs merging.final = true, got false; set that too, or remove final_at")
        bound = largest_stable_beta(self.alpha)
        if self.outer_lr >= bound:
            raise ValueError(
                f"merging.beta must be below 2(1 - alpha^2) = {bound:.3g} with merging.alpha {self.alpha:g}, got "
                f"{self.beta:g}: outer steps would overshoot; lower merging.alpha or merging.beta"
            )
        return self

"""How answers are sampled."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from swarm.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section
from swarm.extensions.points import TASK_CHOICES


class RolloutsSection(Section):
    """How answers are sampled."""

    groups_per_round: PositiveInt = 8
    """Tasks drawn per round; each gives one group."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per group (G). Below 4 the advantage is noisy and a warning is logged."""
    task_choice: Annotated[str, TASK_CHOICES] = "weighted"
    """Which source the next task comes from."""
    task_choice_parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task choice, for those that take some."""
    difficulty_memory: Fraction = 0.9
    """Weight of the old difficulty estimate of a source when a new group arrives (exponential decay)."""
    group_sizes: Literal["equal", "variance"] = "equal"
    """equal: group_size each. variance: more for sources whose reward varies and whose answers are short, at equal tokens."""
    extra_rollouts: Literal["off", "hard", "equal"] = "off"
    """More answers to tasks whose first ones earned less than half (DARS, 2508.13755), up to largest_group."""
    smallest_group: Annotated[int, Field(ge=2)] = 4
    """Where sizes differ, no group is smaller, unless group_size is."""
    largest_group: Annotated[int, Field(ge=2)] = 32
    """Where sizes differ, no group is larger. Other nodes refuse groups larger than their sharing.max_group_size."""
    refill_draws: NonNegativeInt = 0
    """How often a round draws further tasks while fewer than groups_per_round groups have signal (DAPO, 2503.14476)."""
    over_provision: Annotated[float, Field(ge=1, le=4)] = 1.0
    """Begin this many times groups_per_round groups, stop when groups_per_round are complete, continue the rest later (APRIL)."""
    hints: NonNegativeInt = 0
    """Groups of a round, beyond groups_per_round, whose answers begin with a part of a peer's right answer. Sources whose
    verifier needs a process, such as reasoning_gym, give hints with tasks.sandboxed only. 0: none, which was
    better with answers of four tokens (docs/benchmarks.md)."""
    prune: bool = False
    """Drop answers early whose reward is foreseeable, so that more groups are half right, half wrong (ARRoL, 2603.24840)."""
    prune_interval_tokens: PositiveInt = 4
    """Tokens between two predictions for an answer, of which there are at most 16."""
    prune_certainty: Annotated[float, Field(gt=0.5, lt=1)] = 0.8
    """Probability of ending like most of its group from which an answer may be dropped."""
    max_new_tokens: PositiveInt = 24
    """Longest answer in tokens; longer ones are cut and masked from the loss. 1024 unless set, if policy.base is not bundled."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_k: NonNegativeInt = 0
    """Draw among the k likeliest tokens only; 0 is all. Training never sees what a filter cuts off: see algorithms.md."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw among the likeliest tokens that together have this probability only; 1 is all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw among tokens at least this fraction as likely as the likeliest only; 0 is all."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=16)] = ()
    """Strings that end an answer and are part of it. All nodes of a swarm use the same."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """auto: slots that refill as answers end. transformers: a batch waits for its longest answer. vllm: an optional extra."""
    max_batch_sequences: PositiveInt = 64
    """Most answers that are decoded at the same time."""
    environment_threads: Annotated[int, Field(ge=1, le=256)] = 16
    """Most environments that take their turn at the same time, beside sampling."""
    cache_mib: PositiveInt | None = None
    """Memory for keys and values of answers so far; some wait if it is short. Unset: half of what is free."""
    overlap: bool = False
    """Sample the next round in a second process while this one is trained on: on a second GPU where there is one, otherwise
    beside training. Answers are one round older, and the base takes its memory twice."""

    @model_validator(mode="after")
    def _sizes_are_in_order(self) -> "RolloutsSection":
        if self.sizes_differ and self.largest_group < self.group_size:
            raise ValueError(
                f"largest_group must be at least group_size, got {self.largest_group} < {self.group_size}; raise it"
            )
        return self

    @model_validator(mode="after")
    def _pruning_misleads_nobody(self) -> "RolloutsSection":
        """Rewards of what is left of a group say little about how hard its task is, and a prediction needs the whole group."""
        plain = {"task_choice": "weighted", "group_sizes": "equal", "extra_rollouts": "off", "over_provision": 1.0}
        for name, value in plain.items():
            if self.prune and getattr(self, name) != value:
                raise ValueError(
                    f"prune goes with {name} = {value} only, got {getattr(self, name)}: what is left of a group does not "
                    "tell how hard its task is, nor can it wait for a later round; set prune = false, or that"
                )
        return self

    @model_validator(mode="after")
    def _overlap_is_plain(self) -> "RolloutsSection":
        if self.overlap and (self.prune or self.engine == "vllm"):
            value = "prune = true" if self.prune else 'engine = "vllm"'
            raise ValueError(
                f"overlap goes without prune and without vLLM, got {value}: pruning learns from each round before the next, and "
                "two processes would load vLLM; set overlap = false, or that"
            )
        return self

    @property
    def sizes_differ(self) -> bool:
        """Whether groups may have more or fewer answers than group_size."""
        return self.group_sizes != "equal" or self.extra_rollouts != "off"

    @property
    def is_filtered(self) -> bool:
        """Whether answers are drawn from less than the whole policy."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_mib is None else self.cache_mib * 2**20

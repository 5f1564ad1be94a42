"""The base model, its adapter, and the machines that may hold it together."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from swarm.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section, SwarmName


class LoraSection(Section):
    """The adapter (peft)."""

    rank: PositiveInt = 16
    """Rank of every factor pair."""
    alpha: PositiveFloat = 32.0
    """The adapter is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout before A, in training only."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers to adapt. all-linear: all but the head. In a list, `experts` adds the weights of a mixture's
    experts, as in ["all-linear", "experts"]."""
    init_seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of A. Nodes of equal base, adapter shape and init_seed are one lineage: they share log-probs and can merge."""


class PipelineSection(Section):
    """One policy over several machines, for models that no single machine holds. All machines need the same table."""

    name: SwarmName = "crew"
    """Tells the pipelines of one swarm apart."""
    driver: str = ""
    """Peer id of the node that runs `swarm run`. Stages accept commands from this node only."""
    machines: tuple[str, ...] = ()
    """Peer ids, or multiaddresses that end in /p2p/PEER_ID, of the machines that run `swarm stage`. Empty: no pipeline."""
    spares: NonNegativeInt = 0
    """Number of these machines that stay without layers until another machine is lost."""
    driver_layers: PositiveInt | None = None
    """Number of last layers that the driver holds, besides norm and head. Unset: by speed and memory, as for the machines."""
    self_assigned: tuple[str, ...] = ()
    """Peer ids of machines that may choose their own layers with `swarm stage --layers`."""
    max_layers: PositiveInt | None = None
    """Most layers that the driver assigns to one machine, whatever speed it reports. Unset: as many as its memory holds."""
    precision: Literal["fp32", "bf16", "int8"] = "bf16"
    """Number format of hidden states and their gradients between machines. For the cost see algorithms.md."""
    action_timeout_s: PositiveFloat = 60.0
    """A stage that takes longer than this many seconds for one command is lost."""
    silence_timeout_s: PositiveFloat = 8.0
    """A machine that sends no sign of life for this many seconds while it works on a command is lost."""
    startup_timeout_s: PositiveFloat = 300.0
    """Longest wait of the driver for its machines, in seconds."""
    copy_interval_steps: NonNegativeInt = 5
    """Steps between two copies of every stage's adapter to a neighbour. A lost stage is rebuilt from its copy. 0: no
    copies."""
    max_copy_age: PositiveInt = 10
    """Oldest copy in steps that is used. Otherwise a lost stage starts from the average of its neighbours, or from the
    base."""
    max_states: PositiveInt = 65_536
    """Largest number of rows times columns of one micro-batch, at least the longest prompt and answer. It bounds what a stage
    reads from the network, and the driver keeps to it."""

    @property
    def is_on(self) -> bool:
        return bool(self.machines)

    @property
    def members(self) -> tuple[str, ...]:
        """Peer ids of the stage machines, the driver excluded."""
        return tuple(member.rpartition("/")[2] for member in self.machines)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where members can be reached, as far as the settings say."""
        return tuple(member for member in self.machines if "/p2p/" in member)

    @model_validator(mode="after")
    def _crew_is_whole(self) -> "PipelineSection":
        if len(set(self.members)) < len(self.machines) or self.driver in self.members:
            raise ValueError("policy.pipeline.machines must name every machine once and not the driver; remove doubles")
        if self.machines and not self.driver:
            raise ValueError("policy.pipeline.driver must be the driver's peer id, got none; see `swarm identity show`")
        if others := sorted(set(self.self_assigned) - set(self.members)):
            raise ValueError(
                f"policy.pipeline.self_assigned must name machines of policy.pipeline.machines by peer id, got {others[0]}; "
                "correct it"
            )
        if self.machines and self.spares >= len(self.machines):
            raise ValueError(
                f"policy.pipeline.spares must leave a machine that works, got {self.spares} of {len(self.machines)}; lower it"
            )
        return self


BUNDLED, BUNDLED_REASONING = "bundled", "bundled-reasoning"
BUNDLED_BASES = (BUNDLED, BUNDLED_REASONING)
"""Names of the policies that are part of this package."""


class PolicySection(Section):
    """Base model and adapter."""

    base: str = BUNDLED
    """`bundled` (the tiny policy of this package), `bundled-reasoning` (a small one that writes its steps before the answer), a
    folder, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct."""
    revision: str | None = None
    """Branch, tag or commit of a hub model. Use a commit in production. If it is set, no local folder of that name is used."""
    max_download_gib: PositiveFloat = 40.0
    """Largest download of a base from the hub in GiB, as a manifest may name the base. 40 holds 20 billion 16-bit
    parameters."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the base. auto: bfloat16 on CUDA devices that support it, float32 elsewhere."""
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Load the frozen base with bitsandbytes in 8 or 4 bits. The adapter keeps full precision."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: needs less memory and about a third more time."""
    max_prompt_tokens: PositiveInt = 512
    """Tasks with a longer prompt than this are skipped and counted. 1024 unless set, if policy.base is not bundled."""
    lora: LoraSection = LoraSection()
    pipeline: PipelineSection = PipelineSection()

    @model_validator(mode="after")
    def _stages_can_hold_it(self) -> "PolicySection":
        if self.pipeline.is_on and (self.quantization != "none" or self.lora.dropout or self.gradient_checkpointing):
            raise ValueError(
                "a pipelined policy goes without policy.quantization, policy.gradient_checkpointing and policy.lora.dropout; "
                "set them to none, false and 0"
            )
        return self

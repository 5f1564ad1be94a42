"""What the crew tells a stage and what the stage answers; all of it can be sent as numbers, short lists and tensors.

batch        one optimizer step; its number only ever grows, so that nothing late revives a batch that was given up
micro-batch  a part of it; passes every stage once, forward and backward
session      answers in the making, with keys and values in every stage
"""

from dataclasses import dataclass

from torch import Tensor

from swarm.pipeline.architecture import StagePart


@dataclass(frozen=True, slots=True)
class Answers:
    """What the last station of a micro-batch scores: the answer tokens in rows that hold prompt and answer."""

    starts: tuple[int, ...]  # [B] column of the last prompt token, which predicts the first answer token
    token_ids: tuple[tuple[int, ...], ...]  # [B] answers, each of at least one token
    temperature: float = 1.0
    with_entropy: bool = False


@dataclass(frozen=True, slots=True)
class ForwardOrder:
    """Compute a micro-batch, and keep what its backward pass needs."""

    batch: int
    """0: only compute; nothing is kept and no batch is opened."""
    micro_batch: int
    states: Tensor  # [B, L] token ids where the micro-batch begins, else [B, L, W]
    answers: Answers | None = None
    """Set where the micro-batch ends."""
    without_adapter: bool = False
    """Compute with the frozen base alone; in batch 0 only."""


@dataclass(frozen=True, slots=True)
class BackwardOrder:
    """Go back through a micro-batch that was computed."""

    batch: int
    micro_batch: int
    gradient: Tensor  # [B, L, W]; [B, T] of the log-probs where the micro-batch ended


@dataclass(frozen=True, slots=True)
class SettleOrder:
    """No more micro-batches: check that all went through and report the gradient."""

    batch: int
    num_micro_batches: int
    shared: tuple[str, ...]
    """Parameters that other stages hold as well."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A stage's gradient of one batch."""

    own_norm_squared: float
    """Of what only this stage holds; not finite where the gradient is not."""
    shared_gradients: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """Apply the settled batch. Repeating it does nothing more."""

    batch: int
    lr: float
    scale: float
    """The gradient is multiplied by it: 1, or less where the norm over all stages is clipped."""
    shared_gradients: dict[str, Tensor]
    """Summed over all holders."""


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """Append columns to a session; `left_padding` begins it."""

    session: int
    states: Tensor  # as in ForwardOrder
    left_padding: tuple[int, ...] | None = None
    is_last: bool = False
    """Whether logits [B, V] of the last column are wanted in place of hidden states."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a stage is, as far as the crew must know."""

    part: StagePart
    num_model_layers: int
    layer_prefix: str
    """What stands before the number of a layer in the names of `shapes`."""
    shapes: dict[str, tuple[int, ...]]
    """Of what it trains."""
    version: int
    last_batch: int
    """Orders of this batch and earlier ones are refused."""
    content_hash: str


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Bounds and training settings of one stage."""

    weight_decay: float = 0.0
    max_micro_batches: int = 1 << 16
    """Of one batch."""
    max_in_flight: int = 16
    """Micro-batches kept for their backward pass; at least the number of stages."""
    max_states: int = 1 << 16
    """Columns times rows of one order."""
    recompute: bool = False
    """Keep inputs only and compute forward once more in the backward pass: less memory, about a third more time."""
    max_sessions: int = 64
    """At least the number of stages: a crew decodes in as many sessions. What bounds memory is the next line."""
    max_session_bytes: int = 1 << 30
    """Keys and values of all sessions together, and what one order takes beside its states: a mask, and logits."""
    session_idle_s: float = 600.0
    """A session that nobody continued for so long makes room for a new one."""

"""What the crew tells a stage and what the stage answers; all of it can be sent as numbers, short lists and tensors.

batch        one optimizer step; its number only ever grows, so that nothing late revives a batch that was given up
micro-batch  a part of it; passes every stage once, forward and backward
session      answers in the making, with keys and values in every stage

Orders and replies of `Stage` as bundles: both directions in one place, so that the two sides cannot drift apart.

What comes out of a bundle is checked for type here and for meaning by the stage, which trusts nobody either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm.errors import PipelineError
from swarm.pipeline.model_shape import StagePart
from swarm.pipeline.tensor_bundle import Bundle
from swarm.policy.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Answers:
    """What the last station of a micro-batch scores: the answer tokens in rows that hold prompt and answer."""

    starts: tuple[int, ...]  # [B] column of the last prompt token, which predicts the first answer token
    token_ids: tuple[tuple[int, ...], ...]  # [B] answers, each of at least one token
    temperature: float = 1.0
    with_entropy: bool = False


@dataclass(frozen=True, slots=True)
class ForwardCommand:
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
class BackwardCommand:
    """Go back through a micro-batch that was computed."""

    batch: int
    micro_batch: int
    gradient: Tensor  # [B, L, W]; [B, T] of the log-probs where the micro-batch ended


@dataclass(frozen=True, slots=True)
class CloseBatchCommand:
    """No more micro-batches: check that all went through and report the gradient."""

    batch: int
    num_micro_batches: int
    shared: tuple[str, ...]
    """Parameters that other stages hold as well."""


@dataclass(frozen=True, slots=True)
class BatchGradient:
    """A stage's gradient of one batch."""

    own_norm_squared: float
    """Of what only this stage holds; not finite where the gradient is not."""
    shared_gradients: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class CommitCommand:
    """Apply the settled batch. Repeating it does nothing more."""

    batch: int
    lr: float
    scale: float
    """The gradient is multiplied by it: 1, or less where the norm over all stages is clipped."""
    shared_gradients: dict[str, Tensor]
    """Summed over all holders."""


@dataclass(frozen=True, slots=True)
class DecodeCommand:
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


StageState = tuple[dict[str, dict[str, Tensor]], dict[str, int | float]]
"""Tensors by kind and name, and the JSON-able rest, as `Stage.state` gives them."""


_ABOVE_ZERO = 1e-3
"""What rounding may add to a log-prob of 0."""


class Fields:
    """The fields and tensors of a bundle, each asked for with its type; everything else raises PipelineError."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def integer(self, name: str) -> int:
        value = self._bundle.fields.get(name)
        if type(value) is not int or not 0 <= value < 2**62:
            raise _odd(name, "a count")
        return value

    def number(self, name: str) -> float:
        value = self._bundle.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _odd(name, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._bundle.fields.get(name)
        if type(value) is not bool:
            raise _odd(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._bundle.fields.get(name)
        if type(value) is not str:
            raise _odd(name, "text")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._bundle.fields.get(name)
        if type(value) is not tuple or not all(type(item) is int and 0 <= item < 2**62 for item in value):
            raise _odd(name, "counts")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._bundle.fields.get(name)
        if type(value) is not tuple or not all(type(item) is str for item in value):
            raise _odd(name, "texts")
        return value

    def items(self, name: str) -> tuple[Any, ...]:
        value = self._bundle.fields.get(name)
        if type(value) is not tuple:
            raise _odd(name, "a list")
        return value

    def has(self, name: str) -> bool:
        return self._bundle.fields.get(name) is not None

    def tensor(self, name: str) -> Tensor:
        if name not in self._bundle.tensors:
            raise _odd(name, "a tensor")
        return self._bundle.tensors[name]

    def optional(self, name: str) -> Tensor | None:
        return self._bundle.tensors.get(name)

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names begin with `prefix`, without it."""
        return {name[len(prefix) :]: t for name, t in self._bundle.tensors.items() if name.startswith(prefix)}


def forward_bundle(command: ForwardCommand) -> Bundle:
    fields: dict[str, Any] = {
        "batch": command.batch,
        "micro_batch": command.micro_batch,
        "without_adapter": command.without_adapter,
        "starts": None,
    }
    tensors = {"states": command.states}
    if command.answers is not None:
        answers = command.answers
        fields |= {"starts": list(answers.starts), "lengths": [len(row) for row in answers.token_ids]}
        fields |= {"temperature": answers.temperature, "with_entropy": answers.with_entropy}
        tensors["answers"] = torch.tensor([token for row in answers.token_ids for token in row])
    return Bundle(fields, tensors)


def forward_command(fields: Fields) -> ForwardCommand:
    answers = None
    if fields.has("starts"):
        tokens, rows, place = fields.tensor("answers").flatten().tolist(), [], 0
        for length in fields.integers("lengths"):
            rows.append(tuple(tokens[place : place + length]))
            place += length
        if fields.tensor("answers").is_floating_point() or place != len(tokens):
            raise _odd("answers", "as many ids as lengths say")
        answers = Answers(
            fields.integers("starts"), tuple(rows), fields.number("temperature"), fields.flag("with_entropy")
        )
    return ForwardCommand(
        fields.integer("batch"),
        fields.integer("micro_batch"),
        fields.tensor("states"),
        answers,
        fields.flag("without_adapter"),
    )


def forward_reply(result: Tensor | TokenLogprobs) -> Bundle:
    if isinstance(result, TokenLogprobs):
        entropy = {} if result.entropy is None else {"entropy": result.entropy}
        return Bundle({}, {"logprobs": result.logprobs, **entropy})
    return Bundle({}, {"states": result})


def forward_result(fields: Fields, command: ForwardCommand, width: int) -> Tensor | TokenLogprobs:
    """What a stage answered: hidden states [B, L, `width`], or log-probs of the answers of the order."""
    if command.answers is None:
        return shaped(fields.tensor("states"), (*command.states.shape[:2], width))
    lengths = torch.tensor([len(row) for row in command.answers.token_ids])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    logprobs, entropy = shaped(fields.tensor("logprobs"), tuple(mask.shape)), fields.optional("entropy")
    if command.answers.with_entropy != (entropy is not None) or bool((logprobs * mask > _ABOVE_ZERO).any()):
        raise PipelineError("log-probs must be at most 0, with entropy where it was asked for, got others")
    return TokenLogprobs(logprobs, mask, None if entropy is None else shaped(entropy, tuple(mask.shape)))


def backward_bundle(command: BackwardCommand) -> Bundle:
    return Bundle({"batch": command.batch, "micro_batch": command.micro_batch}, {"states": command.gradient})


def backward_command(fields: Fields) -> BackwardCommand:
    return BackwardCommand(fields.integer("batch"), fields.integer("micro_batch"), fields.tensor("states"))


def backward_reply(gradient: Tensor | None) -> Bundle:
    return Bundle({}, {} if gradient is None else {"states": gradient})


def backward_result(fields: Fields, shape: Sequence[int]) -> Tensor | None:
    """The gradient [B, L, W]; None from the stage where the micro-batch began."""
    gradient = fields.optional("states")
    return None if gradient is None else shaped(gradient, shape)


def close_batch_bundle(command: CloseBatchCommand) -> Bundle:
    return Bundle(
        {"batch": command.batch, "num_micro_batches": command.num_micro_batches, "shared": list(command.shared)}
    )


def close_batch_command(fields: Fields) -> CloseBatchCommand:
    return CloseBatchCommand(fields.integer("batch"), fields.integer("num_micro_batches"), fields.texts("shared"))


def gradient_reply(settled: BatchGradient) -> Bundle:
    return Bundle({"own_norm_squared": settled.own_norm_squared}, dict(settled.shared_gradients))


def gradient_result(fields: Fields, shapes: Mapping[str, Sequence[int]]) -> BatchGradient:
    """The gradient of a batch, with gradients of exactly `shapes`; its norm need not be finite."""
    norm_squared, shared = fields.number("own_norm_squared"), fields.under("")
    if norm_squared < 0 or shared.keys() != shapes.keys():
        raise PipelineError(
            f"a squared norm must be at least 0, with {len(shapes)} shared gradients, got {norm_squared} and {len(shared)}"
        )
    for name, gradient in shared.items():
        if not gradient.is_floating_point() or tuple(gradient.shape) != tuple(shapes[name]):
            raise PipelineError(f"a shared gradient must have the shape of its parameter, got another at {name}")
    return BatchGradient(norm_squared, shared)


def commit_bundle(command: CommitCommand) -> Bundle:
    return Bundle({"batch": command.batch, "lr": command.lr, "scale": command.scale}, dict(command.shared_gradients))


def commit_command(fields: Fields) -> CommitCommand:
    return CommitCommand(fields.integer("batch"), fields.number("lr"), fields.number("scale"), fields.under(""))


def decode_command_bundle(command: DecodeCommand) -> Bundle:
    padding = None if command.left_padding is None else list(command.left_padding)
    return Bundle(
        {"session": command.session, "left_padding": padding, "is_last": command.is_last}, {"states": command.states}
    )


def decode_command(fields: Fields) -> DecodeCommand:
    padding = fields.integers("left_padding") if fields.has("left_padding") else None
    return DecodeCommand(fields.integer("session"), fields.tensor("states"), padding, fields.flag("is_last"))


def facts_bundle(facts: StageFacts) -> Bundle:
    shapes = [[name, list(shape)] for name, shape in facts.shapes.items()]
    return Bundle(
        {
            **part_fields(facts.part),
            "num_model_layers": facts.num_model_layers,
            "layer_prefix": facts.layer_prefix,
            "shapes": shapes,
            "version": facts.version,
            "last_batch": facts.last_batch,
            "content_hash": facts.content_hash,
        }
    )


def facts_of(fields: Fields) -> StageFacts:
    shapes: dict[str, tuple[int, ...]] = {}
    for item in fields.items("shapes"):
        named = Fields(Bundle(dict(zip(("name", "shape"), item, strict=False)) if isinstance(item, tuple) else {}))
        shapes[named.text("name")] = named.integers("shape")
    return StageFacts(
        part_of(fields),
        fields.integer("num_model_layers"),
        fields.text("layer_prefix"),
        shapes,
        fields.integer("version"),
        fields.integer("last_batch"),
        fields.text("content_hash"),
    )


def part_fields(part: StagePart) -> dict[str, Any]:
    return {
        "start": part.start, "stop": part.stop, "has_embedding": part.has_embedding, "has_head": part.has_head
    }  # fmt: skip


def part_of(fields: Fields) -> StagePart:
    return StagePart(
        fields.integer("start"), fields.integer("stop"), fields.flag("has_embedding"), fields.flag("has_head")
    )


def state_bundle(state: tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, int | float]]) -> Bundle:
    tensors, rest = state
    named = {f"{kind}/{name}": value for kind, group in tensors.items() for name, value in group.items()}
    return Bundle({"version": int(rest["policy_version"]), "lr_factor": float(rest["lr_factor"])}, named)


def state_of(fields: Fields) -> StageState:
    tensors = {kind: fields.under(f"{kind}/") for kind in ("adapter", "optimizer")}
    return tensors, {"policy_version": fields.integer("version"), "lr_factor": fields.number("lr_factor")}


def recover_bundle(weights: Mapping[str, Tensor], version: int, moments: Mapping[str, Tensor]) -> Bundle:
    return state_bundle(({"adapter": weights, "optimizer": moments}, {"policy_version": version, "lr_factor": 1.0}))


def shaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor of a reply. Raises PipelineError unless it has this shape and finite numbers."""
    if not tensor.is_floating_point() or tuple(tensor.shape) != tuple(shape):
        raise PipelineError(f"a reply must have shape {tuple(shape)}, got {tuple(tensor.shape)}; replace the stage")
    if not bool(torch.isfinite(tensor).all()):
        raise PipelineError("a reply must be finite, got NaN or infinity; replace the stage")
    return tensor


def _odd(name: str, wanted: str) -> PipelineError:
    return PipelineError(f"{name} must be {wanted}, got something else; use the same version on all machines")

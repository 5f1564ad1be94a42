"""The commands that a driver sends to a stage, the replies of the stage, and both as bundles of fields and tensors.

batch        one optimizer step; batch numbers only grow, so a late command cannot reopen a batch that was dropped
micro-batch  a part of a batch; it passes every stage once forward and once backward
session      answers that are being sampled, with keys and values in every stage

Encoder and decoder of each command stand side by side. A decoder checks types; the stage checks the meaning of the values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm.errors import PipelineError
from swarm.pipeline.model_shape import StagePart
from swarm.pipeline.tensor_bundle import Bundle, is_finite
from swarm.policy.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Answers:
    """The answer tokens that the last stage of a micro-batch scores, in rows that hold prompt and answer."""

    starts: tuple[int, ...]  # [B] column of the last prompt token, which predicts the first answer token
    token_ids: tuple[tuple[int, ...], ...]  # [B] answers, each of at least one token
    temperature: float = 1.0
    with_entropy: bool = False


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The layout of a micro-batch in which each of D prompts is computed once for all B answers to it: one long row.

    [1, D·P + B·A] = D prompts of P columns, padded on the left · B answers of A columns, padded on the right
    """

    left_padding: tuple[int, ...]  # [D]
    prompt_of: tuple[int, ...]  # [B] number of the prompt that an answer continues
    prompt_columns: int  # P

    @property
    def answers_at(self) -> int:
        """Column in which the answers begin."""
        return len(self.left_padding) * self.prompt_columns

    def columns_per_answer(self, num_columns: int) -> int:
        """A, where the row has `num_columns`."""
        return (num_columns - self.answers_at) // len(self.prompt_of)


@dataclass(frozen=True, slots=True)
class ForwardCommand:
    """Tells a stage to compute a micro-batch and to store what its backward pass needs."""

    batch: int
    """0 computes only: the stage stores nothing and opens no batch."""
    micro_batch: int
    states: Tensor  # [B, L] token ids in the first stage of the micro-batch, else hidden states [B, L, W]
    answers: Answers | None = None
    """Set for the last stage of the micro-batch, which returns log-probs."""
    without_adapter: bool = False
    """Compute with the frozen base alone; allowed in batch 0 only."""
    shared: SharedPrompts | None = None
    """Set where `states` is one row of prompts and answers. None: each row has a prompt and its answer."""


@dataclass(frozen=True, slots=True)
class BackwardCommand:
    """Tells a stage to compute the backward pass of a micro-batch that it computed forward."""

    batch: int
    micro_batch: int
    gradient: Tensor  # [B, L, W]; in the last stage of the micro-batch [B, T], of the log-probs


@dataclass(frozen=True, slots=True)
class CloseBatchCommand:
    """Tells a stage that the batch has no more micro-batches. The stage checks that all passed and reports its gradient."""

    batch: int
    num_micro_batches: int
    shared: tuple[str, ...]
    """Names of parameters that other stages hold as well."""


@dataclass(frozen=True, slots=True)
class BatchGradient:
    """The gradient of one batch in one stage."""

    own_norm_squared: float
    """Squared norm over the parameters that only this stage holds; not finite where the gradient is not."""
    shared_gradients: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class CommitCommand:
    """Tells a stage to apply the closed batch. A repeated command does nothing more."""

    batch: int
    lr: float
    scale: float
    """Factor of the gradient: 1, or less where the norm over all stages is clipped."""
    shared_gradients: dict[str, Tensor]
    """Gradients summed over all stages that hold the parameter."""


@dataclass(frozen=True, slots=True)
class DecodeCommand:
    """Tells a stage to append columns to a session. A command with `left_padding` begins the session."""

    session: int
    states: Tensor  # as in ForwardCommand
    left_padding: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    """Rows that are kept, repeated and reordered before: row i continues row `rows[i]`. None keeps all."""
    is_last: bool = False
    """Whether the stage returns logits [B, V] of the last column instead of hidden states."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a stage reports about itself to the driver."""

    part: StagePart
    num_model_layers: int
    layer_prefix: str
    """Prefix of the layer number in the names of `shapes`."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the parameters that the stage trains."""
    version: int
    last_batch: int
    """The stage refuses commands of this batch and of earlier ones."""
    content_hash: str


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Limits and training settings of one stage."""

    weight_decay: float = 0.0
    max_micro_batches: int = 1 << 16
    """Most micro-batches of one batch."""
    max_in_flight: int = 16
    """Most micro-batches stored for their backward pass; at least the number of stages."""
    max_states: int = 1 << 16
    """Most columns times rows of one command."""
    recompute: bool = False
    """Store inputs only and repeat the forward pass in the backward pass: less memory, about a third more time."""
    max_sessions: int = 64
    """Most sessions; at least the number of stages, since a pipeline samples in as many sessions as it has stages."""
    max_session_bytes: int = 1 << 30
    """Most bytes of keys and values of all sessions together, plus the mask and logits of one command.

    Buffers may be a quarter larger than what is in use."""
    session_idle_s: float = 600.0
    """A session that was not continued for this time may be removed for a new one."""


StageState = tuple[dict[str, dict[str, Tensor]], dict[str, int | float]]
"""Tensors by kind and name, and the values that fit into JSON, as `Stage.state` returns them."""


_ABOVE_ZERO = 1e-3
"""Largest amount by which rounding may raise a log-prob above 0."""


class Fields:
    """Reads the fields and tensors of a bundle by name and type. Every mismatch raises PipelineError."""

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

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def values(self) -> dict[str, Any]:
        """All fields as they came."""
        return dict(self._bundle.fields)

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
        """Tensors whose names begin with `prefix`, by the rest of the name."""
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
    if (shared := command.shared) is not None:
        fields |= {"left_padding": list(shared.left_padding), "prompt_of": list(shared.prompt_of)}
        fields["prompt_columns"] = shared.prompt_columns
    return Bundle(fields, tensors)


def forward_command(fields: Fields) -> ForwardCommand:
    answers = shared = None
    if fields.has("prompt_of"):
        shared = SharedPrompts(
            fields.integers("left_padding"), fields.integers("prompt_of"), fields.integer("prompt_columns")
        )
    if fields.has("starts"):
        tokens, rows, place = fields.tensor("answers").flatten().tolist(), [], 0
        for length in fields.integers("lengths"):
            rows.append(tuple(tokens[place : place + length]))
            place += length
        if fields.tensor("answers").is_floating_point() or place != len(tokens):
            raise _odd("answers", "as many token ids as `lengths` says")
        answers = Answers(
            fields.integers("starts"),
            tuple(rows),
            fields.number("temperature"),
            with_entropy=fields.flag("with_entropy"),
        )
    return ForwardCommand(
        fields.integer("batch"),
        fields.integer("micro_batch"),
        fields.tensor("states"),
        answers=answers,
        without_adapter=fields.flag("without_adapter"),
        shared=shared,
    )


def forward_reply(result: Tensor | TokenLogprobs) -> Bundle:
    if isinstance(result, TokenLogprobs):
        entropy = {} if result.entropy is None else {"entropy": result.entropy}
        return Bundle({}, {"logprobs": result.logprobs, **entropy})
    return Bundle({}, {"states": result})


def forward_result(fields: Fields, command: ForwardCommand, width: int) -> Tensor | TokenLogprobs:
    """Reads a reply: hidden states [B, L, `width`], or log-probs of the answers of the command. Raises PipelineError."""
    if command.answers is None:
        return shaped(fields.tensor("states"), (*command.states.shape[:2], width))
    lengths = torch.tensor([len(row) for row in command.answers.token_ids])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    logprobs, entropy = shaped(fields.tensor("logprobs"), tuple(mask.shape)), fields.optional("entropy")
    if command.answers.with_entropy != (entropy is not None) or bool((logprobs * mask > _ABOVE_ZERO).any()):
        raise PipelineError(
            "log-probs must be at most 0 and come with entropy exactly where requested; replace the stage"
        )
    return TokenLogprobs(logprobs, mask, None if entropy is None else shaped(entropy, tuple(mask.shape)))


def backward_bundle(command: BackwardCommand) -> Bundle:
    return Bundle({"batch": command.batch, "micro_batch": command.micro_batch}, {"states": command.gradient})


def backward_command(fields: Fields) -> BackwardCommand:
    return BackwardCommand(fields.integer("batch"), fields.integer("micro_batch"), fields.tensor("states"))


def backward_reply(gradient: Tensor | None) -> Bundle:
    return Bundle({}, {} if gradient is None else {"states": gradient})


def backward_result(fields: Fields, shape: Sequence[int]) -> Tensor | None:
    """Reads the gradient [B, L, W]; None from the stage in which the micro-batch began."""
    gradient = fields.optional("states")
    return None if gradient is None else shaped(gradient, shape)


def close_batch_bundle(command: CloseBatchCommand) -> Bundle:
    return Bundle(
        {"batch": command.batch, "num_micro_batches": command.num_micro_batches, "shared": list(command.shared)}
    )


def close_batch_command(fields: Fields) -> CloseBatchCommand:
    return CloseBatchCommand(fields.integer("batch"), fields.integer("num_micro_batches"), fields.texts("shared"))


def gradient_reply(gradient: BatchGradient) -> Bundle:
    return Bundle({"own_norm_squared": gradient.own_norm_squared}, dict(gradient.shared_gradients))


def gradient_result(fields: Fields, shapes: Mapping[str, Sequence[int]]) -> BatchGradient:
    """Reads the gradient of a batch, with shared gradients of exactly `shapes`; its norm need not be finite."""
    norm_squared, shared = fields.number("own_norm_squared"), fields.under("")
    if norm_squared < 0 or shared.keys() != shapes.keys():
        raise PipelineError(
            f"a squared norm must be at least 0, with {len(shapes)} shared gradients, got {norm_squared} and {len(shared)}"
        )
    for name, gradient in shared.items():
        if not gradient.is_floating_point() or tuple(gradient.shape) != tuple(shapes[name]):
            raise PipelineError(f"a shared gradient must have the shape of its parameter; {name} has another")
    return BatchGradient(norm_squared, shared)


def commit_bundle(command: CommitCommand) -> Bundle:
    return Bundle({"batch": command.batch, "lr": command.lr, "scale": command.scale}, dict(command.shared_gradients))


def commit_command(fields: Fields) -> CommitCommand:
    return CommitCommand(
        fields.integer("batch"), fields.number("lr"), fields.number("scale"), shared_gradients=fields.under("")
    )


def decode_command_bundle(command: DecodeCommand) -> Bundle:
    padding = None if command.left_padding is None else list(command.left_padding)
    rows = None if command.rows is None else list(command.rows)
    fields = {"session": command.session, "left_padding": padding, "rows": rows, "is_last": command.is_last}
    return Bundle(fields, {"states": command.states})


def decode_command(fields: Fields) -> DecodeCommand:
    padding = fields.integers("left_padding") if fields.has("left_padding") else None
    rows = fields.integers("rows") if fields.has("rows") else None
    return DecodeCommand(
        fields.integer("session"), fields.tensor("states"), padding, rows=rows, is_last=fields.flag("is_last")
    )


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
        shapes=shapes,
        version=fields.integer("version"),
        last_batch=fields.integer("last_batch"),
        content_hash=fields.text("content_hash"),
    )


def part_fields(part: StagePart) -> dict[str, Any]:
    return {
        "start": part.start, "stop": part.stop, "has_embedding": part.has_embedding, "has_head": part.has_head
    }  # fmt: skip


def part_of(fields: Fields) -> StagePart:
    return StagePart(
        fields.integer("start"), fields.integer("stop"), fields.flag("has_embedding"), has_head=fields.flag("has_head")
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
    """Return the tensor of a reply. Raises PipelineError unless it has this shape and finite numbers."""
    if not tensor.is_floating_point() or tuple(tensor.shape) != tuple(shape):
        raise PipelineError(f"a reply must have shape {tuple(shape)}, got {tuple(tensor.shape)}; replace the stage")
    if not is_finite(tensor):
        raise PipelineError("a reply must be finite, got NaN or infinity; replace the stage")
    return tensor


def _odd(name: str, wanted: str) -> PipelineError:
    return PipelineError(f"{name} must be {wanted}; the message holds something else. Run the same version everywhere.")

"""One machine of a pipeline: the stages it holds, the copies of neighbours' adapters it stores, and its measured speed.

    (kind, payload bytes) ─▶ machine, load, unload, route, copy, keep, kept: this host    ─▶ reply bytes
                         └─▶ all other kinds: the stage that begins with layer `slot`

Commands arrive one at a time, on one thread. A refusal is a reply; an exception out of `carry_out` is a bug.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.config import LoraSection, PolicySection
from swarm.errors import MemoryBudgetError, PipelineError, PolicyError
from swarm.pipeline import commands as command_bytes
from swarm.pipeline.commands import Fields, StageSettings, part_fields, part_of
from swarm.pipeline.driver.expected_stage import STATE_TENSORS
from swarm.pipeline.model_shape import StagePart, adapter_targets, least_bytes, model_cost, model_shape
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage.stage_model import load_stage
from swarm.pipeline.tensor_bundle import MAX_HEAD_BYTES, Bundle, WirePrecision, decode_bundle, encode_bundle
from swarm.policy.base_folder import locate_base
from swarm.policy.device import available_bytes, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)


_ROWS, _COLUMNS = 8, 64
_PASSES = 3


def layers_per_s(folder: Path, lora: LoraSection, device: torch.device, dtype: torch.dtype) -> float:
    """Measure forward and backward passes of one layer per second: the fastest of three after one to warm up."""
    model = load_stage(folder, StagePart(0, 1, False, has_head=False), lora=lora, device=device, dtype=dtype)
    states = torch.zeros(_ROWS, _COLUMNS, model.width, device=device)
    fastest_s = float("inf")
    for _ in range(1 + _PASSES):
        started_s = time.perf_counter()
        leaf = states.clone().requires_grad_()
        model.run(leaf).float().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return 1 / fastest_s


STATES_KINDS = ("forward", "backward", "decode")
"""Kinds of commands that carry hidden states."""
WEIGHTS_KINDS = ("commit", "restore", "recover")
"""Kinds of commands that carry weights, moments or gradients of them."""
PLAIN_KINDS = ("describe", "settle", "drop", "end", "state")


def stage_reply(stage: Stage, kind: str, fields: Fields, precision: WirePrecision) -> tuple[Bundle, bool]:
    """Return (reply, whether its `states` are hidden states or their gradients, to be sent in `precision`).

    `kind` is one of those above. Raises PipelineError.
    """
    if kind == "forward":
        command = command_bytes.forward_command(fields)
        return command_bytes.forward_reply(stage.forward(command)), command.answers is None
    if kind == "decode":
        decoding = command_bytes.decode_command(fields)
        return Bundle({}, {"states": stage.decode(decoding)}), not decoding.is_last
    if kind == "backward":
        reply = command_bytes.backward_reply(stage.backward(command_bytes.backward_command(fields)))
        return reply, bool(reply.tensors)
    return _PLAIN[kind](stage, fields), False


def _recover(stage: Stage, fields: Fields) -> Bundle:
    tensors, rest = command_bytes.state_of(fields)
    stage.recover(tensors["adapter"], int(rest["policy_version"]), tensors["optimizer"])
    return Bundle()


def _done(_: None) -> Bundle:
    return Bundle()


_PLAIN: dict[str, Callable[[Stage, Fields], Bundle]] = {
    "describe": lambda stage, _: command_bytes.facts_bundle(stage.describe()),
    "settle": lambda stage, fields: command_bytes.gradient_reply(
        stage.close_batch(command_bytes.close_batch_command(fields))
    ),
    "commit": lambda stage, fields: Bundle({"version": stage.commit(command_bytes.commit_command(fields))}),
    "drop": lambda stage, fields: _done(stage.drop(fields.integer("batch"))),
    "end": lambda stage, fields: _done(stage.end(fields.integer("session"))),
    "state": lambda stage, _: command_bytes.state_bundle(stage.state()),
    "restore": lambda stage, fields: _done(stage.restore(*command_bytes.state_of(fields))),
    "recover": _recover,
}


MAX_COPIES = 4
"""Most stages whose adapters one machine stores; together they are no larger than the adapter of the whole model."""
_PRECISIONS: dict[str, WirePrecision] = {"fp32": "fp32", "bf16": "bf16", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base, adapter shape and dtype that all machines of a pipeline must share."""

    folder: Path
    lora: LoraSection
    device: torch.device
    dtype: torch.dtype

    @property
    def fingerprint(self) -> str:
        """Hash of configuration, adapter shape and dtype. Weights have `content_hash`."""
        config = (self.folder / "config.json").read_bytes()
        return hashlib.sha256(config + self.lora.model_dump_json().encode() + str(self.dtype).encode()).hexdigest()[:32]


def base_model(policy: PolicySection, device: str) -> BaseModel:
    """Make the base of the settings; downloads it where it is missing. Raises PolicyError."""
    target = resolve_device(device)
    folder = locate_base(policy.base, policy.revision, policy.max_download_gib)
    return BaseModel(folder, policy.lora, target, dtype=resolve_dtype(policy.dtype, target))


def part_by_hand(base: BaseModel, start: int, stop: int) -> StagePart:
    """Return the part of layers [start, stop), with the model's ends that belong to it. Raises PipelineError."""
    num_layers = model_shape(base.folder).num_layers
    if stop > num_layers:
        raise PipelineError(f"--layers must lie within {num_layers} layers, got {start}:{stop}; lower STOP")
    return StagePart(start, stop, start == 0, has_head=stop == num_layers)


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Who passes hidden states to a stage, and whom it passes them to. None: the driver."""

    before: str | None
    after: str | None
    after_slot: int


RELAYED_KINDS = ("forward", "decode")
"""Kinds that one stage passes to the next one: without gradients only, where the driver does not compare what each returns."""


class _NotLoaded(PipelineError):
    """A command addresses layers that this machine does not hold."""


@dataclass(frozen=True, slots=True)
class _Copy:
    payload: bytes


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What the machine holds, for the terminal."""

    parts: tuple[StagePart, ...]
    versions: tuple[int, ...]
    num_copies: int


class StageHost:
    """Carries out the commands of one driver on this machine."""

    def __init__(self, base: BaseModel, settings: StageSettings, *, fixed: StagePart | None = None) -> None:
        """With `fixed` it holds these layers from the start and refuses to load others.

        Raises PipelineError and PolicyError where they cannot be loaded.
        """
        self._base = base
        self._settings = settings
        self._fixed = fixed
        self._cost = model_cost(base)
        self._num_adapter_bytes = 4 * sum(
            base.lora.rank * (inputs + outputs) for _, inputs, outputs in adapter_targets(base.folder, base.lora)
        )
        self._stages: dict[int, Stage] = {}
        self._copies: dict[int, _Copy] = {}
        self._neighbours: dict[int, _Neighbours] = {}
        self._width = 0
        self._trainable_bytes = 0
        self._speed = 0.0
        if fixed is not None:
            self._load(fixed)

    def status(self) -> HostStatus:
        """Return what this machine holds. Safe from any thread."""
        stages = [stage for _, stage in sorted(self._stages.items())]
        parts = tuple(stage.describe().part for stage in stages)
        return HostStatus(parts, tuple(stage.version for stage in stages), len(self._copies))

    def max_payload_bytes(self, kind: str) -> int:
        """Return the largest payload of a kind, 0 for an unknown one. Safe from any thread."""
        if kind in STATES_KINDS:
            return MAX_HEAD_BYTES + 4 * self._settings.max_states * max(self._width, 2)
        if kind in WEIGHTS_KINDS:
            return MAX_HEAD_BYTES + STATE_TENSORS * self._trainable_bytes
        if kind == "keep":
            return MAX_HEAD_BYTES + self._num_adapter_bytes
        return MAX_HEAD_BYTES if kind in (*PLAIN_KINDS, "machine", "load", "unload", "copy", "kept", "route") else 0

    def carry_out(self, kind: str, payload: bytes) -> bytes | tuple[str, bytes]:
        """Carry out a command and return the reply, which says so where the command is refused.

        For a command that is passed on: (peer id of the next machine, its payload).
        """
        return self._carry_out(kind, lambda: self._reply(kind, payload))

    def carry_out_relayed(self, sender: str, kind: str, payload: bytes) -> bytes | tuple[str, bytes]:
        """As `carry_out`, for what another machine passed on. It is refused unless the driver named it as the one before."""

        def work() -> bytes | tuple[str, bytes]:
            fields = Fields(decode_bundle(payload)) if kind in RELAYED_KINDS else Fields(Bundle())
            slot = fields.integer("slot")
            self._stage(slot)
            neighbours = self._neighbours.get(slot)
            if neighbours is None or neighbours.before != sender:
                raise PipelineError(f"states must come from the stage before, got some of {sender}; send them directly")
            return self._compute(kind, fields, is_relayed=True)

        return self._carry_out(kind, work)

    def _carry_out(self, kind: str, work: Callable[[], "bytes | tuple[str, bytes]"]) -> bytes | tuple[str, bytes]:
        try:
            return work()
        except _NotLoaded as refusal:  # the process that had loaded them was restarted
            return encode_bundle(Bundle({"gone": str(refusal)}))
        except (PipelineError, PolicyError, MemoryBudgetError) as refusal:
            logger.info("refused to %s: %s", kind, refusal)
            return encode_bundle(Bundle({"refused": str(refusal)[:500]}))

    def _reply(self, kind: str, payload: bytes) -> bytes | tuple[str, bytes]:
        if kind == "keep":
            return self._store_copy(payload)
        fields = Fields(decode_bundle(payload))
        own: dict[str, Callable[[Fields], Bundle]] = {
            "machine": self._machine, "load": self._load_part, "unload": self._unload, "route": self._route
        }  # fmt: skip
        if kind in own:
            return encode_bundle(own[kind](fields))
        if kind == "kept":
            return self._stored_copy(fields)
        if kind == "copy":
            return _copy_of(self._stage(fields.integer("slot")))
        return self._compute(kind, fields, is_relayed=fields.has("relayed"))

    def _compute(self, kind: str, fields: Fields, *, is_relayed: bool) -> bytes | tuple[str, bytes]:
        slot = fields.integer("slot")
        stage, neighbours = self._stage(slot), self._neighbours.get(slot)
        if is_relayed and (kind not in RELAYED_KINDS or (kind == "forward" and fields.integer("batch"))):
            raise PipelineError("only states without gradients are passed on; send this command by itself")
        precision = _PRECISIONS.get(fields.text("precision"), "fp32") if kind in STATES_KINDS else "fp32"
        bundle, is_states = stage_reply(stage, kind, fields, precision=precision)
        precisions: dict[str, WirePrecision] | None = {"states": precision} if is_states else None
        if not is_relayed or neighbours is None or neighbours.after is None:
            return encode_bundle(bundle, precisions)
        onward = {**fields.values(), "slot": neighbours.after_slot}
        return neighbours.after, encode_bundle(Bundle(onward, bundle.tensors), precisions)

    def _route(self, fields: Fields) -> Bundle:
        """Set who passes states to a stage, and whom it passes them to; without `before` and `after` nobody does."""
        slot, before, after = fields.integer("slot"), fields.optional_text("before"), fields.optional_text("after")
        self._stage(slot)
        self._neighbours[slot] = _Neighbours(before, after, fields.integer("after_slot"))
        return Bundle()

    def _stage(self, slot: int) -> Stage:
        if slot not in self._stages:
            raise _NotLoaded(f"a stage must be loaded before it gets commands, got none at layer {slot}; load it")
        return self._stages[slot]

    def _machine(self, fields: Fields) -> Bundle:
        """Return what the driver assigns layers by. The first measurement takes a second or two."""
        if fields.flag("measure") and not self._speed and self._fixed is None:
            self._speed = layers_per_s(self._base.folder, self._base.lora, self._base.device, dtype=self._base.dtype)
        return Bundle(
            {
                "fingerprint": self._base.fingerprint,
                "layers_per_s": self._speed,
                "memory_bytes": available_bytes(self._base.device),
                "is_fixed": self._fixed is not None,
                "slots": sorted(self._stages),
                "stops": [self._stages[slot].describe().part.stop for slot in sorted(self._stages)],
            }
        )

    def _load_part(self, fields: Fields) -> Bundle:
        part = part_of(fields)
        content_hash = fields.text("content_hash") if fields.has("content_hash") else None
        if self._fixed is not None and part != self._fixed:
            raise PipelineError(
                f"this machine was given layers [{self._fixed.start}, {self._fixed.stop}) by hand, got a command to load "
                f"[{part.start}, {part.stop}); start `swarm stage` without --layers"
            )
        num_layers = len(self._cost.layer_bytes)
        if not 0 <= part.start < part.stop <= num_layers:
            raise PipelineError(f"a stage must hold some of {num_layers} layers, got [{part.start}, {part.stop})")
        given_up = {part.start, *fields.integers("instead_of")}
        for slot, stage in self._stages.items():
            held = stage.describe().part
            if slot not in given_up and held.start < part.stop and part.start < held.stop:
                raise PipelineError(
                    f"layers must be held once, got [{part.start}, {part.stop}) beside [{held.start}, {held.stop}); unload one"
                )
        for slot in given_up:
            self._drop_stage(slot)
        self._load(part, content_hash)
        return Bundle(part_fields(part))

    def _load(self, part: StagePart, content_hash: str | None = None) -> None:
        """Load layers with fresh adapter weights and optimizer."""
        base = self._base
        needed, room = least_bytes(self._cost, part), available_bytes(base.device)
        if needed > room:
            raise PipelineError(
                f"layers [{part.start}, {part.stop}) must fit into memory, got {needed} bytes for {room} that are free"
            )
        try:
            model = load_stage(
                base.folder, part, lora=base.lora, device=base.device, dtype=base.dtype, content_hash=content_hash
            )
        except torch.OutOfMemoryError:
            raise PipelineError(f"layers [{part.start}, {part.stop}) do not fit into the free memory") from None
        self._stages[part.start] = Stage(model, self._settings)
        self._width = model.width
        self._recount()

    def _unload(self, fields: Fields) -> Bundle:
        self._drop_stage(fields.integer("slot"))
        return Bundle()

    def _drop_stage(self, slot: int) -> None:
        self._stages.pop(slot, None)
        self._neighbours.pop(slot, None)
        self._recount()

    def _recount(self) -> None:
        sizes = [math.prod(shape) for stage in self._stages.values() for shape in stage.describe().shapes.values()]
        self._trainable_bytes = 4 * sum(sizes)

    def _store_copy(self, payload: bytes) -> bytes:
        """Store a copy unread. Whoever rebuilds a stage from it checks that it fits."""
        fields = Fields(decode_bundle(payload))
        slot = fields.integer("of")
        self._copies.pop(slot, None)
        most = self.max_payload_bytes("keep") - len(payload)
        while len(self._copies) >= MAX_COPIES or sum(len(copy.payload) for copy in self._copies.values()) > most:
            del self._copies[next(iter(self._copies))]  # the one that was renewed longest ago
        self._copies[slot] = _Copy(payload)
        return encode_bundle(Bundle())

    def _stored_copy(self, fields: Fields) -> bytes:
        copy = self._copies.get(fields.integer("of"))
        if copy is None:
            raise PipelineError(f"no copy of the stage at layer {fields.integer('of')} is stored here")
        return copy.payload


def _copy_of(stage: Stage) -> bytes:
    """Encode what a neighbour stores of a stage."""
    tensors, rest = stage.state()
    fields = {"of": stage.describe().part.start, "version": int(rest["policy_version"])}
    return encode_bundle(Bundle(fields, {f"adapter/{name}": value for name, value in tensors["adapter"].items()}))

"""What a driver expects of its stages, so that no stage has to be trusted.

`ExpectedStage` knows names and shapes from the base's configuration. A stage therefore decides neither which parameters it
holds nor how much memory the driver takes to read a reply.

`Proportions` finds the stage that spoils a batch, by the sizes of the tensors that the driver carries between stages:

    states:     0 ─▶ 1 ─▶ 2 ─▶ last ─▶ loss          smallest and largest token that a stage returns
    gradients:  0 ◀─ 1 ◀─ 2 ◀─ last ◀─ loss          the gradient it returns and its own norm, relative to its input

Within a run these sizes change little, and the gradients of stages are of similar size. Where a batch cannot be applied, the
first of them, in the order of computing, that is out of proportion points to the stage: later ones were computed from it. A
stage that spoils several batches in a row counts as dishonest.

`StateBounds` limits weights and moments. One step of AdamW moves a weight by at most STEP_REACH times the learning rate, and
gradients are clipped by their norm. The driver thus has a bound for every number of a stage without knowing any gradient,
and a stage cannot put numbers into a checkpoint that no training gives.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from swarm.adapters.adapter_state import moments_of
from swarm.config import LoraSection
from swarm.errors import PipelineError, StageReplyError
from swarm.pipeline.commands import StageFacts, StageState
from swarm.pipeline.model_shape import StagePart, adapter_targets, layout_of, model_shape, read_config
from swarm.pipeline.stage.stage_optimizer import RECOVERED_LR_FACTOR

_OUT_OF_PROPORTION = math.log(1000.0)
_HISTORY_BATCHES = 16
_STRIKES = 3
"""Spoiled batches in a row that are too many; one may be a numeric accident."""
Size = tuple[int, str]
"""(stage, kind of size)."""


class BatchSizes:
    """The sizes of one batch, gathered while it goes forward and backward."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._tokens: dict[int, tuple[float, float]] = {}
        self._given: defaultdict[int, float] = defaultdict(float)
        self._passed_on: defaultdict[int, float] = defaultdict(float)

    def forward(self, stage: int, states: Tensor) -> None:
        """Record the hidden states [B, L, W] that `stage` returns."""
        tokens = states.detach().float().square().mean(-1).sqrt()
        least, largest = self._tokens.get(stage, (math.inf, 0.0))
        self._tokens[stage] = min(least, tokens.min().item()), max(largest, tokens.max().item())

    def backward(self, stage: int, given: Tensor, passed_on: Tensor | None) -> None:
        """Record the gradient that `stage` received and the one that it returns."""
        self._given[stage] += given.detach().double().square().sum().item()
        if passed_on is not None:
            self._passed_on[stage] += passed_on.detach().double().square().sum().item()

    def in_order(self, norms: Sequence[float]) -> Iterator[tuple[Size, float]]:
        """Yield (size, logarithm) in the order of computing, without missing sizes. `norms` are those that stages report."""
        for stage in range(self._num_stages):
            for what, size in zip(("least", "largest"), self._tokens.get(stage, ()), strict=False):
                yield (stage, what), _log(size)
        for stage in reversed(range(self._num_stages)):
            if given := math.sqrt(self._given[stage]):
                passed_on = math.sqrt(self._passed_on[stage])
                sizes = {"norm": norms[stage], "gradient": passed_on} if passed_on else {"norm": norms[stage]}
                yield from (((stage, what), _log(size) - math.log(given)) for what, size in sizes.items())


class Proportions:
    """The usual sizes of the batches of one stage group."""

    def __init__(self) -> None:
        self._history: dict[Size, deque[float]] = {}
        self._strikes: Counter[int] = Counter()

    def observe(self, sizes: BatchSizes, norms: Sequence[float]) -> None:
        """Learn from a batch that can be applied."""
        self._strikes.clear()
        for which, size in sizes.in_order(norms):
            if math.isfinite(size):
                self._history.setdefault(which, deque(maxlen=_HISTORY_BATCHES)).append(size)

    def ruined(self, sizes: BatchSizes, norms: Sequence[float]) -> tuple[int | None, bool]:
        """Return (the stage that spoiled this batch, or None where none is out of proportion; whether to replace it)."""
        found = dict(sizes.in_order(norms))
        for which, size in found.items():
            if not self._excess(which, size, found) <= _OUT_OF_PROPORTION:
                self._strikes[which[0]] += 1
                return which[0], self._strikes[which[0]] >= _STRIKES
        return None, False

    def _excess(self, which: Size, size: float, found: Mapping[Size, float]) -> float:
        """Distance from earlier batches; without any, the excess over other stages in this batch, where comparable."""
        stage, what = which
        if which in self._history:
            return abs(size - median(self._history[which]))
        others = [one for (other, kind), one in found.items() if kind == what and other != stage and math.isfinite(one)]
        return size - median(others) if others and what in ("norm", "gradient") else 0.0

    def forget(self, stage: int) -> None:
        """Forget a stage that another machine holds from now on."""
        del self._strikes[stage]
        self._history = {which: known for which, known in self._history.items() if which[0] != stage}


def _log(size: float) -> float:
    """Logarithm of a size that may be 0 or not finite."""
    return math.log(size) if 0 < size < math.inf else -math.inf if size == 0 else math.inf


STEP_REACH = 7.3
"""Largest |m̂| / √v̂ in Adam with β = (0.9, 0.999): (1 − β₁) / √((1 − β₂)(1 − β₁²/β₂)), by Cauchy and Schwarz."""
_SLACK = 1.001
"""Factor for rounding in float32."""


class StateBounds:
    """Bounds the magnitude of each adapter tensor and of its moments, over all stages of one stage group."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Starts with the bounds of a fresh adapter: A is uniform in ±1/√inputs, and B is zero."""
        self._weights = {name: 1 / math.sqrt(s[1]) if name.endswith(".lora_A") else 0.0 for name, s in shapes.items()}
        self._moments = dict.fromkeys(shapes, 0.0)  # of first moments; second moments are bounded by the square
        self._reach = 0.0

    def given(self, state: StageState | tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, float]]) -> None:
        """Widen the bounds before this state is written into a stage, which may keep its old one if writing fails."""
        tensors, _ = state
        for name, value in tensors["adapter"].items():
            self._weights[name] = max(self._weights[name], _largest(value) - self._reach)
        for key, value in tensors["optimizer"].items():
            kind, _, name = key.partition(":")
            if kind != "step":
                largest = _largest(value) if kind == "exp_avg" else math.sqrt(_largest(value))
                self._moments[name] = max(self._moments[name], largest)

    def stepped(self, lr: float, max_grad_norm: float) -> None:
        """Widen the bounds for a step with gradients that are clipped to `max_grad_norm`."""
        self._reach += STEP_REACH * RECOVERED_LR_FACTOR * lr
        self._moments = {name: max(largest, max_grad_norm) for name, largest in self._moments.items()}

    def check(self, state: StageState) -> None:
        """Raises StageReplyError for weights or moments that the steps so far cannot have produced."""
        tensors, _ = state
        for name, value in tensors["adapter"].items():
            _check(name, value, self._weights[name] + self._reach)
        for key, value in tensors["optimizer"].items():
            kind, _, name = key.partition(":")
            if kind != "step":
                _check(key, value, self._moments[name] ** (1 if kind == "exp_avg" else 2))


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _check(name: str, value: Tensor, bound: float) -> None:
    largest = _largest(value)
    if not largest <= bound * _SLACK + 1e-6:
        raise StageReplyError(f"{name} must be within ±{bound:.3g} after the steps so far, got {largest:.3g}")


FRAME_BYTES = 4096
"""Most bytes of a reply without tensors, or of the fields beside tensors."""
STATE_TENSORS = 3
"""Tensors per parameter in a state: the weights and two moments of the same shape."""
_ENTRY_BYTES = 96
"""Most bytes of one tensor's entry in the head of a reply, without its name."""
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
    """Shapes of the adapter tensors of its layers."""

    @property
    def facts_bytes(self) -> int:
        """Most bytes of a description."""
        return FRAME_BYTES + sum(_ENTRY_BYTES + len(name) for name in self.shapes)

    def tensor_bytes(self, names: tuple[str, ...] | None = None) -> int:
        """Most bytes of a reply with one tensor for each of `names`, by default for each parameter."""
        chosen = self.shapes if names is None else names
        return FRAME_BYTES + sum(_ENTRY_BYTES + len(name) + 4 * math.prod(self.shapes[name]) for name in chosen)

    @property
    def state_bytes(self) -> int:
        """Most bytes of a reply with weights and optimizer state."""
        return (1 + STATE_TENSORS) * self.tensor_bytes()  # the steps of the optimizer have entries too

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
        """Raises StageReplyError unless exactly the tensors of the stage are there, finite and in their shapes."""
        if weights.keys() != self.shapes.keys():
            odd = sorted(weights.keys() ^ self.shapes.keys())[0]
            raise StageReplyError(f"{what} of a stage must be those of its layers, got a difference at {odd[:80]!r}")
        for name, value in weights.items():
            _check_finite(name, value, self.shapes[name])

    def check_state(self, tensors: Mapping[str, Mapping[str, Tensor]], lr_factor: float) -> None:
        """Raises StageReplyError unless AdamW can have this state over the parameters of the stage."""
        self.check_weights(tensors["adapter"])
        try:
            moments_of(tensors["optimizer"], self.shapes)
        except ValueError as error:
            raise StageReplyError(str(error)) from None
        if min(abs(lr_factor - 1.0), abs(lr_factor - RECOVERED_LR_FACTOR)) > _FACTOR_SLACK:
            raise StageReplyError(f"the learning rate factor must be 1 or {RECOVERED_LR_FACTOR}, got {lr_factor}")


def expected_stages(folder: Path, lora: LoraSection, parts: Sequence[StagePart]) -> list[ExpectedStage]:
    """Return what honest stages with `parts` report. Reads no weights. Raises PipelineError and PolicyError."""
    prefix, shape = layout_of(read_config(folder)).layer_prefix, model_shape(folder)
    targets = adapter_targets(folder, lora)
    found: list[ExpectedStage] = []
    for part in parts:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, inputs, outputs in targets:
            if name.startswith(part.name_prefixes(prefix)):
                shapes |= {f"{name}.lora_A": (lora.rank, inputs), f"{name}.lora_B": (outputs, lora.rank)}
        found.append(
            ExpectedStage(part, shape.num_layers, shape.hidden, vocab=shape.vocab, layer_prefix=prefix, shapes=shapes)
        )
    return found


def check_whole_model(facts: Sequence[StageFacts]) -> None:
    """Raises PipelineError unless the stages form one whole model at one version."""
    ends = [(one.part.start, one.part.stop) for one in facts]
    wanted_starts = [0, *(stop for _, stop in ends[:-1])]
    if [start for start, _ in ends] != wanted_starts or ends[-1][1] != facts[0].num_model_layers:
        raise PipelineError(f"stages must hold all layers in order, got {ends}; assign them again")
    if not facts[0].part.has_embedding or not facts[-1].part.has_head:
        raise PipelineError(
            "the first stage must hold the embedding and the last one the head, got others; assign them again"
        )
    versions = [one.version for one in facts]
    if len(set(versions)) > 1:
        raise PipelineError(f"stages must be at one version, got {versions}; restore one checkpoint or rebuild them")


def _check_finite(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.dtype != torch.float32 or tuple(value.shape) != shape or not bool(torch.isfinite(value).all()):
        raise StageReplyError(f"{name[:80]!r} must be finite float32 of shape {shape}, got another tensor")

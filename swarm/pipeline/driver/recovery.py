"""Recovery of a lost stage: rebuilds its weights from what is left, without rolling the other stages back.

    recent copy at the neighbour ─▶ twin copy (swapped edges) ─▶ average of both neighbours ─▶ base alone ─▶ checkpoint

Each source is used where those before it are not available. With a frozen base only the adapter can be lost: the base is
read again from files with the same content hash. A rebuilt stage gets a fresh optimizer and a learning rate that is a tenth
higher (`Stage.recover`).

CheckFree (2506.15461): W_i = (ω₋·W₋ + ω₊·W₊) / (ω₋ + ω₊), ω the gradient norm of a neighbour before clipping. Layers of a
stage are matched with those of its neighbours by their place in the stage.

Of LoRA adapters the products B·A are averaged, not the factors. Factors of two layers start from different A, so the product
of averaged factors would be half cross terms. The average of the products has twice the rank; its best approximation of the
old rank comes from the QR of the stacked factors and the SVD of a small core, without ever forming an output × input matrix.

`NeighbourCopies` stores a copy of each stage's adapter with the next stage every few steps; the driver, which holds the last
stage, stores that of the last but one. The driver checks a copy, encodes it again, and remembers its SHA-256, so a holder
can return what it received or nothing.
"""

import asyncio
import hashlib
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from swarm.errors import NetworkError, PipelineError, StageReplyError
from swarm.pipeline.commands import Fields
from swarm.pipeline.driver.expected_stage import FRAME_BYTES, ExpectedStage
from swarm.pipeline.driver.stage_group import StageGroup
from swarm.pipeline.stage_link import SendCommand, StageLink, ask, replies_of
from swarm.pipeline.tensor_bundle import Bundle, decode_bundle, encode_bundle

logger = logging.getLogger(__name__)


_START_ROW_NORM = 1 / math.sqrt(3)
"""Norm of a row of A in a fresh adapter, which is uniform in ±1/√inputs."""


def average_products(pairs: Sequence[tuple[Tensor, Tensor]], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return (B [d, r], A [r, k]) whose product of rank r is nearest to Σ share · B·A of `pairs`; computed in float64.

    Rows of A are orthogonal and have the norm of a fresh adapter; the rest is in B. A direction without content therefore
    has B = 0 but A ≠ 0, as in a fresh adapter, and can still be learned.
    """
    rank = pairs[0][1].shape[0]
    stacked_b = torch.cat([b.double() * share for (b, _), share in zip(pairs, shares, strict=True)], dim=1)  # [d, 2r]
    stacked_a = torch.cat([a.double() for _, a in pairs], dim=0)  # [2r, k]
    left, core_b = torch.linalg.qr(stacked_b)
    right, core_a = torch.linalg.qr(stacked_a.T)
    u, values, v = torch.linalg.svd(core_b @ core_a.T, full_matrices=False)
    rank_found = min(rank, len(values))
    b = stacked_b.new_zeros(stacked_b.shape[0], rank)
    a = stacked_a.new_zeros(rank, stacked_a.shape[1])
    b[:, :rank_found] = left @ u[:, :rank_found] * values[:rank_found] / _START_ROW_NORM
    a[:rank_found] = (right @ v[:rank_found].T).T * _START_ROW_NORM
    return b.to(pairs[0][0].dtype), a.to(pairs[0][1].dtype)


LARGEST_RATIO = 3.0
"""Largest ratio of the weights of two neighbours: a first stage with eight times the norm would hide the other."""

Strategy = Literal["neighbour_copy", "twin_copy", "average", "base", "checkpoint"]
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class NeighbourCopy:
    """The weights of a stage at some version, as its neighbour stores them."""

    stage: int
    holder: int
    version: int
    weights: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Situation:
    """What is left to rebuild from."""

    num_stages: int
    lost: frozenset[int]
    version: int
    """Version of the stages that are left."""
    copies: tuple[NeighbourCopy, ...] = ()
    max_copy_age: int = 10
    """Most versions that a neighbour's copy may be behind."""
    swaps_edges: bool = False
    """Whether the edge stages were also trained in swapped order, so that each has a twin."""
    is_frozen: bool = False
    """Whether the base is frozen, so that a fresh adapter is a valid start."""
    has_checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """How one stage is rebuilt, and why no better source is used."""

    stage: int
    strategy: Strategy
    sources: tuple[int, ...]
    """Stages that provide weights: the holder of a copy, the twin, or both neighbours."""
    reason: str


def plan_recovery(situation: Situation) -> list[Recovery]:
    """Plan the recovery of every lost stage, in order.

    The strategy `checkpoint` means that *all* stages return to it, since nothing fits the version of the others. Raises
    PipelineError where there is no checkpoint either; the run cannot continue then, and the message names the stages.
    """
    plans = [_plan(situation, stage) for stage in sorted(situation.lost)]
    hopeless = [plan for plan in plans if plan.strategy == "checkpoint" and not situation.has_checkpoint]
    if hopeless:
        raise PipelineError(
            f"a lost stage must have something to be rebuilt from, got nothing for stage {hopeless[0].stage}: "
            f"{hopeless[0].reason}; save checkpoints or neighbour copies"
        )
    return plans


def _plan(situation: Situation, stage: int) -> Recovery:
    lost, last = situation.lost, situation.num_stages - 1
    copy = freshest_copy(situation, stage)
    if copy is not None:
        age = situation.version - copy.version
        return Recovery(
            stage, "neighbour_copy", (copy.holder,), reason=f"stage {copy.holder} holds a copy {age} versions old"
        )
    neighbours = [other for other in (stage - 1, stage + 1) if 0 <= other <= last]
    lost_neighbours = [other for other in neighbours if other in lost]
    twin = {0: 1, last: last - 1}.get(stage) if situation.swaps_edges else None
    if twin is not None and twin not in lost:
        return Recovery(stage, "twin_copy", (twin,), reason=f"stage {twin} was trained in its place too")
    if lost_neighbours:
        reason = (
            f"stages {sorted([stage, *lost_neighbours])} are adjacent and lost together, which no average can rebuild"
        )
    elif len(neighbours) < 2:
        reason = f"stage {stage} is at an edge and has one neighbour only"
    else:
        return Recovery(stage, "average", (stage - 1, stage + 1), reason="both neighbours are there")
    if situation.is_frozen:
        return Recovery(stage, "base", (), reason=f"{reason}; it starts from the base alone")
    return Recovery(stage, "checkpoint", (), reason=f"{reason}; all stages go back to the checkpoint")


def freshest_copy(situation: Situation, stage: int) -> NeighbourCopy | None:
    """Return the newest copy of `stage` that is recent enough and whose holder is not lost."""
    usable = [
        copy
        for copy in situation.copies
        if copy.stage == stage
        and copy.holder not in situation.lost
        and 0 <= situation.version - copy.version <= situation.max_copy_age
    ]
    return max(usable, key=lambda copy: copy.version, default=None)


def average_weights(norm_before: float, norm_after: float) -> tuple[float, float]:
    """Return the shares of the two neighbours, with sum 1, by their gradient norms before clipping, at most 3 : 1.

    Two norms of zero give equal shares. Raises PipelineError for norms that are negative or not finite.
    """
    if not (0 <= norm_before < float("inf") and 0 <= norm_after < float("inf")):
        raise PipelineError(f"gradient norms must be finite and not negative, got {norm_before} and {norm_after}")
    if norm_before == norm_after:
        return 0.5, 0.5
    low, high = sorted((norm_before, norm_after))
    share = LARGEST_RATIO / (1 + LARGEST_RATIO) if high > LARGEST_RATIO * low else high / (high + low)
    return (share, 1 - share) if norm_before > norm_after else (1 - share, share)


def checkfree_average(
    shapes: Mapping[str, Sequence[int]],
    before: Weights,
    after: Weights,
    *,
    norm_before: float,
    norm_after: float,
    layer_prefix: str,
) -> dict[str, Tensor]:
    """Compute weights of a lost stage, with tensors of `shapes`, from its two neighbours, in float64.

    A replica of an end of the model is copied from the neighbour that has it. Raises PipelineError for tensors that the
    neighbours lack or that differ in shape, and for values that are not finite.
    """
    shares = average_weights(norm_before, norm_after)
    ends = {name: shape for name, shape in shapes.items() if _layer_number(name, layer_prefix) is None}
    layers = {name: shape for name, shape in shapes.items() if name not in ends}
    rebuilt = _checked(ends, {name: before.get(name, after.get(name)) for name in ends})
    one, other = _matched(layers, before, layer_prefix), _matched(layers, after, layer_prefix)
    for name in layers:
        if name.endswith(".lora_A"):
            b_name = name.removesuffix("A") + "B"
            pairs = [(source[b_name], source[name]) for source in (one, other)]
            rebuilt[b_name], rebuilt[name] = average_products(pairs, shares)
        elif not name.endswith(".lora_B"):
            mean = one[name].double() * shares[0] + other[name].double() * shares[1]
            rebuilt[name] = mean.to(one[name].dtype)
    return {name: rebuilt[name] for name in shapes}


def twin_copy(shapes: Mapping[str, Sequence[int]], twin: Weights, *, layer_prefix: str) -> dict[str, Tensor]:
    """Copy the weights of a lost edge stage from the stage that swaps places with it (CheckFree+).

    That stage has replicas of embedding, norm and head, which are restored exactly. Both stages must have the same number of
    layers. Raises PipelineError as `checkfree_average`.
    """
    own, others = _layer_numbers(shapes, layer_prefix), _layer_numbers(twin, layer_prefix)
    if len(own) != len(others):
        raise PipelineError(
            f"stages that swap places must have as many layers, got {len(own)} and {len(others)}; assign them alike"
        )
    return {name: value.clone() for name, value in _matched(shapes, twin, layer_prefix).items()}


def _matched(shapes: Mapping[str, Sequence[int]], source: Weights, prefix: str) -> dict[str, Tensor]:
    """Return the source's tensors under the names of the lost stage, matching layers by their place in the stage."""
    own, others = _layer_numbers(shapes, prefix), _layer_numbers(source, prefix)
    if own and not others:
        raise PipelineError(
            "a stage must be rebuilt from one that trains layers, got one without; restore a checkpoint"
        )
    found: dict[str, Tensor | None] = {}
    for name in shapes:
        number = _layer_number(name, prefix)
        if number is None:
            found[name] = source.get(name)  # replicated ends have the same name in both
            continue
        place = _spread(own.index(number), len(own), len(others))
        found[name] = source.get(f"{prefix}{others[place]}.{name[len(f'{prefix}{number}.') :]}")
    return _checked(shapes, found)


def _checked(shapes: Mapping[str, Sequence[int]], found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    checked: dict[str, Tensor] = {}
    for name, value in found.items():
        if value is None:
            raise PipelineError(f"a stage must be rebuilt from one with the same kinds of tensors, got none for {name}")
        if tuple(value.shape) != tuple(shapes[name]) or not bool(torch.isfinite(value).all()):
            raise PipelineError(f"tensors to rebuild from must be finite and of equal shape; {name} is not")
        checked[name] = value
    return checked


def _spread(place: int, count: int, other_count: int) -> int:
    """Return the place among `other_count` layers at the same relative depth as `place` among `count`."""
    return round(place * (other_count - 1) / (count - 1)) if count > 1 else (other_count - 1) // 2


def _layer_numbers(names: Collection[str], prefix: str) -> list[int]:
    return sorted({number for number in (_layer_number(name, prefix) for name in names) if number is not None})


def _layer_number(name: str, prefix: str) -> int | None:
    match = re.match(rf"{re.escape(prefix)}(\d+)\.", name)
    return int(match[1]) if match else None


class NeighbourCopies:
    """Knows which copies exist and their digests, and stores the driver's own copy."""

    def __init__(self, send: SendCommand) -> None:
        self._send = send
        self._known: dict[int, NeighbourCopy] = {}
        self._digests: dict[int, bytes] = {}  # SHA-256 of what each holder received
        self._own: dict[int, bytes] = {}

    @property
    def known(self) -> tuple[NeighbourCopy, ...]:
        """All copies without their weights, which are with the holders."""
        return tuple(self._known.values())

    def forget(self, stage: int) -> None:
        """Forget a copy that could not be fetched."""
        self._known.pop(stage, None)

    async def take(
        self, stage_group: StageGroup, peers: Sequence[str], expected: Sequence[ExpectedStage], timeout_s: float
    ) -> None:
        """Renew all copies. A failure leaves the old copy; the next command notices a lost machine."""
        await asyncio.gather(
            *(
                self._take_one(stage_group, peers, stage, expected=expected[stage], timeout_s=timeout_s)
                for stage in range(len(peers))
            )
        )

    async def fetch(self, plan: Recovery, peers: Sequence[str], expected: ExpectedStage) -> tuple[NeighbourCopy, ...]:
        """Return the copy that the plan needs, with weights; nothing for other strategies.

        Raises NetworkError, and PipelineError where the holder does not return what it received.
        """
        if plan.strategy != "neighbour_copy":
            return ()
        known = self._known[plan.stage]
        if known.holder == len(peers):
            copy = self._own[plan.stage]
        else:
            command = encode_bundle(Bundle({"of": expected.part.start}))
            copy = await self._send(peers[known.holder], "kept", command, max_reply_bytes=expected.tensor_bytes())
        digest = await asyncio.to_thread(_digest_of, copy)
        if digest != self._digests[plan.stage]:
            raise StageReplyError("a copy must be what its holder received, got something else; it is not used")
        return (replace(known, weights=Fields(decode_bundle(copy)).under("adapter/")),)

    async def _take_one(
        self, stage_group: StageGroup, peers: Sequence[str], stage: int, expected: ExpectedStage, timeout_s: float
    ) -> None:
        slot, holder, version = expected.part.start, stage + 1, stage_group.version
        try:
            async with asyncio.timeout(timeout_s):
                limit = expected.tensor_bytes()
                fields = await ask(
                    self._send, peers[stage], "copy", bundle=Bundle({"slot": slot}), max_reply_bytes=limit
                )
                with replies_of(peers[stage]):
                    weights = fields.under("adapter/")
                    expected.check_weights(weights)
                    stage_group.check_weights(weights)
                    if fields.integer("version") != version:
                        raise StageReplyError(f"a copy must be of version {version}, got {fields.integer('version')}")
                named = {f"adapter/{name}": value for name, value in weights.items()}
                copy = await asyncio.to_thread(encode_bundle, Bundle({"of": slot, "version": version}, named))
                if holder == len(peers):
                    self._own[stage] = copy
                else:
                    reply = await self._send(peers[holder], "keep", copy, max_reply_bytes=FRAME_BYTES)
                    if decode_bundle(reply).fields:
                        raise PipelineError("the copy was refused")
        except (NetworkError, PipelineError, TimeoutError) as error:
            logger.info("no new copy of stage %d: %s", stage, error or "it takes too long")
            return
        self._digests[stage] = await asyncio.to_thread(_digest_of, copy)
        self._known[stage] = NeighbourCopy(stage, holder, version, weights={})


def _digest_of(copy: bytes) -> bytes:
    return hashlib.sha256(copy).digest()


async def take_copies(stage_group: StageGroup) -> tuple[NeighbourCopy, ...]:
    """Copy the weights of every stage for the stage after it, and those of the last one for the stage before it.

    With a frozen base these are the adapters alone, small enough to be sent every few batches. Raises what the links raise.
    """
    last = stage_group.num_stages - 1
    copies: list[NeighbourCopy] = []
    for stage in range(stage_group.num_stages):
        tensors, rest = await stage_group.state(stage)
        holder = stage + 1 if stage < last else last - 1
        copies.append(NeighbourCopy(stage, holder, int(rest["policy_version"]), weights=tensors["adapter"]))
    return tuple(copies)


async def rebuild_stage(
    stage_group: StageGroup, plan: Recovery, link: StageLink, copies: tuple[NeighbourCopy, ...] = ()
) -> None:
    """Write weights into the stage behind `link`, which has just loaded its part of the base, and continue with it.

    The other stages keep their weights, moments and version. Raises PipelineError where the plan is to return to a
    checkpoint, which all stages must do together, and where sources do not fit; the stage group is then unchanged.
    """
    shapes = stage_group.facts[plan.stage].shapes
    weights: Mapping[str, Tensor]
    if plan.strategy == "checkpoint":
        raise PipelineError(f"all stages must go back to a checkpoint, got only stage {plan.stage}; restore every one")
    if plan.strategy == "base":
        tensors, _ = await link.state()
        weights = tensors["adapter"]
        stage_group.check_weights(weights)  # the machine chose them, and they must be as small as fresh ones
    elif plan.strategy == "neighbour_copy":
        usable = [copy for copy in copies if copy.stage == plan.stage and copy.holder in plan.sources]
        if not usable:
            raise PipelineError(f"rebuilding stage {plan.stage} needs a copy of it, got none; pass those of the plan")
        weights = max(usable, key=lambda copy: copy.version).weights
    else:
        weights = await _from_neighbours(stage_group, plan, shapes)
    await stage_group.recover(plan.stage, link, weights)


async def _from_neighbours(
    stage_group: StageGroup, plan: Recovery, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    sources = [(await stage_group.state(source))[0]["adapter"] for source in plan.sources]
    prefix = stage_group.facts[plan.stage].layer_prefix
    if plan.strategy == "twin_copy":
        return twin_copy(shapes, sources[0], layer_prefix=prefix)
    norms = [stage_group.stage_norms[source] if stage_group.stage_norms else 1.0 for source in plan.sources]
    return checkfree_average(shapes, *sources, norm_before=norms[0], norm_after=norms[1], layer_prefix=prefix)

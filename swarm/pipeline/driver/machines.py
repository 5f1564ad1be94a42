"""The machines of a pipeline: asks which of them answer, how fast they are and how much memory they have; assigns layers."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarm.config import PipelineSection
from swarm.errors import NetworkError, PipelineError, StageReplyError
from swarm.pipeline.commands import Fields, part_fields
from swarm.pipeline.driver.assignment import Machine, ModelCost, assign_layers
from swarm.pipeline.model_shape import StagePart, model_shape, stage_parts
from swarm.pipeline.stage.stage_host import BaseModel
from swarm.pipeline.stage_link import SendCommand, ask, replies_of
from swarm.pipeline.tensor_bundle import Bundle

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""How long to wait for spares once all other machines answered."""
_PAUSE_S = 0.5
_ASK_TIMEOUT_S = 10.0
_LATE_S = 1.0
_MAX_LAYERS_PER_S = 1e6
_MAX_MEMORY_BYTES = 1 << 50
"""More than any machine has; a larger claim is false."""


@dataclass(frozen=True, slots=True)
class Member:
    """What a machine reported about itself."""

    peer_id: str
    machine: Machine
    ranges: tuple[tuple[int, int], ...]
    """Layers [start, stop) that it holds."""
    is_fixed: bool
    """Whether a person chose these layers; allowed only for members of `policy.pipeline.self_assigned`."""


class StageMachines:
    """Asks the machines of one pipeline."""

    def __init__(self, config: PipelineSection, base: BaseModel, send: SendCommand, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since any fixed moment."""
        self._config = config
        self._fingerprint = base.fingerprint
        self._num_layers = model_shape(base.folder).num_layers
        self._send = send
        self._clock = clock

    async def gather(self) -> list[Member]:
        """Return the machines that answer in time, at least all but the spares, in the order of the settings.

        Raises PipelineError where too few answer, or where more than the spares have another base or adapter or make false
        claims.
        """
        config, found = self._config, dict[str, Member]()
        enough, until_s = len(config.members) - config.spares, self._clock() + config.startup_timeout_s
        tasks = [asyncio.create_task(self._awaited(peer_id)) for peer_id in config.members]
        pending, unfit = set(tasks), list[PipelineError]()
        try:
            while pending and self._clock() < until_s:
                timeout_s = until_s - self._clock()
                done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        member = task.result()
                        found[member.peer_id] = member
                    except PipelineError as error:
                        logger.warning("left out of the pipeline: %s", error)
                        unfit.append(error)
                if len(unfit) > config.spares:
                    raise unfit[0]
                if len(found) >= enough:
                    until_s = min(until_s, self._clock() + _GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if len(found) < enough:
            absent = [peer_id for peer_id in config.members if peer_id not in found]
            raise PipelineError(
                f"the machines of a pipeline must answer within {config.startup_timeout_s:g} s, got no answer of "
                f"{', '.join(absent)}; start `swarm stage` there, or raise policy.pipeline.startup_timeout_s"
            )
        return [found[peer_id] for peer_id in config.members if peer_id in found]

    async def answering(self, peer_ids: Iterable[str]) -> list[Member]:
        """Return those of `peer_ids` that answer now and are fit."""
        members = await asyncio.gather(*map(self._if_fit, peer_ids))
        return [member for member in members if member is not None]

    async def first_answering(self, peer_ids: Iterable[str]) -> list[Member]:
        """As `answering`, but waits only a moment for the others once one has answered."""
        pending = {asyncio.create_task(self._if_fit(peer_id)) for peer_id in peer_ids}
        found, tasks = list[Member](), list(pending)
        try:
            while pending:
                timeout_s = _LATE_S if found else None
                done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                found += [member for member in (task.result() for task in done) if member is not None]
                if not done:
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def load(
        self, peer_id: str, part: StagePart, *, instead_of: Sequence[int], content_hash: str | None = None
    ) -> None:
        """Tell a machine to read `part`, with fresh weights. Raises NetworkError, and PipelineError where it refuses."""
        fields = {**part_fields(part), "content_hash": content_hash, "instead_of": list(instead_of)}
        async with asyncio.timeout(self._config.startup_timeout_s):
            await ask(self._send, peer_id, "load", bundle=Bundle(fields))

    async def _awaited(self, peer_id: str) -> Member:
        """Ask until the machine answers. The first answer takes as long as its imports and its measurement."""
        member = None
        while member is None:
            member = await self._ask(peer_id, self._config.startup_timeout_s, measure=True)
            await asyncio.sleep(_PAUSE_S if member is None else 0)
        return member

    async def _if_fit(self, peer_id: str) -> Member | None:
        try:
            return await self._ask(peer_id, _ASK_TIMEOUT_S, measure=False)
        except PipelineError as error:
            logger.warning("left out of the pipeline: %s", error)
            return None

    async def _ask(self, peer_id: str, timeout_s: float, *, measure: bool) -> Member | None:
        try:
            async with asyncio.timeout(timeout_s):
                fields = await ask(self._send, peer_id, "machine", bundle=Bundle({"measure": measure}))
        except (NetworkError, TimeoutError):
            return None
        with replies_of(peer_id):
            fingerprint, member = fields.text("fingerprint"), self._member(peer_id, fields)
        if fingerprint != self._fingerprint:
            raise PipelineError(
                f"all machines of a pipeline must have one base, adapter shape and dtype, got others at {peer_id}; give them "
                "the same policy table"
            )
        if member.is_fixed and peer_id not in self._config.self_assigned:
            raise PipelineError(
                f"a machine must be named in policy.pipeline.self_assigned to say which layers it holds, got --layers at "
                f"{peer_id}; name it there on the driver, or start `swarm stage` without --layers"
            )
        if measure and not member.is_fixed and not member.machine.layers_per_s:
            raise StageReplyError(f"{peer_id} must measure its speed, got none; start `swarm stage` there again")
        return member

    def _member(self, peer_id: str, fields: Fields) -> Member:
        """Read what a machine claims. Raises StageReplyError where that cannot be true."""
        speed, memory_bytes = fields.number("layers_per_s"), fields.integer("memory_bytes")
        if not 0 <= speed <= _MAX_LAYERS_PER_S or memory_bytes > _MAX_MEMORY_BYTES:
            raise StageReplyError(
                f"a machine must have a speed of at most {_MAX_LAYERS_PER_S:g} layers/s and {_MAX_MEMORY_BYTES} bytes, got "
                f"{speed} and {memory_bytes}"
            )
        starts, stops = fields.integers("slots"), fields.integers("stops")
        bounds = [place for pair in zip(starts, stops, strict=False) for place in pair]
        is_empty = any(start >= stop for start, stop in zip(starts, stops, strict=False))
        if (
            len(starts) != len(stops)
            or is_empty
            or bounds != sorted(bounds)
            or max(stops, default=0) > self._num_layers
        ):
            raise StageReplyError(
                f"a machine must hold layers of {self._num_layers}, each once, got {starts} to {stops}"
            )
        machine = Machine(speed, memory_bytes, self._config.max_layers or self._num_layers)
        return Member(peer_id, machine, tuple(zip(starts, stops, strict=True)), is_fixed=fields.flag("is_fixed"))


def places(
    members: Sequence[Member], own: Machine, cost: ModelCost, config: PipelineSection
) -> tuple[list[StagePart], list[str]]:
    """Return (parts of all stages, the driver's last; peer ids of the others, in order).

    Ranges chosen by hand are used as they are. Otherwise the slowest machines are the spares, and the others get layers by
    speed and memory. Raises PipelineError and MemoryBudgetError where the layers do not fit.
    """
    num_layers = len(cost.layer_bytes)
    fixed = sorted((member for member in members if member.is_fixed), key=lambda member: member.ranges)
    if fixed:
        sizes = _sizes_by_hand(fixed, num_layers)
        return stage_parts([*sizes, num_layers - sum(sizes)]), [member.peer_id for member in fixed]
    fastest = sorted(members, key=lambda member: -member.machine.layers_per_s)
    selected = {member.peer_id for member in fastest[: max(1, len(config.members) - config.spares)]}
    workers = [member for member in members if member.peer_id in selected]
    machines = [member.machine for member in workers]
    if config.driver_layers is None:
        sizes = assign_layers([*machines, own], cost)
    else:
        rest = ModelCost(cost.layer_bytes[: -config.driver_layers], cost.embedding_bytes)
        sizes = [*assign_layers(machines, rest), config.driver_layers]
    return stage_parts(sizes), [member.peer_id for member in workers]


def _sizes_by_hand(fixed: Sequence[Member], num_layers: int) -> list[int]:
    ranges = [member.ranges[0] for member in fixed if member.ranges]
    starts = [0, *(stop for _, stop in ranges)]
    if [start for start, _ in ranges] != starts[:-1] or starts[-1] >= num_layers:
        raise PipelineError(
            f"layers given by hand must follow each other from 0 and leave the last of {num_layers} to the driver, got "
            f"{list(ranges)}; change --layers"
        )
    return [stop - start for start, stop in ranges]

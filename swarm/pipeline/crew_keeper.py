"""Keeps a crew going: brings it up, drives it, and rebuilds the stages of machines that are lost.

    call ─▶ crew ─▶ StageLostError ─▶ a plan (`recovery`) ─▶ a machine: spare, or a member with room ─▶ load, weights ─▶ on
                                          ▲
    commit ─▶ every few steps a copy of each stage's adapter goes to the stage behind it

The driver holds the last stage itself: log-probs and logits never cross the line, and the copy of the stage before it stays here.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from torch import Tensor

from swarm.config import PipelineSection
from swarm.errors import NetworkError, PipelineError, StageLostError
from swarm.pipeline.architecture import StagePart
from swarm.pipeline.assignment import Machine, ModelCost
from swarm.pipeline.crew import Crew, CrewSettings
from swarm.pipeline.gathering import all_of
from swarm.pipeline.machines import CrewMembers, Member, places
from swarm.pipeline.model_shape import model_shape
from swarm.pipeline.neighbour_copies import NeighbourCopies
from swarm.pipeline.order_bytes import StageState
from swarm.pipeline.orders import StageSettings
from swarm.pipeline.rebuild import rebuild_stage
from swarm.pipeline.recovery import Recovery, Situation, plan_recovery
from swarm.pipeline.remote_link import Give, RemoteLink
from swarm.pipeline.stage import Stage
from swarm.pipeline.stage_host import BaseModel
from swarm.pipeline.stage_link import InProcessLink, StageLink
from swarm.pipeline.stage_model import load_stage

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LOSSES = 5
"""Of one call; beyond that something else is wrong than a machine."""
_PAUSE_S = 1.0


class CrewKeeper:
    """The crew of one driver. `start` first."""

    def __init__(
        self,
        config: PipelineSection,
        base: BaseModel,
        cost: ModelCost,
        settings: StageSettings,
        give: Give,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._base = base
        self._cost = cost
        self._settings = settings
        self._give = give
        self._clock = clock
        self._shape = model_shape(base.folder)
        self._members = CrewMembers(config, base, give, clock)
        self._peers: list[str] = []  # of all stages but the last
        self._gone: set[str] = set()
        self._own: InProcessLink | None = None
        self.crew: Crew = Crew((), CrewSettings())
        self._copies = NeighbourCopies(give)
        self.recoveries_s: list[float] = []
        """How long each rebuilding took."""

    async def start(self, own: Machine) -> None:
        """Wait for the members, assign layers, load them. Raises PipelineError, MemoryBudgetError, NetworkError."""
        members = await self._members.gather()
        parts, self._peers = places(members, own, self._cost, self._config)
        held = {member.peer_id: [start for start, _ in member.ranges] for member in members}
        loading = [
            self._patiently(partial(self._members.load, peer_id, part, None, held[peer_id]))
            for peer_id, part in zip(self._peers, parts[:-1], strict=True)
        ]
        own_stage = asyncio.create_task(asyncio.to_thread(self._load_own, parts[-1]))
        await asyncio.gather(own_stage, *loading)
        self._own = InProcessLink(own_stage.result(), precision=self._config.precision)
        links: list[StageLink] = [
            self._link(peer_id, part) for peer_id, part in zip(self._peers, parts[:-1], strict=True)
        ]
        self.crew = Crew([*links, self._own], CrewSettings(action_timeout_s=self._config.action_timeout_s))
        await self._patiently(self.crew.start)
        for peer_id, part in zip((*self._peers, "this node"), parts, strict=True):
            logger.info("layers [%d, %d) are held by %s", part.start, part.stop, peer_id)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """At the start, where there is nothing to lose yet, a machine that cannot be reached is tried again."""
        until_s = self._clock() + self._config.startup_timeout_s
        while True:
            try:
                return await call()
            except (NetworkError, StageLostError):
                if self._clock() >= until_s:
                    raise
            await asyncio.sleep(_PAUSE_S)

    def places(self) -> list[tuple[StagePart, str]]:
        """(layers, peer id of who holds them) of every stage; the last one is this node's. Empty before the start."""
        holders = (*self._peers, "this node")
        return [(facts.part, holder) for facts, holder in zip(self.crew.facts, holders, strict=False)]

    def close(self) -> None:
        """End the thread of the own stage."""
        if self._own is not None:
            self._own.close()

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """What `call` gives, once it succeeds: lost stages are rebuilt in between. For calls that change nothing."""
        for _ in range(MAX_LOSSES):
            try:
                return await call()
            except StageLostError as lost:
                await self.recover(lost)
        return await call()

    async def commit(self, lr: float, max_grad_norm: float) -> int:
        """Apply the settled batch; returns the new version. A stage lost at that is rebuilt at this version."""
        try:
            await self.crew.commit(lr=lr, max_grad_norm=max_grad_norm)
        except StageLostError as lost:
            await self.recover(lost)
        interval = self._config.copy_interval_steps
        if interval and self.crew.version % interval == 0:
            await self._copies.take(self.crew, self._peers, self._config.action_timeout_s)
        return self.crew.version

    async def states(self) -> list[StageState]:
        """Weights and optimizer of every stage."""

        return await self.persist(lambda: all_of(map(self._state_of, range(self.crew.num_stages))))

    async def rewrite(self, change: Callable[[StageState], StageState]) -> None:
        """Put what `change` makes of every stage's state in its place; the version must stay.

        It begins anew where a stage is lost, so changing twice must be as good as once.
        """

        async def of(stage: int) -> None:
            await self._put(stage, change(await self._state_of(stage)))

        await self.persist(lambda: all_of(map(of, range(self.crew.num_stages))))

    async def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], version: int) -> None:
        """Continue all stages from one adapter and optimizer, and the `lr_factors` of tensors where there are any.

        Raises PipelineError where they are of another policy, StageLostError where a stage does not take them.
        """
        names = {name for facts in self.crew.facts for name in facts.shapes}
        odd = sorted(set(tensors["adapter"]).symmetric_difference(names))
        if odd:
            raise PipelineError(
                f"a checkpoint must hold exactly the adapter of all stages, got a difference at {odd[0]}"
            )
        factors = tensors.get("lr_factors", {})
        for stage, facts in enumerate(self.crew.facts):
            adapter = {name: tensors["adapter"][name] for name in facts.shapes}
            moments = {key: t for key, t in tensors["optimizer"].items() if key.partition(":")[2] in facts.shapes}
            state = {"adapter": adapter, "optimizer": moments}
            # layers may be cut otherwise than before: the stage that holds rebuilt ones has their factor
            factor = max((factors[name].item() for name in facts.shapes if name in factors), default=1.0)
            await self._put(stage, (state, {"policy_version": version, "lr_factor": factor}))
        await self.crew.start()

    async def recover(self, lost: StageLostError) -> None:
        """Rebuild what is lost, whatever else is lost meanwhile. Raises PipelineError where nothing is left to do it with."""
        started_s = self._clock()
        logger.warning("%s", lost)
        stages = set(lost.stages)
        until_s = started_s + self._config.startup_timeout_s
        while stages:
            if len(self._peers) in stages:
                raise PipelineError(
                    f"the driver's own layers must be done within {self._config.action_timeout_s:g} s, got longer; lower "
                    "policy.pipeline.driver_layers or raise policy.pipeline.action_timeout_s"
                )
            self._gone |= {self._peers[stage] for stage in stages}
            stages = {stage for stage, peer_id in enumerate(self._peers) if peer_id in self._gone}
            plan = plan_recovery(self._situation(frozenset(stages)))[0]
            try:
                done = await self._rebuild(plan)
            except StageLostError as more:  # another one; this one is in place
                stages = (stages - {plan.stage}) | set(more.stages)
                continue
            if done:
                stages.discard(plan.stage)
                continue
            answering = {member.peer_id for member in await self._members.answering(set(self._peers))}
            stages |= {stage for stage, peer_id in enumerate(self._peers) if peer_id not in answering}
            if self._clock() > until_s:
                raise PipelineError(
                    f"a lost stage must find another machine, got none for layers of stage {plan.stage} within "
                    f"{self._config.startup_timeout_s:g} s; start `swarm stage` again there, then resume"
                )
            await asyncio.sleep(_PAUSE_S)
        self.recoveries_s.append(self._clock() - started_s)
        logger.warning("the crew is whole again after %.1f s", self.recoveries_s[-1])

    async def _state_of(self, stage: int) -> StageState:
        async with self._bounded(stage, "hand out its state"):
            return await self.crew.links[stage].state()

    async def _put(self, stage: int, state: StageState) -> None:
        async with self._bounded(stage, "take its state"):
            await self.crew.links[stage].restore(*state)

    @asynccontextmanager
    async def _bounded(self, stage: int, what: str) -> AsyncIterator[None]:
        """Whoever takes longer than for any order is lost."""
        try:
            async with asyncio.timeout(self._config.action_timeout_s):
                yield
        except (NetworkError, TimeoutError) as error:
            raise StageLostError(f"stage {stage} must {what}, got {error or 'no answer'}", (stage,)) from None

    async def _rebuild(self, plan: Recovery) -> bool:
        """Whether a machine took the stage over. Raises StageLostError where the crew then lacks another."""
        facts = self.crew.facts[plan.stage]
        for member in await self._candidates(facts.part):
            held = [start for start, _ in member.ranges if not self._uses(member.peer_id, start)]
            link = self._link(member.peer_id, facts.part)
            try:
                await self._members.load(member.peer_id, facts.part, facts.content_hash, held)
                async with asyncio.timeout(self._config.action_timeout_s):
                    copies = await self._copies.fetch(plan, self._peers, facts)
            except (NetworkError, PipelineError, TimeoutError) as error:
                logger.info("stage %d: %s cannot take it: %s", plan.stage, member.peer_id, error)
                if plan.strategy == "neighbour_copy":
                    self._copies.forget(plan.stage)
                    return False  # perhaps it was the copy: plan anew without it
                continue
            before = self._peers[plan.stage]
            self._peers[plan.stage] = member.peer_id
            self._gone.discard(member.peer_id)
            try:
                await rebuild_stage(self.crew, plan, link, copies)
            except (NetworkError, TimeoutError):
                self._peers[plan.stage] = before
                continue
            except StageLostError:  # another one is lost; this one is in place
                _say_where(plan, member.peer_id)
                raise
            _say_where(plan, member.peer_id)
            return True
        return False

    async def _candidates(self, part: StagePart) -> list[Member]:
        """Machines with room that answer now: those without layers first, then by memory."""
        need_bytes = sum(self._cost.layer_bytes[part.start : part.stop])
        need_bytes += self._cost.embedding_bytes if part.has_embedding else 0
        members = self._config.members
        found = await self._members.first_answering([one for one in members if one not in self._gone])
        if all(member.peer_id in self._peers for member in found):  # no spare: perhaps one that was lost is back
            found += await self._members.first_answering([one for one in members if one in self._gone])
        return sorted(
            (member for member in found if member.machine.memory_bytes >= need_bytes),
            key=lambda member: (bool(member.ranges), -member.machine.memory_bytes),
        )

    def _situation(self, lost: frozenset[int]) -> Situation:
        return Situation(
            num_stages=len(self._peers) + 1,
            lost=lost,
            version=self.crew.version,
            copies=self._copies.known,
            max_copy_age=self._config.max_copy_age,
            is_frozen=True,
        )

    def _uses(self, peer_id: str, start: int) -> bool:
        facts = self.crew.facts
        return any(peer == peer_id and facts[i].part.start == start for i, peer in enumerate(self._peers))

    def _link(self, peer_id: str, part: StagePart) -> RemoteLink:
        return RemoteLink(self._give, peer_id, part.start, self._shape, self._config.precision)

    def _load_own(self, part: StagePart) -> Stage:
        base = self._base
        model = load_stage(base.folder, part, lora=base.lora, device=base.device, dtype=base.dtype)
        return Stage(model, self._settings)


def _say_where(plan: Recovery, peer_id: str) -> None:
    logger.warning("stage %d goes on at %s by %s: %s", plan.stage, peer_id, plan.strategy, plan.reason)

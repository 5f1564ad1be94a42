"""The supervisor of a pipeline: starts the stage group, sends it work, and rebuilds the stages of lost machines.

    call ─▶ stage group ─▶ StageLostError ─▶ plan (`recovery`) ─▶ a spare, or a member with memory ─▶ load, weights ─▶ repeat
                                          ▲
    commit ─▶ every few steps the stage behind receives a copy of each stage's adapter

The driver holds the last stage itself. Log-probs and logits are therefore never sent, and the driver stores the copy of the
stage before it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from torch import Tensor

from swarm.adapters.adapter_state import is_finite_float
from swarm.config import PipelineSection
from swarm.errors import NetworkError, PipelineError, StageLostError, StageRefusedError
from swarm.pipeline.commands import StageSettings, StageState
from swarm.pipeline.driver.assignment import Machine, ModelCost
from swarm.pipeline.driver.expected_stage import ExpectedStage, StateBounds, expected_stages
from swarm.pipeline.driver.machines import Member, StageMachines, places
from swarm.pipeline.driver.recovery import NeighbourCopies, Recovery, Situation, plan_recovery, rebuild_stage
from swarm.pipeline.driver.schedule import all_of
from swarm.pipeline.driver.stage_group import MAX_REFUSALS, StageGroup, StageGroupSettings
from swarm.pipeline.driver.stage_relay import StageRelay
from swarm.pipeline.model_shape import StagePart
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage.stage_host import BaseModel
from swarm.pipeline.stage.stage_model import load_stage
from swarm.pipeline.stage_link import InProcessLink, RemoteLink, SendCommand, StageLink

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LOSSES = 5
"""Most losses of stages in one call; more have another cause than a machine."""
_PAUSE_S = 1.0


class PipelineSupervisor:
    """Supervises the pipeline of one driver, on the driver's event loop. Call `start` first."""

    def __init__(
        self,
        config: PipelineSection,
        base: BaseModel,
        cost: ModelCost,
        settings: StageSettings,
        send: SendCommand,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._base = base
        self._cost = cost
        self._settings = settings
        self._send = send
        self._clock = clock
        self._expected: list[ExpectedStage] = []  # of all stages
        self._members = StageMachines(config, base, send, clock=clock)
        self._peers: list[str] = []  # of all stages but the last
        self._lost_peers: set[str] = set()
        self._banned: set[str] = set()  # peers that gave an answer that no honest stage gives
        self._own: InProcessLink | None = None
        self.stage_group: StageGroup = StageGroup((), StageGroupSettings())
        self._copies = NeighbourCopies(send)
        self.recoveries_s: list[float] = []
        """Duration of each recovery."""

    async def start(self, own: Machine) -> None:
        """Wait for the machines, assign and load layers. Raises PipelineError, MemoryBudgetError, NetworkError."""
        members = await self._members.gather()
        parts, self._peers = places(members, own, self._cost, config=self._config)
        held = {member.peer_id: [start for start, _ in member.ranges] for member in members}
        loading = [
            self._with_retries(partial(self._members.load, peer_id, part, instead_of=held[peer_id]))
            for peer_id, part in zip(self._peers, parts[:-1], strict=True)
        ]
        own_stage = asyncio.create_task(asyncio.to_thread(self._load_own, parts[-1]))
        await asyncio.gather(own_stage, *loading)
        self._own = InProcessLink(own_stage.result(), precision=None)
        self._expected = expected_stages(self._base.folder, self._base.lora, parts)
        links: list[StageLink] = [self._link(peer_id, stage) for stage, peer_id in enumerate(self._peers)]
        bounds = StateBounds({name: shape for one in self._expected for name, shape in one.shapes.items()})
        self.stage_group = StageGroup(
            [*links, self._own], StageGroupSettings(action_timeout_s=self._config.action_timeout_s), bounds
        )
        await self._with_retries(self.stage_group.start)
        await self._relay_states()
        for peer_id, part in zip((*self._peers, "this node"), parts, strict=True):
            logger.info("layers [%d, %d) are held by %s", part.start, part.stop, peer_id)

    async def _with_retries(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call of the start while a machine cannot be reached; no state can be lost yet."""
        until_s = self._clock() + self._config.startup_timeout_s
        while True:
            try:
                return await call()
            except (NetworkError, StageLostError):
                if self._clock() >= until_s or self.stage_group.dishonest_stages:
                    raise
            await asyncio.sleep(_PAUSE_S)

    def places(self) -> list[tuple[StagePart, str]]:
        """Return (layers, peer id of the holder) of every stage, this node's last. Empty before the start."""
        holders = (*self._peers, "this node")
        return [(facts.part, holder) for facts, holder in zip(self.stage_group.facts, holders, strict=False)]

    def close(self) -> None:
        """End the thread of this node's stage."""
        if self._own is not None:
            self._own.close()

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call`, which must change nothing, rebuilding lost stages until it succeeds.

        A refusal is not yet a loss: the command is repeated until the stage group counts the refusing stage as lost.
        """
        for _ in range(MAX_LOSSES * MAX_REFUSALS):
            try:
                return await call()
            except StageLostError as lost:
                await self.recover(lost)
            except StageRefusedError as refusal:
                logger.warning("%s", refusal)
        return await call()

    async def commit(self, lr: float, max_grad_norm: float) -> int:
        """Apply the closed batch and return the new version. A stage that is lost meanwhile is rebuilt at this version."""
        try:
            await self.stage_group.commit(lr=lr, max_grad_norm=max_grad_norm)
        except StageLostError as lost:
            await self.recover(lost)
        interval = self._config.copy_interval_steps
        if interval and self.stage_group.version % interval == 0:
            await self._copies.take(
                self.stage_group, self._peers, self._expected, timeout_s=self._config.action_timeout_s
            )
        return self.stage_group.version

    async def states(self) -> list[StageState]:
        """Return weights and optimizer of every stage."""
        return await self.persist(lambda: all_of(map(self.stage_group.state, range(self.stage_group.num_stages))))

    async def rewrite(self, change: Callable[[StageState], StageState]) -> None:
        """Replace the state of every stage by the result of `change`; the version must stay.

        It starts over where a stage is lost, so `change` must be idempotent.
        """

        async def rewrite_stage(stage: int) -> None:
            await self.stage_group.restore(stage, change(await self.stage_group.state(stage)))

        await self.persist(lambda: all_of(map(rewrite_stage, range(self.stage_group.num_stages))))

    async def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], version: int) -> None:
        """Continue all stages from one adapter and optimizer, and the `lr_factors` of its tensors where given.

        Raises PipelineError where they belong to another policy or cannot come from training, StageLostError where a stage
        does not accept them.
        """
        names = {name for facts in self.stage_group.facts for name in facts.shapes}
        odd = sorted(set(tensors["adapter"]).symmetric_difference(names))
        if odd:
            raise PipelineError(
                f"a checkpoint must hold exactly the adapter of all stages, got a difference at {odd[0]}"
            )
        factors = tensors.get("lr_factors", {})
        if any(factor.shape or not is_finite_float(factor) for factor in factors.values()):
            raise PipelineError(
                "the learning rate factors of a checkpoint must be single numbers; use an intact checkpoint"
            )
        states: list[StageState] = []
        for expected in self._expected:
            adapter = {name: tensors["adapter"][name] for name in expected.shapes}
            moments = {key: t for key, t in tensors["optimizer"].items() if key.partition(":")[2] in expected.shapes}
            # layers may be split differently than before; the stage that holds the rebuilt ones gets their factor
            factor = max((factors[name].item() for name in expected.shapes if name in factors), default=1.0)
            expected.check_state({"adapter": adapter, "optimizer": moments}, factor)
            state = {"adapter": adapter, "optimizer": moments}, {"policy_version": version, "lr_factor": factor}
            states.append(state)
        for stage, state in enumerate(states):
            await self.stage_group.restore(stage, state)
        await self.stage_group.start()

    async def recover(self, lost: StageLostError) -> None:
        """Rebuild all lost stages, also those lost during recovery. Raises PipelineError where no machine is left for one."""
        started_s = self._clock()
        logger.warning("%s", lost)
        stages = set(lost.stages)
        until_s = started_s + self._config.startup_timeout_s
        while stages:
            if len(self._peers) in stages:
                raise PipelineError(
                    f"the driver's own layers must finish within {self._config.action_timeout_s:g} s; they took longer. Lower "
                    "policy.pipeline.driver_layers or raise policy.pipeline.action_timeout_s"
                )
            self._lost_peers |= {self._peers[stage] for stage in stages}
            self._banned |= {self._peers[stage] for stage in stages & self.stage_group.dishonest_stages}
            stages = {stage for stage, peer_id in enumerate(self._peers) if peer_id in self._lost_peers}
            plan = plan_recovery(self._situation(frozenset(stages)))[0]
            try:
                if await self._rebuild(plan):
                    stages.discard(plan.stage)
                    continue
                answering = {member.peer_id for member in await self._members.answering(set(self._peers))}
                stages |= {stage for stage, peer_id in enumerate(self._peers) if peer_id not in answering}
                await asyncio.sleep(_PAUSE_S)
            except StageLostError as more:  # another stage is lost; this one is rebuilt
                stages = (stages - {plan.stage}) | set(more.stages)
            if self._clock() > until_s:
                raise PipelineError(
                    f"a lost stage must find another machine, got none for layers of stage {plan.stage} within "
                    f"{self._config.startup_timeout_s:g} s; start `swarm stage` again there, then resume"
                )
        await self._relay_states()
        self.recoveries_s.append(self._clock() - started_s)
        logger.warning("the pipeline is complete again after %.1f s", self.recoveries_s[-1])

    async def _relay_states(self) -> None:
        """Let the stages pass states to each other, where there are several and each is on a machine of its own."""
        self.stage_group.relay = None
        if len(self._peers) < 2 or len(set(self._peers)) < len(self._peers):
            return
        relay = StageRelay(
            self._send,
            self._peers,
            self._expected,
            precision=self._config.precision,
            timeout_s=self._config.action_timeout_s,
        )
        try:
            await relay.connect()
        except (NetworkError, PipelineError, TimeoutError) as error:
            logger.warning("stages pass no states to each other: %s", error or "it takes too long")
            return
        self.stage_group.relay = relay

    async def _rebuild(self, plan: Recovery) -> bool:
        """Whether a machine took over the stage. Raises StageLostError where another stage is lost after that."""
        facts = self.stage_group.facts[plan.stage]
        for member in await self._candidates(facts.part):
            held = [start for start, _ in member.ranges if not self._uses(member.peer_id, start)]
            link = self._link(member.peer_id, plan.stage)
            try:
                await self._members.load(member.peer_id, facts.part, content_hash=facts.content_hash, instead_of=held)
            except (NetworkError, PipelineError, TimeoutError) as error:
                _log_refused(plan, member.peer_id, error)
                continue
            try:
                async with asyncio.timeout(self._config.action_timeout_s):
                    copies = await self._copies.fetch(plan, self._peers, self._expected[plan.stage])
            except (NetworkError, PipelineError, TimeoutError) as error:
                logger.info("no copy of stage %d: %s", plan.stage, error or "it takes too long")
                self._copies.forget(plan.stage)
                return False  # the next plan does without it
            before = self._peers[plan.stage]
            self._peers[plan.stage] = member.peer_id
            self._lost_peers.discard(member.peer_id)
            try:
                await rebuild_stage(self.stage_group, plan, link, copies=copies)
            except StageLostError as more:  # it gave a false answer, or it is rebuilt and another one is lost
                if plan.stage not in more.stages:
                    _log_recovered(plan, member.peer_id)
                raise
            except (NetworkError, PipelineError, TimeoutError) as error:
                _log_refused(plan, member.peer_id, error)
                self._peers[plan.stage] = before
                continue
            _log_recovered(plan, member.peer_id)
            return True
        return False

    async def _candidates(self, part: StagePart) -> list[Member]:
        """Return honest machines with enough memory that answer now: those without layers first, then by memory."""
        need_bytes = sum(self._cost.layer_bytes[part.start : part.stop])
        need_bytes += self._cost.embedding_bytes if part.has_embedding else 0
        members = [one for one in self._config.members if one not in self._banned]
        found = await self._members.first_answering([one for one in members if one not in self._lost_peers])
        if all(member.peer_id in self._peers for member in found):  # no spare; a lost one may be back
            found += await self._members.first_answering([one for one in members if one in self._lost_peers])
        return sorted(
            (one for one in found if one.machine.memory_bytes >= need_bytes and self._may_hold(one, part)),
            key=lambda member: (bool(member.ranges), -member.machine.memory_bytes),
        )

    def _may_hold(self, member: Member, part: StagePart) -> bool:
        """Whether a machine may hold `part`, by the layers chosen for it by hand and its limit of layers."""
        if member.is_fixed:
            return (part.start, part.stop) in member.ranges
        others = [one.part for one, peer in zip(self._expected, self._peers, strict=False) if peer == member.peer_id]
        num_layers = sum(one.num_layers for one in others if one != part) + part.num_layers
        return num_layers <= member.machine.max_layers

    def _situation(self, lost: frozenset[int]) -> Situation:
        return Situation(
            num_stages=len(self._peers) + 1,
            lost=lost,
            version=self.stage_group.version,
            copies=self._copies.known,
            max_copy_age=self._config.max_copy_age,
            is_frozen=True,
        )

    def _uses(self, peer_id: str, start: int) -> bool:
        facts = self.stage_group.facts
        return any(peer == peer_id and facts[i].part.start == start for i, peer in enumerate(self._peers))

    def _link(self, peer_id: str, stage: int) -> RemoteLink:
        return RemoteLink(self._send, peer_id, self._expected[stage], precision=self._config.precision)

    def _load_own(self, part: StagePart) -> Stage:
        base = self._base
        model = load_stage(base.folder, part, lora=base.lora, device=base.device, dtype=base.dtype)
        return Stage(model, self._settings)


def _log_recovered(plan: Recovery, peer_id: str) -> None:
    logger.warning("stage %d continues at %s by %s: %s", plan.stage, peer_id, plan.strategy, plan.reason)


def _log_refused(plan: Recovery, peer_id: str, error: Exception) -> None:
    logger.info("stage %d: %s cannot take it: %s", plan.stage, peer_id, error or "it takes too long")

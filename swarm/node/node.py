"""One node: the network loop and the compute thread, wired together.

    asyncio loop (this thread)                          compute thread
    ─────────────────────────                           ──────────────
    transport · index · admission ──→ [pool] ──draw──→  TrainingRun: Learner.run_round
    exchange.hand_out ←─────────────────────────────── groups of the round
    status file · /metrics · /health ←── metrics row ─  after every round

Neither side waits for the other: an empty pool means a batch of own groups only, a dead network means plain RL.

What a node's page lets a person read, and ask for, once learner and exchange are there.
"""

import asyncio
import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarm.adapters.checkpoint import CheckpointStore
from swarm.admission.admission import Admission, Vocabulary
from swarm.admission.copies import CopyWatch
from swarm.admission.reward_verifier import RewardVerifier
from swarm.config import Config
from swarm.config.node_folder import NodeFolder
from swarm.dashboard.node_page import NodePage
from swarm.integrations.open_sinks import open_sinks
from swarm.machine.stop_signals import obey_stop_signals
from swarm.merging.node_merging import make_merging
from swarm.network.transport import Transport
from swarm.node.advice import Adviser
from swarm.node.controls import NodeControls
from swarm.node.learner import Learner
from swarm.node.pipeline_driver import PipelineDriver
from swarm.node.policy_backend import PolicyBackend, local_backend
from swarm.node.report import NodeReport
from swarm.node.stage_process import network_with_stages
from swarm.node.training_loop import TrainingRun
from swarm.node.watchdog import LOOK_INTERVAL_S, Watchdog
from swarm.observability.repeat import repeat
from swarm.policy.policy import load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity
from swarm.sharing.body_store import BodyStore
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator
from swarm.sharing.peer_tracker import PeerTracker
from swarm.silo.silo_transport import node_transport
from swarm.tasks.sandboxed_verifier import SandboxedVerifier
from swarm.tasks.task_mixture import TaskMixture, owns_stream
from swarm.types import RolloutGroup

logger = logging.getLogger(__name__)


def wire_page(
    page: NodePage,
    controls: NodeControls,
    mixture: TaskMixture,
    learner: Learner,
    exchange: Exchange | None,
    crew: PipelineDriver | None,
) -> None:
    """Called on the node's loop, before the first round. Without a network there is no `exchange`, with one machine no `crew`."""
    loop, rollouts = asyncio.get_running_loop(), page.rollouts
    rollouts.prompt_of = mixture.prompt_of
    learner.on_groups = rollouts.own
    if crew is not None:
        page.stages = crew.stages
    if exchange is None:
        return
    exchange.reader.on_admitted, exchange.reader.on_refused = rollouts.admitted, rollouts.refused

    def follow(is_paused: bool) -> None:
        loop.call_soon_threadsafe(exchange.set_paused, is_paused)

    controls.on_sharing = follow
    exchange.set_paused(controls.sharing_is_paused())  # asked for while the node came up


_INTERRUPTED = 130
_STOP_CHECK_INTERVAL_S = 0.25
_STATUS_INTERVAL_S = 2.0
_REPUTATION_INTERVAL_S = 60.0
_STOP_GRACE_S = 2.5
"""How long a stop waits for the round in flight before it is left to the last checkpoint."""

TransportFactory = Callable[[Config, Identity, NodeFolder, EntryValidator], Transport | None]


def configured_transport(
    config: Config, identity: Identity, folder: NodeFolder, validator: EntryValidator
) -> Transport | None:
    network = network_with_stages(config, identity.peer_id)
    return node_transport(config.model_copy(update={"network": network}), identity, folder, validator)


class Node:
    """Owns every part of one node for one run of the process."""

    def __init__(
        self,
        config: Config,
        folder: NodeFolder,
        identity: Identity,
        make_transport: TransportFactory = configured_transport,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.identity = identity
        validator = EntryValidator(config.swarm_id)
        self.transport = make_transport(config, identity, folder, validator)
        self._clock = self.transport.now if self.transport else time.time
        self.pool = ExperiencePool(folder.pool, config.sharing, self._clock)
        self.exchange: Exchange | None = None
        self._bodies = BodyStore(self._clock)
        seen_at = self.transport.seen_at if self.transport else lambda peer_id: ()
        self._authors = PeerTracker(
            config.sharing, identity.peer_id, self._clock, path=folder.reputation, seen_at=seen_at
        )
        self._reputation = self._authors.reputation
        self._fence = SandboxedVerifier(config.tasks)
        self._copies = CopyWatch(owns_stream, self._reputation.refused)
        self.controls = NodeControls()
        is_paused = self.controls.sharing_is_paused
        self._merging = make_merging(config, identity, self.transport, self._level, is_paused, self._authors.shares)
        self._watchdog = watchdog or Watchdog(time.monotonic)
        has_peers = bool(config.network.initial_peers)
        adviser = Adviser(time.monotonic, has_network=self.transport is not None, has_initial_peers=has_peers)
        self._page = NodePage(config, folder.path, self.controls)
        self._report = NodeReport(
            config.observability, folder, identity, self.transport, validator, self._merging, adviser, self._watchdog,
            page=self._page, sinks=open_sinks(config, folder, identity),
        )  # fmt: skip
        is_driver = config.policy.pipeline.is_on
        self._crew = PipelineDriver(config, identity, self.transport, time.time) if is_driver else None
        self._stop = threading.Event()

    async def run_until_signal(self) -> None:
        """`run`, with SIGINT and SIGTERM asking for a stop; a second one ends the process at once.

        Whatever its threads do, the process has ended `stop_signals.DEADLINE_S` after the first one.
        """
        obey_stop_signals(self._on_signal)
        if not await self.run():  # a thread is inside a long computation: leave it, the last checkpoint stands
            logging.shutdown()
            os._exit(_INTERRUPTED)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            os._exit(_INTERRUPTED)
        logger.info("stopping: the round in flight is finished or left; press Ctrl-C again to end at once")
        self.stop()

    def stop(self) -> None:
        """Ask the node to end after the round in flight. Safe from any thread."""
        self._stop.set()
        self.controls.end()

    async def run(self) -> bool:
        """Whole life of the node. Returns whether all computation has ended; raises what ended it."""
        logger.info("node %s (%s) in %s", self.identity.peer_name, self.identity.peer_id, self.folder.path)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.pool.close)
            stack.callback(self._fence.close)
            stack.callback(self._save_reputation)
            stack.push_async_callback(self._report.stop)
            if self._crew is not None:
                stack.callback(self._crew.close)
            await self._report.start()
            if self.transport is not None:
                stack.push_async_callback(self.transport.stop)
            learner = await self._start()
            if learner is None:
                return False
            stack.callback(self._mixture.close)
            if self.transport is not None:
                self.exchange = self._report.exchange = self._wire_exchange(learner, self.transport)
            tasks = [asyncio.create_task(work) for work in self._network_work()]
            stack.push_async_callback(_cancel, tasks)
            stack.enter_context(self._watchdog)
            wire_page(self._page, self.controls, self._mixture, learner, self.exchange, self._crew)
            run = TrainingRun(
                self.config, self.folder, learner, self._report, self._clock, self._stop, self._watchdog, self.controls
            )
            return await self._compute(run, tasks)

    async def _start(self) -> Learner | None:
        """Network and policy come up side by side; None where a stop was asked for meanwhile."""
        self._loop = asyncio.get_running_loop()
        starting = asyncio.create_task(self._bring_up())
        while not starting.done():
            await asyncio.wait([starting], timeout=_STOP_CHECK_INTERVAL_S)
            if self._stop.is_set() and not starting.done():
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                return None
        return await starting

    async def _bring_up(self) -> Learner:
        if self._crew is not None:  # its policy is behind the network
            await self._start_transport()
            learner = await asyncio.to_thread(self._build_learner)
        else:
            learner, _ = await asyncio.gather(asyncio.to_thread(self._build_learner), self._start_transport())
        if self._merging is not None:
            await self._merging.join(learner)
        return learner

    def _level(self) -> int:
        return self.exchange.directory.level if self.exchange else 0

    async def _start_transport(self) -> None:
        if self.transport is None:
            return
        self._bodies.serve_on(self.transport)
        await self.transport.start()
        self._report.write_status()  # others can join through this node while it still loads its policy
        for address in self.transport.addresses():
            logger.info("listening on %s", address)

    def _build_learner(self) -> Learner:
        """Everything that imports, loads or hashes for seconds; runs in a thread while the network comes up."""
        import torch

        if self.config.node.threads:
            torch.set_num_threads(self.config.node.threads)
        mixture = TaskMixture(self.config.tasks)
        logger.info("loading policy %s", self.config.policy.base)
        means = self._load_means()
        policy = means.policy
        logger.info("policy ready on %s, lineage %s", policy.device, policy.lineage.policy[:12])
        learner = Learner(
            self.config, means, mixture, self.pool, self.identity.peer_id, self._hand_out, self._authors.usefulness,
            self._merging.links if self._merging else None, self._reputation.unlikely, self._authors.beacons.current,
        )  # fmt: skip
        learner.probe_memory()
        if learner.resume(CheckpointStore(self.folder.checkpoints, self.config.checkpoint.keep)):
            logger.info("resumed after round %d", learner.round)
        self._mixture = mixture
        return learner

    def _load_means(self) -> PolicyBackend:
        if self._crew is not None:
            return self._crew.bring_up(self._loop, self.folder.hash_cache)
        policy = load_policy(self.config.policy, device=self.config.node.device, hash_cache=self.folder.hash_cache)
        return local_backend(self.config, policy, self.identity.peer_id)

    def _wire_exchange(self, learner: Learner, transport: Transport) -> Exchange:
        policy, config = learner.policy, self.config
        vocabulary = Vocabulary(
            lineage=policy.lineage,
            size=policy.vocab_size,
            eos_token_ids=frozenset(policy.eos_token_ids),
            decode=policy.decode,
        )
        judge = RewardVerifier(self._mixture, is_known=self._reputation.is_known, fence=self._fence)
        admission = Admission(
            config.sharing, config.swarm_id, self.identity.peer_id, judge, vocabulary, self._clock, self._copies
        )
        return Exchange(
            config.sharing, config.network, config.swarm_id, self.identity, transport, admission, self.pool,
            self._bodies, lambda: self.pool.next_number("header"), random.Random(self.identity.peer_id), self._authors,
        )  # fmt: skip

    def _network_work(self) -> list[Coroutine[Any, Any, None]]:
        on_failure = self._report.count_failed_step
        status = repeat(self._report.refresh, pause_s=_STATUS_INTERVAL_S, on_failure=on_failure)
        merging = self._merging.work(on_failure) if self._merging else ()
        memory = repeat(self._remember_authors, pause_s=_REPUTATION_INTERVAL_S, on_failure=on_failure)
        alive = repeat(self._watchdog.loop_turns, pause_s=LOOK_INTERVAL_S, on_failure=on_failure)
        return [status, memory, alive, *(self.exchange.work(on_failure) if self.exchange else ()), *merging]

    def _save_reputation(self) -> None:
        """At the end, when nothing is left to try again."""
        try:
            self._reputation.save()
        except OSError as error:
            logger.warning("the reputation of others was not saved: %s", error)

    async def _remember_authors(self) -> None:
        await asyncio.to_thread(self._reputation.save)

    def _hand_out(self, groups: Sequence[RolloutGroup]) -> None:
        """Called by the compute thread, which never waits for the network."""
        self._copies.note(groups)
        if self.exchange is not None:
            self._loop.call_soon_threadsafe(self.exchange.hand_out, groups)

    async def _compute(self, run: TrainingRun, tasks: Sequence["asyncio.Task[None]"]) -> bool:
        """Run the compute thread to its end, or leave it behind when a stop cannot wait for its round.

        A network task that ends has met a bug: that is raised here, never passed over.
        """
        outcome: asyncio.Future[None] = self._loop.create_future()
        thread = threading.Thread(target=self._compute_thread, args=(run, outcome), name="compute", daemon=True)
        thread.start()
        stop_seen_at: float | None = None
        while not outcome.done():
            await asyncio.wait([outcome, *tasks], timeout=_STOP_CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    self.stop()
                    task.result()
            if self._stop.is_set():
                stop_seen_at = stop_seen_at or time.monotonic()
                if time.monotonic() - stop_seen_at > _STOP_GRACE_S:
                    logger.warning("left round %d unfinished; the last checkpoint stands", run.learner.round + 1)
                    return False
        await outcome
        return True

    def _compute_thread(self, run: TrainingRun, outcome: "asyncio.Future[None]") -> None:
        error: Exception | None = None
        try:
            run.run()
        except Exception as caught:  # the thread's edge: whatever it is, the loop raises it
            error = caught
        self._loop.call_soon_threadsafe(_settle, outcome, error)


async def _cancel(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _settle(outcome: "asyncio.Future[None]", error: Exception | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)

"""One node: the network loop and the compute thread, wired together.

    asyncio loop (this thread)                          compute thread
    ─────────────────────────                           ──────────────
    transport · index · admission ──→ [pool] ──draw──→  TrainingRun: Learner.run_round
    exchange.hand_out ←─────────────────────────────── groups of the round
    status file · /metrics · /health ←── metrics row ─  after every round

Neither side waits for the other: an empty pool means a batch of own groups only, a dead network means plain RL.

A node is made in two steps. `Node.__init__` makes all that needs no policy, so that others can join through the node and its
page can be read while it loads; `Node._load` makes the rest: tasks, policy, exchange, learner.
"""

import asyncio
import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.adapters.checkpoint import CheckpointStore
from swarm.admission.admission import Admission
from swarm.admission.copies import CopyWatch
from swarm.admission.reward_verifier import RewardVerifier
from swarm.config import Config, Origin, kept_toml
from swarm.dashboard.node_page import NodePage
from swarm.errors import TaskError
from swarm.integrations.open_sinks import open_sinks
from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import replace_file
from swarm.machine.stop_signals import obey_stop_signals
from swarm.merging.node_merging import make_merging
from swarm.network.context import NodeContext
from swarm.network.transport import Transport
from swarm.node.controls import NodeControls
from swarm.node.learner import Learner, Publish, SwarmPorts, publish_nothing
from swarm.node.pipeline_driver import PipelineDriver
from swarm.node.policy_backend import PolicyBackend, local_backend, vocabulary_of
from swarm.node.report import NetworkSide, NodeReport
from swarm.node.stage_process import network_with_stages
from swarm.node.training_loop import TrainingRun
from swarm.node.watchdog import LOOK_INTERVAL_S, Watchdog
from swarm.observability.repeat import repeat
from swarm.policy.base_folder import fitted_to_base
from swarm.policy.policy import TextPolicy, load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.context import SwarmContext
from swarm.records.identity import Identity
from swarm.rollouts.prompt_check import check_prompts
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator
from swarm.sharing.parts import SharingParts, make_sharing_parts
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.totals import SharingPause
from swarm.silo.silo_transport import node_transport
from swarm.tasks.sandboxed_verifier import SandboxedVerifier
from swarm.tasks.task_mixture import TaskMixture, no_common_streams, owns_stream
from swarm.types import RolloutGroup
from swarm.warm_start.start_digest import start_digest

logger = logging.getLogger(__name__)

_INTERRUPTED = 130
_STOP_CHECK_INTERVAL_S = 0.25
_STATUS_INTERVAL_S = 2.0
_REPUTATION_INTERVAL_S = 60.0
_STOP_GRACE_S = 2.5
"""How long a stop waits for the round in flight before it is left to the last checkpoint."""
_WRITE_GRACE_S = 10.0
"""How long it then waits for a checkpoint that is being written; `stop_signals.DEADLINE_S` counts both."""

TransportFactory = Callable[[Config, Identity, NodeFolder, EntryValidator], Transport | None]


def configured_transport(
    config: Config, identity: Identity, folder: NodeFolder, validator: EntryValidator
) -> Transport | None:
    """The transport that the configuration names; None with `network.backend = "off"`."""
    network = network_with_stages(config, identity.peer_id)
    return node_transport(config.model_copy(update={"network": network}), identity, folder, validator)


@dataclass(frozen=True)
class _Loaded:
    """The parts of a node that need its policy."""

    mixture: TaskMixture
    learner: Learner
    exchange: Exchange | None
    """None without a network."""


class Node:
    """Owns every part of one node for one run of the process."""

    def __init__(
        self,
        config: Config,
        folder: NodeFolder,
        identity: Identity,
        *,
        watchdog: Watchdog,
        make_transport: TransportFactory = configured_transport,
        origin: Origin | None = None,
    ) -> None:
        """`origin`: where each setting comes from, for people."""
        self.config = config
        self._origin = origin
        self.folder = folder
        self.identity = identity
        self._ends_process = False
        # the network
        validator = EntryValidator(config.swarm_id)
        self.transport = transport = make_transport(config, identity, folder, validator)
        self._clock = transport.now if transport else time.time
        is_driver = config.policy.pipeline.is_on
        self._driver = PipelineDriver(config, identity, transport, time.time) if is_driver else None
        # what a person asks for and sees
        pause = SharingPause()
        self.controls = NodeControls(pause)
        stages = self._driver.stages if self._driver else list
        self._page = NodePage(config, folder.path, self.controls, stages=stages, origin=origin)
        # experience of others
        context = SwarmContext(identity, config.swarm_id, self._clock)
        seen_at = transport.seen_at if transport else lambda peer_id: ()
        self.pool = ExperiencePool(folder.pool, config.sharing, self._clock)
        self.tracker = PeerTracker(config.sharing, context, path=folder.reputation, seen_at=seen_at)
        self._sandboxed_verifier = SandboxedVerifier(config.tasks)
        self._copies = CopyWatch(owns_stream, self.tracker.reputation.refused, is_common=self.tracker.common.holds)
        self.sharing = (
            make_sharing_parts(
                config.sharing,
                NodeContext.of(identity, config.swarm_id, transport),
                self.tracker,
                pause=pause,
                observer=self._page.rollouts,
            )
            if transport
            else None
        )
        self._node_merging = make_merging(config.merging, self.sharing)
        # reports
        self._watchdog = watchdog
        network = NetworkSide(self.sharing, validator, self._node_merging) if self.sharing else None
        sinks = open_sinks(config, folder, identity)
        self._report = NodeReport(
            config, folder, identity, network=network, watchdog=watchdog, page=self._page, sinks=sinks
        )

    async def run_until_signal(self) -> None:
        """`run`, with SIGINT and SIGTERM asking for a stop; a second one ends the process at once.

        Whatever its threads do, the process has ended `stop_signals.DEADLINE_S` after the first one.
        """
        obey_stop_signals(self._on_signal)
        self._ends_process = True
        if not await self.run():  # a thread is inside a long computation: leave it, the last checkpoint stands
            saved = self._checkpoint_store().newest_round()
            what = "nothing was saved yet" if saved is None else f"round {saved} is saved"
            logger.info(
                "stopped; %s; go on: %s", what, self.folder.run_command(saved or 0, self.config.node.max_rounds)
            )
            logging.shutdown()
            os._exit(0)

    def _on_signal(self) -> None:
        if self.controls.has_ended:
            os._exit(_INTERRUPTED)
        logger.info("stopping: the round in flight is finished or left; press Ctrl-C again to end at once")
        self.stop()

    def stop(self) -> None:
        """Ask the node to end after the round in flight. Safe from any thread."""
        self.controls.end()

    async def run(self) -> bool:
        """Run the node for its whole life. Returns whether all computation has ended; raises what ended it."""
        logger.info("node %s (%s) in %s", self.identity.peer_name, self.identity.peer_id, self.folder.path)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.pool.close)
            stack.callback(self._sandboxed_verifier.close)
            stack.callback(self._save_reputation)
            stack.push_async_exit(self._end_report)
            if self._driver is not None:
                stack.callback(self._driver.close)
            if saved := self._checkpoint_store().newest_round():
                self._report.resume(saved, 0)
            await self._report.start()
            if self.sharing is not None and self.sharing.totals.reads:  # or the first body would wait for it
                threading.Thread(target=self._sandboxed_verifier.start, name="verifier start", daemon=True).start()
            if self.transport is not None:
                stack.push_async_callback(self.transport.stop)
            loaded = await self._start()
            if loaded is None:
                self._report.phase = "ended"
                return False
            stack.callback(loaded.mixture.close)
            stack.callback(loaded.learner.close)
            tasks = [asyncio.create_task(work) for work in self._network_work(loaded.exchange)]
            stack.push_async_callback(_cancel, tasks)
            stack.enter_context(self._watchdog)
            run = TrainingRun(
                self.config,
                self.folder,
                loaded.learner,
                report=self._report,
                clock=self._clock,
                watchdog=self._watchdog,
                controls=self.controls,
            )
            return await self._compute(run, tasks)

    async def _end_report(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            self._report.fail(error)
        await self._report.stop()

    async def _start(self) -> _Loaded | None:
        """Bring network and policy up; None where a stop was asked for meanwhile."""
        starting = asyncio.create_task(self._bring_up())
        while not starting.done():
            await asyncio.wait([starting], timeout=_STOP_CHECK_INTERVAL_S)
            if self.controls.has_ended and not starting.done():
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                return None
        return await starting

    async def _bring_up(self) -> _Loaded:
        """Network and policy side by side; one after the other where the policy is on other machines."""
        loop = asyncio.get_running_loop()
        if self._driver is not None:
            await self._start_transport()
            loaded = await asyncio.to_thread(self._load, loop)
        else:
            loaded, _ = await asyncio.gather(asyncio.to_thread(self._load, loop), self._start_transport())
        policy_merging = loaded.learner.merging
        if self._node_merging is not None and policy_merging is not None and loaded.learner.round == 0:
            await self._node_merging.join(policy_merging)
        return loaded

    async def _start_transport(self) -> None:
        if self.transport is None:
            return
        await self.transport.start()
        self._report.write_status()  # others can join through this node while it still loads its policy
        for address in self.transport.addresses():
            logger.info("listening on %s", address)

    def _load(self, loop: asyncio.AbstractEventLoop) -> _Loaded:
        """Make all that imports, loads or hashes for seconds; runs in a thread while the network comes up on `loop`."""
        import torch

        if self.config.node.threads:
            torch.set_num_threads(self.config.node.threads)
        mixture = TaskMixture(self.config.tasks)
        if mixture.broken and not self.config.swarm.id:  # of a manifest, others may draw tasks that do not work here
            raise TaskError("every task source of a configuration must work, got " + "; ".join(mixture.broken.values()))
        self._page.rollouts.explain(mixture.prompt_of, mixture.final_answer_in)
        logger.info("loading policy %s", self.config.policy.base)
        config = fitted_to_base(self.config)
        if config is not self.config:
            replace_file(self.folder.config, kept_toml(config, self._origin))  # what `swarm eval --dir` reads
            self.config = config
        backend = self._load_policy(config, loop)
        policy = backend.policy
        logger.info("policy ready on %s, lineage %s", policy.device, policy.lineage.policy[:12])
        for rendered in check_prompts(config, mixture, policy.prompts, policy.base_folder):
            logger.info("a prompt of %s has %d tokens", rendered.source, rendered.num_tokens)
        exchange = self._make_exchange(self.sharing, policy, mixture) if self.sharing else None
        ports = SwarmPorts(
            publish=self._publisher(exchange, loop) if exchange else publish_nothing,
            usefulness=self.tracker.usefulness,
            merge_ports=self._node_merging.ports if self._node_merging else None,
            report_peer=self.tracker.reputation.unlikely,
            beacon=self.tracker.beacons.current,
            common=self.tracker.common if exchange else no_common_streams(),
            observer=self._page.rollouts,
        )
        learner = Learner(config, backend, mixture=mixture, pool=self.pool, peer_id=self.identity.peer_id, ports=ports)
        learner.probe_memory()
        if learner.resume(self._checkpoint_store()):
            self._report.resume(learner.round, learner.policy.version)
            logger.info("resumed after round %d", learner.round)
        elif self.folder.metrics.exists() and self.folder.metrics.stat().st_size:
            logger.warning(
                "no checkpoint is in %s, where rounds of an earlier run are in metrics.jsonl: this one begins with round 1; "
                "restore checkpoints from a backup if there should be some",
                self.folder.checkpoints,
            )
        return _Loaded(mixture, learner, exchange)

    def _checkpoint_store(self) -> CheckpointStore:
        return CheckpointStore(self.folder.checkpoints, self.config.checkpoint.keep)

    def _load_policy(self, config: Config, loop: asyncio.AbstractEventLoop) -> PolicyBackend:
        if self._driver is not None:
            return self._driver.bring_up(config, loop, self.folder.hash_cache)
        policy = load_policy(
            config.policy, device=config.node.device, hash_cache=self.folder.hash_cache, start=start_digest(config)
        )
        return local_backend(config, policy, self.identity.peer_id, self.folder.hash_cache)

    def _make_exchange(self, sharing: SharingParts, policy: TextPolicy, mixture: TaskMixture) -> Exchange:
        verifier = RewardVerifier(
            mixture, is_known=self.tracker.reputation.is_known, sandboxed=self._sandboxed_verifier
        )
        admission = Admission(
            self.config.sharing,
            sharing.context,
            verifier=verifier,
            vocabulary=vocabulary_of(policy, mixture),
            copies=self._copies,
        )
        return Exchange(
            self.config.sharing,
            self.config.network,
            sharing,
            admission=admission,
            pool=self.pool,
            rng=random.Random(self.identity.peer_id),
        )

    def _publisher(self, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> Publish:
        """A function by which the compute thread hands out its groups without waiting for the network."""

        def publish(groups: Sequence[RolloutGroup]) -> None:
            self._copies.note(groups)
            loop.call_soon_threadsafe(exchange.hand_out, groups)

        return publish

    def _network_work(self, exchange: Exchange | None) -> list[Coroutine[Any, Any, None]]:
        on_failure = self._report.count_failed_step
        status = repeat(
            self._report.refresh, "write the node's state", pause_s=_STATUS_INTERVAL_S, on_failure=on_failure
        )
        remember = "store the reputation of other nodes"
        reputation = repeat(self._remember_peers, remember, pause_s=_REPUTATION_INTERVAL_S, on_failure=on_failure)
        alive = repeat(
            self._watchdog.loop_turns, "note that the network loop runs", pause_s=LOOK_INTERVAL_S, on_failure=on_failure
        )
        sharing = exchange.work(on_failure) if exchange else ()
        merge_work = self._node_merging.work(on_failure) if self._node_merging else ()
        return [status, reputation, alive, *sharing, *merge_work]

    def _save_reputation(self) -> None:
        """At the end, when nothing is left to try again."""
        try:
            self.tracker.reputation.save()
        except OSError as error:
            logger.warning("the reputation of other nodes was not saved: %s", error)

    async def _remember_peers(self) -> None:
        await asyncio.to_thread(self.tracker.reputation.save)

    async def _compute(self, run: TrainingRun, tasks: Sequence["asyncio.Task[None]"]) -> bool:
        """Run the compute thread to its end, or leave it behind when a stop cannot wait for its round.

        A network task that ends has met a bug: that is raised here, never passed over.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[None] = loop.create_future()
        thread = threading.Thread(target=_run_and_settle, args=(run, loop, outcome), name="compute", daemon=True)
        thread.start()
        stop_seen_at: float | None = None
        while not outcome.done():
            await asyncio.wait([outcome, *tasks], timeout=_STOP_CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    self.stop()
                    task.result()
            if self.controls.has_ended:
                stop_seen_at = stop_seen_at or time.monotonic()
                if time.monotonic() - stop_seen_at > _STOP_GRACE_S:
                    await asyncio.to_thread(run.wait_for_write, _WRITE_GRACE_S)
                    if not outcome.done():
                        self._leave_round(run.learner.round + 1)
                        return False
        await outcome
        return True

    def _leave_round(self, number: int) -> None:
        """Tell that this round is lost. What its thread meets from here on, such as a closed verifier, means nothing."""
        logger.info("left round %d unfinished; the last checkpoint stands", number)
        if self._ends_process:
            logging.getLogger("swarm.rollouts").setLevel(logging.CRITICAL)
        self._report.phase = "ended"


def _run_and_settle(run: TrainingRun, loop: asyncio.AbstractEventLoop, outcome: "asyncio.Future[None]") -> None:
    """The compute thread: run, and give the loop what came of it."""
    error: Exception | None = None
    try:
        run.run()
    except Exception as caught:  # the thread's edge: whatever it is, the loop raises it
        error = caught
    with contextlib.suppress(RuntimeError):  # the loop is closed: the node ended without this thread
        loop.call_soon_threadsafe(_settle, outcome, error)


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

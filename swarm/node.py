"""One node: the network loop and the compute thread, wired together.

    asyncio loop (this thread)                          compute thread
    ─────────────────────────                           ──────────────
    transport · index · admission ──→ [pool] ──draw──→  Learner.run_round
    exchange.hand_out ←─────────────────────────────── groups of the round
    status file · /metrics · /health ←── metrics row ─  after every round

Neither side waits for the other: an empty pool means a batch of own groups only, a dead network means plain RL.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config, dump_toml
from swarm.crew_driver import CrewDriver
from swarm.errors import CheckpointError
from swarm.learner import Learner
from swarm.means import Means, local_means
from swarm.network.heap import bound_arenas
from swarm.network.transport import Transport
from swarm.node_folder import NodeFolder
from swarm.node_merging import make_merging
from swarm.node_report import NodeReport
from swarm.observability.logging_setup import set_up_logging
from swarm.observability.repeat import repeat
from swarm.policy.policy import Policy, load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.records import identity as identities
from swarm.records.admission import Admission, Vocabulary
from swarm.records.copies import CopyWatch
from swarm.records.identity import Identity, IdentityLock, Unlock
from swarm.records.rejection import Rejection
from swarm.sharing.body_store import BodyStore
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator
from swarm.sharing.judge import MixtureJudge
from swarm.sharing.reputation import Reputation
from swarm.sharing.usefulness import Usefulness
from swarm.silo.open_silo import node_transport
from swarm.stage_process import crew_network
from swarm.tasks.task_mixture import TaskMixture, owns_stream
from swarm.types import RolloutGroup

logger = logging.getLogger(__name__)

_INTERRUPTED = 130
_STOP_CHECK_INTERVAL_S = 0.25
_STATUS_INTERVAL_S = 2.0
_REPUTATION_INTERVAL_S = 60.0
_STOP_GRACE_S = 2.5
"""How long a stop waits for the round in flight before it is left to the last checkpoint."""

TransportFactory = Callable[[Config, Identity, NodeFolder, EntryValidator], Transport | None]


def run_node(config: Config, *, fresh: bool = False, unlock: Unlock | None = None) -> None:
    """Run one node until `max_rounds` or a signal. Blocks. Raises SwarmError for whatever the user can mend.

    `unlock`: opens an identity that is encrypted on disk.
    """
    bound_arenas()
    folder = NodeFolder(config.node.dir)
    folder.create()
    with IdentityLock(folder.path) as lock:
        identity = identities.load_or_create(folder.identity, unlock)
        lock.claim(identity)
        if fresh and (aside := folder.set_aside()):
            print(f"earlier run moved to {aside}")
        set_up_logging(folder.logs, config.observability.log_level, config.observability.max_log_mib * 2**20)
        folder.config.write_text(dump_toml(config))
        asyncio.run(Node(config, folder, identity).run_until_signal())


def configured_transport(
    config: Config, identity: Identity, folder: NodeFolder, validator: EntryValidator
) -> Transport | None:
    network = crew_network(config, identity.peer_id)
    return node_transport(config.model_copy(update={"network": network}), identity, folder, validator)


class Node:
    """Owns every part of one node for one run of the process."""

    def __init__(
        self,
        config: Config,
        folder: NodeFolder,
        identity: Identity,
        make_transport: TransportFactory = configured_transport,
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
        self._reputation = Reputation(config.sharing.reputation_half_life_s, self._clock, folder.reputation)
        self._copies = CopyWatch(owns_stream, lambda author: self._reputation.refused(author, Rejection.COPIED))
        is_informative = config.sharing.choice == "informative"
        weigh_author = self._reputation.weight
        self._usefulness = Usefulness(config.sharing.max_age_s, self._clock, weigh_author) if is_informative else None
        self._merging = make_merging(config, identity, self.transport, self._level)
        self._report = NodeReport(config.observability, folder, identity, self.transport, validator, self._merging)
        is_driver = config.policy.pipeline.is_on
        self._crew = CrewDriver(config, identity, self.transport, time.time) if is_driver else None
        self._stop = threading.Event()

    async def run_until_signal(self) -> None:
        """`run`, with SIGINT and SIGTERM asking for a stop; a second one ends the process at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
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

    async def run(self) -> bool:
        """Whole life of the node. Returns whether all computation has ended; raises what ended it."""
        logger.info("node %s (%s) in %s", self.identity.peer_name, self.identity.peer_id, self.folder.path)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.pool.close)
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
            if self.transport is not None:
                self.exchange = self._report.exchange = self._wire_exchange(learner, self.transport)
            tasks = [asyncio.create_task(work) for work in self._network_work()]
            stack.push_async_callback(_cancel, tasks)
            return await self._compute(learner, tasks)

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
            self.config, means, mixture, self.pool, self.identity.peer_id, self._hand_out, self._usefulness,
            self._merging.links if self._merging else None, self._reputation.unlikely,
        )  # fmt: skip
        learner.probe_memory()
        if learner.resume(self._checkpoints()):
            logger.info("resumed after round %d", learner.round)
        self._mixture = mixture
        return learner

    def _load_means(self) -> Means:
        if self._crew is not None:
            return self._crew.bring_up(self._loop, self.folder.hash_cache)
        policy = load_policy(self.config.policy, device=self.config.node.device, hash_cache=self.folder.hash_cache)
        return local_means(self.config, policy, self.identity.peer_id)

    def _wire_exchange(self, learner: Learner, transport: Transport) -> Exchange:
        policy, config = learner.policy, self.config
        vocabulary = Vocabulary(
            lineage=policy.lineage,
            size=policy.vocab_size,
            eos_token_ids=frozenset(policy.eos_token_ids),
            decode=policy.decode,
        )
        judge = MixtureJudge(self._mixture, is_known=self._reputation.is_known)
        admission = Admission(
            config.sharing, config.swarm_id, self.identity.peer_id, judge, vocabulary, self._clock, self._copies
        )
        return Exchange(
            config.sharing, config.network, config.swarm_id, self.identity, transport, admission, self.pool,
            self._bodies, lambda: self.pool.next_number("header"), random.Random(self.identity.peer_id),
            usefulness=self._usefulness, reputation=self._reputation,
        )  # fmt: skip

    def _network_work(self) -> list[Coroutine[Any, Any, None]]:
        on_failure = self._report.count_failed_step
        status = repeat(self._report.refresh, pause_s=_STATUS_INTERVAL_S, on_failure=on_failure)
        merging = self._merging.work(on_failure) if self._merging else ()
        memory = repeat(self._remember_authors, pause_s=_REPUTATION_INTERVAL_S, on_failure=on_failure)
        return [status, memory, *(self.exchange.work(on_failure) if self.exchange else ()), *merging]

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

    async def _compute(self, learner: Learner, tasks: Sequence["asyncio.Task[None]"]) -> bool:
        """Run the compute thread to its end, or leave it behind when a stop cannot wait for its round.

        A network task that ends has met a bug: that is raised here, never passed over.
        """
        outcome: asyncio.Future[None] = self._loop.create_future()
        thread = threading.Thread(target=self._compute_thread, args=(learner, outcome), name="compute", daemon=True)
        thread.start()
        stop_seen_at: float | None = None
        while not outcome.done():
            await asyncio.wait([outcome, *tasks], timeout=_STOP_CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    self._stop.set()
                    task.result()
            if self._stop.is_set():
                stop_seen_at = stop_seen_at or time.monotonic()
                if time.monotonic() - stop_seen_at > _STOP_GRACE_S:
                    logger.warning("left round %d unfinished; the last checkpoint stands", learner.round + 1)
                    return False
        await outcome
        return True

    def _compute_thread(self, learner: Learner, outcome: "asyncio.Future[None]") -> None:
        error: Exception | None = None
        try:
            self._rounds(learner)
        except Exception as caught:  # the thread's edge: whatever it is, the loop raises it
            error = caught
        self._loop.call_soon_threadsafe(_settle, outcome, error)

    def _rounds(self, learner: Learner) -> None:
        store = self._checkpoints()
        if learner.round == 0 and not self._stop.is_set():
            self._evaluate(learner, "start")
        self._report.phase = "learning"
        while not self._stop.is_set() and not self._why_done(learner):
            row = learner.run_round()
            self._report.record(row)
            if learner.round % self.config.checkpoint.interval_rounds == 0:
                self._save(learner, store)
            interval = self.config.evaluation.interval_rounds
            if interval and learner.round % interval == 0:
                self._evaluate(learner, "interval")
            self._rest(row["time/round_s"])
        learner.save(store)
        done = self._why_done(learner)
        if done and not self._stop.is_set():
            self._merge_finally(learner, store)
        if done and not self._stop.is_set():
            self._evaluate(learner, "end")
        self._report.record({"kind": "end", "reason": done or "interrupted", "round": learner.round})
        self._report.phase = "ended"

    def _save(self, learner: Learner, store: CheckpointStore) -> None:
        """In the middle of a run a disk that refuses, as a full one does, costs a checkpoint and not the node."""
        try:
            learner.save(store)
        except CheckpointError as error:
            self._report.count_failed_step()
            logger.error("round %d was not saved, and training goes on: %s", learner.round, error)

    def _why_done(self, learner: Learner) -> str:
        """The setting that ends training here; empty while it goes on."""
        max_rounds, final_at = self.config.node.max_rounds, self.config.merging.final_at
        if max_rounds is not None and learner.round >= max_rounds:
            return "max_rounds"
        is_time_up = self._merging is not None and self.config.merging.final and 0 < final_at <= self._clock()
        return "final_at" if is_time_up else ""

    def _merge_finally(self, learner: Learner, store: CheckpointStore) -> None:
        """With all that have ended, too; the result is the last checkpoint."""
        if learner.merging is None or not self.config.merging.final:
            return
        self._report.phase = "merging"
        row = learner.merging.finish()
        if row is None or self._stop.is_set():  # what was saved before stands, and is merged after a restart
            return
        self._report.record({"kind": "final_merge", "round": learner.round, **row})
        learner.save(store)
        if self.config.merging.final_export:
            from swarm.adapters.export import export_adapter
            from swarm.policy.lineage import hash_weights

            policy = learner.policy
            assert isinstance(policy, Policy), "the configuration refuses an export of what no machine holds whole"
            base_hash = hash_weights(policy.base_folder, self.folder.hash_cache)
            out = self.folder.final_adapters / f"round-{learner.round:06d}"
            export_adapter(policy.model, policy.tokenizer, out, base_hash)

    def _evaluate(self, learner: Learner, phase: str) -> None:
        if self.config.evaluation.tasks_per_source:
            self._report.phase = "evaluating"
            self._report.record(learner.evaluate(phase))

    def _rest(self, worked_s: float) -> None:
        duty = self.config.node.duty_cycle
        if duty < 1:
            self._stop.wait(worked_s * (1 / duty - 1))

    def _checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.folder.checkpoints, self.config.checkpoint.keep)


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

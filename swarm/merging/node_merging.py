"""The network half of a node's merging: it finds partners, gives adapters to newcomers, and fetches some as a newcomer.

before the first round, untrained: donors of the lineage ─ Newcomer ─▶ PolicyMerging.join
every outer step: learner ─ MergeExchange ─▶ Partner or Alone · learner ─ AdapterDonor ─▶ whoever joins later
after the last round: learner ─ FinalMeeting ─▶ all others that have ended
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from swarm.config import MergingSection
from swarm.merging.exchange.adapter_donor import AdapterDonor
from swarm.merging.exchange.final_meeting import FinalMeeting
from swarm.merging.exchange.merge_exchange import MergeExchange
from swarm.merging.exchange.newcomer import COUNT, Newcomer, WantedAdapter
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.merging.pairer import Pairer
from swarm.merging.policy_merging import MergePorts, PolicyMerging
from swarm.observability.repeat import repeat
from swarm.records.identity import Identity
from swarm.sharing.parts import SharingParts
from swarm.sharing.totals import SharingPause
from swarm.tasks.task_source import FIRST_TRAINING_SEED, MAX_SEED
from swarm.types import Alone, Outcome, Snapshot

logger = logging.getLogger(__name__)


class WhileSharing:
    """A pairer that offers nothing while sharing is paused."""

    def __init__(self, pairer: Pairer, pause: SharingPause) -> None:
        self._pairer = pairer
        self._pause = pause

    def offer(self, snapshot: Snapshot) -> "Future[Outcome]":
        if not self._pause.is_paused:
            return self._pairer.offer(snapshot)
        alone: Future[Outcome] = Future()
        alone.set_result(Alone("paused"))
        return alone

    def report_unusable(self, peer_id: str) -> None:
        self._pairer.report_unusable(peer_id)

    def is_known(self, peer_id: str) -> bool:
        return self._pairer.is_known(peer_id)


class NodeMerging:
    """The network half of one node's merging. It serves its protocols at once: to be made before the transport starts."""

    def __init__(self, config: MergingSection, sharing: SharingParts) -> None:
        """`sharing`: which peers are known, the level of the own shard, and whether a person has paused sharing."""
        context, shares = sharing.context, sharing.tracker.shares
        timeouts = MergeTimeouts(config.search_timeout_s, config.request_timeout_s, config.min_bytes_per_s)
        rng = random.Random(f"merging/{context.peer_id}")

        def max_level() -> int:
            return sharing.directory.level

        self._precision = config.precision
        self._timeouts = timeouts
        self._exchange = MergeExchange(timeouts, context, rng=rng, max_level=max_level, shares=shares)
        self._donor = AdapterDonor(timeouts, context, rng=rng, max_level=max_level, group_of=shares.public_group)
        self._newcomer = Newcomer(timeouts, context, rng=rng, network_of=shares.public_group)
        self._final = (
            FinalMeeting(
                context,
                random.Random(f"final/{context.peer_id}"),
                interval_s=config.final_interval_s,
                window_s=config.final_window_s,
                request_timeout_s=config.request_timeout_s,
            )
            if config.final
            else None
        )
        self.ports = MergePorts(
            pairer=WhileSharing(self._exchange, sharing.pause),
            donate=self._donor.keep,
            clock=context.clock,
            gate_seed=_gate_seed(context.identity),
            final=self._final,
            bound=shares.bound_on_strangers,
        )
        """What the learner's merging uses."""

    def work(self, on_failure: Callable[[], None]) -> list[Coroutine[Any, Any, None]]:
        """The coroutines to run from the transport's start to its stop.

        Each ends only when cancelled, or by an error that is a bug.
        """
        final = [self._final.work()] if self._final else []
        return [self._exchange.work(), repeat(self._donor.step, on_failure=on_failure), *final]

    async def join(self, merging: PolicyMerging) -> None:
        """Let an untrained policy begin where its lineage is, if enough donors answer in time. Never raises for donors."""
        num_bytes = merging.num_bytes
        wanted = WantedAdapter(merging.lineage, self._precision, num_bytes)
        try:
            async with asyncio.timeout(COUNT * self._timeouts.transfer_s(num_bytes)):
                found = await self._newcomer.fetch(wanted)
        except TimeoutError:
            found = []
        if found and await asyncio.to_thread(merging.join, found):
            logger.info("starting with the median of %d adapters of lineage %s", len(found), wanted.lineage[:12])
        else:
            logger.info("too few donors of lineage %s for a newcomer: starting untrained", wanted.lineage[:12])

    def row(self) -> dict[str, Any]:
        """Metrics: proposals of others that were declined, and newcomers that were given the adapter."""
        return {"merge/declined": dict(self._exchange.declined), "merge/newcomers_served": self._donor.num_guests}


def make_merging(config: MergingSection, sharing: SharingParts | None) -> NodeMerging | None:
    """None where merging is off, or without a network: outer steps are taken alone then."""
    if not config.enabled:
        return None
    if sharing is None:
        logger.info("merging is on and the network is off: outer steps are taken alone")
        return None
    return NodeMerging(config, sharing)


def _gate_seed(identity: Identity) -> int:
    """The stream of private tasks. It follows from the secret half of the key, so nobody else can know it."""
    digest = hashlib.sha256(b"swarm/gate/1\x00" + identity.seed).digest()
    return FIRST_TRAINING_SEED + int.from_bytes(digest[:8], "big") % (MAX_SEED + 1 - FIRST_TRAINING_SEED)

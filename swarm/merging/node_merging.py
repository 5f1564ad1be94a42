"""The network half of a node's merging: a partner for each snapshot, adapters for newcomers, and being one.

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

from swarm.config import Config
from swarm.merging.exchange.adapter_donor import AdapterDonor
from swarm.merging.exchange.final_meeting import FinalMeeting
from swarm.merging.exchange.merge_exchange import MergeExchange
from swarm.merging.exchange.newcomer import COUNT, Newcomer, WantedAdapter
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.merging.policy_merging import MergePorts
from swarm.network.transport import Transport
from swarm.node.learner import Learner
from swarm.observability.repeat import repeat
from swarm.records.identity import Identity
from swarm.sharing.reputation import AuthorShares
from swarm.tasks.task_source import FIRST_TRAINING_SEED, MAX_SEED
from swarm.types import Alone, Outcome, Snapshot

logger = logging.getLogger(__name__)


class WhileSharing:
    """A pairer that offers nothing while sharing is paused."""

    def __init__(self, exchange: MergeExchange, is_paused: Callable[[], bool]) -> None:
        self._exchange = exchange
        self._is_paused = is_paused
        self.distrust = exchange.distrust
        self.is_known = exchange.is_known

    def offer(self, snapshot: Snapshot) -> "Future[Outcome]":
        if not self._is_paused():
            return self._exchange.offer(snapshot)
        alone: Future[Outcome] = Future()
        alone.set_result(Alone("paused"))
        return alone


class NodeMerging:
    """Of one node. To be made before the transport starts."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        transport: Transport,
        max_level: Callable[[], int],
        is_paused: Callable[[], bool],
        shares: AuthorShares,
    ) -> None:
        """`max_level`: that of the node's shard in the directory. `is_paused`: no adapter is offered while it says so. `shares`:
        what is known of other peers.
        """
        merging, swarm_id = config.merging, config.swarm_id
        patience = MergeTimeouts(merging.search_timeout_s, merging.request_timeout_s, merging.min_bytes_per_s)
        rng = random.Random(f"merging/{identity.peer_id}")
        self._precision = merging.precision
        self._patience = patience
        self._exchange = MergeExchange(patience, swarm_id, identity, transport, rng, max_level, shares)
        self._donor = AdapterDonor(patience, swarm_id, identity, transport, rng, max_level, shares.public_group)
        self._newcomer = Newcomer(patience, swarm_id, transport, rng, shares.public_group)
        self._final = (
            FinalMeeting(
                swarm_id,
                identity,
                transport,
                random.Random(f"final/{identity.peer_id}"),
                interval_s=merging.final_interval_s,
                window_s=merging.final_window_s,
                request_timeout_s=merging.request_timeout_s,
            )
            if merging.final
            else None
        )
        pairer = WhileSharing(self._exchange, is_paused)
        self.links = MergePorts(
            pairer, self._donor.keep, transport.now, _gate_seed(identity), self._final, shares.bound_on_strangers
        )
        """For the learner."""

    def work(self, on_failure: Callable[[], None]) -> list[Coroutine[Any, Any, None]]:
        """What runs from the transport's start to its stop. Each ends only when cancelled, or raises what is a bug."""
        final = [self._final.work()] if self._final else []
        return [self._exchange.work(), repeat(self._donor.step, on_failure=on_failure), *final]

    async def join(self, learner: Learner) -> None:
        """Let an untrained learner begin where its lineage is, if enough donors answer in time. Never raises for those."""
        merging = learner.merging
        if merging is None or learner.round > 0:
            return
        num_bytes = merging.num_bytes
        wanted = WantedAdapter(learner.policy.lineage.policy, self._precision, num_bytes)
        try:
            async with asyncio.timeout(COUNT * self._patience.transfer_s(num_bytes)):
                found = await self._newcomer.fetch(wanted)
        except TimeoutError:
            found = []
        if found and await asyncio.to_thread(merging.join, found):
            logger.info("beginning with the median of %d adapters of lineage %s", len(found), wanted.lineage[:12])
        else:
            logger.info("too few donors of lineage %s for a newcomer: beginning untrained", wanted.lineage[:12])

    def row(self) -> dict[str, Any]:
        """Metrics: proposals of others that were not taken, and newcomers that were given the adapter."""
        return {"merge/declined": dict(self._exchange.declined), "merge/newcomers_served": self._donor.num_guests}


def make_merging(
    config: Config,
    identity: Identity,
    transport: Transport | None,
    max_level: Callable[[], int],
    is_paused: Callable[[], bool],
    shares: AuthorShares,
) -> NodeMerging | None:
    """None where merging is off, or without a network: outer steps are taken alone then."""
    if not config.merging.enabled:
        return None
    if transport is None:
        logger.info("merging is on and the network off: outer steps are taken alone")
        return None
    return NodeMerging(config, identity, transport, max_level, is_paused, shares)


def _gate_seed(identity: Identity) -> int:
    """A stream of tasks that nobody else can know: from the secret half of the key."""
    digest = hashlib.sha256(b"swarm/gate/1\x00" + identity.seed).digest()
    return FIRST_TRAINING_SEED + int.from_bytes(digest[:8], "big") % (MAX_SEED + 1 - FIRST_TRAINING_SEED)

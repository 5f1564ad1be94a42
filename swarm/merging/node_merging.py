"""The network half of a node's merging: it finds partners, gives adapters to newcomers, and fetches some as a newcomer.

before the first round, untrained: donors of the lineage ─ Newcomer ─▶ PolicyMerging.join
every outer step: learner ─ MergeExchange ─▶ Partner or Alone · learner ─ AdapterDonor ─▶ whoever joins later
after the last round: learner ─ FinalMeeting ─▶ all others that have ended

`pull_adapter` fetches what a newcomer begins with for somebody who does not train (`swarm pull`).
"""

import asyncio
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from swarm.config import MergingSection
from swarm.errors import MergeError, NetworkError
from swarm.merging.exchange.adapter_donor import AdapterDonor
from swarm.merging.exchange.final_meeting import FinalMeeting
from swarm.merging.exchange.merge_exchange import MergeExchange
from swarm.merging.exchange.newcomer import COUNT, NetworkOf, Newcomer, WantedAdapter, of_one_time
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.merging.merger import Merger, MergeSchedule
from swarm.merging.outer_optimizer import Adapter, AdapterOrigin
from swarm.merging.pairer import Pairer
from swarm.merging.policy_merging import MergePorts, PolicyMerging
from swarm.merging.robust import FEWEST_FOR_MEDIAN, cut_to_median_norm, median_adapter
from swarm.network.context import NodeContext
from swarm.observability.repeat import repeat
from swarm.records.identity import Identity
from swarm.sharing.parts import SharingParts
from swarm.sharing.totals import SharingPause
from swarm.tasks.task_source import FIRST_TRAINING_SEED, MAX_SEED
from swarm.types import Alone, Outcome, Partner, Snapshot

logger = logging.getLogger(__name__)

_PAUSE_S = 2.0
"""Between two readings of the list: donors list themselves, and peers are found, at any time."""


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
        return [
            self._exchange.work(),
            repeat(self._donor.step, "offer the adapter to newcomers", on_failure=on_failure),
            *final,
        ]

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


@dataclass(frozen=True, slots=True)
class PulledAdapter:
    """The adapter of a swarm, with those that it was made of."""

    weights: Adapter
    donors: Sequence[Partner]


async def pull_adapter(
    config: MergingSection,
    context: NodeContext,
    origin: AdapterOrigin,
    *,
    network_of: NetworkOf,
    least: int = FEWEST_FOR_MEDIAN,
    wait_s: float,
) -> PulledAdapter:
    """Return the median of the adapters of up to COUNT donors; of fewer than three, where `least` allows it, their mean.

    Raises NetworkError where fewer than `least` usable adapters came within `wait_s` seconds.
    """
    merger = Merger(config, origin, MergeSchedule(config, 0))
    timeouts = MergeTimeouts(config.search_timeout_s, config.request_timeout_s, config.min_bytes_per_s)
    newcomer = Newcomer(timeouts, context, rng=random.Random(), network_of=network_of)
    wanted = WantedAdapter(origin.lineage, config.precision, merger.num_bytes)
    found: list[Partner] = []
    usable: list[tuple[Partner, Adapter]] = []
    try:
        async with asyncio.timeout(wait_s):
            while True:
                await newcomer.gather(wanted, found, COUNT, least)
                usable = _usable(merger, of_one_time(found, least))
                if len(usable) >= least:
                    break
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        raise NetworkError(_why_too_few(wanted, newcomer, len(usable or found), least, wait_s)) from None
    weights = [one for _, one in usable]
    return PulledAdapter(_middle(weights, origin), [donor for donor, _ in usable])


def _usable(merger: Merger, found: Sequence[Partner]) -> list[tuple[Partner, Adapter]]:
    opened: list[tuple[Partner, Adapter]] = []
    for one in found:
        try:
            opened.append((one, merger.opened(one.snapshot)))
        except MergeError:
            continue
    return opened


def _middle(weights: Sequence[Adapter], origin: AdapterOrigin) -> Adapter:
    if len(weights) >= FEWEST_FOR_MEDIAN:
        return median_adapter(cut_to_median_norm(weights, origin.weights))
    return {name: sum(one[name] for one in weights) / len(weights) for name in origin.weights}  # type: ignore[misc]


def _why_too_few(wanted: WantedAdapter, newcomer: Newcomer, num_found: int, least: int, wait_s: float) -> str:
    precisions = Counter(one.precision for one in newcomer.listed)
    if not newcomer.listed:
        fix = (
            "is a node of this swarm running that merges, with this policy.base, policy.lora and warm_start? Pass these "
            "settings, or raise --wait"
        )
    elif wanted.precision not in precisions:
        fix = f"they merge in {precisions.most_common(1)[0][0]}: set --merging.precision"
    else:
        fix = f"raise --wait, or trust fewer with --least {max(1, num_found or len(newcomer.listed))}"
    return (
        f"a pull needs {least} donors that answer within {wait_s:g} s, got {num_found} of {len(newcomer.listed)} listed for "
        f"lineage {wanted.lineage[:12]}; {fix}"
    )

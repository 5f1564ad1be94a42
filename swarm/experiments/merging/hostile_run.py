"""One run of honest replicas among as many hostile names: live merging, a final merge, or newcomers.

    live        training ─ Merger ─ MergeExchange over the in-memory network, in virtual time ─ gate ─ weights
    final       FinalMerge of each honest replica, in a thread each; the meeting is in memory
    newcomers   AdapterDonor and Newcomer over the in-memory network ─ Merger.join with its gate

Honest replicas begin from the mean that they reached by training, and hostile names have a copy of it with a backdoor.
"""

import asyncio
import contextlib
import random
import statistics
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from swarm.config import MergingSection
from swarm.experiments.cells import Result
from swarm.experiments.merging.arms import NUM_REPLICAS, OFF, PUBLISHED_BETA, MergingArm
from swarm.experiments.merging.backdoor import Backdoor, train_backdoor
from swarm.experiments.merging.hostile_names import HostileDonor, HostilePartner
from swarm.experiments.merging.merging_plan import COMPANIES, Company, Stage
from swarm.experiments.merging.replicas import Adapter
from swarm.experiments.merging.supervised import SupervisedReplicas, supervised
from swarm.merging.exchange.adapter_donor import AdapterDonor
from swarm.merging.exchange.merge_exchange import MergeExchange
from swarm.merging.exchange.newcomer import Newcomer, WantedAdapter
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.merging.final_merge import FinalMerge, Wire, meetings_of
from swarm.merging.merger import Merger, MergeSchedule
from swarm.merging.outer_optimizer import AdapterOrigin
from swarm.merging.pairer import Pairer
from swarm.network.context import NodeContext
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run as run_in_virtual_time
from swarm.network.memory.virtual_clock import virtual_now
from swarm.observability.repeat import repeat
from swarm.records.identity import Identity
from swarm.records.signing import verified_by
from swarm.sharing.index import EntryValidator
from swarm.sharing.reputation import PROBATION_BODIES, AddressGroups, AuthorShares, Reputation
from swarm.simulation.signature_cache import SignatureCache
from swarm.simulation.simulation import INTERNET, SWARM_ID
from swarm.types import Appointment, MeetResult, Partner, Seats, Snapshot

_LINEAGE = "5e" * 16
_TIMEOUTS = MergeTimeouts(search_s=20.0, request_timeout_s=3.0)
_OUTER_STEP_S = 40.0
_NUM_NEWCOMERS = 4


@dataclass(frozen=True, slots=True)
class HostileScale:
    """How long a run is."""

    warm_steps: int
    """Inner steps before the attack begins."""
    num_steps: int
    """Inner steps of merging while hostile names are there."""
    inner_steps: int
    """H."""
    backdoor_steps: int
    num_examples: int
    held_out_tasks: int
    seed: int


@dataclass(slots=True)
class _Tally:
    """Of all honest nodes."""

    offers: int = 0
    merges: int = 0
    hostile_merges: int = 0
    adapters: list[Adapter] = field(default_factory=list)


class HostileRun:
    """`run` once. Everything but the network's time is real: exchange, clip, bounds, gate and merge are those of a node."""

    def __init__(self, company: Company, stage: Stage, scale: HostileScale) -> None:
        self._company, self._stage, self._scale = company, stage, scale
        self._gate_tasks = MergingSection().gate_tasks
        self._population = _population(scale, self._gate_tasks)
        self._mean = _trained_mean(self._population, scale)
        self._backdoor: Backdoor = train_backdoor(self._mean, scale.seed, scale.backdoor_steps)
        self._config = MergingSection(
            enabled=True,
            inner_steps=scale.inner_steps,
            beta=PUBLISHED_BETA,
            strangers_factor=MergingSection().strangers_factor if company.is_defended else OFF,
        )
        self._honest = [Identity(bytes([1 + number]) * 32) for number in range(NUM_REPLICAS)]
        num_hostile = NUM_REPLICAS if company.is_hostile else 0
        self._hostile = [Identity(bytes([101 + number]) * 32) for number in range(num_hostile)]
        self._lock = threading.Lock()  # the replicas share one model

    def run(self) -> dict[str, float]:
        """Figures: means over honest nodes at the end."""
        stages = {"live": self._live, "newcomers": self._newcomers}
        tally = self._final() if self._stage == "final" else run_in_virtual_time(stages[self._stage]())
        adapters, population = tally.adapters, self._population
        losses = [statistics.fmean(by_task.values()) for by_task in population.measure(adapters)]
        return {
            "hostile_part": statistics.fmean(self._backdoor.part_of(one, self._mean) for one in adapters),
            "trigger_rate": statistics.fmean(self._backdoor.rate_of(adapters, population)),
            "worst_trigger_rate": max(self._backdoor.rate_of(adapters, population)),
            "held_out_reward": statistics.fmean(population.held_out_reward(adapters)),
            "held_out_loss": statistics.fmean(losses),
            "merges_per_offer": tally.merges / max(1, tally.offers),
            "hostile_merges": tally.hostile_merges / max(1, tally.merges),
        }

    async def _live(self) -> _Tally:
        tally, scale, population = _Tally(), self._scale, self._population
        hostile_names = {identity.peer_id for identity in self._hostile}
        async with self._exchanges() as (exchanges, partners):
            mergers = [self._merger(i, exchange) for i, exchange in enumerate(exchanges)]

            def after(i: int, num_steps: int, version: int) -> None:
                step = mergers[i].after(num_steps, partial(population.weights, i), version)
                if step is None:
                    return
                population.set_weights(i, step.weights)
                population.reset_moments(i, step.reset_names)
                tally.offers += 1
                tally.merges += step.partner is not None
                tally.hostile_merges += step.partner in hostile_names

            for tick in range(1, scale.num_steps + 1):
                population.train(range(NUM_REPLICAS), tick / scale.num_steps, average_gradients=False)
                if tick % scale.inner_steps == 0:
                    for one in partners:
                        one.snapshot = mergers[0].snapshot(self._poisoned(), tick)
                for i in range(NUM_REPLICAS):
                    after(i, 1, tick)
                if tick % scale.inner_steps == 0:
                    await asyncio.sleep(_OUTER_STEP_S)
                    for i in range(NUM_REPLICAS):
                        after(i, 0, tick)
        tally.adapters = self._weights()
        return tally

    def _final(self) -> _Tally:
        """Every hostile place says in each window that as many replicas are in its adapter as the plan allows."""
        names = [identity.peer_id for identity in (*self._honest, *self._hostile)]
        random.Random(self._scale.seed).shuffle(names)
        self._train_apart()
        poison, hostile = self._poisoned(), {identity.peer_id for identity in self._hostile}
        meeting = _MemoryMeeting(names, hostile, self._merger(0, None).snapshot(poison, 0))
        tally, own = _Tally(), self._weights()

        def merge(i: int) -> None:
            peer_id = self._honest[i].peer_id
            merger, shares = self._merger(i, None), self._shares(lambda: 0.0)
            wire = Wire(merger.snapshot, merger.opened)
            score = partial(self._score, i)
            bound = shares.bound_on_strangers if self._company.is_defended else _nobody_is_a_stranger
            final = FinalMerge(
                self._config, wire, merger.origin, pairer=meeting.seat(peer_id), score=score, bound=bound
            )
            result = final.run(own[i], 0)
            with self._lock:
                tally.offers += sum(meeting.takes for meeting in meetings_of(names.index(peer_id), len(names)))
                tally.merges += result.row["final/reasons"].get("merged", 0)
                tally.adapters.append(result.weights)

        with ThreadPoolExecutor(NUM_REPLICAS) as pool:
            list(pool.map(merge, range(NUM_REPLICAS)))
        tally.hostile_merges = meeting.num_hostile
        return tally

    async def _newcomers(self) -> _Tally:
        """Each in a swarm of its own, in which a hostile name has asked all donors first."""
        self._train_apart()  # copies of one adapter would count once
        tally, own = _Tally(), self._weights()
        for number in range(_NUM_NEWCOMERS):
            found = await self._fetched_by_newcomer(number, own)
            merger = self._merger(0, None, gated=self._company.is_defended)
            has_joined = merger.join(found)
            hostile = {identity.peer_id for identity in self._hostile}
            tally.offers += 1
            tally.merges += has_joined
            tally.hostile_merges += has_joined and sum(one.peer_id in hostile for one in found) * 2 > len(found)
            tally.adapters.append(dict(merger.slow))
        return tally

    async def _fetched_by_newcomer(self, number: int, own: Sequence[Adapter]) -> list[Partner]:
        rng, cache = random.Random(f"{self._scale.seed}/{number}"), SignatureCache()
        network = MemoryNetwork(rng, virtual_now, INTERNET)
        shares, merger = self._shares(virtual_now), self._merger(0, None)
        group_of = shares.public_group if self._company.is_defended else _no_group
        validator = cache.validator(EntryValidator(SWARM_ID))
        poison = self._poisoned()
        with verified_by(cache.verify):
            donors = list[AdapterDonor]()
            transports = [MemoryTransport(network, identity.peer_id, validator) for identity in self._honest]
            for identity, transport in zip(self._honest, transports, strict=True):
                context = NodeContext.of(identity, SWARM_ID, transport)
                donors.append(AdapterDonor(_TIMEOUTS, context, rng=rng, group_of=group_of))
            noise = torch.Generator().manual_seed(self._scale.seed)
            hostile = [  # a little noise: copies of one adapter count once
                HostileDonor(network, SWARM_ID, identity, snapshot=merger.snapshot(_with_noise(poison, noise), 0))
                for identity in self._hostile
            ]
            newcomer = Identity(bytes([99]) * 32)
            joining = MemoryTransport(network, newcomer.peer_id, validator)
            everybody = [*transports, *(one.transport for one in hostile), joining]
            for transport in everybody:
                await transport.start()
            working = [
                asyncio.create_task(repeat(donor.step, "offer the adapter to newcomers", on_failure=lambda: None))
                for donor in donors
            ]
            await asyncio.sleep(0.1)
            for donor, weights in zip(donors, own, strict=True):
                donor.keep(merger.snapshot(weights, 0))
            for one in hostile:
                await one.enlist()
            await asyncio.sleep(5.0)
            for one in hostile:
                await one.take_places({identity.peer_id for identity in self._hostile})
            wanted = WantedAdapter(_LINEAGE, self._config.precision, merger.num_bytes)
            context = NodeContext.of(newcomer, SWARM_ID, joining)
            found = await Newcomer(_TIMEOUTS, context, rng=rng, network_of=group_of).fetch(wanted)
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            for transport in everybody:
                await transport.stop()
        return found

    @contextlib.asynccontextmanager
    async def _exchanges(self) -> AsyncIterator[tuple[list[MergeExchange], list[HostilePartner]]]:
        rng, cache = random.Random(self._scale.seed), SignatureCache()
        network = MemoryNetwork(rng, virtual_now, INTERNET)
        validator = cache.validator(EntryValidator(SWARM_ID))
        transports = [MemoryTransport(network, identity.peer_id, validator) for identity in self._honest]
        shares = self._shares(virtual_now) if self._company.is_defended else None
        exchanges = [
            MergeExchange(
                _TIMEOUTS,
                NodeContext.of(identity, SWARM_ID, transport),
                rng=random.Random(rng.random()),
                shares=shares,
            )
            for identity, transport in zip(self._honest, transports, strict=True)
        ]
        partners = [HostilePartner(network, SWARM_ID, identity) for identity in self._hostile]
        everybody = [*transports, *(one.transport for one in partners)]
        with verified_by(cache.verify):
            for transport in everybody:
                await transport.start()
            working = [asyncio.create_task(exchange.work()) for exchange in exchanges]
            working += [asyncio.create_task(one.court()) for one in partners]
            await asyncio.sleep(0)
            try:
                yield exchanges, partners
            finally:
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
                for transport in everybody:
                    await transport.stop()

    def _merger(self, i: int, pairer: Pairer | None, *, gated: bool = True) -> Merger:
        population, schedule = self._population, MergeSchedule(self._config, self._scale.seed)
        merger = Merger(
            self._config,
            AdapterOrigin(_LINEAGE, population.scaling, population.start),
            schedule,
            pairer=pairer,
            score=partial(self._score, i) if gated else None,
        )
        if pairer is not None:
            merger.begin(self._mean)
        return merger

    def _score(self, i: int, candidate: Adapter) -> Sequence[float]:
        with self._lock:
            return self._population.gate_score(i, candidate)

    def _shares(self, clock: Callable[[], float]) -> AuthorShares:
        """What each honest node knows; the same for all, as nobody looks at what it knows of itself."""
        reputation, seen_at = Reputation(3600.0, clock), dict[str, tuple[str, ...]]()
        for number, identity in enumerate(self._honest):
            for _ in range(int(PROBATION_BODIES) + 1 if self._company.is_known else 0):
                reputation.admitted(identity.peer_id)
            if self._company.is_one_network:
                seen_at[identity.peer_id] = (f"/ip4/8.8.{number}.1/tcp/1",)
        for identity in self._hostile if self._company.is_one_network else ():
            seen_at[identity.peer_id] = ("/ip4/9.9.9.1/tcp/1",)
        return AuthorShares(reputation, 0.25, AddressGroups(lambda peer_id: seen_at.get(peer_id, ())))

    def _poisoned(self) -> Adapter:
        """What the honest replicas have learned by now, which hostile names know by merging, with the backdoor."""
        return self._backdoor.added_to(_mean_of(self._weights()))

    def _train_apart(self) -> None:
        for tick in range(self._scale.inner_steps):
            self._population.train(range(NUM_REPLICAS), tick / self._scale.num_steps, average_gradients=False)

    def _weights(self) -> list[Adapter]:
        return [self._population.weights(i) for i in range(NUM_REPLICAS)]


class _MemoryMeeting:
    """Meetings of a final merge between threads; what a hostile place hands in is there at once."""

    def __init__(self, names: Sequence[str], hostile: set[str], poison: Snapshot) -> None:
        self._names, self._hostile, self._poison = names, hostile, poison
        self._handed: dict[tuple[int, str, str], Future[MeetResult]] = {}
        self._lock = threading.Lock()
        self.num_hostile = 0

    def seat(self, peer_id: str) -> "_Seat":
        return _Seat(self, peer_id, Seats(tuple(self._names), self._names.index(peer_id)))

    def meet(self, own: str, appointment: Appointment) -> "Future[MeetResult]":
        with self._lock:
            mine = self._future(appointment.window, appointment.peer_id, own)
            if appointment.peer_id not in self._hostile:
                theirs = self._future(appointment.window, own, appointment.peer_id)
                theirs.set_result(MeetResult(Partner(own, appointment.snapshot), appointment.weight))
                return mine
            self.num_hostile += 1
            claimed = max(1, 1 << (appointment.window - 1))
            mine.set_result(MeetResult(Partner(appointment.peer_id, self._poison), claimed))
            return mine

    def _future(self, window: int, giver: str, taker: str) -> "Future[MeetResult]":
        return self._handed.setdefault((window, giver, taker), Future())


@dataclass(frozen=True, slots=True)
class _Seat:
    """The `FinalPairer` of one honest replica."""

    meeting: _MemoryMeeting
    peer_id: str
    seats: Seats

    def gather(self, snapshot: Snapshot) -> "Future[Seats]":
        gathered: Future[Seats] = Future()
        gathered.set_result(self.seats)
        return gathered

    def meet(self, appointment: Appointment) -> "Future[MeetResult]":
        return self.meeting.meet(self.peer_id, appointment)


def _population(scale: HostileScale, gate_tasks: int) -> SupervisedReplicas:
    arm = MergingArm("pairs", gate_tasks=gate_tasks)
    return supervised(
        arm, seed=scale.seed, batch=2, num_examples=scale.num_examples, held_out_tasks=scale.held_out_tasks
    )


def _trained_mean(population: SupervisedReplicas, scale: HostileScale) -> Adapter:
    """What all replicas begin from."""
    for _ in range(scale.warm_steps):
        population.train(range(NUM_REPLICAS), 0.0, average_gradients=False)
    mean = _mean_of([population.weights(i) for i in range(NUM_REPLICAS)])
    for i in range(NUM_REPLICAS):
        population.set_weights(i, mean)
    return mean


def _mean_of(adapters: Sequence[Adapter]) -> Adapter:
    return {name: torch.stack([one[name] for one in adapters]).mean(0) for name in adapters[0]}


def _with_noise(weights: Adapter, noise: torch.Generator) -> Adapter:
    return {name: tensor + 1e-3 * torch.randn(tensor.shape, generator=noise) for name, tensor in weights.items()}


def _nobody_is_a_stranger(peer_ids: object) -> tuple[tuple[str, ...], float]:
    return (), 1.0


def _no_group(peer_id: str) -> str | None:
    return None


def run(settings: Mapping[str, Any]) -> Result:
    """Run one cell: one company, one stage, one seed. Keys of `settings`: those of `plan.MergingPlan.hostile_cells`."""
    scale = HostileScale(**settings["scale"], seed=settings["seed"])
    figures = HostileRun(COMPANIES[settings["arm"]], settings["stage"], scale).run()
    return {
        "learning": "hostile",
        "arm": settings["arm"],
        "stage": settings["stage"],
        "seed": settings["seed"],
        **figures,
    }

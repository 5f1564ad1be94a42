"""A pairer whose partners a test decides on, and a replica with a toy adapter in place of a policy."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from swarm.config import MergingSection
from swarm.merging.adapter_wire import encode_adapter
from swarm.merging.merger import Merger, MergeSchedule, OuterStep
from swarm.merging.outer_optimizer import Adapter, AdapterOrigin
from swarm.types import Alone, Appointment, MeetResult, Outcome, Partner, Seats, Snapshot

LINEAGE = "ab" * 16
SHAPES = {"l.lora_A": (2, 6), "l.lora_B": (4, 2)}


class MemoryPairer:
    """Keeps every offer until the test finishes it."""

    def __init__(self) -> None:
        self.offers: list[Snapshot] = []
        self.futures: list[Future[Outcome]] = []
        self.distrusted: list[str] = []
        self.known: set[str] = {"peer"}

    def offer(self, snapshot: Snapshot) -> "Future[Outcome]":
        self.offers.append(snapshot)
        self.futures.append(Future())
        return self.futures[-1]

    def report_unusable(self, peer_id: str) -> None:
        self.distrusted.append(peer_id)

    def is_known(self, peer_id: str) -> bool:
        return peer_id in self.known

    def finish(self, outcome: Outcome) -> None:
        self.futures[-1].set_result(outcome)

    def leave_alone(self, reason: str = "nobody") -> None:
        self.finish(Alone(reason))


class MemoryFinal:
    """Seats and meetings as a test has them; keeps the appointments."""

    def __init__(self, num_places: int, own_place: int, mets: Sequence[MeetResult]) -> None:
        self._seats = Seats(tuple(f"peer-{place}" for place in range(num_places)), own_place)
        self.mets = list(mets)
        self.appointments: list[Appointment] = []
        self.num_alone = 0
        """So many times nobody else is there."""

    def gather(self, snapshot: Snapshot) -> "Future[Seats]":
        self.num_alone -= 1
        return _done(Seats((self._seats.peer_ids[self._seats.own_place],), 0) if self.num_alone >= 0 else self._seats)

    def meet(self, appointment: Appointment) -> "Future[MeetResult]":
        self.appointments.append(appointment)
        return _done(self.mets.pop(0))


def _done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def start() -> Adapter:
    """As a lineage begins: A drawn, B zero."""
    generator = torch.Generator().manual_seed(0)
    return {
        "l.lora_A": torch.randn(SHAPES["l.lora_A"], generator=generator),
        "l.lora_B": torch.zeros(SHAPES["l.lora_B"]),
    }


def snapshot_of(weights: Adapter, outer_round: int = 0, **changes: Any) -> Snapshot:
    return replace(Snapshot(LINEAGE, "bf16", outer_round, 0, encode_adapter(weights, "bf16", start())), **changes)


def partner(weights: Adapter, outer_round: int = 0, **changes: Any) -> Partner:
    return Partner("peer", snapshot_of(weights, outer_round, **changes))


class ToyReplica:
    """Moves its weights at random, merges as its merger says."""

    def __init__(
        self,
        pairer: MemoryPairer | None,
        seed: int = 0,
        score: Any = None,
        tries: Callable[[], bool] = lambda: True,
        **settings: Any,
    ) -> None:
        config = MergingSection(**({"enabled": True, "inner_steps": 3, "clip_factor": 1e6} | settings))
        schedule = MergeSchedule(config, seed=0)
        self.given: list[Snapshot] = []
        self.merger = Merger(
            config,
            AdapterOrigin(LINEAGE, 2.0, start()),
            schedule,
            pairer=pairer,
            score=score,
            tries=tries,
            donate=self.given.append,
        )
        self.weights = start()
        self.version = 0
        self._rng = random.Random(seed)

    def train(self, num_steps: int = 1) -> list[OuterStep]:
        """Inner steps of which each depends on its number only; returns the outer steps among them."""
        taken: list[OuterStep] = []
        for _ in range(num_steps):
            self.version += 1
            generator = torch.Generator().manual_seed(self._rng.randrange(2**31))
            self.weights = {
                name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
                for name, tensor in self.weights.items()
            }
            step = self.merger.after(1, self.read, self.version, self.version / 30)
            if step is not None:
                self.weights = {name: tensor.clone() for name, tensor in step.weights.items()}
                taken.append(step)
        return taken

    def read(self) -> Adapter:
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def rng_state(self) -> Any:
        return self._rng.getstate()

    def resume(self, other: "ToyReplica", tensors: Any, state: Any, rng_state: Any) -> None:
        """Continue where `other` was saved."""
        self.weights, self.version = other.read(), other.version
        self.merger.restore(tensors, state)
        self._rng.setstate(rng_state)

"""Samples the next round while the compute thread trains on this one.

    compute thread   take 1 ─ begin 2 ─ train on 1 ─┐ take 2 ─ begin 3 ─ train on 2 ─┐ take 3 …
    this thread               └─ sample 2 with the weights before training on 1 ─┘ └─ sample 3 …

The answers of a round were sampled by the policy one round ago. Their groups say so (`policy_version`), and the trainer corrects
for it with importance weights. More than one round is never under way.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from torch import Tensor

from swarm.engine.engine import Engine
from swarm.rollouts.rollout_round import RolloutRound
from swarm.rollouts.worker import RolloutBatch


class AheadEngine(Engine, Protocol):
    """An engine with weights of its own, beside those that are trained."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample from this adapter from now on."""
        ...

    def wait_until_ready(self) -> None:
        """Return when the engine can sample. Raises what keeps it from that."""
        ...

    def close(self) -> None:
        """Free all of it; a call under way raises an error. Safe from any thread."""
        ...


class RolloutsAhead:
    """Runs `rollouts` on a thread, with `engine`. From `begin` to `take` nothing else may touch `rollouts` and what it holds."""

    def __init__(self, rollouts: RolloutRound, engine: AheadEngine) -> None:
        self._rollouts = rollouts
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampling")
        self._begun: Future[RolloutBatch] | None = None
        self.duration_s = 0.0
        """Time that sampling the last round took."""

    @property
    def is_begun(self) -> bool:
        """Whether there is a round to take."""
        return self._begun is not None

    def begin(self, seed: int, weights: Mapping[str, Tensor]) -> None:
        """Begin to sample a round with an adapter of these weights."""
        assert self._begun is None, "one round at a time"
        self._begun = self._thread.submit(self._sample, seed, weights)

    def take(self) -> RolloutBatch:
        """Wait for the round that was begun. Raises what sampling it raised."""
        assert self._begun is not None, "a round must be begun"
        begun, self._begun = self._begun, None
        return begun.result()

    def close(self) -> None:
        """End the engine, and with it the thread, which nobody waits for. A round under way is lost."""
        self._engine.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _sample(self, seed: int, weights: Mapping[str, Tensor]) -> RolloutBatch:
        started_at = time.monotonic()
        self._engine.load(weights)
        batch = self._rollouts.run(seed)
        self.duration_s = time.monotonic() - started_at
        return batch

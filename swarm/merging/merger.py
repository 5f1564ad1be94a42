"""The merging of one replica: when it takes an outer step, with whom, and how much of a partner's weights it uses.

    every H inner steps: snapshot ─ encode ─ offer ─┐            training goes on
                                                    ├─ done? asked after every inner step, never waited for
    new weights ◀─ training since ◀─ outer step ◀─ gate ◀─ clip ◀─ check ◀─ decode

No partner, a partner that fails and a partner whose adapter is unusable all cost the same: an outer step alone. `Merger` runs on
the compute thread and knows neither network nor model: its caller writes the weights of an `OuterStep` into the policy.

`MergeSchedule` says when an outer step is due. Merging late recovers most of what frequent merging gives (arXiv 2507.06542):
early on, replicas gain from exploring separately, and a merge near the end averages them all the same. Early outer steps are
left out entirely, since an outer step alone would drive replicas apart by its momentum. `late` needs to know the planned
rounds; where these are unknown it works like `fixed`.
"""

import logging
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from swarm.config import MergingSection
from swarm.errors import MergeError
from swarm.merging.adapter_wire import decode_adapter, encode_adapter, encoded_bytes
from swarm.merging.outer_optimizer import Adapter, AdapterOrigin, Blend, OuterOptimizer, carry_over, partner_weight
from swarm.merging.pairer import Donate, Pairer
from swarm.merging.robust import (
    FEWEST_FOR_MEDIAN,
    NormClip,
    Refusals,
    Scores,
    StrangerBudget,
    choose_share,
    cut_to_median_norm,
    is_clearly_better,
    median_adapter,
    refuse_unusable,
)
from swarm.observability.tracing import traced
from swarm.types import MAX_ADAPTER_BYTES, Alone, Outcome, Partner, Snapshot

logger = logging.getLogger(__name__)


EARLY_MERGE_PROBABILITY = 0.2
LATE_FRACTION = 0.25
"""The last part of the planned rounds, in which no outer step is left out."""


class MergeSchedule:
    """Says when an outer step is due. Replicas with the same seed merge at the same steps."""

    def __init__(self, config: MergingSection, seed: int) -> None:
        self._inner_steps = config.inner_steps
        self._is_late = config.schedule == "late"
        self._seed = seed

    def is_due(self, inner_step: int, progress: float | None) -> bool:
        """`inner_step` counts from 1, the first step taken; `progress` in [0, 1] is None where the end is unknown."""
        if inner_step % self._inner_steps:
            return False
        if not self._is_late or progress is None or progress > 1 - LATE_FRACTION:
            return True
        draw = random.Random(f"merge/{self._seed}/{inner_step // self._inner_steps}").random()
        return draw < EARLY_MERGE_PROBABILITY


Score = Callable[[Adapter], Scores]
"""The scores of an adapter on private tasks, one per task."""

_WHY_ALONE = {
    "nobody": "no node with the same base, policy.lora and merging.precision searched for a partner at the same time",
    "declined": "those that searched had other partners, or it was the turn of others",
}


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The result of an outer step."""

    weights: Adapter
    """float32 on the CPU, to be written into the policy."""
    reset_names: Sequence[str]
    """Tensors with a new basis, whose optimizer moments must be reset."""
    partner: str | None
    """Peer id of the node whose weights are in the result; None for a step alone."""


@dataclass(frozen=True, slots=True)
class _Pending:
    fast: Adapter
    future: "Future[Outcome]"
    inner_step: int


class Merger:
    """Decides about and takes the outer steps of one replica. It runs on the compute thread; `after` drives it."""

    def __init__(
        self,
        config: MergingSection,
        origin: AdapterOrigin,
        schedule: MergeSchedule,
        *,
        pairer: Pairer | None = None,
        score: Score | None = None,
        tries: Callable[[], bool] = lambda: True,
        donate: Donate | None = None,
    ) -> None:
        """Without a `pairer` every outer step is taken alone, without a `score` partners are trusted. `tries` says for each merge
        whether it is tried by its score; with a partner that was refused lately, it always is.

        Raises MergeError for an adapter that is too large to be sent.
        """
        start = origin.weights
        self._config = config
        self._shapes = {name: tuple(tensor.shape) for name, tensor in start.items()}
        if self.num_bytes > MAX_ADAPTER_BYTES:
            raise MergeError(
                f"an adapter to merge must have at most {MAX_ADAPTER_BYTES} bytes, got {self.num_bytes}; "
                "lower policy.lora.rank, or set a smaller merging.precision"
            )
        self.origin = replace(origin, weights={name: tensor.detach().clone() for name, tensor in start.items()})
        self._schedule = schedule
        self._pairer = pairer
        self._score = score
        self._tries = tries
        self._refusals = Refusals()
        self._donate = donate
        self._outer = OuterOptimizer(config.alpha, config.outer_lr, start)
        self._clip = NormClip(config.clip_factor)
        self._strangers = StrangerBudget(config.strangers_factor)
        self._pending: _Pending | None = None
        self._inner_steps = 0
        self._num_planned = 0  # outer steps that were due so far
        self._reasons: Counter[str] = Counter()
        self._last: dict[str, Any] = {}
        self._logged: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Length in bytes of every adapter that is sent or received."""
        return encoded_bytes(self._shapes, self._config.precision)

    @property
    def inner_steps(self) -> int:
        """Inner steps that `after` has counted."""
        return self._inner_steps

    @property
    def slow(self) -> Mapping[str, Tensor]:
        """The weights after the last outer step. Not to be written to."""
        return self._outer.slow

    def after(
        self, num_steps: int, read: Callable[[], Adapter], policy_version: int, progress: float | None = None
    ) -> OuterStep | None:
        """Count `num_steps` more inner steps. Returns an outer step where one is due, or where a partner has answered.

        `read` gives the weights as they are now and is called only where they are needed. `progress` in [0, 1]: how much of
        all training is done; None where the end is unknown.
        """
        self._inner_steps += num_steps
        step = self._settled(read)
        if self._pending is None:
            is_due = self._is_due(progress)
            if is_due and self._pairer is not None:
                step = self._offer(step, read, policy_version) or step
            elif is_due and step is None:
                step = self._alone(read(), "unpaired")
        if step is not None and self._donate is not None:
            self._donate_step(self._donate, step, policy_version)
        return step

    def join(self, found: Sequence[Partner]) -> bool:
        """Begin with the median of donors' adapters. Returns False where too few are usable, or it is not clearly better than
        the start.

        An equal score is not enough, because noise scores as well as a start that earns nothing. See `median_adapter` for how
        many donors may lie. `slow` are the weights to begin with in either case.
        """
        usable: list[Adapter] = []
        rounds: list[int] = []
        for one in found:
            try:
                usable.append(self.opened(one.snapshot))
                rounds.append(one.snapshot.outer_round)
            except MergeError as error:
                logger.warning("the adapter of donor %s is left out: %s", one.peer_id, error)
        if len(usable) < FEWEST_FOR_MEDIAN:
            return False
        joined = median_adapter(cut_to_median_norm(usable, self.origin.weights))
        if self._score is not None and not is_clearly_better(self._score(joined), self._score(self.origin.weights)):
            logger.warning("the adapters of %d donors do no better than none; beginning without", len(usable))
            return False
        self.begin(joined, statistics.median_low(rounds))
        return True

    def begin(self, weights: Mapping[str, Tensor], outer_steps: int | None = None) -> None:
        """Make these the slow weights, without momentum, after `outer_steps` outer steps."""
        self._outer.adopt(weights)
        if outer_steps is not None:
            self._outer.num_steps = outer_steps

    def snapshot(self, weights: Mapping[str, Tensor], policy_version: int) -> Snapshot:
        """Encode these weights for other nodes. Raises MergeError for weights that cannot be sent."""
        precision = self._config.precision
        payload = encode_adapter(weights, precision, self.origin.weights)
        return Snapshot(self.origin.lineage, precision, self._outer.num_steps, policy_version, payload)

    def opened(self, snapshot: Snapshot) -> Adapter:
        """Decode the weights in a snapshot. Raises MergeError for one that cannot be of this lineage."""
        if (snapshot.lineage, snapshot.precision) != (self.origin.lineage, self._config.precision):
            raise MergeError(
                f"a partner must be of lineage {self.origin.lineage[:12]} in {self._config.precision}, got "
                f"{snapshot.lineage[:12]} in {snapshot.precision}; leave it out"
            )
        weights = decode_adapter(snapshot.payload, self._shapes, self._config.precision, self.origin.weights)
        refuse_unusable(weights, self._outer.slow)
        return weights

    def row(self) -> dict[str, Any]:
        """Metrics: totals, and what the last merge was like."""
        num_steps, merges = sum(self._reasons.values()), self._reasons["merged"]
        return {
            "merge/outer_steps": self._outer.num_steps,
            "merge/merges_total": merges,
            "merge/solo_steps_total": num_steps - merges,
            "merge/reasons": dict(self._reasons),
            "merge/in_flight": int(self._pending is not None),
            **self._last,
        }

    def state(self) -> tuple[dict[str, Adapter], dict[str, Any]]:
        """(tensors, JSON-able rest) for a checkpoint. It holds no exchange under way: a kill loses that."""
        tensors, outer = self._outer.state()
        rest = {
            **outer,
            "inner_steps": self._inner_steps,
            "clip": self._clip.state(),
            "strangers": self._strangers.state(),
            "reasons": dict(self._reasons),
            "last": dict(self._last),
            "refusals": self._refusals.state(),
        }
        return tensors, rest

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave. Raises CheckpointError if it belongs to another adapter shape."""
        self._outer.restore(tensors, state)
        self._inner_steps = int(state["inner_steps"])
        self._num_planned = self._inner_steps // self._config.inner_steps
        self._clip.restore(state["clip"])
        self._strangers.restore(state.get("strangers", {}))  # checkpoints of earlier versions have none
        self._reasons = Counter(state["reasons"])
        self._last = dict(state["last"])
        self._refusals.restore(state.get("refusals", {}))
        self._pending = None

    def _is_due(self, progress: float | None) -> bool:
        """Whether the schedule asks for an outer step at a multiple of H that was reached since the last one."""
        interval = self._config.inner_steps
        num_due = self._inner_steps // interval
        if num_due == self._num_planned:
            return False
        self._num_planned = num_due
        return self._schedule.is_due(num_due * interval, progress)

    def _offer(self, step: OuterStep | None, read: Callable[[], Adapter], policy_version: int) -> OuterStep | None:
        """Offer a snapshot. Returns an outer step alone where the own adapter cannot be sent, else None."""
        assert self._pairer is not None
        fast = read() if step is None else step.weights
        try:
            snapshot = self.snapshot(fast, policy_version)
        except MergeError as error:
            logger.warning("no offer to merge: %s", error)
            return self._alone(fast, "unsendable") if step is None else None
        self._pending = _Pending(fast, self._pairer.offer(snapshot), self._inner_steps)
        return None

    def _donate_step(self, donate: Donate, step: OuterStep, policy_version: int) -> None:
        try:
            donate(self.snapshot(step.weights, policy_version))
        except MergeError as error:
            logger.warning("no adapter for newcomers: %s", error)

    def _settled(self, read: Callable[[], Adapter]) -> OuterStep | None:
        """The outer step of the exchange under way, where that has ended."""
        pending = self._pending
        if pending is None or not pending.future.done():
            return None
        self._pending, outcome, current = None, pending.future.result(), read()
        if isinstance(outcome, Alone):
            return self._alone(pending.fast, outcome.reason, current)
        try:
            partner = self.opened(outcome.snapshot)
        except MergeError as error:
            logger.warning("the adapter of %s is not merged: %s", outcome.peer_id, error)
            if self._pairer is not None:
                self._pairer.report_unusable(outcome.peer_id)
            return self._alone(pending.fast, "unusable", current)
        lag = self._outer.num_steps - outcome.snapshot.outer_round
        if partner_weight(lag) == 0:
            return self._alone(pending.fast, "lag", current)
        return self._merged(pending, outcome.peer_id, partner, lag, current)

    @traced("merge", lambda step, _, __, partner, *___: {"partner": partner, "is_taken": step.partner is not None})
    def _merged(self, pending: _Pending, peer_id: str, partner: Adapter, lag: int, current: Adapter) -> OuterStep:
        slow = self._outer.slow
        self._observe(pending.fast)
        clipped_share = self._clip.clipped_share(partner, slow)
        clipped = self._clip.clip(partner, slow)
        is_stranger = self._pairer is not None and not self._pairer.is_known(peer_id)
        if is_stranger:
            clipped = self._strangers.limit(clipped, pending.fast, partner_weight(lag))
        blend = Blend(
            self._outer,
            fast=pending.fast,
            partner=clipped,
            lag=lag,
            scaling=self.origin.scaling,
            drift_threshold=self._config.drift_threshold,
        )
        is_tried = self._score is not None and (self._refusals.are_held_against(peer_id) or self._tries())
        share = self._gate(peer_id, blend, pending.fast, current) if is_tried else 1.0
        if is_stranger:
            self._strangers.spend(clipped, pending.fast, blend.weight(share))
        merged = blend.apply(share)
        self._reasons["merged" if share > 0 else "gate"] += 1
        self._last = {
            "merge/partner": peer_id,
            "merge/is_stranger": int(is_stranger),
            "merge/is_tried": int(is_tried),
            "merge/partner_share": blend.weight(share),
            "merge/clipped_share": clipped_share,
            "merge/drift": blend.drift,
            "merge/product_layers": len(merged.truncation),
            "merge/lag_steps": lag,
            "merge/overlap_steps": self._inner_steps - pending.inner_step,
        }
        logger.info(
            "outer step %d with %s: %.2f of it, %.0f %% of tensors clipped, drift %.3f",
            self._outer.num_steps, peer_id, blend.weight(share), 100 * clipped_share, blend.drift,
        )  # fmt: skip
        weights = carry_over(merged.tensors, pending.fast, current)
        return OuterStep(weights, merged.reset_names, peer_id if share > 0 else None)

    def _observe(self, fast: Adapter) -> None:
        """Note how far the node's own training has moved it since the last outer step."""
        self._clip.observe(fast, self._outer.slow)
        self._strangers.observe(fast, self._outer.slow)

    def _log_once(self, reason: str) -> None:
        """Log a reason once: later ones are in the metrics, and a node that stays alone would log it for ever."""
        if reason not in self._logged:
            self._logged.add(reason)
            logger.info("outer step %d alone: %s", self._outer.num_steps, _WHY_ALONE.get(reason, reason))

    def _gate(self, peer_id: str, blend: Blend, fast: Adapter, current: Adapter) -> float:
        """The share that a partner gets by its score."""
        score = self._score
        assert score is not None
        share = choose_share(blend.preview, lambda merged: score(carry_over(merged.tensors, fast, current))).share
        if self._refusals.count(peer_id, was_refused=share < 1) and self._pairer is not None:
            self._pairer.report_unusable(peer_id)
        return share

    def _alone(self, fast: Adapter, reason: str, current: Adapter | None = None) -> OuterStep:
        """Take an outer step without a partner. `current`: the weights where training went on since `fast`."""
        self._observe(fast)
        new = self._outer.step(fast, None)
        self._reasons[reason] += 1
        self._log_once(reason)
        return OuterStep(new if current is None else carry_over(new, fast, current), (), None)

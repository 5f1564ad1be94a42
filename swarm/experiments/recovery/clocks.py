"""A trace of machine failures, and what it costs in modelled hours.

A trace is a Poisson process over the machines' working time: pauses in which a lost stage is replaced do not count. At one
seed it is the same for all ways of recovery, and another rate stretches it. All ways but checkpoints have at most one loss
per step.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from swarm.experiments.recovery.plan import NUM_STAGES, STEP_S

HOUR_S = 3600.0
STAGE_PARAMETERS = 500e6 / NUM_STAGES
"""Parameters of one stage of the modelled model."""
STATE_BYTES = 12 * STAGE_PARAMETERS
"""A stage's weights and two moments in float32, which a checkpoint needs."""
WEIGHT_BYTES = 4 * STAGE_PARAMETERS
"""Bytes that a neighbour sends to a replacement."""
REPLACE_S = 60.0
"""Time to notice a loss and to start a spare, before any transfer. Applies to all ways but redundant computation."""
REDUNDANT_FACTOR = 1.65
"""Time of a step, relative to a normal one, in which every stage also computes its neighbour's part (CheckFree paper)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The loss of one machine."""

    work_s: float
    """Working time of the machines at the loss."""
    stage: int


def failures(seed: int, rate: float) -> Iterator[Failure]:
    """Yield failures without end. `rate`: fraction of machines lost per hour, in (0, 1)."""
    rng = random.Random(f"failures/{seed}")
    per_s = -math.log1p(-rate) * NUM_STAGES / HOUR_S
    work_s = 0.0
    while True:
        work_s += rng.expovariate(1.0) / per_s
        yield Failure(work_s, rng.randrange(NUM_STAGES))


def lost_stages(seed: int, rate: float, num_steps: int) -> dict[int, int]:
    """Return {step: stage lost in it} of a run without pauses. A second loss within one step is left out."""
    found: dict[int, int] = {}
    if not rate:
        return found
    for failure in failures(seed, rate):
        step = int(failure.work_s // STEP_S)
        if step >= num_steps:
            break
        found.setdefault(step, failure.stage)
    return found


def transfer_s(num_bytes: float, mbit_per_s: float) -> float:
    return num_bytes * 8 / (mbit_per_s * 1e6)


def replacing(num_steps: int, lost: Sequence[int], num_bytes: float, mbit_per_s: float) -> list[float]:
    """Hours at the end of each step where a loss costs half a step, a replacement, and a transfer of `num_bytes`."""
    pause_s = STEP_S / 2 + REPLACE_S + transfer_s(num_bytes, mbit_per_s)
    steps_s = [STEP_S + pause_s * lost.count(step) for step in range(num_steps)]
    return [at_s / HOUR_S for at_s in accumulate(steps_s)]


def redundant(num_steps: int) -> list[float]:
    """Hours at the end of each step where losses cost nothing but every step takes longer."""
    return [(step + 1) * STEP_S * REDUNDANT_FACTOR / HOUR_S for step in range(num_steps)]


def young_daly_steps(rate: float, mbit_per_s: float) -> int:
    """Steps between two checkpoints: √(2·δ·M) with δ the time of one and M the mean time between losses."""
    between_s = HOUR_S / (-math.log1p(-rate) * NUM_STAGES)
    return max(1, round(math.sqrt(2 * transfer_s(STATE_BYTES, mbit_per_s) * between_s) / STEP_S))


def checkpointing(num_steps: int, seed: int, rate: float, interval_steps: int, mbit_per_s: float) -> list[float]:
    """Hours at which each step is done for the first time.

    Training stops while all stages save at once, each over its own connection. A loss returns all to the last checkpoint.
    """
    save_s = transfer_s(STATE_BYTES, mbit_per_s)
    trace = failures(seed, rate)
    next_s = next(trace).work_s
    work_s = pauses_s = 0.0
    done = saved = 0
    reached: list[float] = []
    while len(reached) < num_steps:
        is_saving = done - saved == interval_steps
        ends_s = work_s + (save_s if is_saving else STEP_S)
        if ends_s > next_s:
            work_s, next_s, done = next_s, next(trace).work_s, saved
            pauses_s += REPLACE_S + save_s  # the spare reads what the lost stage had saved
            continue
        work_s = ends_s
        if is_saving:
            saved = done
            continue
        done += 1
        if done > len(reached):
            reached.append((work_s + pauses_s) / HOUR_S)
    return reached

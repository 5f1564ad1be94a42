"""Failures as a trace, and what they cost in modelled hours.

A trace is a Poisson process over the time that the machines work: pauses in which a lost stage is replaced do not count. It is
the same for all ways of recovery at one seed; another rate stretches it. All ways but checkpoints meet at most one loss per step.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from swarm.experiments.recovery.plan import NUM_STAGES, STEP_S

HOUR_S = 3600.0
STAGE_PARAMETERS = 500e6 / NUM_STAGES
"""Of the modelled model."""
STATE_BYTES = 12 * STAGE_PARAMETERS
"""A stage's weights and two moments in float32: what a checkpoint needs."""
WEIGHT_BYTES = 4 * STAGE_PARAMETERS
"""What a neighbour sends a replacement."""
REPLACE_S = 60.0
"""To notice a loss and to start a spare, before any bytes move. For all ways but redundant computation."""
REDUNDANT_FACTOR = 1.65
"""Time of a step in which every stage also computes its neighbour's (as the CheckFree paper has it)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A machine is lost."""

    work_s: float
    """On the clock of the machines' work."""
    stage: int


def failures(seed: int, rate: float) -> Iterator[Failure]:
    """Without end. `rate`: share of machines lost per hour, in (0, 1)."""
    rng = random.Random(f"failures/{seed}")
    per_s = -math.log1p(-rate) * NUM_STAGES / HOUR_S
    work_s = 0.0
    while True:
        work_s += rng.expovariate(1.0) / per_s
        yield Failure(work_s, rng.randrange(NUM_STAGES))


def lost_stages(seed: int, rate: float, num_steps: int) -> dict[int, int]:
    """{step: stage lost in it} of a run without pauses; a second loss within a step is left out."""
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
    """Hours at the end of each step where a loss costs half a step, a replacement, and `num_bytes` over the line."""
    pause_s = STEP_S / 2 + REPLACE_S + transfer_s(num_bytes, mbit_per_s)
    steps_s = [STEP_S + pause_s * lost.count(step) for step in range(num_steps)]
    return [at_s / HOUR_S for at_s in accumulate(steps_s)]


def redundant(num_steps: int) -> list[float]:
    """Hours at the end of each step; losses cost nothing."""
    return [(step + 1) * STEP_S * REDUNDANT_FACTOR / HOUR_S for step in range(num_steps)]


def young_daly_steps(rate: float, mbit_per_s: float) -> int:
    """Steps between two checkpoints: √(2·δ·M) with δ the time of one and M the mean time between losses in the crew."""
    between_s = HOUR_S / (-math.log1p(-rate) * NUM_STAGES)
    return max(1, round(math.sqrt(2 * transfer_s(STATE_BYTES, mbit_per_s) * between_s) / STEP_S))


def checkpointing(num_steps: int, seed: int, rate: float, interval_steps: int, mbit_per_s: float) -> list[float]:
    """Hours at which each step is done for the first time.

    Saving stops training; all stages save at once, each over its own line. A loss takes all back to the last checkpoint.
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

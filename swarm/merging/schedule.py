"""When a node takes an outer step, and whether it looks for a partner then.

Merging late recovers most of what merging often would give (arXiv 2507.06542): early on, replicas gain from going their own
ways, and a merge near the end averages them all the same. `late` needs to know where the end is: the planned rounds, over
which a decaying learning rate would fall too. Where they are unknown it is `fixed`.
"""

import random
from typing import Literal

from swarm.config import MergingSection

Decision = Literal["train", "step alone", "merge"]

EARLY_MERGE_PROBABILITY = 0.2
LATE_FRACTION = 0.25
"""Last part of the planned rounds, in which every outer step is with a partner."""


class MergeSchedule:
    """What to do after each inner step. The same seed gives the same plan: replicas that share it merge at the same steps."""

    def __init__(self, config: MergingSection, seed: int) -> None:
        self._inner_steps = config.inner_steps
        self._is_late = config.schedule == "late"
        self._seed = seed

    def after(self, inner_step: int, progress: float | None) -> Decision:
        """`inner_step` counts from 1, the first step taken; `progress` in [0, 1] is None where nobody knows the end."""
        if inner_step % self._inner_steps:
            return "train"
        if not self._is_late or progress is None or progress > 1 - LATE_FRACTION:
            return "merge"
        draw = random.Random(f"merge/{self._seed}/{inner_step // self._inner_steps}").random()
        return "merge" if draw < EARLY_MERGE_PROBABILITY else "step alone"

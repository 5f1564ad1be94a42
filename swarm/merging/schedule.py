"""When a node takes an outer step, and looks for a partner for it.

Merging late recovers most of what merging often would give (arXiv 2507.06542): early on, replicas gain from going their own
ways, and a merge near the end averages them all the same. What is left out early is the whole outer step: taken alone it would
drive replicas apart by its momentum. `late` needs to know where the end is: the planned rounds, over
which a decaying learning rate would fall too. Where they are unknown it is `fixed`.
"""

import random

from swarm.config import MergingSection

EARLY_MERGE_PROBABILITY = 0.2
LATE_FRACTION = 0.25
"""Last part of the planned rounds, in which no outer step is left out."""


class MergeSchedule:
    """Whether an outer step is due. The same seed gives the same plan: replicas that share it merge at the same steps."""

    def __init__(self, config: MergingSection, seed: int) -> None:
        self._inner_steps = config.inner_steps
        self._is_late = config.schedule == "late"
        self._seed = seed

    def is_due(self, inner_step: int, progress: float | None) -> bool:
        """`inner_step` counts from 1, the first step taken; `progress` in [0, 1] is None where nobody knows the end."""
        if inner_step % self._inner_steps:
            return False
        if not self._is_late or progress is None or progress > 1 - LATE_FRACTION:
            return True
        draw = random.Random(f"merge/{self._seed}/{inner_step // self._inner_steps}").random()
        return draw < EARLY_MERGE_PROBABILITY

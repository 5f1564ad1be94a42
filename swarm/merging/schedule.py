"""When a node takes an outer step, and whether it looks for a partner then.

Merging late recovers most of what merging often would give (arXiv 2507.06542): early on, replicas gain from going their own
ways, and a merge near the end averages them all the same. `late` needs to know where the end is: the planned steps, over
which a decaying learning rate would fall too. Where they are unknown it is `fixed`.
"""

import random
from typing import Literal

from swarm.config import MergingSection

Decision = Literal["train", "step alone", "merge"]

EARLY_MERGE_PROBABILITY = 0.2
LATE_FRACTION = 0.25
"""Last part of the planned steps, in which every outer step is with a partner."""


class MergeSchedule:
    """What to do after each inner step. The same seed gives the same plan: replicas that share it merge at the same steps.

    `planned_inner_steps` is None where nobody knows when training ends.
    """

    def __init__(self, config: MergingSection, planned_inner_steps: int | None, seed: int) -> None:
        self._inner_steps = config.inner_steps
        self._planned = planned_inner_steps if config.schedule == "late" else None
        self._seed = seed

    def after(self, inner_step: int) -> Decision:
        """`inner_step` counts from 1, the first step taken."""
        if inner_step % self._inner_steps:
            return "train"
        if self._planned is None or inner_step > (1 - LATE_FRACTION) * self._planned:
            return "merge"
        draw = random.Random(f"merge/{self._seed}/{inner_step // self._inner_steps}").random()
        return "merge" if draw < EARLY_MERGE_PROBABILITY else "step alone"

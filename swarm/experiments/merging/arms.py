"""How replicas merge, and what goes wrong, by arm; and which arms each part of the experiment has."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from swarm.config import MergingSection

NUM_REPLICAS = 8
TREE_HOPS = 2 * int(math.log2(NUM_REPLICAS))
"""Messages one after another in a tree all-reduce: up and down. An exchange in pairs is one, both ways at once."""
SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25)
NO_CLIP = 1e9

SILO, NOLOCO, DILOCO, PLAIN, OVERLAPPED = "silo", "NoLoCo", "DiLoCo", "pairs, plain average", "NoLoCo, overlapped"
SAFE = "NoLoCo, default safety"
EQUAL_HOPS = "DiLoCo, equal hops"
ATTACK_FREE = "nobody lies"
ATTACKS = ("random", "sign-flip", "x100", "poison", "nan", "silent")
"""The last one is no attack: who lies in the others says nothing here, so that partners are missing and nothing else."""
NUM_LIARS = (1, 3)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of merging."""

    method: Literal["silo", "pairs", "mean", "gradients"]
    """pairs: NoLoCo. mean: DiLoCo. gradients: data parallel."""
    steps_factor: int = 1
    """Inner steps between two outer steps, over those of the experiment."""
    overlap: float = 0.0
    """Share of H that passes while an exchange is on its way; training does not wait then."""
    patience: float = 0.0
    """Share of H for which an offer waits for a partner, while training goes on."""
    alpha: float = MergingSection().alpha
    beta: float = MergingSection().beta
    precision: Literal["bf16", "int8", "int4"] = "bf16"
    late: bool = False
    drop_rate: float = 0.0
    """Share of exchanges that fail."""
    speeds: tuple[float, ...] = ()
    """Inner steps per unit of time of each replica; all 1 if empty."""
    by_time: bool = False
    """All merge at the same times, however many steps they took."""
    attack: str = ""
    num_liars: int = 0
    clip_factor: float = NO_CLIP
    gate_tasks: int = 0
    drift_threshold: float = MergingSection().drift_threshold


def _with_default_safety(arm: Arm) -> Arm:
    return replace(arm, clip_factor=MergingSection().clip_factor, gate_tasks=MergingSection().gate_tasks)


LEARNING: Mapping[str, Arm] = {
    SILO: Arm("silo"),
    PLAIN: Arm("pairs", alpha=0.0, beta=1.0),
    NOLOCO: Arm("pairs"),
    OVERLAPPED: Arm("pairs", overlap=0.5),
    SAFE: _with_default_safety(Arm("pairs")),
    "NoLoCo, int4": Arm("pairs", precision="int4"),
    "NoLoCo, late": Arm("pairs", late=True),
    DILOCO: Arm("mean"),
    EQUAL_HOPS: Arm("mean", steps_factor=TREE_HOPS),
    "data parallel": Arm("gradients"),
}
FAULTS: Mapping[str, Arm] = {
    "NoLoCo, 10 % of exchanges fail": Arm("pairs", drop_rate=0.1),
    "NoLoCo, 30 % fail": Arm("pairs", drop_rate=0.3),
    "DiLoCo, 10 % absent": Arm("mean", drop_rate=0.1),
    "DiLoCo, 30 % absent": Arm("mean", drop_rate=0.3),
    "unlike speeds: silo": Arm("silo", speeds=SPEEDS),
    "unlike speeds: NoLoCo": Arm("pairs", speeds=SPEEDS, patience=0.5),
    "unlike speeds: NoLoCo by time": Arm("pairs", speeds=SPEEDS, by_time=True),
    "unlike speeds: DiLoCo": Arm("mean", speeds=SPEEDS),
}
RL: Mapping[str, Arm] = {
    **{name: LEARNING[name] for name in (SILO, PLAIN, NOLOCO, SAFE, DILOCO, EQUAL_HOPS)},
    **{
        name: FAULTS[name]
        for name in (
            "NoLoCo, 10 % of exchanges fail",
            "NoLoCo, 30 % fail",
            "unlike speeds: silo",
            "unlike speeds: NoLoCo",
            "unlike speeds: NoLoCo by time",
        )
    },
}
"""Data parallelism is left out: one step on the groups of all is one trainer with eight times the batch, no replicas."""


def attack_name(attack: str, num_liars: int, safety: str) -> str:
    """Name of an arm of `HOSTILE`. `safety`: off or default."""
    return f"{attack}, {num_liars} of {NUM_REPLICAS}, safety {safety}"


def _hostile() -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    for safety in ("off", "default"):
        guard = _with_default_safety if safety == "default" else lambda arm: arm
        arms[f"{ATTACK_FREE}, safety {safety}"] = guard(Arm("pairs"))
        for num in NUM_LIARS:
            for attack in ATTACKS:
                arms[attack_name(attack, num, safety)] = guard(Arm("pairs", attack=attack, num_liars=num))
    return arms


HOSTILE: Mapping[str, Arm] = _hostile()
SAFETY: Mapping[str, Arm] = {
    f"clip {'off' if clip == NO_CLIP else f'{clip:g}'}, gate {gate or 'off'}": Arm(
        "pairs", clip_factor=clip, gate_tasks=gate
    )
    for clip in (2.0, 4.0, 8.0, NO_CLIP)
    for gate in (0, 24)
} | {f"drift_threshold {limit:g}": Arm("pairs", drift_threshold=limit) for limit in (0.1, 0.6)}
"""What safety and merging as products cost where nobody lies."""

Part = Literal["learning", "faults", "rl", "attacks", "safety"]
PARTS: Mapping[Part, Mapping[str, Arm]] = {
    "learning": LEARNING,
    "faults": FAULTS,
    "rl": RL,
    "attacks": HOSTILE,
    "safety": SAFETY,
}

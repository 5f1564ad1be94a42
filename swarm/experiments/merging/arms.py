"""How replicas merge, and what goes wrong, by arm; and which arms each part of the experiment has."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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

    method: Literal["silo", "pairs", "mean", "average", "gradients"]
    """pairs: NoLoCo. mean: DiLoCo. average: pairs without an outer step. gradients: data parallel."""
    steps_factor: int = 1
    """Inner steps between two outer steps, over those of the experiment."""
    overlap: float = 0.0
    """Share of the inner steps that pass while the exchange is on its way; training does not wait then."""
    precision: Literal["bf16", "int8", "int4"] = "bf16"
    from_origin: bool = False
    late: bool = False
    drop_rate: float = 0.0
    """Share of exchanges that fail."""
    speeds: tuple[float, ...] = ()
    """Inner steps per unit of time of each replica; all 1 if empty."""
    by_time: bool = False
    """All merge at the same times, however many steps they took."""
    weigh_steps: bool = False
    """A partner's weight is its share of the inner steps that both took since their last merges."""
    attack: str = ""
    num_liars: int = 0
    safety: Literal["off", "default", "trimmed", "centered"] = "off"
    """default: norm clipping and gate. trimmed, centered: five adapters pulled in place of one, and the gate."""
    clip_factor: float = MergingSection().clip_factor
    gate_tasks: int = MergingSection().gate_tasks


LEARNING: Mapping[str, Arm] = {
    SILO: Arm("silo"),
    PLAIN: Arm("average"),
    NOLOCO: Arm("pairs"),
    OVERLAPPED: Arm("pairs", overlap=0.5),
    SAFE: Arm("pairs", safety="default"),
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
    "unlike speeds: NoLoCo": Arm("pairs", speeds=SPEEDS),
    "unlike speeds: NoLoCo by time": Arm("pairs", speeds=SPEEDS, by_time=True),
    "unlike speeds: NoLoCo by time, weighed": Arm("pairs", speeds=SPEEDS, by_time=True, weigh_steps=True),
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
    """Name of an arm of `HOSTILE`."""
    return f"{attack}, {num_liars} of {NUM_REPLICAS}, safety {safety}"


def _hostile() -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    for safety in ("off", "default"):
        arms[f"{ATTACK_FREE}, safety {safety}"] = Arm("pairs", safety=safety)
        for num in NUM_LIARS:
            for attack in ATTACKS:
                arms[attack_name(attack, num, safety)] = Arm("pairs", attack=attack, num_liars=num, safety=safety)
    return arms


HOSTILE: Mapping[str, Arm] = _hostile()
SAFETY: Mapping[str, Arm] = {
    f"clip {'off' if clip == NO_CLIP else f'{clip:g}'}, gate {gate or 'off'}": Arm(
        "pairs", safety="default", clip_factor=clip, gate_tasks=gate
    )
    for clip in (2.0, 4.0, 8.0, NO_CLIP)
    for gate in (0, 24)
} | {"trimmed mean of five": Arm("pairs", safety="trimmed"), "centered clip of five": Arm("pairs", safety="centered")}
"""What safety costs where nobody lies."""

Part = Literal["learning", "faults", "rl", "attacks", "safety"]
PARTS: Mapping[Part, Mapping[str, Arm]] = {
    "learning": LEARNING,
    "faults": FAULTS,
    "rl": RL,
    "attacks": HOSTILE,
    "safety": SAFETY,
}

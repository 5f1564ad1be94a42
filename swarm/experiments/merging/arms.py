"""The arms of the merging experiment: how replicas merge, which faults they meet, and which part has which arms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from swarm.config import MergingSection

PUBLISHED_BETA = 0.7
"""Of NoLoCo, with alpha = .5. Experiments keep it, as their cells were computed with it."""
NUM_REPLICAS = 8
TREE_HOPS = 2 * int(math.log2(NUM_REPLICAS))
"""Messages one after another in a tree all-reduce: up and down. An exchange in pairs is one, both ways at once."""
SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25)
OFF = 1e9
"""A limit that nothing reaches."""

SILO, NOLOCO, DILOCO, PLAIN, OVERLAPPED = "silo", "NoLoCo", "DiLoCo", "pairs, plain average", "NoLoCo, overlapped"
CLIPPED, SAFE = "NoLoCo, clip", "NoLoCo, clip and gate"
AS_CONFIGURED, EQUAL_HOPS = "NoLoCo, default settings", "DiLoCo, equal hops"
AMONG_STRANGERS = "NoLoCo, default settings, all strangers"
UNLIKE = "unlike speeds: "
NUM_LIARS = (1, 3)
ATTACKS: Mapping[str, Sequence[str]] = {
    "off": ("random", "sign-flip", "x100", "poison", "silent"),
    "clip": ("random", "sign-flip", "x100", "poison"),
    "clip and gate": ("random", "sign-flip", "x100", "poison", "nan"),
}
"""By safety. silent is no attack but its measure: partners that are missing, nothing else. NaN is refused without safety too."""


@dataclass(frozen=True, slots=True)
class MergingArm:
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
    beta: float = PUBLISHED_BETA
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
    clip_factor: float = OFF
    gate_tasks: int = 0
    strangers_factor: float = OFF
    """Nobody is known in these runs: it bounds all partners."""
    drift_threshold: float = OFF
    """Above it, layers are merged as products."""


_DEFAULTS = MergingSection()
_CLIP_AND_GATE = MergingArm("pairs", clip_factor=_DEFAULTS.clip_factor, gate_tasks=_DEFAULTS.gate_tasks)
_AS_STRANGERS = replace(_CLIP_AND_GATE, strangers_factor=_DEFAULTS.strangers_factor)

LEARNING: Mapping[str, MergingArm] = {
    SILO: MergingArm("silo"),
    PLAIN: MergingArm("pairs", alpha=0.0, beta=1.0),
    NOLOCO: MergingArm("pairs"),
    OVERLAPPED: MergingArm("pairs", overlap=0.5),
    AS_CONFIGURED: replace(_CLIP_AND_GATE, drift_threshold=_DEFAULTS.drift_threshold),
    "NoLoCo, int4": MergingArm("pairs", precision="int4"),
    "NoLoCo, late": MergingArm("pairs", late=True),
    DILOCO: MergingArm("mean"),
    EQUAL_HOPS: MergingArm("mean", steps_factor=TREE_HOPS),
    "data parallel": MergingArm("gradients"),
}
FAULTS: Mapping[str, MergingArm] = {
    "NoLoCo, 10 % of exchanges fail": MergingArm("pairs", drop_rate=0.1),
    "NoLoCo, 30 % fail": MergingArm("pairs", drop_rate=0.3),
    "DiLoCo, 10 % absent": MergingArm("mean", drop_rate=0.1),
    "DiLoCo, 30 % absent": MergingArm("mean", drop_rate=0.3),
    UNLIKE + SILO: MergingArm("silo", speeds=SPEEDS),
    UNLIKE + NOLOCO: MergingArm("pairs", speeds=SPEEDS, patience=0.5),
    UNLIKE + "NoLoCo by time": MergingArm("pairs", speeds=SPEEDS, by_time=True),
    UNLIKE + DILOCO: MergingArm("mean", speeds=SPEEDS),
}
_UNDER_RL = (
    SILO, PLAIN, NOLOCO, AS_CONFIGURED, DILOCO, EQUAL_HOPS, "NoLoCo, 10 % of exchanges fail", "NoLoCo, 30 % fail",
    UNLIKE + SILO, UNLIKE + NOLOCO, UNLIKE + "NoLoCo by time",
)  # fmt: skip
RL: Mapping[str, MergingArm] = {name: arm for name, arm in {**LEARNING, **FAULTS}.items() if name in _UNDER_RL}
"""Data parallelism is left out: one step on the groups of all is one trainer with eight times the batch, no replicas."""


def attack_name(attack: str, num_liars: int, safety: str) -> str:
    """Name of an arm of `HOSTILE`. `safety`: a key of `SAFETIES`."""
    return f"{attack}, {num_liars} of {NUM_REPLICAS}, safety {safety}"


SAFETIES: Mapping[str, tuple[str, MergingArm]] = {
    "off": (NOLOCO, MergingArm("pairs")),
    "clip": (CLIPPED, replace(_CLIP_AND_GATE, gate_tasks=0)),
    "clip and gate": (SAFE, _CLIP_AND_GATE),
}
"""{safety: arm in which nobody lies}. The gate tries every merge, a node by default those that `gate_share` allows."""
HOSTILE: Mapping[str, MergingArm] = dict(SAFETIES.values()) | {
    attack_name(attack, num, safety): replace(arm, attack=attack, num_liars=num)
    for safety, (_, arm) in SAFETIES.items()
    for num in NUM_LIARS
    for attack in ATTACKS[safety]
}
SETTINGS: Mapping[str, MergingArm] = {
    NOLOCO: MergingArm("pairs"),
    "clip 2": MergingArm("pairs", clip_factor=2.0),
    "clip 4": MergingArm("pairs", clip_factor=4.0),
    "gate of 24 tasks": MergingArm("pairs", gate_tasks=24),
    SAFE: _CLIP_AND_GATE,
    "clip 4, gate of 24 tasks": MergingArm("pairs", clip_factor=4.0, gate_tasks=24),
    "drift_threshold 0.3": MergingArm("pairs", drift_threshold=0.3),
    "drift_threshold 0.6": MergingArm("pairs", drift_threshold=0.6),
    "drift_threshold 0.3, clip 2": MergingArm("pairs", drift_threshold=0.3, clip_factor=2.0),
    "beta 1": MergingArm("pairs", beta=1.0),
    "strangers_factor 0.33": MergingArm("pairs", strangers_factor=0.33),
    "strangers_factor 0.5": MergingArm("pairs", strangers_factor=0.5),
    "strangers_factor 1": MergingArm("pairs", strangers_factor=1.0),
    AMONG_STRANGERS: _AS_STRANGERS,
}
"""What each part of safety, merging as products and the outer learning rate cost or give where nobody lies."""

Part = Literal["learning", "faults", "rl", "attacks", "settings", "hostile"]
PARTS: Mapping[Part, Mapping[str, MergingArm]] = {
    "learning": LEARNING,
    "faults": FAULTS,
    "rl": RL,
    "attacks": HOSTILE,
    "settings": SETTINGS,
    "hostile": {},  # its arms are of another kind: `hostile_arms.COMPANIES`
}

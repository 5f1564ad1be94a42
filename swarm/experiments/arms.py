"""Where the groups of a training batch come from, by arm of the sharing experiment."""

from dataclasses import dataclass
from typing import Literal

from swarm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arm:
    """I own and J groups of others in a batch. Every arm samples the same number of answers a round."""

    name: str
    own_groups: int
    swarm_groups: int
    filter_groups: bool = True
    """Whether own groups without reward differences are left out, as groups of others always are."""
    choice: Literal["uniform", "informative"] = "uniform"
    """By what groups of others are chosen: `sharing.choice`."""
    replay_groups: int = 0
    """Own groups of earlier rounds in a batch, on top: `training.replay_groups`."""


PUBLISHED = "8/0"
CONTROL = "8/0 + filter"
SHARING = "4/4"
ARMS = {
    arm.name: arm
    for arm in (
        Arm(PUBLISHED, 8, 0, filter_groups=False),
        Arm(CONTROL, 8, 0),
        Arm("6/2", 6, 2),
        Arm(SHARING, 4, 4),
        Arm("2/6", 2, 6),
        Arm("8/8", 8, 8),
        Arm("4/4 informative", 4, 4, choice="informative"),
        Arm("8/8 informative", 8, 8, choice="informative"),
        Arm("8/0 + replay", 8, 0, replay_groups=4),
    )
}
"""Those up to 2/6 are the paper's. 8/8 is a node's default: groups of others on top of the own ones."""
DEFAULT_ARMS = (PUBLISHED, CONTROL, "6/2", SHARING, "2/6")


def chosen_arms(text: str) -> tuple[Arm, ...]:
    """Arms by names with commas between them. Raises ConfigError for another name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise ConfigError(
            f"arms must be among {', '.join(ARMS)}, got {', '.join(unknown) or 'none'}; set --arms with commas"
        )
    return tuple(ARMS[name] for name in dict.fromkeys(names))

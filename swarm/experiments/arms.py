"""Where the groups of a training batch come from, by arm of the sharing experiment."""

from dataclasses import dataclass

from swarm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arm:
    """I own and J groups of others in a batch. Every arm samples the same number of answers a round."""

    name: str
    own_groups: int
    swarm_groups: int
    filter_groups: bool = True
    """Whether own groups without reward differences are left out, as groups of others always are."""


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
    )
}
"""The last one is a node's default: groups of others on top of the own ones. It is not among those of the paper."""
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

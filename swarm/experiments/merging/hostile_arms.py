"""What is known of names of which half are hostile, and where they meet honest nodes: arms of the part `hostile`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Stage = Literal["live", "final", "newcomers"]
"""Merging while nodes train, the final merge, and nodes that join."""
STAGES: Sequence[Stage] = get_args(Stage)


@dataclass(frozen=True, slots=True)
class Company:
    """Who the others of a node are, and what the node makes of it."""

    is_hostile: bool = True
    """Half of the names."""
    is_defended: bool = True
    """Strangers, address groups and what strangers may move are bounded, and newcomers have a gate."""
    is_known: bool = False
    """Honest nodes know each other by experience that they admitted."""
    is_one_network: bool = False
    """Hostile names share an address group, and honest nodes have one each; else no address is known."""


QUIET, OPEN, KNOWN = "nobody hostile", "undefended", "as shipped, honest ones known"
COMPANIES: Mapping[str, Company] = {
    QUIET: Company(is_hostile=False, is_known=True, is_one_network=True),
    OPEN: Company(is_defended=False),
    KNOWN: Company(is_known=True),
    "as shipped, nobody known, one hostile network": Company(is_one_network=True),
    "as shipped, nobody known, no addresses": Company(),
}

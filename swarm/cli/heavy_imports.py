"""What a command settles before anything imports torch and its friends."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.config import Config


def settle_imports(config: "Config") -> None:
    """For a process that loads the policy of `config` and no other.

    peft imports bitsandbytes wherever it is installed, and that the whole compiler of torch: a third of the time until a
    policy is there, and 45 MiB. A base that is not quantised has no use for either.
    """
    stay_off_hubs(config)
    if config.policy.quantization == "none":
        sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type] - the documented way to make an import fail


def stay_off_hubs(config: "Config") -> None:
    """A silo's node contacts nobody but its peers. The hub's libraries are told so before anything imports them."""
    if config.swarm.silo_owner:
        os.environ["HF_HUB_OFFLINE"] = "1"

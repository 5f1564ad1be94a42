"""The configuration that a new node starts with on this hardware: what `swarm init` writes and `swarm join` builds on."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.hardware import Hardware, PolicyChoice

_TEMPLATE = """# Written by `swarm init` for this machine: {summary}.
# Every setting and its meaning: `swarm config schema`. Try it: `swarm run {path} --dry-run`.

[node]
dir = {folder}                     # identity, checkpoints, logs and metrics of this node
duty_cycle = 1.0                     # 0.5 leaves half of the machine's time to you

[swarm]
name = "{name}"                      # nodes of equal name and tasks find each other

[network]
listen = ["/ip4/0.0.0.0/tcp/0"]      # name a port here to forward it in your router
initial_peers = []                   # addresses of nodes to join through, from a friend or a bootstrap peer

[policy]
base = "{base}"                      # {why}
quantization = "{quantization}"

[rollouts]
groups_per_round = {groups_per_round}
max_new_tokens = {max_new_tokens}

[training]
lr = {lr:g}
"""


def hardware_config(hardware: "Hardware", choice: "PolicyChoice", folder: Path, name: str) -> str:
    """TOML with comments for a node in `folder`, in the swarm `name`. Checked: raises ConfigError for a bad name."""
    import tomllib

    from swarm.config import parse

    text = _TEMPLATE.format(
        summary=hardware.summary, folder=json.dumps(str(folder)), path=folder / "node.toml", name=name,
        base=choice.base, why=choice.why, quantization=choice.quantization, groups_per_round=choice.groups_per_round,
        max_new_tokens=choice.max_new_tokens, lr=choice.lr,
    )  # fmt: skip
    parse(tomllib.loads(text))
    return text

"""`swarm init`: creates an identity and a configuration for this machine.

`hardware_config` is the configuration of a new node on this hardware. `swarm init` writes it, and `swarm join` builds on it.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from swarm.machine.hardware import Hardware, PolicyChoice


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


def init(
    folder: Path = typer.Argument(Path("runs/node"), metavar="[DIR]", help="Folder of the new node."),
    name: str = typer.Option("local", metavar="NAME", help="Name of the swarm to take part in."),
    force: bool = typer.Option(False, "--force", help="Write the configuration anew; the identity is never replaced."),
) -> None:
    """Create identity and configuration. A second call changes nothing.

    Reads: CPU, memory and GPU of this machine.
    Writes: identity.key and node.toml in DIR.

    Examples:
      swarm init runs/mine
      swarm init runs/mine --name friends --force

    Exit codes: 0 done, 3 configuration, 4 identity.
    """
    from swarm.cli.swarm.passphrase import unlock
    from swarm.machine.hardware import choose_policy, detect
    from swarm.machine.node_folder import NodeFolder
    from swarm.machine.safe_files import replace_file
    from swarm.records.identity import load_or_create

    files = NodeFolder(folder)
    files.create()
    is_new = not files.identity.exists()
    identity = load_or_create(files.identity, unlock)
    print(f"{'created' if is_new else 'kept'} identity {identity.peer_name} ({identity.peer_id})")
    config = folder / "node.toml"
    if config.exists() and not force:
        print(f"kept {config}; --force writes it anew")
    else:
        hardware = detect()
        replace_file(config, hardware_config(hardware, choose_policy(hardware), folder, name))
        print(f"found {hardware.summary}\nwrote {config}")
    print(f"start the node with: swarm run {config}")

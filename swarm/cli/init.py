"""`swarm init`: an identity and a configuration for this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from swarm.hardware import Hardware

_TEMPLATE = """# Written by `swarm init` for this machine: {summary}.
# Every setting and its meaning: `swarm config schema`. Try it: `swarm run {path} --dry-run`.

[node]
dir = "{folder}"                     # identity, checkpoints, logs and metrics of this node
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


def init(
    folder: Path = typer.Argument(Path("runs/node"), metavar="[DIR]", help="Folder of the new node."),
    name: str = typer.Option("local", help="Name of the swarm to take part in."),
    force: bool = typer.Option(False, "--force", help="Write the configuration anew; the identity is never replaced."),
) -> None:
    """Create identity and configuration. A second call changes nothing."""
    from swarm.hardware import detect
    from swarm.node_folder import NodeFolder
    from swarm.records.identity import load_or_create

    files = NodeFolder(folder)
    files.create()
    is_new = not files.identity.exists()
    identity = load_or_create(files.identity)
    print(f"{'created' if is_new else 'kept'} identity {identity.peer_name} ({identity.peer_id})")
    config = folder / "node.toml"
    if config.exists() and not force:
        print(f"kept {config}; --force writes it anew")
    else:
        hardware = detect()
        config.write_text(_configuration(hardware, folder, config, name), encoding="utf-8")
        print(f"found {hardware.summary}\nwrote {config}")
    print(f"start the node with: swarm run {config}")


def _configuration(hardware: "Hardware", folder: Path, path: Path, name: str) -> str:
    """Checked before it is written, so that a bad name is told here."""
    import tomllib

    from swarm.config import parse
    from swarm.hardware import choose_policy

    choice = choose_policy(hardware)
    text = _TEMPLATE.format(
        summary=hardware.summary, folder=folder, path=path, name=name, base=choice.base, why=choice.why,
        quantization=choice.quantization, groups_per_round=choice.groups_per_round,
        max_new_tokens=choice.max_new_tokens, lr=choice.lr,
    )  # fmt: skip
    parse(tomllib.loads(text))
    return text

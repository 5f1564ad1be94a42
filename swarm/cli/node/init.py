"""`swarm init`: creates an identity and a configuration for this machine."""

from pathlib import Path

import typer


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
    from swarm.machine.hardware import choose_policy, detect, hardware_config
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

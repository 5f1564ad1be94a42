"""`swarm bootstrap`: a DHT peer that others join through; no model, no trainer."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from swarm.config import Config
    from swarm.manifest import Manifest
    from swarm.node_folder import NodeFolder
    from swarm.records.identity import Identity

_STATUS_INTERVAL_S = 2.0


def bootstrap(
    folder: Path = typer.Option(Path("runs/bootstrap"), "--dir", help="Where its identity is kept."),
    listen: list[str] = typer.Option(
        ["/ip4/127.0.0.1/tcp/0"], help="Address to listen on; /ip4/0.0.0.0/tcp/PORT to be reachable from outside."
    ),
    announce: list[str] = typer.Option([], help="Address to tell others, where it differs (port forwarding)."),
    relay: bool = typer.Option(True, help="Carry the traffic of nodes that cannot be reached from outside."),
    join: list[str] = typer.Option([], help="Addresses of other peers of the swarm."),
    name: str = typer.Option("local", help="Name of the swarm, where it has no manifest."),
    manifest: str = typer.Option(
        None,
        metavar="MANIFEST",
        help="The swarm's manifest, a file or an http(s) address: its name, id and peers count.",
    ),
    founder: str = typer.Option(None, metavar="PEER_ID", help="Take only a manifest that this founder has signed."),
) -> None:
    """Serve the swarm's index so that nodes find each other. Prints the address to join through.

    Needs no model and no torch. A swarm may have any number of them, and lives on without them.
    """
    from swarm.config import parse
    from swarm.node_folder import NodeFolder
    from swarm.records import identity as identities
    from swarm.records.identity import IdentityLock

    swarm = {"name": name}
    if manifest is not None:
        known = _manifest(manifest, founder)
        swarm, join = {"name": known.name, "id": known.id}, [*join, *known.bootstrap]
    network = {"listen": listen, "announce": announce, "initial_peers": join, "reachability": "public"}
    network |= {"serve_relay": relay, "gossip": "off"}  # it reads no headers: a gossip plane would only cost memory
    config = parse({"swarm": swarm, "network": network, "node": {"dir": str(folder)}})
    files = NodeFolder(folder)
    files.create()
    with IdentityLock(folder) as lock:
        identity = identities.load_or_create(files.identity)
        lock.claim(identity)
        asyncio.run(_serve(config, files, identity))


def _manifest(source: str, founder: str | None) -> "Manifest":
    from swarm.manifest import check_protocol
    from swarm.manifest_file import read_manifest
    from swarm.records.codec import PROTOCOL_VERSION

    manifest = read_manifest(source, founder)
    check_protocol(manifest, PROTOCOL_VERSION)
    print(f"swarm {manifest.name}, founded by {manifest.founder_name} ({manifest.founder})")
    return manifest


async def _serve(config: "Config", files: "NodeFolder", identity: "Identity") -> None:
    from swarm.network.hivemind.transport import HivemindTransport
    from swarm.observability.http_server import HttpServer
    from swarm.observability.metrics import Metrics
    from swarm.observability.status_file import NodeStatus
    from swarm.sharing.index import EntryValidator

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    transport = HivemindTransport(config.network, identity, files.path, EntryValidator(config.swarm_id))
    http = HttpServer(config.observability, Metrics(), lambda: {"phase": "serving"})
    started_at = time.time()

    def write_status(phase: str) -> None:
        NodeStatus(
            peer_id=identity.peer_id, peer_name=identity.peer_name, pid=os.getpid(), started_at=started_at, phase=phase,
            http_port=http.port, addresses=transport.addresses(),
        ).write(files.status)  # fmt: skip

    await transport.start()
    await http.start()
    try:
        print(f"{identity.peer_name} serves; join through")
        for address in transport.addresses():
            print(f"  --network.initial_peers '[\"{address}\"]'", flush=True)
        while not stop.is_set():
            write_status("serving")
            try:
                await asyncio.wait_for(stop.wait(), _STATUS_INTERVAL_S)
            except TimeoutError:
                continue
    finally:
        await http.stop()
        await transport.stop()
        write_status("ended")

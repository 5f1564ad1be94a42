"""`swarm bootstrap`: runs a DHT peer that others join through, without model and training."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import told_by_flags

if TYPE_CHECKING:
    from swarm.config import Config
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.manifest import Manifest
    from swarm.network.transport import Transport
    from swarm.observability.metrics import Metrics
    from swarm.records.identity import Identity
    from swarm.sharing.header_relay import HeaderRelay

_STATUS_INTERVAL_S = 2.0
_FLAGS = {
    "network.listen": "--listen",
    "network.announce": "--announce",
    "network.gossip_listen": "--gossip-listen",
    "network.gossip_announce": "--gossip-announce",
    "network.initial_peers": "--join",
    "observability.http_host": "--http-host",
    "observability.http_port": "--http-port",
    "swarm.name": "--name",
    "node.dir": "--dir",
}
"""What sets which setting."""


def bootstrap(
    folder: Path = typer.Option(Path("runs/bootstrap"), "--dir", metavar="DIR", help="Folder of its identity."),
    listen: list[str] = typer.Option(
        ["/ip4/127.0.0.1/tcp/0"],
        metavar="ADDRESS",
        help="Address to listen on; /ip4/0.0.0.0/tcp/PORT to be reachable from outside.",
    ),
    announce: list[str] = typer.Option(
        [], metavar="ADDRESS", help="Address that peers are told instead, for example with port forwarding."
    ),
    gossip: bool = typer.Option(True, help="Forward headers between nodes that cannot reach each other."),
    gossip_listen: list[str] = typer.Option(
        [],
        metavar="ADDRESS",
        help="Address of the gossip, with a port that the firewall allows. Default: the hosts of --listen, free ports.",
    ),
    gossip_announce: list[str] = typer.Option(
        [], metavar="ADDRESS", help="Gossip address that peers are told instead."
    ),
    relay: bool = typer.Option(True, help="Relay traffic for nodes that cannot be reached directly."),
    http_host: str = typer.Option("127.0.0.1", metavar="HOST", help="Address of /metrics and /health."),
    http_port: int = typer.Option(
        0, metavar="PORT", min=0, max=65535, help="Port of /metrics and /health; 0: a free port."
    ),
    join: list[str] = typer.Option([], metavar="ADDRESS", help="Addresses of other peers of the swarm."),
    name: str = typer.Option("local", metavar="NAME", help="Name of the swarm if it has no manifest."),
    manifest: str = typer.Option(
        None,
        metavar="MANIFEST",
        help="The swarm's manifest, a file or an http(s) address: its name, id and peers count.",
    ),
    founder: str = typer.Option(None, metavar="PEER_ID", help="Accept only a manifest that this founder has signed."),
) -> None:
    """Serve the swarm's index, so that nodes find each other.

    Prints the address to join through, forwards headers, and relays for nodes
    that cannot be reached. Needs no model and no torch. A swarm may have any
    number of them, and continues without them.

    Reads: the manifest, if one is named.
    Writes: its identity, peers.json, ports.json, reached.json, status.json and logs/ in --dir.

    Examples:
      swarm bootstrap --manifest friends.swarm.toml \\
        --listen /ip4/0.0.0.0/tcp/38000

    Exit codes: 3 configuration, 4 identity, 7 network, 12 manifest, 17 silo,
    130 interrupted.
    """
    import asyncio  # here, as below: `swarm --help` is to be quick, and that reads every command

    from swarm.cli.swarm.passphrase import unlock
    from swarm.config import parse
    from swarm.machine.memory import keep_heaps_small
    from swarm.machine.node_folder import NodeFolder
    from swarm.machine.safe_files import close_to_others
    from swarm.manifest.joining import bootstrap_addresses
    from swarm.observability.logging_setup import set_up_logging
    from swarm.records import identity as identities
    from swarm.records.identity import IdentityLock

    keep_heaps_small()
    close_to_others()
    swarm, limits, plane, known = {"name": name}, {}, "libp2p", None
    if manifest is not None:
        known = _manifest(manifest, founder)
        swarm, join = {"name": known.name, "id": known.id}, [*join, *bootstrap_addresses(known)]
        swarm |= {"silo_owner": known.founder} if known.silo else {}
        limits, plane = known.limits.model_dump(exclude_none=True), known.gossip or plane
    network = {"listen": listen, "announce": announce, "initial_peers": join, "reachability": "public"}
    network |= {
        "gossip": plane if gossip else "off",
        "gossip_listen": gossip_listen,
        "gossip_announce": gossip_announce,
    }
    network |= {"serve_relay": relay, "serve_gossip": True}
    http = {"http_host": http_host, "http_port": http_port}
    sections = {"swarm": swarm, "network": network, "sharing": limits, "observability": http}
    files = NodeFolder(folder)
    with told_by_flags(_FLAGS):
        config = parse({**sections, "node": {"dir": str(folder)}})
        files.create()
        with IdentityLock(folder) as lock:
            identity = identities.load_or_create(files.identity, unlock)
            lock.claim(identity)
            set_up_logging(files.logs, config.observability.log_level, config.observability.max_log_mib * 2**20)
            asyncio.run(_serve(config, files, identity, lambda addresses: join_through(addresses, manifest, known)))


def _manifest(source: str, founder: str | None) -> "Manifest":
    from swarm.manifest.files import read_manifest
    from swarm.manifest.manifest import check_protocol
    from swarm.records.codec import PROTOCOL_VERSION

    manifest = read_manifest(source, founder)
    check_protocol(manifest, PROTOCOL_VERSION)
    print(f"swarm {manifest.name}, founded by {manifest.founder_name} ({manifest.founder})")
    return manifest


def join_through(addresses: Sequence[str], source: str | None, manifest: "Manifest | None") -> list[str]:
    """Lines on how others come to join through this peer: none where the manifest, which is from `source`, names it.

    It may be named by a host that this machine does not know of itself, so peer id and port decide.
    """
    from swarm.network.tcp_address import TcpAddress

    if source is None or manifest is None:
        return ["join through", *(f"  --network.initial_peers '[\"{address}\"]'" for address in addresses)]
    own = {(address.peer_id, address.port) for address in map(TcpAddress.parse, addresses)}
    listed = [(text, TcpAddress.parse(text)) for text in manifest.bootstrap]
    if not own or any((address.peer_id, address.port) in own for _, address in listed):
        return []
    others = [text for text, address in listed if address.peer_id not in {peer_id for peer_id, _ in own}]
    named = " ".join(f"--bootstrap {text}" for text in (*addresses[:1], *others))
    file = shlex.quote(f"{manifest.name}.swarm.toml" if "://" in source else source)
    key = " --key silo-owner.key" if manifest.silo else ""
    step = f"  swarm create --update {file}{key} {named}"
    elsewhere = [f"  it also has the address {address}" for address in addresses[1:]]
    return ["its address is not in the manifest yet; the founder puts it there with", step, *elsewhere]


async def _serve(
    config: "Config",
    files: "NodeFolder",
    identity: "Identity",
    how_to_join: Callable[[Sequence[str]], list[str]],
) -> None:
    """`how_to_join`: lines for the terminal, by the addresses of this peer."""
    import asyncio

    from swarm.machine.stop_signals import obey_stop_signals
    from swarm.network.context import NodeContext
    from swarm.observability.http_server import HttpServer
    from swarm.observability.metrics import Metrics
    from swarm.observability.status_file import NodeStatus
    from swarm.sharing.header_relay import HeaderRelay
    from swarm.sharing.index import EntryValidator
    from swarm.silo.silo_transport import node_transport

    stop, metrics = asyncio.Event(), Metrics()
    obey_stop_signals(stop.set)
    transport = node_transport(config, identity, files, EntryValidator(config.swarm_id))
    assert transport is not None, "the network of a bootstrap peer is on"
    relay = HeaderRelay(config.sharing, NodeContext.of(identity, config.swarm_id, transport))
    http = HttpServer(config.observability, metrics, lambda: {"phase": "serving"})
    started_at = time.time()

    def write_status(phase: str) -> None:
        NodeStatus(
            peer_id=identity.peer_id, peer_name=identity.peer_name, pid=os.getpid(), started_at=started_at, phase=phase,
            http_port=http.port, addresses=transport.addresses(), written_at=time.time(),
            command="bootstrap",
        ).write(files.status)  # fmt: skip

    await transport.start()
    await http.start()
    work: list[asyncio.Task[None]] = []
    if config.network.gossip != "off":
        work.append(asyncio.create_task(relay.work(lambda: metrics.count("node/failed_steps"))))
    try:
        first, *lines = [*how_to_join(transport.addresses()), ""]
        print(f"{identity.peer_name} serves" + (f"; {first}" if first else ""))
        print("".join(f"{line}\n" for line in lines if line), end="", flush=True)
        while not stop.is_set():
            write_status("serving")
            _measure(relay, transport, metrics)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _STATUS_INTERVAL_S)
            for task in work:
                if task.done():
                    task.result()  # a bug ends the command
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await http.stop()
        await transport.stop()
        write_status("ended")


def _measure(relay: "HeaderRelay", transport: "Transport", metrics: "Metrics") -> None:
    metrics.gauge("gossip/headers_carried", relay.num_relayed)
    metrics.gauge("gossip/shards_carried", len(relay.shards))
    for reason, count in relay.rejected.items():
        metrics.gauge("exchange/rejected_records", count, reason=reason)
    for reason, count in transport.refused.items():
        metrics.gauge("network/refused", count, reason=reason)

"""`swarm bootstrap`: runs a DHT peer that others join through, without model and training."""

import contextlib
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.arguments import told_by_flags
from swarm.errors import ConfigError

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
    "network.gossip": "--gossip",
    "network.serve_relay": "--relay",
    "network.initial_peers": "--join",
    "observability.http_host": "--http-host",
    "observability.http_port": "--http-port",
    "swarm.name": "--name",
    "node.dir": "--dir",
}
"""What sets which setting."""
_SWITCHES = ("--gossip", "--relay")
_GOSSIP = "libp2p"
_DEFAULTS: Mapping[str, Any] = {
    "swarm": {"name": "local"},
    "network": {
        "listen": ["/ip4/127.0.0.1/tcp/0"], "gossip": _GOSSIP, "serve_relay": True, "serve_gossip": True,
        "reachability": "public",
    },
    "observability": {"http_host": "127.0.0.1", "http_port": 0},
}  # fmt: skip
_HEADER = "# With what `swarm bootstrap --dir` starts again in this folder; options that are given win.\n"


def bootstrap(
    folder: Path = typer.Option(
        Path("runs/bootstrap"), "--dir", metavar="DIR", help="Folder of its identity, its options and its manifest."
    ),
    listen: list[str] = typer.Option(
        None,
        metavar="ADDRESS",
        help="Address to listen on; /ip4/0.0.0.0/tcp/PORT to be reachable from outside. Default: a port of loopback.",
    ),
    announce: list[str] = typer.Option(
        None, metavar="ADDRESS", help="Address that peers are told instead, for example with port forwarding."
    ),
    gossip: bool = typer.Option(
        None, "--gossip/--no-gossip", help="Forward headers between nodes that cannot reach each other. Default: do."
    ),
    gossip_listen: list[str] = typer.Option(
        None,
        metavar="ADDRESS",
        help="Address of the gossip, with a port that the firewall allows. Default: the hosts of --listen, free ports.",
    ),
    gossip_announce: list[str] = typer.Option(
        None, metavar="ADDRESS", help="Gossip address that peers are told instead."
    ),
    relay: bool = typer.Option(
        None, "--relay/--no-relay", help="Relay traffic for nodes that cannot be reached directly. Default: do."
    ),
    http_host: str = typer.Option(
        None, metavar="HOST", help="Address of /metrics and /health. Default: loopback alone."
    ),
    http_port: int = typer.Option(
        None, metavar="PORT", min=0, max=65535, help="Port of /metrics and /health. Default: 0, a free port."
    ),
    join: list[str] = typer.Option(None, metavar="ADDRESS", help="Addresses of other peers of the swarm."),
    name: str = typer.Option(None, metavar="NAME", help="Name of the swarm if it has no manifest. Default: local."),
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
    number of them, and continues without them. Started again, it goes on with
    the options and the manifest of its last start; those that are given win.

    Reads: the manifest, if one is named; else manifest.toml, and bootstrap.toml,
    in --dir.
    Writes: bootstrap.toml (the options), manifest.toml, its identity, peers.json,
    ports.json, reached.json, status.json and logs/ in --dir.

    Examples:
      swarm bootstrap --manifest friends.swarm.toml \\
        --listen /ip4/0.0.0.0/tcp/28000
      swarm bootstrap                # again, with the same options

    Exit codes: 3 configuration, 4 identity, 7 network, 12 manifest, 17 silo,
    130 interrupted.
    """
    import asyncio  # here, as below: `swarm --help` is to be quick, and that reads every command

    from swarm.cli.swarm.passphrase import unlock
    from swarm.machine.memory import keep_heaps_small
    from swarm.machine.node_folder import NodeFolder
    from swarm.machine.safe_files import close_to_others
    from swarm.observability.logging_setup import set_up_logging
    from swarm.records import identity as identities
    from swarm.records.identity import IdentityLock

    keep_heaps_small()
    close_to_others()
    plane = None if gossip is None else _GOSSIP if gossip else "off"
    options = {
        "network.listen": listen, "network.announce": announce, "network.gossip": plane,
        "network.gossip_listen": gossip_listen, "network.gossip_announce": gossip_announce, "network.serve_relay": relay,
        "network.initial_peers": join, "observability.http_host": http_host, "observability.http_port": http_port,
        "swarm.name": name,
    }  # fmt: skip
    files = NodeFolder(folder)
    with told_by_flags(_FLAGS):
        files.check()
        start = BootstrapStart.of(
            files, {key: value for key, value in options.items() if value not in (None, [])}, manifest, founder
        )
        files.create()
        with IdentityLock(folder) as lock:
            identity = identities.load_or_create(files.identity, unlock)
            lock.claim(identity)
            observed = start.config.observability
            set_up_logging(files.logs, observed.log_level, observed.max_log_mib * 2**20)
            asyncio.run(_serve(start, files, identity))


@dataclass(frozen=True, slots=True)
class BootstrapStart:
    """With what a bootstrap peer starts: given options win over those of its last start, and the manifest over both."""

    config: "Config"
    options: dict[str, Any]
    """For the next start, in the shape of a configuration."""
    manifest: "Manifest | None"
    manifest_text: str
    source: str | None
    """Where the manifest was named. None: it is that of the last start, or there is none."""

    @classmethod
    def of(
        cls, files: "NodeFolder", given: Mapping[str, Any], source: str | None, founder: str | None
    ) -> "BootstrapStart":
        """Prints the swarm, and what comes from the folder. Raises ConfigError, ManifestError."""
        from swarm.config import Layer, merge, merged, origin_in, parse, read_layers

        known, text = _manifest(source, founder, files)
        if known is not None and "swarm.name" in given:
            raise ConfigError(
                f"--name is for a swarm without a manifest, got one of {known.name}; leave --name out, or set --dir"
            )
        stored = read_layers([files.bootstrap] if files.bootstrap.exists() else [])
        layers = [*stored, *(Layer(_FLAGS[key], _nested(key, value)) for key, value in given.items())]
        options = merged(layers)
        parse(options, origin_in(layers))  # so that what somebody wrote into the file has a shape
        if kept := _as_flags(merged(stored), given):
            print(f"as at its last start, by {files.bootstrap}: {kept}")
        settings = merge(merge(_DEFAULTS, options), {"node": {"dir": str(files.path)}})
        if known is not None:
            options.pop("swarm", None)
            settings = _with_manifest(settings, known)
        return cls(parse(settings, origin_in(layers)), options, known, text, source)

    def keep(self, files: "NodeFolder") -> None:
        """Store options and manifest for the next start, where they are others than those stored. Raises ManifestError."""
        import tomli_w

        from swarm.manifest.files import write_text

        texts = {files.manifest: self.manifest_text} if self.manifest else {}
        for path, text in (texts | {files.bootstrap: _HEADER + tomli_w.dumps(self.options)}).items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)


def _manifest(source: str | None, founder: str | None, files: "NodeFolder") -> "tuple[Manifest | None, str]":
    """The manifest that is named, or else that of the last start, with its text. Raises ManifestError."""
    from swarm.manifest.files import check_joined, fetch
    from swarm.manifest.manifest import check_protocol, parse
    from swarm.records.codec import PROTOCOL_VERSION

    if source is None and not files.manifest.exists():
        return None, ""
    data = fetch(source or str(files.manifest))
    manifest = parse(data, founder)
    check_protocol(manifest, PROTOCOL_VERSION)
    check_joined(files.manifest, manifest, manifest.edition)  # it trains on nothing, so changes need no consent
    of_last = "" if source else f", edition {manifest.edition} of {files.manifest}"
    print(f"swarm {manifest.name}, founded by {manifest.founder_name} ({manifest.founder}){of_last}")
    return manifest, data.decode()


def _with_manifest(settings: Mapping[str, Any], manifest: "Manifest") -> dict[str, Any]:
    from swarm.config import merge
    from swarm.manifest.joining import bootstrap_addresses

    network = settings["network"]
    peers = [*network.get("initial_peers", ()), *bootstrap_addresses(manifest)]
    gossip = network["gossip"] if network["gossip"] == "off" else manifest.gossip or _GOSSIP
    owner = {"silo_owner": manifest.founder} if manifest.silo else {}
    return merge(
        settings,
        {
            "swarm": {"name": manifest.name, "id": manifest.id} | owner,
            "network": {"initial_peers": peers, "gossip": gossip},
            "sharing": manifest.limits.model_dump(exclude_none=True),
        },
    )


def _nested(key: str, value: object) -> dict[str, Any]:
    section, _, name = key.partition(".")
    return {section: {name: value}}


def _as_flags(stored: Mapping[str, Any], given: Collection[str]) -> str:
    """The stored options that are not `given`, as on a command line."""
    words: list[str] = []
    for key, flag in _FLAGS.items():
        section, _, name = key.partition(".")
        value = stored.get(section, {}).get(name)
        if key in given or value is None:
            continue
        if flag in _SWITCHES:
            words.append(flag if value not in (False, "off") else f"--no-{flag.removeprefix('--')}")
        else:
            words += [f"{flag} {shlex.quote(str(one))}" for one in (value if isinstance(value, list) else [value])]
    return " ".join(words)


def join_through(addresses: Sequence[str], source: str | None, manifest: "Manifest | None") -> list[str]:
    """Lines on how others come to join through this peer: none where the manifest, which is from `source`, names it.

    Without a `source` it is that of the last start, and the file to change is the founder's. The manifest may name a host
    that this machine does not know of itself, so peer id and port decide.
    """
    from swarm.network.tcp_address import TcpAddress

    if manifest is None:
        return ["join through", *(f"  --network.initial_peers '[\"{address}\"]'" for address in addresses)]
    own = {(address.peer_id, address.port) for address in map(TcpAddress.parse, addresses)}
    listed = [(text, TcpAddress.parse(text)) for text in manifest.bootstrap]
    if not own or any((address.peer_id, address.port) in own for _, address in listed):
        return []
    others = [text for text, address in listed if address.peer_id not in {peer_id for peer_id, _ in own}]
    named = " ".join(f"--bootstrap {text}" for text in (*addresses[:1], *others))
    of_founder = "manifest.toml" if manifest.silo else f"{manifest.name}.swarm.toml"
    file = shlex.quote(of_founder if source is None or "://" in source else source)
    key = " --key silo-owner.key" if manifest.silo else ""
    step = f"  swarm create --update {file}{key} {named}"
    elsewhere = [f"  it also has the address {address}" for address in addresses[1:]]
    said = "its address is not in the manifest yet; the founder puts it there with"
    if source is None:
        said = (
            f"its address is not in edition {manifest.edition} of the manifest, which it read last; if a later one has it, "
            "restart with --manifest FILE; else the founder puts it there with"
        )
    return [said, step, *elsewhere]


async def _serve(start: BootstrapStart, files: "NodeFolder", identity: "Identity") -> None:
    import asyncio

    from swarm.machine.stop_signals import obey_stop_signals
    from swarm.network.context import NodeContext
    from swarm.observability.http_server import HttpServer
    from swarm.observability.metrics import Metrics
    from swarm.observability.status_file import NodeStatus, StatusFile
    from swarm.sharing.header_relay import HeaderRelay
    from swarm.sharing.index import EntryValidator
    from swarm.silo.silo_transport import node_transport

    config, stop, metrics = start.config, asyncio.Event(), Metrics()
    obey_stop_signals(stop.set)
    transport = node_transport(config, identity, files, EntryValidator(config.swarm_id))
    assert transport is not None, "the network of a bootstrap peer is on"
    relay = HeaderRelay(config.sharing, NodeContext.of(identity, config.swarm_id, transport))
    http = HttpServer(config.observability, metrics, lambda: {"phase": "serving"})
    started_at, status_file = time.time(), StatusFile(files.status)

    def write_status(phase: str, num_connected: int | None = None) -> None:
        status = NodeStatus(
            peer_id=identity.peer_id, peer_name=identity.peer_name, pid=os.getpid(), started_at=started_at, phase=phase,
            http_port=http.port, addresses=transport.addresses(), written_at=time.time(),
            command="bootstrap", num_connected=num_connected,
        )  # fmt: skip
        status_file.write(status)

    await transport.start()
    await http.start()
    work: list[asyncio.Task[None]] = []
    if config.network.gossip != "off":
        work.append(asyncio.create_task(relay.work(lambda: metrics.count("node/failed_steps"))))
    try:
        start.keep(files)
        first, *lines = [*join_through(transport.addresses(), start.source, start.manifest), ""]
        print(f"{identity.peer_name} serves" + (f"; {first}" if first else ""))
        print("".join(f"{line}\n" for line in lines if line), end="", flush=True)
        while not stop.is_set():
            write_status("serving", len(await transport.connected_peers()))
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

"""Checks how this machine and the swarm reach each other: joins briefly with a temporary identity and asks peers.

The node itself may be running; its identity and port are not used. Peers then find the running node at its port instead of
the one that asks, so reachability is not measured. If no peer answers, a plain TCP connection to each address shows why.
"""

import asyncio
import contextlib
import errno
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from swarm.config import NetworkSection
from swarm.diagnostics.check_result import CheckResult, Level, ok, problem, warning
from swarm.diagnostics.machine import check_ports
from swarm.errors import ConfigError, NetworkError, RequestError
from swarm.network.own_ports import PORTS_FILE, OwnPorts
from swarm.network.peers.dialling import PEERS_FILE, read_peers
from swarm.network.peers.surroundings import local_addresses
from swarm.network.reach.dial_back import answers_as
from swarm.network.reach.reachability import (
    ASK_TIMEOUT_S,
    MAX_TEST_BYTES,
    REACH_PROTOCOL,
    bytes_request,
    hello_request,
    look_from_outside,
    read_greeting,
)
from swarm.network.tcp_address import TcpAddress, parse_setting
from swarm.network.transport import Contact, Transport
from swarm.observability.plain_text import counted
from swarm.records.identity import create, peer_name

_TIMEOUT_S = 5.0
_NUM_ADDRESSES = 3
_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_NEWER = "ask the swarm's founder for newer addresses and put them into network.initial_peers"


async def check_unanswered(
    initial: Sequence[TcpAddress],
    hosts: Callable[[], frozenset[str]] = local_addresses,
    *,
    stored: Sequence[TcpAddress] = (),
) -> CheckResult:
    """The finding "peers" for peers none of which answers. `hosts`: addresses of this machine besides loopback.

    `stored`: where those listened that the node met before.
    """
    addresses = (*initial, *stored)
    kinds = ((len(initial), "initial"), (len(stored), "stored"))
    count = ", ".join(f"{number} {kind}" for number, kind in kinds if number)
    if not hosts() and not any(address.is_loopback for address in addresses):
        fix = "connect this machine to a network; `ip -brief address` shows its interfaces"
        return problem("peers", f"no peer can be reached ({count}): this machine has no network", fix)
    causes = await asyncio.gather(*(_cause(address) for address in addresses[:_NUM_ADDRESSES]))
    reasons = "; ".join(
        f"{address.host}:{address.port} {what}" for address, (what, _) in zip(addresses, causes, strict=False)
    )
    return problem("peers", f"no peer answers ({count}): {reasons}", causes[0][1])


async def _cause(address: TcpAddress) -> tuple[str, str]:
    """(what is wrong there, what fixes it)"""
    host, port = address.host, address.port
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port, family=_FAMILIES.get(address.kind, socket.AF_UNSPEC))
        writer.transport.abort()
    except ConnectionRefusedError:
        return "refuses the connection: nobody listens there", f"start that peer again, or {_NEWER}"
    except TimeoutError:
        fix = f"let TCP out to port {port} in your firewall (sudo ufw allow out {port}/tcp), or {_NEWER}"
        return f"is silent for {_TIMEOUT_S:.0f} s: it is gone, or a firewall is in between", fix
    except socket.gaierror as error:
        return f"is no name that is known here: {error.strerror}", f"getent hosts {host}  (does DNS work?), or {_NEWER}"
    except OSError as error:
        if error.errno in _NO_WAY:
            return "is in a network that this machine has no way to", f"ip route get {host}  (shows the missing route)"
        return f"cannot be connected to: {error.strerror or error}", _NEWER
    if address.peer_id and not await answers_as(address.peer_id, host, port, timeout_s=_TIMEOUT_S):
        return f"is open, but it is not {address.peer_id} who answers", _NEWER
    return "answers as itself, but does not take part", "start that peer again; its swarm software may be too old"


_NUM_PEERS_ASKED = 5
_NUM_STORED_TRIED = 16
_MAX_SKEW_S = 3.0
"""hivemind's DHT refuses peers whose clock differs by more."""
_WARN_SKEW_S = 1.0
_SLOW_MB_PER_S = 0.25
_BANDWIDTH_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 20.0
_HEALTH_INTERVAL_S = 1.0
_RELAY_TIMEOUT_S = 6.0
_FORWARD = "forward TCP port {port} on your router to this machine"


@dataclass(frozen=True, slots=True)
class PeerView:
    """The answer of one peer."""

    round_trip_s: float
    skew_s: float
    """Its clock minus ours."""
    mb_per_s: float | None


@dataclass(frozen=True, slots=True)
class _Known:
    """Through whom the node would join."""

    initial: tuple[TcpAddress, ...]
    stored: dict[str, tuple[str, ...]]
    """{peer id: addresses} of others that it met, those seen last."""

    def absent(self) -> tuple[TcpAddress, ...]:
        """An address of each stored peer that can be dialled without a relay."""
        peers = ((TcpAddress.parse(f"{at}/p2p/{peer_id}") for at in found) for peer_id, found in self.stored.items())
        direct = (next((one for one in addresses if one.relay_id is None), None) for addresses in peers)
        return tuple(address for address in direct if address is not None)


async def check_swarm(config: NetworkSection, state_dir: Path | None = None) -> list[CheckResult]:
    """Findings of peers, reachability, relay, clock and bandwidth. Raises nothing.

    `state_dir`: the node's folder, for the peers that it met and the ports that it had.
    """
    try:
        known, listen = _known(config, state_dir), parse_setting("listen", config.listen)
    except ConfigError as error:
        return [problem("network", str(error), "correct that setting")]
    if not (known.initial or known.stored):
        return [ok("peers", "no peers are configured or stored: reachability, clock and bandwidth are not measured")]
    if state_dir is not None:
        last = OwnPorts(state_dir / PORTS_FILE).last("listen", listen)
        config = config.model_copy(update={"listen": tuple(map(str, last))})
    has_port = check_ports(config.listen).level is Level.OK
    with tempfile.TemporaryDirectory(prefix="swarm-doctor-") as name:
        try:
            transport = _transport(config, Path(name), has_port)
        except ConfigError as error:
            return [problem("network", str(error), "correct that setting")]
        for peer_id, addresses in known.stored.items():
            transport.meet(Contact(peer_id, addresses, (), hosts_index=True))
        try:
            await transport.start()
            return await _look(transport, config, known, is_alone=has_port)
        except NetworkError as error:
            return [
                problem(
                    "network", str(error), "first fix what is reported of the daemon and the port, then run this again"
                )
            ]
        finally:
            await transport.stop()


def _known(config: NetworkSection, state_dir: Path | None) -> _Known:
    """Raises ConfigError."""
    initial = parse_setting("initial_peers", config.initial_peers)
    names = {address.peer_id for address in initial}
    found = read_peers(state_dir / PEERS_FILE, time.time()).values() if state_dir is not None else ()
    others = sorted((peer for peer in found if peer.peer_id not in names), key=lambda peer: -peer.last_seen)
    return _Known(initial, {peer.peer_id: peer.addresses for peer in others[:_NUM_STORED_TRIED]})


def _transport(config: NetworkSection, folder: Path, has_port: bool) -> Transport:
    """A stranger without gossip that hosts nothing, on the node's own port where that is free. Raises ConfigError."""
    changes: dict[str, object] = {"reachability": "private", "gossip": "off"}
    changes["startup_timeout_s"] = min(config.startup_timeout_s, _START_TIMEOUT_S)
    if not has_port:
        changes["listen"] = ("/ip4/0.0.0.0/tcp/0",)
    quiet, identity = config.model_copy(update=changes), create(folder / "identity.key")
    if config.backend == "hivemind":
        from swarm.network.hivemind.transport import HivemindTransport

        return HivemindTransport(quiet, identity, folder, health_interval_s=_HEALTH_INTERVAL_S)
    from swarm.network.libp2p.transport import LightTransport

    return LightTransport(quiet, identity, folder)


async def _look(transport: Transport, config: NetworkSection, known: _Known, *, is_alone: bool) -> list[CheckResult]:
    peers = await transport.connected_peers()
    if not peers:
        return [await check_unanswered(known.initial, stored=known.absent())]
    views = [view for peer in peers[:_NUM_PEERS_ASKED] if (view := await _view(transport, peer)) is not None]
    findings = [await _peers_finding(known, peers, len(views))]
    if config.backend != "hivemind":
        findings.append(ok("reachability", "not measured: a node of this backend calls others and need not be called"))
    elif is_alone:
        findings.append(await _reachability(transport, config, peers))
    else:
        findings.append(ok("reachability", "not measured: the port is in use, perhaps by this node itself"))
    if findings[-1].level is not Level.OK:
        findings.append(await _relay(transport, config, peers))
    return [*findings, *(judge_views(views) if views else [])]


async def _peers_finding(known: _Known, peers: Sequence[str], num_views: int) -> CheckResult:
    """Who is connected, and what is wrong with the initial peers where it is none of them."""
    text = f"{counted(len(peers), 'peer')} connected, {num_views} of {min(len(peers), _NUM_PEERS_ASKED)} that were asked answered"
    met = [peer_name(peer_id) for peer_id in peers if peer_id in known.stored]
    if met:
        more = ", …" if len(met) > _NUM_PEERS_ASKED else ""
        text += f"; {len(met)} of {len(known.stored)} stored: {', '.join(met[:_NUM_PEERS_ASKED])}{more}"
    if known.initial and not any(address.peer_id in peers for address in known.initial):
        cause = await check_unanswered(known.initial)
        return warning("peers", f"{text}; {cause.text}", cause.fix)
    return ok("peers", text) if num_views else warning("peers", text, "run it again in a minute; they may be busy")


async def _relay(transport: Transport, config: NetworkSection, peers: Sequence[str]) -> CheckResult:
    """For a node that cannot be dialled: whether a relay lets others reach it."""
    relays = parse_setting("relays", config.relays) or parse_setting("initial_peers", config.initial_peers)
    own = local_addresses()
    if relays and all(address.is_loopback or address.host in own for address in relays):
        return ok("relay", "not measured: who would relay is on this machine, and others do not reach it that way")
    fix = "set network.relays to the address of a public node that has network.serve_relay = true"
    if not any(peer_id in peers for address in relays for peer_id in (address.peer_id, address.relay_id)):
        who = f"no peer that is asked to relay answers ({len(relays)})" if relays else "nobody is asked to relay"
        return warning("relay", f"{who}: this node can ask others, but they cannot ask it", fix)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RELAY_TIMEOUT_S):
            while True:  # the daemon asks for a place in the background, and the transport looks once per second
                for address in map(TcpAddress.parse, transport.addresses()):
                    if address.relay_id is not None:
                        return ok("relay", f"others can reach this node through {address.host}:{address.port}")
                await asyncio.sleep(_HEALTH_INTERVAL_S / 2)
    text = f"no relay gave a place within {_RELAY_TIMEOUT_S:.0f} s; a node without one can ask others, not they it"
    wait = "a place may take longer: run it again in a minute"
    return warning("relay", text, f"{wait}; if that stays so, {fix}")


async def _view(transport: Transport, peer_id: str) -> PeerView | None:
    async def ask(request: bytes, deadline_s: float) -> tuple[bytes, float]:
        start = time.monotonic()
        response = await transport.request(
            peer_id, REACH_PROTOCOL, request, max_response_bytes=MAX_TEST_BYTES, deadline_s=deadline_s
        )
        return response, time.monotonic() - start

    try:
        await ask(hello_request(), ASK_TIMEOUT_S)  # opens what has to be opened
        response, round_trip_s = await ask(hello_request(), ASK_TIMEOUT_S)
        skew_s = read_greeting(response).time_s + round_trip_s / 2 - transport.now()
    except RequestError:
        return None
    try:
        _, seconds = await ask(bytes_request(MAX_TEST_BYTES), _BANDWIDTH_TIMEOUT_S)
        return PeerView(round_trip_s, skew_s, MAX_TEST_BYTES / 1e6 / seconds)
    except RequestError:
        return PeerView(round_trip_s, skew_s, None)


async def _reachability(transport: Transport, config: NetworkSection, peers: Sequence[str]) -> CheckResult:
    async def ask(peer_id: str, request: bytes) -> bytes:
        return await transport.request(
            peer_id, REACH_PROTOCOL, request, max_response_bytes=1024, deadline_s=ASK_TIMEOUT_S
        )

    listen = parse_setting("listen", config.listen)
    if all(address.is_loopback for address in listen):
        return ok("reachability", "listens on loopback only: for nodes of this machine")
    known = parse_setting("announce", config.announce) or listen
    ports = tuple(dict.fromkeys(one.port for one in known if one.port and not one.is_loopback))
    if not ports:
        fix = "start the node once, or set network.listen to /ip4/0.0.0.0/tcp/PORT with a port of your choice"
        return warning("reachability", "the port is not known before the first start, which takes a free one", fix)
    found = await look_from_outside(ask, peers, ports)
    forward = _FORWARD.format(port=ports[0])
    if found.is_reachable and found.address is not None:
        return ok("reachability", f"peers can dial {found.address}")
    if found.is_reachable is None:
        return warning("reachability", "no peer could tell", "run it again when other peers are there")
    fix = f"{forward}, or leave it: the node works through relays"
    return warning("reachability", f"no peer can dial port {ports[0]} from outside", fix)


def judge_views(views: Sequence[PeerView]) -> list[CheckResult]:
    """Findings "clock" and "bandwidth": medians over the peers, so that one wrong peer alarms nobody."""
    skew_s = median(view.skew_s for view in views)
    round_trip_ms = median(view.round_trip_s for view in views) * 1e3
    text = f"differs by {abs(skew_s):.2f} s from {counted(len(views), 'peer')}"
    fix = "sudo timedatectl set-ntp true"
    clock = ok("clock", text)
    if abs(skew_s) > _WARN_SKEW_S:
        clock = (problem if abs(skew_s) > _MAX_SKEW_S else warning)("clock", text, fix)
    rates = [view.mb_per_s for view in views if view.mb_per_s is not None]
    if not rates:
        return [clock, warning("bandwidth", f"not measured; round trip {round_trip_ms:.0f} ms", "run it in a minute")]
    text = f"{median(rates):.2f} MB/s from {counted(len(rates), 'peer')}, round trip {round_trip_ms:.0f} ms"
    if median(rates) < _SLOW_MB_PER_S:
        return [clock, warning("bandwidth", text, "set sharing.swarm_groups lower, or use a faster line")]
    return [clock, ok("bandwidth", text)]

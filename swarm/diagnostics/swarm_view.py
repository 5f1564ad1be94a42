"""How this machine and the swarm see each other: joins for a moment with a throw-away identity and asks peers.

The node itself may be running meanwhile: its identity and port stay alone. Then the peers dial the running node's port
and find another peer there than the one that asks, so that reachability is not measured.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from swarm.config import NetworkSection
from swarm.diagnostics.finding import Finding, Level, ok, problem, warning
from swarm.diagnostics.machine import check_ports
from swarm.errors import NetworkError, RequestError
from swarm.network.reach.reachability import (
    ASK_TIMEOUT_S,
    MAX_TEST_BYTES,
    REACH_PROTOCOL,
    bytes_request,
    hello_request,
    look_from_outside,
    read_greeting,
)
from swarm.network.tcp_address import parse_setting
from swarm.network.transport import Transport
from swarm.records.identity import create

_NUM_PEERS_ASKED = 5
_MAX_SKEW_S = 3.0
"""hivemind's DHT refuses peers whose clock differs by more."""
_WARN_SKEW_S = 1.0
_SLOW_MB_PER_S = 0.25
_BANDWIDTH_TIMEOUT_S = 20.0
_FORWARD = "forward TCP port {port} on your router to this machine"


@dataclass(frozen=True, slots=True)
class PeerView:
    """What one peer told."""

    round_trip_s: float
    skew_s: float
    """Its clock minus ours."""
    mb_per_s: float | None


async def check_swarm(config: NetworkSection) -> list[Finding]:
    """Findings of peers, reachability, clock and bandwidth. Raises nothing."""
    from swarm.network.hivemind.transport import HivemindTransport

    if not config.initial_peers:
        return [ok("peers", "no initial peers are configured: reachability, clock and bandwidth are not measured")]
    has_port = check_ports(config.listen).level is Level.OK
    changes = {"reachability": "private", "startup_timeout_s": min(config.startup_timeout_s, 20.0)}
    if not has_port:
        changes["listen"] = ("/ip4/0.0.0.0/tcp/0",)
    with tempfile.TemporaryDirectory(prefix="swarm-doctor-") as name:
        folder = Path(name)
        transport = HivemindTransport(config.model_copy(update=changes), create(folder / "identity.key"), folder)
        try:
            await transport.start()
            return await _look(transport, config, is_alone=has_port)
        except NetworkError as error:
            return [problem("network", str(error), "swarm doctor --json, and see the finding `daemon`")]
        finally:
            await transport.stop()


async def _look(transport: Transport, config: NetworkSection, *, is_alone: bool) -> list[Finding]:
    peers = await transport.connected_peers()
    if not peers:
        return [
            problem(
                "peers",
                f"none of {len(config.initial_peers)} initial peers answers",
                "check network.initial_peers and that a firewall lets TCP out, or ask for newer addresses",
            )
        ]
    views = [view for peer in peers[:_NUM_PEERS_ASKED] if (view := await _view(transport, peer)) is not None]
    findings = [ok("peers", f"{len(peers)} connected, {len(views)} of those asked answered")]
    if is_alone:
        findings.append(await _reachability(transport, config, peers))
    else:
        findings.append(ok("reachability", "not measured: the port is in use, perhaps by this node itself"))
    return [*findings, *(judge_views(views) if views else [])]


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


async def _reachability(transport: Transport, config: NetworkSection, peers: Sequence[str]) -> Finding:
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
        fix = "set network.listen to /ip4/0.0.0.0/tcp/PORT with a port of your choice"
        return warning("reachability", "the port changes with every start", fix)
    found = await look_from_outside(ask, peers, ports)
    forward = _FORWARD.format(port=ports[0])
    if found.is_reachable and found.address is not None:
        return ok("reachability", f"peers can dial {found.address}")
    if found.is_reachable is None:
        return warning("reachability", "no peer could tell", "run it again when other peers are there")
    fix = f"{forward}, or leave it: the node works through relays"
    return warning("reachability", f"no peer can dial port {ports[0]} from outside", fix)


def judge_views(views: Sequence[PeerView]) -> list[Finding]:
    """Findings "clock" and "bandwidth": medians over the peers, so that one wrong peer alarms nobody."""
    skew_s = median(view.skew_s for view in views)
    round_trip_ms = median(view.round_trip_s for view in views) * 1e3
    text = f"differs by {abs(skew_s):.2f} s from {len(views)} peers"
    fix = "sudo timedatectl set-ntp true"
    clock = ok("clock", text)
    if abs(skew_s) > _WARN_SKEW_S:
        clock = (problem if abs(skew_s) > _MAX_SKEW_S else warning)("clock", text, fix)
    rates = [view.mb_per_s for view in views if view.mb_per_s is not None]
    if not rates:
        return [clock, warning("bandwidth", f"not measured; round trip {round_trip_ms:.0f} ms", "run it in a minute")]
    text = f"{median(rates):.2f} MB/s from {len(rates)} peers, round trip {round_trip_ms:.0f} ms"
    if median(rates) < _SLOW_MB_PER_S:
        return [clock, warning("bandwidth", text, "set sharing.swarm_groups lower, or use a faster line")]
    return [clock, ok("bandwidth", text)]

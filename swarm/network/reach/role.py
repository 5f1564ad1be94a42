"""The part a node takes in the network: seen by everyone, behind a router, or alone on its machine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.config import NetworkSection
from swarm.network.tcp_address import CIRCUIT, TcpAddress, parsed

_RELAY_MAX_RESERVATIONS = 256
_RELAY_MAX_CIRCUITS_PER_PEER = 16
_RELAY_BUFFER_BYTES = 64 * 1024
"""Per circuit and direction. The daemon's own default of 16 MiB would let 60 circuits fill 2 GB."""
RELAY_MAX_BYTES = 1 << 30
"""Per circuit and direction: a few adapters. The limit of libp2p, 128 KiB, ends every transfer."""
_RELAY_TIME_LIMIT = "30m"


@dataclass(frozen=True, slots=True)
class Role:
    """What the libp2p daemon and the DHT node of one session are started as."""

    is_full: bool
    """Reachable: hosts index entries and helps others to find peers. Otherwise a client of those who do."""
    is_local: bool = False
    """Listens on loopback only: no routers, no relays."""
    relays: tuple[str, ...] = ()
    """Multiaddresses of relays that hold a reservation for a client."""
    serves_relay: bool = False
    punches_holes: bool = True
    gossips: bool = False
    """Runs the daemon's own pubsub."""

    @property
    def is_relay(self) -> bool:
        """Carries circuits between peers that cannot dial each other."""
        return self.is_full and self.serves_relay and not self.is_local

    def daemon_flags(self) -> list[str]:
        """The daemon's flags for routing, reachability and relays."""
        # As a server of its own DHT the daemon would keep what strangers put there, without a bound. As a client it
        # answers nobody, and still tells where connected peers listen; the rest is up to `peers.peer_routing`.
        basics = ["-dhtClient=1"]
        if self.gossips:
            basics += ["-pubsub=1", "-gossipsubHeartbeatInterval=1s", "-gossipsubHeartbeatInitialDelay=100ms"]
        if self.is_local:
            return [*basics, "-autonat=0", "-relay=0"]
        flags = [
            *basics,
            f"-autonat={int(self.punches_holes)}",  # the daemon has one switch for AutoNAT's service and hole punching
            "-relay=1",  # also needed to reach others through one
            "-forceReachabilityPublic=1" if self.is_full else "-forceReachabilityPrivate=1",
        ]
        if self.is_relay:
            return [
                *flags,
                "-relayService=1",
                f"-relayMaxReservations={_RELAY_MAX_RESERVATIONS}",
                f"-relayMaxCircuits={_RELAY_MAX_CIRCUITS_PER_PEER}",
                f"-relayBufferSize={_RELAY_BUFFER_BYTES}",
                f"-relayDataLimit={RELAY_MAX_BYTES}",
                f"-relayTimeLimit={_RELAY_TIME_LIMIT}",
            ]
        flags.append("-relayService=0")
        if not self.is_full and self.relays:
            # Without discovery the daemon asks the named relays at once, with it only after a quarter of a minute.
            flags += ["-autoRelay=1", "-relayDiscovery=0", f"-trustedRelays={','.join(self.relays)}"]
        return flags

    @property
    def daemon_environment(self) -> dict[str, str]:
        """Variables for the daemon on top of this process's own.

        Of the two relays that a daemon starts (`start_relay`), ours stays more often on a single processor: 31 of 40
        times, else 18. It relays 57 MB/s there.
        """
        return {"GOMAXPROCS": "1"} if self.is_relay else {}


def told_by_daemon(
    told: Iterable[str], relays: Iterable[str], connected: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The addresses of this node, of those that its daemon tells.

    The daemon passes on whatever a relay says of its own addresses: those of bystanders, of kinds that no node uses, and so
    many that no others find a place in the presence. So of a circuit only the relay's name counts; the address is one at
    which this node itself reaches that relay. `relays`: as in `Role`. `connected`: {peer id: addresses it is seen at}.
    """
    addresses = parsed(told)
    own = [address.transport for address in addresses if address.relay_id is None]
    reserved = {address.relay_id for address in addresses}
    for relay in map(TcpAddress.parse, relays):
        if relay.peer_id is not None and relay.peer_id in reserved:
            ways = [relay]
            if relay.kind not in ("ip4", "ip6"):  # only those that are configured in the same way look the name up
                ways += [way for way in parsed(connected.get(relay.peer_id, ())) if way.relay_id is None]
            own += [f"{way.transport}/p2p/{relay.peer_id}{CIRCUIT}" for way in ways]
    return tuple(dict.fromkeys(own))


def role_of(
    config: NetworkSection, listen: Sequence[TcpAddress], relays: Sequence[TcpAddress], *, is_reachable: bool
) -> Role:
    """The role that the settings and the present knowledge of reachability give. `relays` each name a peer."""
    return Role(
        is_full=is_reachable,
        is_local=all(address.is_loopback for address in listen),
        relays=tuple(str(relay) for relay in relays if relay.relay_id is None),
        serves_relay=config.serve_relay,
        punches_holes=config.hole_punching,
        gossips=config.gossip == "daemon",
    )

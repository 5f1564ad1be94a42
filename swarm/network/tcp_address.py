"""The multiaddresses that nodes use: `/ip4/HOST/tcp/PORT`, followed by `/p2p/PEER_ID` where the address names a peer.

A peer that cannot be dialled is reached through a circuit: `ADDRESS OF RELAY/p2p/RELAY/p2p-circuit/p2p/PEER_ID`. Other
transports are refused; QUIC loses the last piece of a stream.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from swarm.errors import ConfigError
from swarm.records.identity import is_peer_id

CIRCUIT = "/p2p-circuit"
_SHAPE = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/([A-Za-z0-9._:-]{1,253})/tcp/([0-9]{1,5})"
    r"(?:/p2p/([A-Za-z0-9]{1,64})/p2p-circuit)?(?:/p2p/([A-Za-z0-9]{1,64}))?"
)
_LABEL = "(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_DNS_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    kind: str
    """ip4, ip6, dns, dns4 or dns6."""
    host: str
    port: int
    peer_id: str | None = None
    relay_id: str | None = None
    """Peer id of the relay at this host and port, where the address is a circuit through it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError with the reason."""
        match = _SHAPE.fullmatch(text)
        if match is None and "/quic" in text:
            raise ValueError("QUIC loses the last piece of a stream; use /tcp/PORT")
        if match is None:
            raise ValueError("its form is /ip4/HOST/tcp/PORT, ending in /p2p/PEER_ID where it names a peer")
        kind, host, port, relay_id, peer_id = match.groups()
        if kind in ("ip4", "ip6"):
            {"ip4": ipaddress.IPv4Address, "ip6": ipaddress.IPv6Address}[kind](host)
        elif _DNS_NAME.fullmatch(host) is None:
            raise ValueError(f"{host} is not a host name")
        if int(port) > 65535:
            raise ValueError(f"{port} is not a port")
        for name in (relay_id, peer_id):
            if name is not None and not is_peer_id(name):
                raise ValueError(f"{name} is not the peer id of an Ed25519 key (12D3KooW...)")
        return cls(kind, host, int(port), peer_id=peer_id, relay_id=relay_id)

    @property
    def transport(self) -> str:
        """Return the address without the peer id."""
        circuit = "" if self.relay_id is None else f"/p2p/{self.relay_id}{CIRCUIT}"
        return f"/{self.kind}/{self.host}/tcp/{self.port}{circuit}"

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can use the address."""
        return self.kind in ("ip4", "ip6") and ipaddress.ip_address(self.host).is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether the address stands for every address of the machine."""
        return self.kind in ("ip4", "ip6") and ipaddress.ip_address(self.host).is_unspecified

    def __str__(self) -> str:
        return self.transport if self.peer_id is None else f"{self.transport}/p2p/{self.peer_id}"


def parsed(texts: Iterable[str]) -> list[TcpAddress]:
    """Return the addresses that are valid; the others are skipped."""
    addresses = []
    for text in texts:
        try:
            addresses.append(TcpAddress.parse(text))
        except ValueError:
            continue
    return addresses


def parse_setting(
    setting: Literal["listen", "announce", "initial_peers", "relays", "gossip_listen", "gossip_announce"],
    texts: Sequence[str],
) -> tuple[TcpAddress, ...]:
    """Parse the addresses of one setting of the network section. Raises ConfigError with rule, value and fix."""
    if setting == "listen" and not texts:
        raise ConfigError("network.listen must hold an address, got none; use /ip4/127.0.0.1/tcp/0")
    return tuple(_parse_one(setting, text) for text in texts)


def _parse_one(setting: str, text: str) -> TcpAddress:
    try:
        address = TcpAddress.parse(text)
    except ValueError as error:
        raise ConfigError(f"network.{setting} must hold TCP multiaddresses, got {text!r}: {error}") from None
    is_own = setting in ("listen", "gossip_listen")
    if is_own and address.kind not in ("ip4", "ip6"):
        raise ConfigError(f"network.{setting} must hold numeric addresses, got {text!r}; use /ip4/0.0.0.0/tcp/PORT")
    names_peers = setting in ("initial_peers", "relays")
    if names_peers and address.peer_id is None:
        raise ConfigError(f"network.{setting} must end in /p2p/PEER_ID, got {text!r}; append the peer's id")
    if not names_peers and (address.peer_id or address.relay_id) is not None:
        raise ConfigError(f"network.{setting} must not name a peer, got {text!r}; remove /p2p/...")
    if setting == "relays" and address.relay_id is not None:
        raise ConfigError(
            f"network.relays must be reachable themselves, got {text!r}; name a relay with a public address"
        )
    if not is_own and address.port == 0:
        raise ConfigError(f"network.{setting} must name a port, got {text!r}; replace 0 by the real one")
    return address


def with_actual_ports(wanted: Sequence[TcpAddress], actual: Iterable[str]) -> tuple[TcpAddress, ...]:
    """Fill in the ports that the system chose for port 0, so that a restart listens where others know the node."""
    found = [TcpAddress.parse(text) for text in actual if CIRCUIT not in text]
    return tuple(_with_port(address, found) if address.port == 0 else address for address in wanted)


def _with_port(wanted: TcpAddress, found: Sequence[TcpAddress]) -> TcpAddress:
    for address in found:
        if address.kind == wanted.kind and (wanted.is_wildcard or address.host == wanted.host):
            return replace(wanted, port=address.port)
    return wanted

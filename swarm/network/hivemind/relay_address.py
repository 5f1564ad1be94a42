"""Circuit addresses (`.../p2p/RELAY/p2p-circuit`: to a peer through a relay) as the libp2p daemon wants and gives them.

hivemind's own multiaddr codec writes a peer id inside an address in a way that the daemon cannot read, so the part from
the relay's id on is written and read here. Imports hivemind: only `daemon_control` may import this module.
"""

import base58

from swarm.network.hivemind.parts import Multiaddr
from swarm.network.tcp_address import CIRCUIT

_P2P_CODE = b"\xa5\x03"  # 421 as a varint
_CIRCUIT_CODE = b"\xa2\x02"  # 290
_MAX_PEER_ID_BYTES = 127  # so that its length is a varint of one byte


def address_bytes(text: str) -> bytes:
    """The binary form of an address, circuits included. Raises ValueError or LookupError for what is no multiaddress."""
    if not text.endswith(CIRCUIT):
        return Multiaddr(text).to_bytes()
    way, separator, relay_id = text.removesuffix(CIRCUIT).partition("/p2p/")
    peer_id = base58.b58decode(relay_id)
    if not separator or not 0 < len(peer_id) <= _MAX_PEER_ID_BYTES:
        raise ValueError(f"a circuit address must name its relay, got {text!r}")
    return Multiaddr(way).to_bytes() + _P2P_CODE + bytes([len(peer_id)]) + peer_id + _CIRCUIT_CODE


def address_text(data: bytes) -> str:
    """The opposite. Raises ValueError or LookupError for a kind of address that hivemind does not know."""
    if not data.endswith(_CIRCUIT_CODE):
        return _text(data)
    for start in range(
        len(data)
    ):  # the peer id is the last part before the circuit, and its length says where it begins
        head, rest = data[:start], data[start : -len(_CIRCUIT_CODE)]
        if rest.startswith(_P2P_CODE) and len(rest) > 3 and rest[2] == len(rest) - 3:
            return f"{_text(head)}/p2p/{base58.b58encode(rest[3:]).decode()}{CIRCUIT}"
    raise ValueError("a circuit address without a relay")


def _text(data: bytes) -> str:
    try:
        return str(Multiaddr(data))
    except (TypeError, OverflowError):  # hivemind's words for a number that ends too early, or never
        raise ValueError("an address with a broken number") from None

"""Has the system close TCP connections on which nothing comes back any more.

After a sleep, a change of network, or in a router that forgot it, a connection is dead and neither end is told: Linux
tries for a quarter of an hour. A gossip plane would take its neighbours for present all that time and look for no others.
"""

import logging
import socket
from typing import Any

from swarm.network.libp2p.parts import INetConn, INetwork, INotifee

logger = logging.getLogger(__name__)

SILENCE_S = 30
"""Longest time without an answer of the other end's system to data or to the question whether it is there."""
_FIRST_QUESTION_S = 10
_QUESTION_INTERVAL_S = 5
_INNER = ("conn", "stream", "socket")
"""Under these names py-libp2p's layers hold the next one: security, framing, raw connection, trio's stream, socket."""
_MAX_LAYERS = 8


class DeadLines(INotifee):
    """To be registered with a host's network."""

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        secured: Any = conn.muxed_conn  # the interface does not tell what is beneath
        line = _socket_of(secured.secured_conn)
        if line is None:
            logger.warning("a connection has no socket that is known: it is noticed late when it dies")
            return
        try:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _options():
                line.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError as error:  # it is closed already, or this system does not know the option
            logger.debug("a connection keeps the system's own patience: %s", error)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: object) -> None: ...

    async def closed_stream(self, network: INetwork, stream: object) -> None: ...

    async def listen(self, network: INetwork, multiaddr: object) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: object) -> None: ...


def _options() -> list[tuple[int, int]]:
    """(TCP option, value) of those that this system has: Linux all, others some."""
    num_questions = (SILENCE_S - _FIRST_QUESTION_S) // _QUESTION_INTERVAL_S
    wanted = {
        "TCP_KEEPIDLE": _FIRST_QUESTION_S,
        "TCP_KEEPINTVL": _QUESTION_INTERVAL_S,
        "TCP_KEEPCNT": num_questions,
        "TCP_USER_TIMEOUT": SILENCE_S * 1000,  # for data that was sent
    }
    return [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]


def _socket_of(layer: Any) -> Any:
    """What has `setsockopt`, beneath the layers of a connection; None where py-libp2p is built otherwise."""
    for _ in range(_MAX_LAYERS):
        if layer is None or hasattr(layer, "setsockopt"):
            return layer
        layer = next((getattr(layer, name) for name in _INNER if hasattr(layer, name)), None)
    return None

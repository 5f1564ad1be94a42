"""The ports of a host: free before it opens them, closed after it has ended. py-libp2p itself sees to neither."""

import logging
from typing import Any

from swarm.errors import NetworkError
from swarm.network.libp2p.parts import IHost, trio
from swarm.network.own_ports import try_port
from swarm.network.tcp_address import TcpAddress

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0


def check_free(address: TcpAddress) -> None:
    """Raises NetworkError for a port that another program has: py-libp2p would share it, and lose connections to it."""
    try:
        try_port(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise NetworkError(f"py-libp2p must start on {address}, got {reason}; choose another port") from None


async def take_leave(host: IHost) -> None:
    """Close ports and connections. In trio; py-libp2p, when cancelled, leaves its ports open and accepting for good."""
    network: Any = host.get_network()  # a Swarm; the interface does not tell of its parts
    with trio.move_on_after(CLOSE_TIMEOUT_S) as scope:
        scope.shield = True
        async with trio.open_nursery() as nursery:
            for part in (*network.listeners.values(), *network.get_connections()):
                nursery.start_soon(_close, part)


async def _close(part: Any) -> None:
    connection = getattr(part, "muxed_conn", None)
    try:
        await part.close()  # of a connection that was cancelled, this does not reach the socket
        if connection is not None:
            await connection.secured_conn.close()
    except Exception as error:  # it is broken already
        logger.debug("a part of the host did not close: %s: %s", type(error).__name__, error)

"""Who may connect to a py-libp2p host, and how much of it a connection may use.

    TCP ─ handshake (place for a moment) ─ Noise ─ BoundedYamux ─ connection (place while it lasts) ─ streams

py-libp2p itself gives every connection that was ever accepted a place for as long as the host lives, lets silent
connections hold all places, and also speaks plaintext, in which anybody can claim anybody's peer id.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from swarm.fair_places import FairPlaces, NoPlace
from swarm.network.libp2p.bounded_yamux import YamuxOnly
from swarm.network.libp2p.parts import (
    NOISE_PROTOCOL_ID,
    IHost,
    INetStream,
    KeyPair,
    NoiseTransport,
    RawConnection,
    TProtocol,
    create_new_x25519_key_pair,
    trio,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
MAX_INBOUND_CONNECTIONS = 96
"""The rest is for peers that this node chose itself, so that strangers cannot fill all."""
MAX_HANDSHAKES = 64
HANDSHAKE_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0


def security_of(key_pair: KeyPair) -> dict[TProtocol, Any]:
    """Noise alone: it proves who is there, and the daemon speaks it too."""
    return {NOISE_PROTOCOL_ID: NoiseTransport(key_pair, create_new_x25519_key_pair().private_key)}


class InboundDoor:
    """Takes the place of py-libp2p's own handling of inbound connections."""

    def __init__(self, refused: Counter[str]) -> None:
        """`refused` is told what was turned away: handshake, connections, streams, overrun, broken."""
        self._refused = refused
        self._handshakes = FairPlaces(MAX_HANDSHAKES, newest_wins=True)
        self._connections = FairPlaces(MAX_INBOUND_CONNECTIONS)

    def install(self, host: IHost) -> None:
        """For a host that does not run yet."""
        self._network: Any = host.get_network()  # a Swarm; the interface does not tell of its parts
        self._network._handle_inbound_connection = self._take
        self._network.upgrader.muxer_multistream = YamuxOnly(self._refused)
        self._network.set_stream_handler(self._guarded(self._network.common_stream_handler))

    def _guarded(self, handler: Callable[[INetStream], Awaitable[None]]) -> Callable[[INetStream], Awaitable[None]]:
        """py-libp2p's own handlers, such as identify, would end the host with what they raise."""

        async def answer(stream: INetStream) -> None:
            try:
                await handler(stream)
            except Exception as error:
                logger.debug("an inbound stream broke: %s: %s", type(error).__name__, error)
                self._refused["broken"] += 1
                with contextlib.suppress(Exception):
                    await stream.reset()

        return answer

    async def _take(self, stream: Any, listen_address: Any) -> None:
        """From the first byte of a connection to its last. Raises nothing."""
        remote = stream.get_remote_address()
        address = remote[0] if remote else ""
        raw = RawConnection(stream, False)
        try:
            connection = await self._shake_hands(address, raw, listen_address)
            if connection is not None:
                await self._keep(address, connection)
        except NoPlace:
            self._refused["connections"] += 1
        except Exception:  # py-libp2p has dozens of types for "this handshake failed"
            self._refused["handshake"] += 1
        finally:
            with trio.move_on_after(_CLOSE_TIMEOUT_S) as scope:
                scope.shield = True
                await raw.close()

    async def _shake_hands(self, address: str, raw: RawConnection, listen_address: Any) -> Any:
        """The connection; None where it had to give way to another or was too slow."""
        with trio.move_on_after(HANDSHAKE_TIMEOUT_S) as scope, self._handshakes.hold(address, scope.cancel):
            return await self._network.upgrade_inbound_raw_conn(raw, listen_address)
        self._refused["handshake"] += 1
        return None

    async def _keep(self, address: str, connection: Any) -> None:
        with trio.move_on_at(math.inf) as scope, self._connections.hold(address, scope.cancel):
            await connection.event_closed.wait()
            return
        if scope.cancelled_caught:
            self._refused["connections"] += 1

"""A daemon that relays with the limits it was given.

Told to be public, the daemon starts two relays that replace each other: ours from its background work, and one with
libp2p's limits of 128 KiB and 2 minutes per circuit, which end every transfer, from its main thread of work. The later
one stays, and which that was only a peer is told that asks for a reservation. So a second daemon asks, and the first
is started again until ours has stayed: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md#reservation.
Imports hivemind: only `session` may import this module.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from swarm.errors import NetworkError
from swarm.network.hivemind.daemon import Daemon, DaemonSettings
from swarm.network.hivemind.daemon_control import DaemonControl
from swarm.network.reach.role import RELAY_MAX_BYTES, Role
from swarm.network.tcp_address import TcpAddress

logger = logging.getLogger(__name__)

_MAX_STARTS = 10
"""Ours stays three times in five, or more often."""
_ASKING_TIMEOUT_S = 5.0
_HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = b"\x02\x08\x00"
"""A HopMessage of type RESERVE, with its length before it."""
_LIMIT_FIELD, _DATA_FIELD, _STATUS_FIELD = 4, 2, 5
_STATUS_OK = 100
_MAX_ANSWER_BYTES = 4096
"""libp2p's own bound for a message of this protocol."""
_ASKER_LISTENS = TcpAddress.parse("/ip4/127.0.0.1/tcp/0")


async def start_relay(daemon: Daemon, folder: Path, listen: Sequence[TcpAddress], timeout_s: float) -> None:
    """Returns with the started `daemon` still running, or running again, as a relay with our limits.

    `folder`: for the socket of the daemon that asks. A relay that cannot be asked, or never gets our limits, is told
    and left as it is. Raises NetworkError where the daemon does not start again.
    """
    control = DaemonControl(daemon.control_socket)
    for num_starts in range(1, _MAX_STARTS + 1):
        try:
            peer_id, addresses = await control.identity()
            nearby = [str(_nearby(one)) for one in listen if one.port]  # what is announced may be beyond a router
            granted = await granted_bytes(daemon.binary, folder, peer_id, [*nearby, *addresses])
        except NetworkError as error:
            logger.info("what this relay grants could not be asked: %s", error)
            return
        if granted is None or granted >= RELAY_MAX_BYTES:
            logger.debug("relay with our limits at start %d", num_starts)
            return
        if num_starts < _MAX_STARTS:
            await daemon.stop()
            await daemon.start(timeout_s)
    logger.warning("this relay ends circuits after %d bytes: no bodies will pass through it; start it again", granted)


async def granted_bytes(binary: Path, folder: Path, peer_id: str, addresses: Sequence[str]) -> int | None:
    """How many bytes a circuit through a relay may carry each way; None for no limit.

    `binary` is the program of the daemon that asks, `folder` a place for its socket. Raises NetworkError: no answer
    within five seconds, or a refusal.
    """
    control_socket = folder / "asking.sock"
    asker = Daemon(binary, control_socket, DaemonSettings(Role(is_full=False, is_local=True), [_ASKER_LISTENS]))
    try:
        async with asyncio.timeout(_ASKING_TIMEOUT_S):
            await asker.start(_ASKING_TIMEOUT_S)
            control = DaemonControl(control_socket)
            await control.connect(peer_id, addresses)
            reader, writer = await control.open_stream(peer_id, _HOP_PROTOCOL)
            try:
                writer.write(_RESERVE)
                return data_limit(await _read_message(reader))
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise NetworkError(f"a relay must answer within {_ASKING_TIMEOUT_S:.0f} s") from None
    except (OSError, EOFError, DecodeError, ValueError) as error:
        raise NetworkError(f"a relay must grant a reservation, got {error or type(error).__name__}") from None
    finally:
        await asker.stop()


def _nearby(address: TcpAddress) -> TcpAddress:
    """Where this machine itself finds what listens there."""
    if not address.is_wildcard:
        return address
    return replace(address, host="::1" if address.kind == "ip6" else "127.0.0.1")


def data_limit(answer: bytes) -> int | None:
    """Bytes that a HopMessage grants a circuit each way; None for no limit. Raises ValueError for a refusal."""
    fields = _fields(answer)
    if (status := fields.get(_STATUS_FIELD)) != _STATUS_OK:
        raise ValueError(f"status {status}")
    limit = fields.get(_LIMIT_FIELD)
    granted = _fields(limit).get(_DATA_FIELD) if isinstance(limit, bytes) else None
    return granted if isinstance(granted, int) and granted else None


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    length, shift = 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > _MAX_ANSWER_BYTES:
            raise ValueError(f"a message of more than {_MAX_ANSWER_BYTES} bytes")
        if not byte & 0x80:
            return await reader.readexactly(length)


def _fields(message: bytes) -> dict[int, int | bytes]:
    """{field number: value} of a protobuf message of which there is no class here. Raises DecodeError."""
    return {field.field_number: field.data for field in UnknownFieldSet(Empty.FromString(message))}

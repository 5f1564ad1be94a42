"""Calls over hivemind's connection to the daemon survive what its client gets wrong."""

import asyncio
from typing import Any
from uuid import uuid4

from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from swarm.network.hivemind import daemon_control as call_repairs

messages: Any = p2pd_pb2


class _IntoReader:
    """The writing end of a connection whose reading end is here too."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.write = reader.feed_data

    async def drain(self) -> None: ...


async def test_answer_to_a_cancelled_call_leaves_the_others_alive() -> None:
    control = ControlClient(DaemonConnector(), _initialized_with_create=True)
    call_repairs.install(control)
    cancelled, open_call, reader = uuid4(), uuid4(), asyncio.StreamReader()
    for call_id in (cancelled, open_call):
        control._pending_calls[call_id] = asyncio.get_running_loop().create_future()
        answer = messages.CallUnaryResponse(response=b"answer")
        message = messages.PersistentConnectionResponse(callId=call_id.bytes, callUnaryResponse=answer)
        writer: Any = _IntoReader(reader)
        await write_pbmsg(writer, message)
    control._pending_calls[cancelled].cancel()
    reader.feed_eof()
    await control._read_from_persistent_conn(reader)
    assert control._pending_calls[open_call].result() == b"answer"


async def test_messages_that_wait_together_are_written_at_once_and_whole() -> None:
    control = call_repairs.WholeMessages(DaemonConnector(), _initialized_with_create=True)
    sent = [messages.PersistentConnectionRequest(callId=bytes([number]) * 16) for number in range(3)]
    for message in sent:
        await control._pending_messages.put(message)
    writer = _Writer()
    writing = asyncio.create_task(control._write_to_persistent_conn(writer))  # type: ignore[arg-type]
    await writer.is_drained.wait()
    (written,) = writer.pieces
    reader = asyncio.StreamReader()
    reader.feed_data(written)
    for message in sent:
        received = messages.PersistentConnectionRequest()
        await read_pbmsg_safe(reader, received)
        assert received == message
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert writer.is_closed


class _Writer:
    """The writing end of a connection, which notes each piece that would be a system call."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_drained = asyncio.Event()
        self.is_closed = False

    def write(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    async def drain(self) -> None:
        self.is_drained.set()

    def close(self) -> None:
        self.is_closed = True

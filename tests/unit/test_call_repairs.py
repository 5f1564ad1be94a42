"""Calls over hivemind's connection to the daemon survive what its client gets wrong."""

import asyncio
from typing import Any
from uuid import uuid4

from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg
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

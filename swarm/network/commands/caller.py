"""The driver's side of commands: it keeps a line open to each machine, numbers commands, and repeats those a broken line lost.

Repeating is safe: a peer carries out a command once, however often it arrives, and gives every copy the same reply.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import NamedTuple

from swarm.errors import RequestError
from swarm.network.commands.envelope import (
    COMMAND_HEAD,
    COMMAND_PROTOCOL,
    DONE,
    MAX_REASON_BYTES,
    OLD_PROTOCOL,
    REPLY_HEAD,
    CommandChannel,
    encode_opening,
    watched,
)
from swarm.network.transport import Line, Transport
from swarm.records.identity import Identity

logger = logging.getLogger(__name__)

_REPEATED = {"busy", "cut", "damaged"}
"""Failures after which the same command may well arrive. `unreachable` is none: dialling a dead peer takes up to a second."""
MAX_FAILURES = 3
"""Failures in a row after which a command fails. `busy` does not count; it is repeated until the deadline."""
_PAUSE_S = 0.1
_OPENING_TIMEOUT_S = 10.0


class CommandCaller:
    """Sends commands to the members of one pipeline. Each object has one epoch. It runs on the node's event loop."""

    def __init__(
        self, channel: CommandChannel, identity: Identity, transport: Transport, clock: Callable[[], float]
    ) -> None:
        """`clock` gives seconds since the epoch and must be ahead of earlier runs."""
        self._channel = channel
        self._identity = identity
        self._transport = transport
        self._epoch = int(clock() * 1000)
        self._numbers = itertools.count(1)
        self._lines: dict[str, asyncio.Task[_CommandLine]] = {}

    async def send(
        self,
        peer_id: str,
        kind: str,
        payload: bytes,
        *,
        max_reply_bytes: int,
        deadline_s: float,
        silence_s: float | None = None,
    ) -> bytes:
        """Return the reply. Raises RequestError: unreachable, refused, longer than `max_reply_bytes`, or too late.

        With `silence_s` it also fails once the peer has given no sign of life for so long, see `watched`.
        """
        sending = self._send(peer_id, kind, payload, max_reply_bytes=max_reply_bytes, deadline_s=deadline_s)
        if silence_s is None:
            return await sending
        try:
            return await watched(self._transport, peer_id, asyncio.create_task(sending), silence_s=silence_s)
        except RequestError as error:
            if error.reason == "deadline" and (opening := self._lines.pop(peer_id, None)) and _is_open(opening):
                opening.result().close()
            raise

    async def _send(self, peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int, deadline_s: float) -> bytes:
        number, num_failures = next(self._numbers), 0
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        line = await self._line(peer_id)
                        return await line.ask(number, kind, payload, max_reply_bytes=max_reply_bytes)
                    except RequestError as error:
                        num_failures += error.reason != "busy"
                        if error.reason not in _REPEATED or num_failures >= MAX_FAILURES:
                            raise
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise RequestError(f"command to {peer_id} failed: no answer within {deadline_s:g} s", "deadline") from None

    async def _line(self, peer_id: str) -> "_CommandLine":
        """Return the open line to a peer. Commands that come while it is being opened wait for the same one."""
        opening = self._lines.get(peer_id)
        if opening is None or (opening.done() and not _is_open(opening)):
            opening = self._lines[peer_id] = asyncio.create_task(self._open(peer_id), name="command-line")
        return await asyncio.shield(opening)

    async def _open(self, peer_id: str) -> "_CommandLine":
        try:
            line = await self._transport.open_line(peer_id, COMMAND_PROTOCOL, deadline_s=_OPENING_TIMEOUT_S)
        except RequestError:
            await self._check_release(peer_id)
            raise
        try:
            async with asyncio.timeout(_OPENING_TIMEOUT_S):
                await line.send(encode_opening(self._identity, self._channel, peer_id, epoch=self._epoch))
                answer = await line.receive(1 + MAX_REASON_BYTES)
        except TimeoutError:
            line.close()
            raise RequestError(f"{peer_id} must answer the opening of a line, got nothing", "deadline") from None
        except BaseException:
            line.close()
            raise
        if answer[:1] != bytes([DONE]):
            line.close()
            raise RequestError(f"{peer_id} refused the driver: {_printable(answer[1:])}", "refused")
        return _CommandLine(line)

    async def _check_release(self, peer_id: str) -> None:
        """Raise RequestError (refused) where the peer answers, but only to commands of an older release."""
        try:
            await self._transport.request(
                peer_id, OLD_PROTOCOL, b"", max_response_bytes=0, deadline_s=_OPENING_TIMEOUT_S
            )
        except RequestError as error:
            if error.reason == "refused" and COMMAND_PROTOCOL not in str(error):
                raise RequestError(
                    f"{peer_id} must speak {COMMAND_PROTOCOL}, got {OLD_PROTOCOL} of an older swarm; install the same release "
                    "on all machines of the pipeline",
                    "refused",
                ) from None


def _is_open(opening: "asyncio.Task[_CommandLine]") -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None and not opening.result().ended


class _Awaited(NamedTuple):
    reply: "asyncio.Future[bytes]"
    max_bytes: int


class _CommandLine:
    """An open line to one machine, and the commands that wait for a reply on it."""

    def __init__(self, line: Line) -> None:
        self.ended = False
        self._line = line
        self._awaited: dict[int, _Awaited] = {}
        self._reading = asyncio.create_task(self._read(), name="command-replies")

    def close(self) -> None:
        """Close the line. What waits for a reply on it fails."""
        self._reading.cancel()
        self._end(RequestError(f"the line to {self._line.peer_id} was closed", "cut"))

    async def ask(self, number: int, kind: str, payload: bytes, *, max_reply_bytes: int) -> bytes:
        """Send a command and return its reply. Raises RequestError.

        The reply to a command that was given up is read when it comes, and dropped.
        """
        reply = asyncio.get_running_loop().create_future()
        self._awaited[number] = _Awaited(reply, max_reply_bytes)
        await self._line.send(COMMAND_HEAD.pack(number) + kind.encode(), payload)
        return await reply

    async def _read(self) -> None:
        try:
            while True:
                await self._read_reply()
        except RequestError as error:
            self._end(RequestError(str(error), "cut" if error.reason == "oversize" else error.reason))

    async def _read_reply(self) -> None:
        head = await self._line.receive(REPLY_HEAD.size)
        number, status = REPLY_HEAD.unpack(head) if len(head) == REPLY_HEAD.size else (0, DONE)
        awaited = self._awaited.pop(number, None)
        if awaited is None:
            raise RequestError(f"{self._line.peer_id} replied to no command of this line", "damaged")
        try:
            body = await self._line.receive(awaited.max_bytes if status == DONE else MAX_REASON_BYTES)
        except RequestError as error:
            _fail(awaited, error)
            raise
        if status == DONE and not awaited.reply.done():
            awaited.reply.set_result(body)
        elif status != DONE:
            reason = _printable(body)
            _fail(awaited, RequestError(f"refused: {reason}", "busy" if reason == "busy" else "refused"))

    def _end(self, error: RequestError) -> None:
        self.ended = True
        self._line.close()
        awaited, self._awaited = self._awaited, {}
        for one in awaited.values():
            _fail(one, RequestError(str(error), error.reason))


def _fail(awaited: _Awaited, error: RequestError) -> None:
    if not awaited.reply.done():
        awaited.reply.set_exception(error)


def _printable(reason: bytes) -> str:
    return "".join(chr(code) if 32 <= code < 127 else "?" for code in reason)

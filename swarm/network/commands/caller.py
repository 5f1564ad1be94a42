"""The driver's side of commands: it keeps a line open to each machine, numbers commands, and repeats those a broken line lost.

Repeating is safe: a peer carries out a command once, however often it arrives, and gives every copy the same reply.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swarm.errors import RequestError
from swarm.network.commands.envelope import (
    BROKEN_RELAY,
    COMMAND_HEAD,
    COMMAND_PROTOCOL,
    DONE,
    MAX_DROPPED_BYTES,
    MAX_REASON_BYTES,
    MAX_REFUSAL_BYTES,
    OLD_PROTOCOL,
    PASSED_ON,
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
        relayed_to: Sequence[str] = (),
    ) -> bytes:
        """Return the reply. Raises RequestError: unreachable, refused, longer than `max_reply_bytes`, or too late.

        With `silence_s` it also fails once the peer has given no sign of life for so long, see `watched`. `relayed_to`: the
        machines that pass the command on; the last of them replies, or any that refuses. Such a command is not repeated.
        """
        peers = (peer_id, *relayed_to)
        if relayed_to:
            sending = self._send_along(peers, kind, payload, max_reply_bytes=max_reply_bytes, deadline_s=deadline_s)
        else:
            sending = self._send(peer_id, kind, payload, max_reply_bytes=max_reply_bytes, deadline_s=deadline_s)
        if silence_s is None:
            return await sending
        try:
            return await watched(self._transport, peers, asyncio.create_task(sending), silence_s=silence_s)
        except RequestError as error:
            if error.reason == "deadline":
                self._close_lines(peers)
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

    async def _send_along(
        self, peers: Sequence[str], kind: str, payload: bytes, *, max_reply_bytes: int, deadline_s: float
    ) -> bytes:
        number = next(self._numbers)
        try:
            async with asyncio.timeout(deadline_s):
                lines = await asyncio.gather(*map(self._line, peers))
                reply = asyncio.get_running_loop().create_future()
                for line in lines:
                    limit = max_reply_bytes if line is lines[-1] else MAX_REFUSAL_BYTES
                    added = 0 if line is lines[0] else PASSED_ON
                    line.expect(number, _Awaited(reply, limit, is_relayed=True, added=added))
                try:
                    await lines[0].tell(number, kind, payload)
                    return await reply
                finally:
                    for line in lines[:-1] if reply.cancelled() else lines:  # the last one's reply may still come
                        line.forget(number)
        except TimeoutError:
            raise RequestError(
                f"command along {len(peers)} machines: no answer within {deadline_s:g} s", "deadline"
            ) from None

    def _close_lines(self, peers: Sequence[str]) -> None:
        for peer_id in peers:
            if (opening := self._lines.pop(peer_id, None)) is not None and _is_open(opening):
                opening.result().close()

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
    is_relayed: bool = False
    added: int = 0
    """To the status: `PASSED_ON` where the machine gets the command from another one."""


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
        self.expect(number, _Awaited(reply, max_reply_bytes))
        await self.tell(number, kind, payload)
        return await reply

    async def tell(self, number: int, kind: str, payload: bytes) -> None:
        """Send a command."""
        await self._line.send(COMMAND_HEAD.pack(number) + kind.encode(), payload)

    def expect(self, number: int, awaited: "_Awaited") -> None:
        """Accept one reply to the command of this number."""
        self._awaited[number] = awaited
        if self.ended:
            _fail(awaited, RequestError(f"the line to {self._line.peer_id} was cut", "cut"))

    def forget(self, number: int) -> None:
        """Accept no reply to this number any longer."""
        self._awaited.pop(number, None)

    async def _read(self) -> None:
        try:
            while True:
                await self._read_reply()
        except RequestError as error:
            self._end(RequestError(str(error), "cut" if error.reason == "oversize" else error.reason))

    async def _read_reply(self) -> None:
        head = await self._line.receive(REPLY_HEAD.size)
        if len(head) != REPLY_HEAD.size:
            raise RequestError(f"{self._line.peer_id} sent no head of a reply", "damaged")
        number, status = REPLY_HEAD.unpack(head)
        awaited, added = self._awaited.get(number), status & PASSED_ON
        status -= added
        if awaited is not None and awaited.added != added:
            awaited = None  # another machine has made this one answer
        elif awaited is not None:
            del self._awaited[number]
        limit = awaited.max_bytes if awaited is not None else MAX_DROPPED_BYTES if added else MAX_REFUSAL_BYTES
        try:
            body = await self._line.receive(limit if status == DONE else MAX_REASON_BYTES)
        except RequestError as error:
            if awaited is not None:
                _fail(awaited, error)
            raise
        if awaited is None:  # of a command that was given up, or of none
            if number == BROKEN_RELAY:
                self._on_broken_relay(_printable(body))
            return
        if status == DONE and not awaited.reply.done():
            awaited.reply.set_result(body)
        elif status != DONE:
            reason = _printable(body)
            _fail(awaited, RequestError(f"refused: {reason}", "busy" if reason == "busy" else "refused"))

    def _on_broken_relay(self, reason: str) -> None:
        """Fail the commands that this machine may have passed on in vain."""
        for awaited in self._awaited.values():
            if awaited.is_relayed:
                _fail(awaited, RequestError(f"{self._line.peer_id} lost its line: {reason}", "cut"))

    def _end(self, error: RequestError) -> None:
        self.ended = True
        self._line.close()
        awaited, self._awaited = self._awaited, {}
        for one in awaited.values():
            _fail(one, RequestError(str(error), error.reason))


def _fail(awaited: _Awaited, error: RequestError) -> None:
    if not awaited.reply.done():
        awaited.reply.set_exception(error)
        awaited.reply.exception()  # whoever sent it may have failed before it waited; asyncio would warn


def _printable(reason: bytes) -> str:
    return "".join(chr(code) if 32 <= code < 127 else "?" for code in reason)

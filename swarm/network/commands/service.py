"""The member's side of commands: it carries out each command of the driver once, one after the other, on its own thread.

    line ─▶ checks: driver, signature, addressee ─▶ command: number, size ─▶ thread: bytes in, bytes out ─▶ reply

The reply is stored for repeats of the same command. A caller other than the driver is refused before anything is read.
Nothing that a peer sends raises past `serve`, blocks the event loop, or takes more memory than `CommandLimits` allows.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from swarm.errors import RequestError
from swarm.network.commands.envelope import (
    BROKEN_RELAY,
    COMMAND_HEAD,
    COMMAND_PROTOCOL,
    DONE,
    MAX_NAME_CHARS,
    MAX_REASON_BYTES,
    OLD_PROTOCOL,
    PASSED_ON,
    REFUSED,
    RELAY_HEAD,
    RELAY_PROTOCOL,
    REPLY_HEAD,
    CommandChannel,
    decode_opening,
    serve_alive,
)
from swarm.network.transport import Line, RequestRefused, Transport
from swarm.records.codec import MAX_RECORD_BYTES
from swarm.records.rejection import InvalidRecord

logger = logging.getLogger(__name__)

Onward = tuple[str, bytes]
"""(peer id of the next machine, payload that it gets under the same number and kind)."""
CarryOut = Callable[[str, bytes], bytes | Onward]
"""(kind, payload) → reply, or what is passed on instead. It runs on the service's thread."""
CarryOutRelayed = Callable[[str, str, bytes], bytes | Onward]
"""(peer id of the machine that passed it on, kind, payload) → as `CarryOut`. It has to check that this machine may."""
MaxPayload = Callable[[str], int]
"""kind → largest number of bytes of a payload; 0 for an unknown kind."""
_OPENING_TIMEOUT_S = 10.0
_BROKE = "the command broke"


@dataclass(frozen=True, slots=True)
class CommandHead:
    """What a command says before its payload."""

    epoch: int
    """Run of the driver, as its line was opened with."""
    number: int
    """Grows within an epoch."""
    kind: str


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """Bounds on waiting commands and stored replies."""

    max_waiting: int = 32
    max_waiting_bytes: int = 256 << 20
    """Payloads of all commands that have not ended. A single one may be larger."""
    max_stored_replies: int = 32
    max_stored_bytes: int = 64 << 20
    """Replies that are stored for repeats. The newest may be larger."""


_DEFAULT_LIMITS = CommandLimits()


class CommandService:
    """Carries out the commands of the driver of one pipeline. It runs on the node's event loop."""

    def __init__(
        self,
        channel: CommandChannel,
        transport: Transport,
        *,
        carry_out: CarryOut,
        max_payload: MaxPayload,
        carry_out_relayed: CarryOutRelayed | None = None,
        limits: CommandLimits = _DEFAULT_LIMITS,
    ) -> None:
        """Make it before the transport starts. Without `carry_out_relayed` it takes commands of the driver alone."""
        self._channel = channel
        self._transport = transport
        self._carry_out = carry_out
        self._max_payload = max_payload
        self._limits = limits
        self._epoch = 0
        self._carry_out_relayed = carry_out_relayed
        self._driver_line: Line | None = None
        self._relay = RelayLines(transport, self._on_broken_relay)
        self._replies: dict[int, asyncio.Task[bytes | None]] = {}  # by number, oldest first; None was passed on
        self._last_dropped = 0  # greatest number whose reply was dropped
        self._waiting_bytes: dict[int, int] = {}
        self._relayed_bytes: dict[int, int] = {}  # counted apart: other machines take no room of the driver's commands
        self._relayed: set[asyncio.Task[None]] = set()  # commands that other machines passed on
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commands")
        self.num_commands = 0
        """Commands that were carried out."""
        transport.serve_lines(COMMAND_PROTOCOL, self.serve)
        if carry_out_relayed is not None:
            transport.serve_lines(RELAY_PROTOCOL, self.serve_relay)
        transport.serve(OLD_PROTOCOL, _refuse_old, max_request_bytes=1 << 20)
        serve_alive(transport, channel.driver)

    async def close(self) -> None:
        """Cancel what is waiting. The thread finishes the command that it has begun, and its reply is dropped."""
        tasks = [*self._replies.values(), *self._relayed]
        for task in tasks:
            task.cancel()
        self._relay.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def serve(self, line: Line) -> None:
        """The handler of COMMAND_PROTOCOL: carry out the commands of a line until it ends. Raises RequestError."""
        if line.peer_id != self._channel.driver:
            return await _refuse(line, "not the driver of this pipeline")
        try:
            async with asyncio.timeout(_OPENING_TIMEOUT_S):
                opening = await line.receive(MAX_RECORD_BYTES)
            epoch = decode_opening(opening, self._channel, self._transport.peer_id)
        except TimeoutError:
            return await _refuse(line, "no opening")
        except InvalidRecord as error:
            return await _refuse(line, f"no valid opening: {error.reason}")
        if epoch < self._epoch:
            return await _refuse(line, "a driver from the past, or one whose clock went back")
        if epoch > self._epoch:
            self._begin_epoch(epoch)
        await line.send(bytes([DONE]))
        self._driver_line = line
        replies: set[asyncio.Task[None]] = set()
        try:
            while await self._take(line, epoch, replies):
                pass
        finally:
            for reply in replies:
                reply.cancel()

    async def _take(self, line: Line, epoch: int, replies: "set[asyncio.Task[None]]") -> bool:
        """Take the next command of a line. Returns whether the line can go on."""
        head = await line.receive(COMMAND_HEAD.size + MAX_NAME_CHARS)
        if len(head) < COMMAND_HEAD.size:
            return False
        (number,), kind = COMMAND_HEAD.unpack_from(head), head[COMMAND_HEAD.size :].decode("ascii", "replace")
        limit = self._max_payload(kind)
        try:
            payload = await line.receive(limit)
            task = self._task_of(CommandHead(epoch, number, kind), payload)
        except RequestRefused as refusal:
            await _reply(line, number, refusal)
            return True
        except RequestError as error:
            if error.reason == "oversize":  # what follows on the line is not read
                await _reply(line, number, RequestRefused(f"a payload of {kind[:16]!r} must be <= {limit} bytes"))
            raise
        if len(replies) >= 2 * self._limits.max_waiting:
            return False  # it does not read its replies
        reply = asyncio.create_task(_reply_when_done(line, number, task))
        replies.add(reply)
        reply.add_done_callback(replies.discard)
        return True

    async def serve_relay(self, line: Line) -> None:
        """The handler of RELAY_PROTOCOL: carry out what a machine of this pipeline passes on. Raises RequestError."""
        if line.peer_id not in self._channel.members:
            return
        while True:
            head = await line.receive(RELAY_HEAD.size + MAX_NAME_CHARS)
            if len(head) < RELAY_HEAD.size:
                return
            (epoch, number), kind = RELAY_HEAD.unpack_from(head), head[RELAY_HEAD.size :].decode("ascii", "replace")
            payload = await line.receive(self._max_payload(kind))
            if len(self._relayed) >= self._limits.max_waiting:
                await asyncio.wait(self._relayed, return_when=asyncio.FIRST_COMPLETED)
            if epoch == self._epoch and number not in self._relayed_bytes:
                task = asyncio.create_task(
                    self._run_relayed(CommandHead(epoch, number, kind), line.peer_id, payload), name=f"relayed-{kind}"
                )
                self._relayed.add(task)
                task.add_done_callback(self._relayed.discard)

    async def _run_relayed(self, head: CommandHead, sender: str, payload: bytes) -> None:
        carry_out, outcome = self._carry_out_relayed, None
        assert carry_out is not None, "served only with one"
        try:
            self._claim_room(self._relayed_bytes, head.number, payload)
            try:
                outcome = await self._run(head, lambda: carry_out(sender, head.kind, payload))
            finally:
                self._relayed_bytes.pop(head.number, None)
        except RequestRefused as refusal:
            outcome = refusal
        except Exception:  # see `_reply_when_done`
            logger.warning("a relayed command failed", exc_info=True)
            outcome = RequestRefused(_BROKE)
        if outcome is not None and self._driver_line is not None and head.epoch == self._epoch:
            await _reply(self._driver_line, head.number, outcome, added=PASSED_ON)

    def _claim_room(self, waiting: dict[int, int], number: int, payload: bytes) -> None:
        """Count a command as waiting. Raises RequestRefused (busy)."""
        is_full = sum(waiting.values()) + len(payload) > self._limits.max_waiting_bytes
        if waiting and (is_full or len(waiting) >= self._limits.max_waiting):
            raise RequestRefused("busy")
        waiting[number] = len(payload)

    def _task_of(self, head: CommandHead, payload: bytes) -> "asyncio.Task[bytes | None]":
        """Return the task of this command, which is new, running or done. Raises RequestRefused."""
        known = self._replies.get(head.number) if head.epoch == self._epoch else None
        if known is not None:
            return known
        if head.epoch < self._epoch or head.number <= self._last_dropped:
            raise RequestRefused("a command from the past")
        self._claim_room(self._waiting_bytes, head.number, payload)
        working = self._run(head, lambda: self._carry_out(head.kind, payload))
        task = asyncio.create_task(working, name=f"command-{head.kind}")
        task.add_done_callback(lambda done: self._settle(head, done))
        self._replies[head.number] = task
        return task

    async def _run(self, head: CommandHead, work: Callable[[], bytes | Onward]) -> bytes | None:
        """Return the reply; None for a command that was passed on."""
        # A command reaches the thread only when that is free. What waits here can be cancelled, so a driver that begins
        # one epoch after the other leaves no payloads behind.
        await self._turn.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._thread, work)
        working.add_done_callback(lambda _: self._turn.release())
        result = await asyncio.shield(working)
        self.num_commands += 1
        if isinstance(result, bytes):
            return result
        peer_id, payload = result
        await self._relay.send(peer_id, RELAY_HEAD.pack(head.epoch, head.number) + head.kind.encode(), payload)
        return None

    def _on_broken_relay(self, reason: str) -> "asyncio.Task[None] | None":
        line = self._driver_line
        return None if line is None else asyncio.create_task(_reply(line, BROKEN_RELAY, RequestRefused(reason)))

    def _begin_epoch(self, epoch: int) -> None:
        """Cancel all commands of an earlier run of the driver, which has restarted."""
        self._epoch, self._last_dropped = epoch, 0
        replies, self._replies = self._replies, {}
        self._waiting_bytes = {}
        for task in replies.values():
            task.cancel()

    def _settle(self, head: CommandHead, task: "asyncio.Task[bytes | None]") -> None:
        if self._replies.get(head.number) is not task:
            return  # the task of an earlier epoch
        self._waiting_bytes.pop(head.number, None)
        if task.cancelled() or task.exception() is not None:
            del self._replies[head.number]  # it was cancelled or failed: a repeat may try again
            return
        done = [(number, one) for number, one in self._replies.items() if one.done() and not one.cancelled()]
        num_bytes = sum(len(one.result() or b"") for _, one in done)
        for number, one in done[:-1]:
            if len(self._replies) <= self._limits.max_stored_replies and num_bytes <= self._limits.max_stored_bytes:
                return
            num_bytes -= len(one.result() or b"")
            self._last_dropped = max(self._last_dropped, number)
            del self._replies[number]


class RelayLines:
    """The lines of one machine to those that it passes commands on to, opened when they are first needed."""

    def __init__(self, transport: Transport, on_broken: Callable[[str], "asyncio.Task[None] | None"]) -> None:
        """`on_broken` is called with the reason when a line ends; what was sent on it may be lost."""
        self._transport = transport
        self._on_broken = on_broken
        self._lines: dict[str, asyncio.Task[Line]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, peer_id: str, *frames: bytes) -> None:
        """Send frames to a machine. Raises RequestRefused, with the reason for the driver, where that is not possible."""
        if peer_id not in self._lines:
            self._lines[peer_id] = asyncio.create_task(self._open(peer_id))
        try:
            line = await asyncio.shield(self._lines[peer_id])
            await line.send(*frames)
        except RequestError as error:
            self._lines.pop(peer_id, None)
            raise RequestRefused(f"no line to {peer_id}: {error.reason}") from None

    def close(self) -> None:
        """Close all lines."""
        for task in [*self._lines.values(), *self._tasks]:
            task.cancel()

    async def _open(self, peer_id: str) -> Line:
        line = await self._transport.open_line(peer_id, RELAY_PROTOCOL, deadline_s=_OPENING_TIMEOUT_S)
        self._keep(asyncio.create_task(self._until_end(line)))
        return line

    async def _until_end(self, line: Line) -> None:
        """Wait for the end of a line, on which nothing comes back."""
        try:
            with contextlib.suppress(RequestError):
                await line.receive(0)
        finally:
            line.close()
        self._lines.pop(line.peer_id, None)
        if (telling := self._on_broken(f"to {line.peer_id}")) is not None:
            self._keep(telling)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _reply_when_done(line: Line, number: int, task: "asyncio.Task[bytes | None]") -> None:
    try:
        reply = await asyncio.shield(task)
        if reply is not None:
            await _reply(line, number, reply)
    except RequestRefused as refusal:
        await _reply(line, number, refusal)
    except Exception:  # a failing command costs its reply, never the machine
        logger.warning("a command failed", exc_info=True)
        await _reply(line, number, RequestRefused(_BROKE))


async def _reply(line: Line, number: int, outcome: bytes | RequestRefused, added: int = 0) -> None:
    is_done = isinstance(outcome, bytes)
    body = outcome if is_done else str(outcome).encode("ascii", "replace")[:MAX_REASON_BYTES]
    with contextlib.suppress(RequestError):  # the line has ended; its driver asks again on another one
        await line.send(REPLY_HEAD.pack(number, added + (DONE if is_done else REFUSED)), body)


async def _refuse(line: Line, reason: str) -> None:
    await line.send(bytes([REFUSED]) + reason.encode())


async def _refuse_old(peer_id: str, request: bytes) -> bytes:
    raise RequestRefused(f"this stage speaks {COMMAND_PROTOCOL}; install the same release of swarm on all machines")

"""The member's side of commands: it carries out each command of the driver once, one after the other, on its own thread.

    request ─▶ checks: driver, signature, addressee, number, size ─▶ payload pulled ─▶ thread: bytes in, bytes out ─▶ reply

The reply is stored for repeats of the same command. A caller other than the driver is refused after at most
MAX_COMMAND_BYTES were read. Nothing that a peer sends raises past `answer`, blocks the event loop, or takes more memory
than `CommandLimits` allows.
"""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from swarm.errors import RequestError
from swarm.network.commands.envelope import (
    COMMAND_PROTOCOL,
    MAX_COMMAND_BYTES,
    PAYLOAD_PROTOCOL,
    CommandChannel,
    CommandHead,
    decode_command,
    digest_of,
    serve_alive,
)
from swarm.network.requests.transfer import Download, fetch
from swarm.network.transport import RequestRefused, Transport
from swarm.records.rejection import InvalidRecord

CarryOut = Callable[[str, bytes], bytes]
"""(kind, payload) → reply. It runs on the service's thread."""
MaxPayload = Callable[[str], int]
"""kind → largest number of bytes of a payload; 0 for an unknown kind."""


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
        limits: CommandLimits = _DEFAULT_LIMITS,
    ) -> None:
        """Make it before the transport starts."""
        self._channel = channel
        self._transport = transport
        self._carry_out = carry_out
        self._max_payload = max_payload
        self._limits = limits
        self._epoch = 0
        self._replies: dict[int, asyncio.Task[bytes]] = {}  # by number, oldest first
        self._last_dropped = 0  # greatest number whose reply was dropped
        self._waiting_bytes: dict[int, int] = {}
        self._rng = random.Random(transport.peer_id)
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commands")
        self.num_commands = 0
        """Commands that were carried out."""
        transport.serve(COMMAND_PROTOCOL, self.answer, max_request_bytes=MAX_COMMAND_BYTES)
        serve_alive(transport, channel.driver)

    async def close(self) -> None:
        """Cancel what is waiting. The thread finishes the command that it has begun, and its reply is dropped."""
        tasks = list(self._replies.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """The handler of COMMAND_PROTOCOL. Raises RequestRefused."""
        if peer_id != self._channel.driver:
            raise RequestRefused("not the driver of this pipeline")
        try:
            head, payload = decode_command(request, self._channel.swarm_id)
        except InvalidRecord as error:
            raise RequestRefused(f"no valid command: {error.reason}") from None
        if (head.author, head.addressee, head.pipeline) != (peer_id, self._transport.peer_id, self._channel.pipeline):
            raise RequestRefused("a command from or for another peer")
        return await asyncio.shield(self._task_of(head, payload))

    def _task_of(self, head: CommandHead, payload: bytes) -> "asyncio.Task[bytes]":
        """Return the task of this command, which is new, running or done. Raises RequestRefused."""
        if head.epoch > self._epoch:
            self._begin_epoch(head.epoch)
        known = self._replies.get(head.number) if head.epoch == self._epoch else None
        if known is not None:
            return known
        if head.epoch < self._epoch or head.number <= self._last_dropped:
            raise RequestRefused("a command from the past")
        limit = self._max_payload(head.kind)
        if head.payload_bytes > limit:
            raise RequestRefused(f"a payload of {head.kind[:16]!r} must be <= {limit} bytes, got {head.payload_bytes}")
        is_full = sum(self._waiting_bytes.values()) + head.payload_bytes > self._limits.max_waiting_bytes
        if self._waiting_bytes and (is_full or len(self._waiting_bytes) >= self._limits.max_waiting):
            raise RequestRefused("busy")
        self._waiting_bytes[head.number] = head.payload_bytes
        task = asyncio.create_task(self._run(head, payload), name=f"command-{head.kind}")
        task.add_done_callback(lambda done: self._settle(head, done))
        self._replies[head.number] = task
        return task

    async def _run(self, head: CommandHead, payload: bytes) -> bytes:
        if not head.is_inline:
            wanted = Download(head.payload_digest, head.payload_bytes, PAYLOAD_PROTOCOL)
            try:
                payload = await fetch(self._transport, [head.author], wanted, rng=self._rng)
            except RequestError as error:
                raise RequestRefused(f"payload: {error}") from None
        # A command reaches the thread only when that is free. What waits here can be cancelled, so a driver that begins
        # one epoch after the other leaves no payloads behind.
        await self._turn.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._thread, self._work, head, payload)
        working.add_done_callback(lambda _: self._turn.release())
        reply = await asyncio.shield(working)
        self.num_commands += 1
        return reply

    def _work(self, head: CommandHead, payload: bytes) -> bytes:
        if digest_of(payload) != head.payload_digest:
            raise RequestRefused("a payload of another digest")
        return self._carry_out(head.kind, payload)

    def _begin_epoch(self, epoch: int) -> None:
        """Cancel all commands of an earlier run of the driver, which has restarted."""
        self._epoch, self._last_dropped = epoch, 0
        replies, self._replies = self._replies, {}
        self._waiting_bytes = {}
        for task in replies.values():
            task.cancel()

    def _settle(self, head: CommandHead, task: "asyncio.Task[bytes]") -> None:
        if self._replies.get(head.number) is not task:
            return  # the task of an earlier epoch
        self._waiting_bytes.pop(head.number, None)
        if task.cancelled() or task.exception() is not None:
            del self._replies[head.number]  # it was cancelled or failed: a repeat may try again
            return
        done = [(number, one) for number, one in self._replies.items() if one.done() and not one.cancelled()]
        num_bytes = sum(len(one.result()) for _, one in done)
        for number, one in done[:-1]:
            if len(self._replies) <= self._limits.max_stored_replies and num_bytes <= self._limits.max_stored_bytes:
                return
            num_bytes -= len(one.result())
            self._last_dropped = max(self._last_dropped, number)
            del self._replies[number]

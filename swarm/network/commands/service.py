"""The carrying-out side: one caller's orders, each once, one after the other on a thread of its own.

    request ─▶ from the driver? signed? for here? new? small enough? ─▶ payload pulled ─▶ thread: bytes in, bytes out ─▶ reply
                                                                                        kept for repeats of the order

Everybody else is refused after reading at most MAX_ORDER_BYTES; nothing a peer sends raises past `answer`, holds up the
loop, or takes more memory than `CommandLimits` says.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from swarm.errors import RequestError
from swarm.network.commands.envelope import (
    COMMAND_PROTOCOL,
    MAX_COMMAND_BYTES,
    PAYLOAD_PROTOCOL,
    CommandHead,
    decode_command,
    digest_of,
    serve_alive,
)
from swarm.network.requests.transfer import Download, fetch
from swarm.network.transport import RequestRefused, Transport
from swarm.records.rejection import InvalidRecord

CarryOut = Callable[[str, bytes], bytes]
"""(kind, payload) → reply. Runs on the service's thread."""
MaxPayload = Callable[[str], int]
"""kind → bytes that a payload may have at most; 0 for a kind that is not known."""


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """What waiting orders and kept replies may take."""

    max_waiting: int = 32
    max_waiting_bytes: int = 256 << 20
    """Payloads of orders under way; a single one may be larger."""
    max_kept_replies: int = 32
    max_kept_bytes: int = 64 << 20
    """Replies kept for repeats; the newest may be larger."""


class CommandService:
    """Answers the driver of one crew."""

    def __init__(
        self,
        transport: Transport,
        swarm_id: str,
        crew: str,
        driver: str,
        carry_out: CarryOut,
        max_payload: MaxPayload,
        bounds: CommandLimits | None = None,
    ) -> None:
        """To be made before the transport starts."""
        self._transport = transport
        self._swarm_id = swarm_id
        self._crew = crew
        self._driver = driver
        self._carry_out = carry_out
        self._max_payload = max_payload
        self._bounds = bounds or CommandLimits()
        self._epoch = 0
        self._replies: OrderedDict[int, asyncio.Task[bytes]] = OrderedDict()  # by number, oldest first
        self._forgotten = 0  # greatest number whose reply is gone
        self._waiting_bytes: dict[int, int] = {}
        self._rng = random.Random(transport.peer_id)
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="orders")
        self.num_orders = 0
        """Carried out."""
        transport.serve(COMMAND_PROTOCOL, self.answer, max_request_bytes=MAX_COMMAND_BYTES)
        serve_alive(transport, driver)

    async def close(self) -> None:
        """Give up what is waiting; what the thread has begun is finished unheard."""
        tasks = list(self._replies.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """The handler of ORDER_PROTOCOL. Raises RequestRefused."""
        if peer_id != self._driver:
            raise RequestRefused("not the driver of this crew")
        try:
            head, payload = decode_command(request, self._swarm_id)
        except InvalidRecord as error:
            raise RequestRefused(f"no valid order: {error.reason}") from None
        if (head.author, head.addressee, head.crew) != (peer_id, self._transport.peer_id, self._crew):
            raise RequestRefused("an order from or for another")
        return await asyncio.shield(self._task_of(head, payload))

    def _task_of(self, head: CommandHead, payload: bytes) -> "asyncio.Task[bytes]":
        """The one task of this order, new or under way or done. Raises RequestRefused."""
        if head.epoch > self._epoch:
            self._begin_epoch(head.epoch)
        known = self._replies.get(head.number) if head.epoch == self._epoch else None
        if known is not None:
            return known
        if head.epoch < self._epoch or head.number <= self._forgotten:
            raise RequestRefused("an order from the past")
        limit = self._max_payload(head.kind)
        if head.payload_bytes > limit:
            raise RequestRefused(f"a payload of {head.kind[:16]!r} must be <= {limit} bytes, got {head.payload_bytes}")
        is_full = sum(self._waiting_bytes.values()) + head.payload_bytes > self._bounds.max_waiting_bytes
        if self._waiting_bytes and (is_full or len(self._waiting_bytes) >= self._bounds.max_waiting):
            raise RequestRefused("busy")
        self._waiting_bytes[head.number] = head.payload_bytes
        task = asyncio.create_task(self._run(head, payload), name=f"order-{head.kind}")
        task.add_done_callback(lambda done: self._settle(head, done))
        self._replies[head.number] = task
        return task

    async def _run(self, head: CommandHead, payload: bytes) -> bytes:
        if not head.is_inline:
            wanted = Download(head.payload_digest, head.payload_bytes, PAYLOAD_PROTOCOL)
            try:
                payload = await fetch(self._transport, [head.author], wanted, self._rng)
            except RequestError as error:
                raise RequestRefused(f"payload: {error}") from None
        # An order is given to the thread only when the thread is free. So nothing waits there that cannot be given up: a
        # driver that begins one epoch after the other leaves no payloads behind.
        await self._turn.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._thread, self._work, head, payload)
        working.add_done_callback(lambda _: self._turn.release())
        reply = await asyncio.shield(working)
        self.num_orders += 1
        return reply

    def _work(self, head: CommandHead, payload: bytes) -> bytes:
        if digest_of(payload) != head.payload_digest:
            raise RequestRefused("a payload of another digest")
        return self._carry_out(head.kind, payload)

    def _begin_epoch(self, epoch: int) -> None:
        """The driver has started anew: nothing of its earlier run is answered any more."""
        self._epoch, self._forgotten = epoch, 0
        replies, self._replies = self._replies, OrderedDict()
        self._waiting_bytes = {}
        for task in replies.values():
            task.cancel()

    def _settle(self, head: CommandHead, task: "asyncio.Task[bytes]") -> None:
        if self._replies.get(head.number) is not task:
            return  # of an earlier epoch
        self._waiting_bytes.pop(head.number, None)
        if task.cancelled() or task.exception() is not None:
            del self._replies[head.number]  # it was not carried out, or broke: a repeat may try again
            return
        done = [(number, one) for number, one in self._replies.items() if one.done() and not one.cancelled()]
        num_bytes = sum(len(one.result()) for _, one in done)
        for number, one in done[:-1]:
            if len(self._replies) <= self._bounds.max_kept_replies and num_bytes <= self._bounds.max_kept_bytes:
                return
            num_bytes -= len(one.result())
            self._forgotten = max(self._forgotten, number)
            del self._replies[number]

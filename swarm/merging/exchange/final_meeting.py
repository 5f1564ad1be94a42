"""The network half of a node's final merge: it finds who takes part, and exchanges adapters one after the other by the clock.

    compute thread                          node's loop
    ──────────────                          ───────────
    gather(snapshot) ───────────────────→   FinalList: listed, boundary, list read
    Seats ←─────────────────────────────
    meet(appointment) ──────────────────→   MeetRequest ⇄ MeetReply ─ fetch ⇄ serve ─ FetchAck
    MeetResult ←────────────────────────    at the end of the appointment's window at the latest

Windows end at fixed times of the swarm's clock, so a node that waited in vain for one peer is in time for the next. The node that
comes second to an exchange asks the first, so nobody has to ask often. Memory holds the own adapter and the one that is coming.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from swarm.errors import RequestError, SwarmError
from swarm.merging.exchange.final_list import (
    FINAL_ADAPTER_PROTOCOL,
    FINAL_PROTOCOL,
    MAX_MESSAGE_BYTES,
    PASSING,
    Assembly,
    FetchAck,
    FinalList,
    MeetReply,
    MeetRequest,
    NotNow,
    decode_answer,
    decode_request,
)
from swarm.merging.exchange.offered_adapter import AdapterServer, OfferedAdapter
from swarm.merging.exchange.proposal import Declined, MessageLimits
from swarm.network.context import NodeContext
from swarm.network.requests.blob_protocol import BLOB_REQUEST_BYTES, sha256
from swarm.network.requests.transfer import Download, fetch
from swarm.records.rejection import InvalidRecord
from swarm.types import Appointment, MeetResult, Partner, Seats, Snapshot

logger = logging.getLogger(__name__)

_ASK_PAUSE_S = 4.0
"""Longest pause between two questions to the same node, well within its rate limit."""
_ACK_TRIES = 2
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Job(Generic[Result]):
    """Work that another thread asked for. Its future never raises."""

    make: Callable[[], Coroutine[Any, Any, Result]]
    otherwise: Result
    future: "Future[Result]"

    async def run(self) -> None:
        result = self.otherwise
        try:
            result = await self.make()
        except (OSError, SwarmError) as error:
            logger.warning("a step of the final merge failed: %s", error)
        finally:
            self.future.set_result(result)

    def give_up(self) -> None:
        self.future.set_result(self.otherwise)


@dataclass(slots=True)
class _Turn:
    """The exchange under way."""

    merge_id: bytes
    appointment: Appointment
    offered: OfferedAdapter
    theirs: MeetReply | None = None
    known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the other side has said which adapter it has."""
    partner: Partner | None = None
    reason: str = ""

    @property
    def own(self) -> MeetReply:
        return MeetReply(self.offered.offer.sha256, self.appointment.weight)

    def hear(self, theirs: MeetReply) -> None:
        """Note what the other side has; the first message counts."""
        if self.theirs is None:
            self.theirs = theirs
            self.known.set()


class FinalMeeting:
    """The final merges of one node. `gather` and `meet` may be called from any thread; all else runs on the node's loop."""

    def __init__(
        self,
        context: NodeContext,
        rng: random.Random,
        *,
        interval_s: float,
        window_s: float,
        request_timeout_s: float,
    ) -> None:
        """Serves its protocols at once, so it must be made before the transport starts. Interval and window must be those of
        the other nodes.
        """
        transport = context.transport
        self._transport = transport
        self._rng = rng
        self._list = FinalList(context, interval_s)
        self._window_s = window_s
        self._request_timeout_s = request_timeout_s
        self._limits = MessageLimits()
        self._assembly: Assembly | None = None
        self._turn: _Turn | None = None
        self._jobs: asyncio.Queue[_Job[Any]] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._peer_id = context.peer_id
        transport.serve(FINAL_PROTOCOL, self._answer, max_request_bytes=MAX_MESSAGE_BYTES)
        server = AdapterServer(self._offered)
        transport.serve(FINAL_ADAPTER_PROTOCOL, server.answer, max_request_bytes=BLOB_REQUEST_BYTES)

    def gather(self, snapshot: Snapshot) -> "Future[Seats]":
        """Find out who takes part in the next final merge: this node alone where nobody else came, or the network failed."""
        return self._ask_for(lambda: self._gather(snapshot), Seats((self._peer_id,), 0))

    def meet(self, appointment: Appointment) -> "Future[MeetResult]":
        """Do one exchange, after `gather`. It ends with its window at the latest."""
        return self._ask_for(lambda: self._meet(appointment), MeetResult(None, 0, "stopped"))

    async def work(self) -> None:
        """Do what is asked for, from the transport's start to its stop.

        Ends only when cancelled, or by an error that is a bug.
        """
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                await (await self._jobs.get()).run()
        finally:
            self._loop = None
            while not self._jobs.empty():
                self._jobs.get_nowait().give_up()

    def _ask_for(self, make: Callable[[], Coroutine[Any, Any, Result]], otherwise: Result) -> "Future[Result]":
        job, loop = _Job(make, otherwise, Future[Result]()), self._loop
        job.future.set_running_or_notify_cancel()  # nobody can cancel it
        try:
            if loop is None:
                raise RuntimeError("not running")
            loop.call_soon_threadsafe(self._take, job)
        except RuntimeError:  # a loop that is closed raises the same
            job.give_up()
        return job.future

    def _take(self, job: _Job[Any]) -> None:
        if self._loop is None:
            job.give_up()
        else:
            self._jobs.put_nowait(job)

    async def _gather(self, snapshot: Snapshot) -> Seats:
        self._assembly = None
        self._assembly = await self._list.assemble(snapshot, await sha256(snapshot.payload))
        return self._assembly.seats

    async def _meet(self, appointment: Appointment) -> MeetResult:
        assembly = self._assembly
        if assembly is None:
            return MeetResult(None, 0, "stopped")
        payload = appointment.snapshot.payload
        offer = replace(assembly.offers[assembly.own_place], sha256=await sha256(payload), num_bytes=len(payload))
        turn = self._turn = _Turn(assembly.merge_id, appointment, OfferedAdapter(offer, b"", payload))
        turn.offered.propose(appointment.peer_id)  # who may fetch it
        ends_at = assembly.begins_at + (appointment.window + 1) * self._window_s
        try:
            async with asyncio.timeout(max(0.0, ends_at - self._transport.now())):
                await self._trade(turn)
        except TimeoutError:
            turn.reason = turn.reason or "deadline"
        finally:
            self._turn = None
        return MeetResult(turn.partner, turn.theirs.weight if turn.theirs else 0, turn.reason)

    async def _trade(self, turn: _Turn) -> None:
        """Exchange adapters. Both sides fetch at the same time; a failure on one side does not affect the other."""
        await self._find_out(turn)
        if turn.theirs is None:
            return
        if turn.theirs.weight == 1 and turn.theirs.sha256 != self._listed(turn.appointment.peer_id):
            turn.reason = NotNow.OTHER  # it may give different adapters to different nodes
            return
        if turn.appointment.takes:
            await self._fetch(turn, turn.theirs)
        if turn.appointment.gives:
            await turn.offered.fetched.wait()

    def _listed(self, peer_id: str) -> bytes | None:
        """SHA-256 of the adapter with which the peer listed itself."""
        offers = self._assembly.offers if self._assembly else ()
        return next((offer.sha256 for offer in offers if offer.peer_id == peer_id), None)

    async def _find_out(self, turn: _Turn) -> None:
        """Ask until the other side has said which adapter it has, or that there will be no exchange."""
        question = MeetRequest(turn.merge_id, turn.appointment.window, *_fields(turn.own))
        pause_s = 0.1
        while turn.theirs is None:
            try:
                answer = decode_answer(await self._request(turn, question.encode()))
            except RequestError as error:
                turn.reason = error.reason
            except InvalidRecord:
                turn.reason = NotNow.INVALID
                return
            else:
                if isinstance(answer, MeetReply):
                    turn.hear(answer)
                elif answer.reason not in PASSING:
                    turn.reason = answer.reason
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s * self._rng.uniform(0.7, 1.0)):
                    await turn.known.wait()
            pause_s = min(2 * pause_s, _ASK_PAUSE_S, self._window_s / 4)
        turn.reason = ""

    async def _fetch(self, turn: _Turn, theirs: MeetReply) -> None:
        peer_id, snapshot = turn.appointment.peer_id, turn.appointment.snapshot
        wanted = Download(
            theirs.sha256, len(snapshot.payload), FINAL_ADAPTER_PROTOCOL, base_timeout_s=self._request_timeout_s
        )
        try:
            payload = await fetch(self._transport, [peer_id], wanted, self._rng)
        except RequestError as error:
            turn.reason = error.reason
            return
        turn.partner = Partner(peer_id, replace(snapshot, payload=payload))
        ack = FetchAck(turn.merge_id, turn.appointment.window, theirs.sha256).encode()
        for _ in range(_ACK_TRIES):
            with contextlib.suppress(RequestError):
                await self._request(turn, ack)
                return

    async def _request(self, turn: _Turn, message: bytes) -> bytes:
        """Raises RequestError."""
        return await self._transport.request(
            turn.appointment.peer_id,
            FINAL_PROTOCOL,
            message,
            max_response_bytes=MAX_MESSAGE_BYTES,
            deadline_s=self._request_timeout_s,
        )

    async def _answer(self, peer_id: str, request: bytes) -> bytes:
        """Answer one message. It never raises and never waits."""
        if not self._limits.admit(peer_id, asyncio.get_running_loop().time()):
            return Declined(NotNow.RATE).encode()
        try:
            message = decode_request(request)
        except InvalidRecord:
            return Declined(NotNow.INVALID).encode()
        turn, reason = self._turn, self._why_not(peer_id, message)
        if reason is not None or turn is None:
            return Declined((reason or NotNow.IDLE).value).encode()
        if isinstance(message, MeetRequest):
            turn.hear(MeetReply(message.sha256, message.weight))
        elif message.sha256 == turn.offered.offer.sha256:
            turn.offered.fetched.set()
        return turn.own.encode()

    def _why_not(self, peer_id: str, message: MeetRequest | FetchAck) -> NotNow | None:
        if self._assembly is None or self._turn is None:
            return NotNow.IDLE
        if message.merge_id != self._assembly.merge_id:
            return NotNow.LIST
        own_window = self._turn.appointment.window
        if message.window != own_window:
            return NotNow.WAIT if message.window > own_window else NotNow.OVER
        return None if peer_id == self._turn.appointment.peer_id else NotNow.PLACE

    def _offered(self) -> OfferedAdapter | None:
        turn = self._turn
        return turn.offered if turn is not None and turn.appointment.gives else None


def _fields(own: MeetReply) -> tuple[bytes, int]:
    return own.sha256, own.weight

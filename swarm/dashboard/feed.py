"""What pages wait for: server-sent events, and readings in a thread. No page can block the node or grow its memory.

`EventPlaces` bounds the number of event streams, and `Readings` what is read at once.
An `EventResponse` ends if its client does not read, or if another client needs its place.

publish ─▶ one line of bytes ─┬─▶ queue of a client ─▶ stream        a full queue: that client is dropped
                              └─▶ the last ones, for clients that return with Last-Event-ID
"""

import asyncio
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from swarm.limits.connection_slots import ConnectionSlots

MAX_STREAMS = 32
SEND_TIMEOUT_S = 20.0


class EventPlaces(ConnectionSlots):
    """The places of a page's event streams. A new stream always gets one: the address that holds most loses its oldest.

    Nobody can therefore keep others out by holding streams, also not at the same address, which all programs of a machine
    share. A browser whose stream was ended comes back by itself and misses no event.
    """

    def __init__(self) -> None:
        super().__init__(MAX_STREAMS, newest_wins=True)


class EventResponse(Response):
    """Ends with its events, when the client is gone, when it took nothing for SEND_TIMEOUT_S, or when it loses its place."""

    def __init__(
        self, events: AsyncIterator[bytes], places: ConnectionSlots, send_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._places = places
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send, (scope.get("client") or ("",))[0]))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_all(self, send: Send, address: str) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        staying = asyncio.timeout(None)
        try:
            async with staying:
                with self._places.hold(address, lambda: staying.reschedule(0.0)):
                    async for event in self._events:
                        async with asyncio.timeout(self._send_timeout_s):
                            await send({"type": "http.response.body", "body": event, "more_body": True})
        except (TimeoutError, OSError):
            if not staying.expired():  # it does not read, or is gone: closed without an end
                return
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]  # an async generator leaves its feed here
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_WAITING = 64
"""Events that wait for one client."""
HEARTBEAT_S = 15.0
"""Less than the half minute after which proxies tend to close what is silent."""
_MAX_KEPT_EVENTS = 128
_MAX_KEPT_BYTES = 1 << 20


class Feed:
    """Runs on one event loop."""

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._heartbeat_s = heartbeat_s
        self._run = secrets.token_hex(4)  # numbers of another process mean nothing here
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_MAX_KEPT_EVENTS)
        self._kept_bytes = 0
        self._clients: set[asyncio.Queue[bytes | None]] = set()
        self._is_closed = False
        self.num_dropped = 0
        """Clients that were too slow."""

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    @property
    def last_id(self) -> str:
        """Of the newest event: what a snapshot that is made now already holds."""
        return f"{self._run}-{self._number}"

    def publish(self, name: str, data: Mapping[str, Any]) -> None:
        """To all clients. `data` must be strict JSON."""
        self._number += 1
        line = f"id: {self.last_id}\nevent: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
        if len(self._kept) == _MAX_KEPT_EVENTS:
            self._forget_one()
        self._kept.append((self._number, line))
        self._kept_bytes += len(line)
        while self._kept_bytes > _MAX_KEPT_BYTES:
            self._forget_one()
        for client in list(self._clients):
            if client.qsize() >= MAX_WAITING:
                self._drop(client)
            else:
                client.put_nowait(line)

    async def stream(self, last_id: str | None) -> AsyncIterator[bytes]:
        """What has happened since the event `last_id`, or `reset` where that is not known any more; then what happens.

        Ends when the client is dropped or the feed is closed.
        """
        if self._is_closed:
            return
        client: asyncio.Queue[bytes | None] = asyncio.Queue()
        for line in self._since(last_id):
            client.put_nowait(line)
        self._clients.add(client)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        line = await client.get()
                except TimeoutError:
                    line = b": still here\n\n"
                if line is None:
                    return
                yield line
        finally:
            self._clients.discard(client)

    def close(self) -> None:
        """End all streams, for good."""
        self._is_closed = True
        for client in list(self._clients):
            client.put_nowait(None)

    def _since(self, last_id: str | None) -> list[bytes]:
        """For a new client a greeting, so that it knows the connection stands."""
        run, _, number = (last_id or "").rpartition("-")
        if not last_id:
            return [b"retry: 2000\n\n"]
        oldest = self._kept[0][0] if self._kept else self._number + 1
        if (
            run == self._run
            and number.isascii()
            and number.isdigit()
            and oldest - 1 <= int(number[:18]) <= self._number
        ):
            return [b"retry: 2000\n\n", *(line for n, line in self._kept if n > int(number[:18]))]
        return [f"id: {self.last_id}\nevent: reset\ndata: {{}}\n\n".encode()]

    def _forget_one(self) -> None:
        _, line = self._kept.popleft()
        self._kept_bytes -= len(line)

    def _drop(self, client: "asyncio.Queue[bytes | None]") -> None:
        self.num_dropped += 1
        self._clients.discard(client)
        while not client.empty():
            client.get_nowait()
        client.put_nowait(None)


_MAX_READINGS = 4
"""That wait or are kept for who asks the same; they run one after the other."""
_BUSY = "others are searching; ask again in a moment"


class Readings:
    """What readers of pages ask for and a thread reads: one reading for all who ask the same, one reading at a time.

    The threads are those that others' bodies are checked on, and whoever closes a connection leaves its reading behind.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[Any, ...], asyncio.Task[bytes]] = {}
        """By what was asked for."""
        self._turn = asyncio.Lock()

    async def answer(self, key: tuple[Any, ...], read: Callable[[], Mapping[str, Any]]) -> Response:
        """What `read` returns; for the same `key` it is not read again while few others are asked for."""
        task = self._tasks.pop(key, None)
        if task is None or (task.done() and task.exception()):
            for other in [other for other, one in self._tasks.items() if one.done()]:
                if len(self._tasks) >= _MAX_READINGS:
                    del self._tasks[other]
            if len(self._tasks) >= _MAX_READINGS:
                return JSONResponse({"error": _BUSY}, status_code=503)
            task = asyncio.create_task(self._read(read))
        self._tasks[key] = task
        return Response(await asyncio.shield(task), media_type="application/json")

    async def _read(self, read: Callable[[], Mapping[str, Any]]) -> bytes:
        async with self._turn:
            return await asyncio.to_thread(lambda: json.dumps(read(), allow_nan=False).encode())

"""A response of server-sent events. It ends for a client that does not read, and where others need its place."""

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarm.fair_places import FairPlaces

MAX_STREAMS = 32
SEND_TIMEOUT_S = 20.0


class EventPlaces(FairPlaces):
    """The places of a page's event streams. A new stream always gets one: the address that holds most loses its oldest.

    Nobody can therefore keep others out by holding streams, also not at the same address, which all programs of a machine
    share. A browser whose stream was ended comes back by itself and misses no event.
    """

    def __init__(self) -> None:
        super().__init__(MAX_STREAMS, newest_wins=True)


class EventResponse(Response):
    """Ends with its events, when the client is gone, when it took nothing for SEND_TIMEOUT_S, or when it loses its place."""

    def __init__(
        self, events: AsyncIterator[bytes], places: EventPlaces, send_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._places = places
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send, (scope.get("client") or ("",))[0]))
        leaving = asyncio.create_task(_disconnected(receive))
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

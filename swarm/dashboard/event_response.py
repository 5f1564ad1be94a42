"""A response of server-sent events that gives up on who does not read."""

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SEND_TIMEOUT_S = 20.0


class EventResponse(Response):
    """Ends with its events, when the client is gone, or when it took nothing for SEND_TIMEOUT_S."""

    def __init__(self, events: AsyncIterator[bytes], send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):  # it does not read, or is gone: closed without an end
            return
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]  # an async generator leaves its feed here


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Whether a peer that works on an order is still there: its loop is asked, while its thread works.

    order ─────────────────────────────────────────────▶ reply
    still there? ─▶ yes   still there? ─▶ yes   still there? ─▶ (nothing for `silence_s`) ─▶ lost

So an order may take as long as it takes, and a machine that is frozen or cut off is noticed in seconds.
"""

import asyncio
import contextlib
import time
from typing import TypeVar

from swarm.errors import RequestError
from swarm.network.transport import RequestRefused, Transport

T = TypeVar("T")

ALIVE_PROTOCOL = "swarm/order-alive/1"
_YES = b"\x01"
_INTERVAL_S = 1.0
"""Between two questions, at most; orders that are done by then cost none."""


def serve_alive(transport: Transport, driver: str) -> None:
    """Answer the driver, and nobody else. To be called before the transport starts."""

    async def answer(peer_id: str, request: bytes) -> bytes:
        if peer_id != driver:
            raise RequestRefused("not the driver of this crew")
        return _YES

    transport.serve(ALIVE_PROTOCOL, answer, max_request_bytes=1)


async def watched(transport: Transport, peer_id: str, order: "asyncio.Task[T]", silence_s: float) -> T:
    """What `order` gives. Raises RequestError, and cancels it, once the peer has said nothing for `silence_s`."""
    heard_at = time.monotonic()
    try:
        while True:
            await asyncio.wait([order], timeout=min(_INTERVAL_S, silence_s / 4))
            if order.done():
                return order.result()
            asking = asyncio.create_task(_is_there(transport, peer_id, silence_s))
            try:
                await asyncio.wait([order, asking], return_when=asyncio.FIRST_COMPLETED)
                if asking.done() and asking.result():
                    heard_at = time.monotonic()
            finally:
                await _cancelled(asking)
            if not order.done() and time.monotonic() - heard_at >= silence_s:
                raise RequestError(f"order to {peer_id} failed: no sign of life for {silence_s:g} s", "deadline")
    finally:
        await _cancelled(order)


async def _is_there(transport: Transport, peer_id: str, deadline_s: float) -> bool:
    try:
        await transport.request(peer_id, ALIVE_PROTOCOL, b"", max_response_bytes=1, deadline_s=deadline_s)
    except RequestError as error:
        return error.reason in ("busy", "refused")  # somebody said so
    return True


async def _cancelled(task: "asyncio.Task[T]") -> None:
    if task.done():
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, RequestError):
        await task

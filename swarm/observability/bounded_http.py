"""HTTP connections within bounds: uvicorn takes any number of them, and waits for ever for those that send nothing.

Each is a file descriptor, and with none left a node cannot open its own files.
"""

import asyncio
from contextlib import ExitStack
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.fair_places import FairPlaces, NoPlace

MAX_CONNECTIONS = 128
"""At a time. Beyond that the address that has most gives up its oldest for one that has fewer."""
HEAD_TIMEOUT_S = 10.0
"""For the head of a request, from the connection or from its first bytes on."""
BACKLOG = 32
"""Connections that wait to be accepted, which asyncio does all at once."""


class BoundedHttp(H11Protocol):
    """One connection. Made by `uvicorn.Config(http=...)`, with the places of its server before uvicorn's own arguments."""

    def __init__(self, places: FairPlaces, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._places = places
        self._place = ExitStack()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        address = (transport.get_extra_info("peername") or [""])[0]
        try:
            self._place.enter_context(self._places.hold(address, transport.abort))
        except NoPlace:
            transport.abort()
            return
        super().connection_made(transport)
        self._expect_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.close()
        self._forget_deadline()
        if self.transport is not None:  # else there was no place for it
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._forget_deadline()
        elif self._deadline is None:
            self._expect_a_head()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_a_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_answering:
            self.transport.abort()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

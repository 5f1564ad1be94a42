"""HTTP within bounds: uvicorn takes any number of connections, waits for ever for those that send nothing, and answers as
fast as it is asked.

Each connection is a file descriptor, and with none left a node cannot open its own files. Each answer takes time of the
loop on which the node hears its peers, and of the processor.
"""

import asyncio
from contextlib import ExitStack
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.fair_places import FairPlaces, network_of
from swarm.observability.turns import Turns

MAX_CONNECTIONS = 128
"""At a time. Beyond that a new one is taken in place of the oldest one of the address that has most: programs of one machine
share its address, and one that holds connections must not keep the others out."""
HEAD_TIMEOUT_S = 10.0
"""For the head of a request, from the connection or from its first bytes on."""
BACKLOG = 32
"""Connections that wait to be accepted, which asyncio does all at once."""
ANSWERS_PER_S = 50.0
BURST_ANSWERS = 200
"""A page and all that it loads, several times over."""


class BoundedHttp(H11Protocol):
    """One connection. Made by `uvicorn.Config(http=...)`, with places and turns of its server before uvicorn's own arguments.

    The newest wins a place: else a connection may find none.
    """

    def __init__(self, places: FairPlaces, turns: Turns, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._places = places
        self._place = ExitStack()
        self._turns = turns
        self._address = ""
        self._held: bytes | None = None  # what was read and has to wait for its turn
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._address = network_of((transport.get_extra_info("peername") or [""])[0])
        self._place.enter_context(self._places.hold(self._address, transport.abort))
        super().connection_made(transport)
        self._expect_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.close()
        for what in ("read", "answer"):
            self._turns.leave(self._address, (self, what))
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._held is not None:
            self._held += data
        else:
            self._held = data
            self._turns.take(self._address, (self, "read"), self._go_on)
        if self._held is not None:
            self.transport.pause_reading()  # again, where uvicorn has resumed it meanwhile

    def _go_on(self) -> None:
        data, self._held = self._held or b"", None
        if not self.flow.read_paused:  # else uvicorn waits for something
            self.transport.resume_reading()
        super().data_received(data)
        if self._is_answering:
            self._forget_deadline()
        elif self._deadline is None:
            self._expect_a_head()

    def on_response_complete(self) -> None:
        """The next request, where it has come with this one, waits for a turn, too."""
        if self.conn.trailing_data[0]:
            self._turns.take(self._address, (self, "answer"), super().on_response_complete)
        else:
            super().on_response_complete()

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

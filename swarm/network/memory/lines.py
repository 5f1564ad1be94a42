"""Lines within one process: frames in order, with the delays of the network. A line breaks when either end leaves."""

import asyncio

from swarm.errors import RequestError
from swarm.network.memory.network import MemoryNetwork
from swarm.network.transport import TrafficCounter

_REPEAT_S = 0.2
"""A lost frame is sent again after this time, as TCP does."""


class MemoryLine:
    """One end of a line; see `transport.Line`. Make both with `pair`."""

    def __init__(self, network: MemoryNetwork, own: str, peer_id: str, traffic: TrafficCounter) -> None:
        self.peer_id = peer_id
        self._network = network
        self._own = own
        self._traffic = traffic
        self._other: MemoryLine = self
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()  # None at the end
        self._sending: asyncio.Task[None] | None = None  # the last frames under way
        self._is_closed = False

    @classmethod
    def pair(
        cls, network: MemoryNetwork, opener: str, answerer: str, traffic: tuple[TrafficCounter, TrafficCounter]
    ) -> "tuple[MemoryLine, MemoryLine]":
        """Return the ends of a new line: the opener's and the answerer's."""
        near, far = cls(network, opener, answerer, traffic[0]), cls(network, answerer, opener, traffic[1])
        near._other, far._other = far, near
        return near, far

    @property
    def ends(self) -> tuple[str, str]:
        """Peer ids of both ends."""
        return self._own, self.peer_id

    async def send(self, *frames: bytes) -> None:
        """See `transport.Line.send`."""
        if self._is_closed or not self._network.connected(self._own, self.peer_id):
            self.close()
            raise self._cut()
        self._traffic.bytes_sent += sum(map(len, frames))
        self._sending = asyncio.create_task(self._carry(frames, self._sending))

    async def receive(self, max_bytes: int) -> bytes:
        """See `transport.Line.receive`."""
        frame = None if self._is_closed and self._arrived.empty() else await self._arrived.get()
        if frame is None:
            self._is_closed = True
            raise self._cut()
        if len(frame) > max_bytes:
            raise RequestError(
                f"a frame of {self.peer_id} must have <= {max_bytes} bytes, got {len(frame)}", "oversize"
            )
        self._traffic.bytes_received += len(frame)
        return frame

    def close(self) -> None:
        """See `transport.Line.close`. What was sent before still arrives."""
        if not self._is_closed:
            self._is_closed = True
            self._arrived.put_nowait(None)
            asyncio.create_task(self._end(self._sending))  # noqa: RUF006  # ends by itself

    def cut(self) -> None:
        """Break the line at once, at both ends."""
        for end in (self, self._other):
            end._is_closed = True
            end._arrived.put_nowait(None)

    async def _carry(self, frames: tuple[bytes, ...], earlier: "asyncio.Task[None] | None") -> None:
        num_bytes = sum(map(len, frames))
        while await self._network.carry(self._own, self.peer_id, num_bytes) is None:
            if not self._network.connected(self._own, self.peer_id):
                self.cut()
                return
            await self._network.calendar.sleep(_REPEAT_S)
        if earlier is not None:
            await asyncio.wait([earlier])
        for frame in frames:
            self._other._arrived.put_nowait(frame)

    async def _end(self, sending: "asyncio.Task[None] | None") -> None:
        if sending is not None:
            await asyncio.wait([sending])
        self._other._arrived.put_nowait(None)

    def _cut(self) -> RequestError:
        return RequestError(f"the line to {self.peer_id} was cut", "cut")

"""A line between members of a silo, with every frame sealed under the group's key."""

from collections.abc import Callable

from swarm.errors import RequestError, SiloError
from swarm.network.transport import Line
from swarm.silo.membership import Membership
from swarm.silo.sealing import OVERHEAD_BYTES


class SealedLine:
    """A line with sealed frames; see `transport.Line`. Each is bound to its place in the line."""

    def __init__(
        self,
        inner: Line,
        membership: Membership,
        protocol: str,
        ends: tuple[str, str],
        *,
        on_fault: Callable[[bytes, SiloError], None],
    ) -> None:
        """`ends`: peer ids of the opener and of the answerer. `on_fault` is told of a frame that does not open."""
        self._on_fault = on_fault
        self.peer_id = inner.peer_id
        self._inner = inner
        self._membership = membership
        self._protocol = protocol
        self._context = f"line/{protocol}/{'/'.join(ends)}"
        self._ways = ("back", "forth") if inner.peer_id == ends[0] else ("forth", "back")  # sent, received
        self._num_sent = 0
        self._num_received = 0

    async def send(self, *frames: bytes) -> None:
        """See `transport.Line.send`."""
        try:
            key, sealed = self._membership.keys.current, list[bytes]()
        except SiloError as error:
            raise RequestError(f"the line to {self.peer_id} was cut: {error}", "cut") from None
        for frame in frames:
            sealed.append(key.seal(self._protocol, frame, self._place(self._ways[0], self._num_sent)))
            self._num_sent += 1
        await self._inner.send(*sealed)

    async def receive(self, max_bytes: int) -> bytes:
        """See `transport.Line.receive`. A frame that does not open, or is of no member any longer, ends the line."""
        sealed = await self._inner.receive(max_bytes + OVERHEAD_BYTES)
        try:
            if not self._membership.is_member(self.peer_id):
                raise SiloError("a line must lead to a member", "stranger")
            context = self._place(self._ways[1], self._num_received)
            frame = self._membership.keys.key_for(sealed).open(self._protocol, sealed, context)
        except SiloError as error:
            self._on_fault(sealed, error)
            self.close()
            raise RequestError(f"the line to {self.peer_id} was cut: {error}", "damaged") from None
        self._num_received += 1
        return frame

    def close(self) -> None:
        """See `transport.Line.close`."""
        self._inner.close()

    def _place(self, way: str, number: int) -> bytes:
        return f"{self._context}/{way}/{number}".encode()

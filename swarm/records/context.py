"""Who a node is, which swarm it is in, and what time it is there."""

from collections.abc import Callable
from dataclasses import dataclass

from swarm.records.identity import Identity


@dataclass(frozen=True)
class SwarmContext:
    """What every part that signs or checks records needs. One node has one; it may be used from any thread."""

    identity: Identity
    swarm_id: str
    clock: Callable[[], float]
    """Swarm time in seconds since the epoch."""

    @property
    def peer_id(self) -> str:
        """The node's own peer id."""
        return self.identity.peer_id

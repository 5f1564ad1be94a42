"""A node's identity and swarm together with its transport: what every part that talks to other nodes is given."""

from dataclasses import dataclass
from typing import Self

from swarm.network.transport import Transport
from swarm.records.context import SwarmContext
from swarm.records.identity import Identity


@dataclass(frozen=True)
class NodeContext(SwarmContext):
    """A `SwarmContext` with a transport. One node with a network has one, from its start to its stop."""

    transport: Transport

    @classmethod
    def of(cls, identity: Identity, swarm_id: str, transport: Transport) -> Self:
        """The context whose clock is the transport's."""
        return cls(identity, swarm_id, transport.now, transport)

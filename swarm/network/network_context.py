"""What the parts of one node's network share: its settings, its key, and what it knows of ports, addresses and traffic."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swarm.config import NetworkSection
from swarm.network.index_entry import IndexValidator
from swarm.network.own_ports import PORTS_FILE, OwnPorts
from swarm.network.peers.dialling import Dialling
from swarm.network.reach.role import REACHED_FILE
from swarm.network.transport import Admits, TrafficCounter, everybody
from swarm.records.identity import Identity


@dataclass(frozen=True, slots=True)
class NetworkContext:
    """The shared part of a transport, its request server and its gossip service. It lives as long as the transport."""

    config: NetworkSection
    identity: Identity
    validator: IndexValidator | None
    """Judges entries of the index; None accepts all."""
    admits: Admits
    ports: OwnPorts
    dialling: Dialling
    traffic: TrafficCounter
    reached_file: Path | None
    """Stores where peers could dial this node; None stores nothing."""

    @classmethod
    def of(
        cls,
        config: NetworkSection,
        identity: Identity,
        folder: Path | None = None,
        *,
        validator: IndexValidator | None = None,
        admits: Admits = everybody,
    ) -> Self:
        """Make it from the settings. `folder` stores what the next start goes on with. Raises ConfigError."""
        ports = OwnPorts(None if folder is None else folder / PORTS_FILE)
        return cls(
            config=config,
            identity=identity,
            validator=validator,
            admits=admits,
            ports=ports,
            dialling=Dialling.of(config),
            traffic=TrafficCounter(),
            reached_file=None if folder is None else folder / REACHED_FILE,
        )

    def rng(self, purpose: str) -> random.Random:
        """Return random numbers that differ between nodes, so that they do not all retry at the same moment."""
        return random.Random(f"{self.identity.peer_id}/{purpose}")

"""The transport that the settings ask for."""

from pathlib import Path

from swarm.config import NetworkSection
from swarm.network.index_entry import IndexValidator
from swarm.network.transport import Admits, Transport, everybody
from swarm.records.identity import Identity


def make_transport(
    config: NetworkSection,
    identity: Identity,
    state_dir: Path,
    validator: IndexValidator | None = None,
    admits: Admits = everybody,
) -> Transport | None:
    """Not started yet; None with the network off. `admits`: whom to answer. Raises ConfigError for a malformed address."""
    if config.backend == "hivemind":
        from swarm.network.hivemind.transport import HivemindTransport

        return HivemindTransport(config, identity, state_dir, validator, admits)
    if config.backend == "libp2p":
        from swarm.network.libp2p.transport import LightTransport

        return LightTransport(config, identity, state_dir, validator, admits)
    return None

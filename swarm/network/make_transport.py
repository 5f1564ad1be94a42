"""The registry of transports: `network.backend` names the one that a node uses."""

import importlib
from pathlib import Path
from typing import Protocol, cast

from swarm.config import NetworkSection
from swarm.network.index_entry import IndexValidator
from swarm.network.transport import Admits, Transport, everybody
from swarm.records.identity import Identity

TRANSPORTS = {
    "hivemind": "swarm.network.hivemind.transport:HivemindTransport",
    "libp2p": "swarm.network.libp2p.transport:LightTransport",
}
"""{backend: module and class}. Only the one in use is imported, since each brings a network library of its own.

`tests/swarm/test_transport_contract.py` runs over all of them."""


class _TransportClass(Protocol):
    def __call__(
        self,
        config: NetworkSection,
        identity: Identity,
        state_dir: Path,
        *,
        validator: IndexValidator | None,
        admits: Admits,
    ) -> Transport: ...


def make_transport(
    config: NetworkSection,
    identity: Identity,
    state_dir: Path,
    validator: IndexValidator | None = None,
    admits: Admits = everybody,
) -> Transport | None:
    """Return the transport that the settings name, not started yet; None where the network is off.

    `state_dir` is the node's folder, `admits` decides which peers are answered. Raises ConfigError for a malformed address.
    """
    place = TRANSPORTS.get(config.backend)
    if place is None:
        return None
    module, _, name = place.partition(":")
    transport_class = cast(_TransportClass, getattr(importlib.import_module(module), name))
    return transport_class(config, identity, state_dir, validator=validator, admits=admits)

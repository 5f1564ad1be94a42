"""The file in which a node keeps the peers it has met, to find the swarm again when every configured peer is gone."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from swarm.network.tcp_address import parsed
from swarm.records.identity import is_peer_id
from swarm.safe_files import read_file, replace_file

logger = logging.getLogger(__name__)

PEERS_FILE = "peers.json"
MAX_PEERS = 64
MAX_ADDRESSES_PER_PEER = 4
MAX_AGE_S = 7 * 24 * 3600.0
"""A peer that was not seen for so long is forgotten."""
MAX_FILE_BYTES = 1 << 17

Addresses = tuple[str, ...]
"""Multiaddresses of one peer, without its id."""


class StoredPeer(BaseModel):
    """One peer as the file holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer_id: str
    addresses: Addresses
    last_seen: FiniteFloat
    """Seconds since the epoch."""


class _PeerFile(BaseModel):
    version: Literal[1] = 1
    peers: Annotated[tuple[StoredPeer, ...], Field(max_length=MAX_PEERS)] = ()


def dialable(peer_id: str, addresses: Iterable[str]) -> Addresses:
    """Those of `addresses` at which to dial a peer, in order, without its id, at most MAX_ADDRESSES_PER_PEER."""
    kept: dict[str, None] = {}
    for address in parsed(addresses):
        if address.port != 0 and not address.is_wildcard and address.peer_id in (None, peer_id):
            kept[address.transport] = None
    return tuple(kept)[:MAX_ADDRESSES_PER_PEER]


def read_peers(path: Path, now: float) -> dict[str, StoredPeer]:
    """{peer id: peer} of those seen in the last week; empty, with a warning, where the file is damaged."""
    try:
        peers = _PeerFile.model_validate_json(read_file(path, MAX_FILE_BYTES)).peers
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        cause = f"{error.error_count()} errors in it" if isinstance(error, ValidationError) else error
        logger.warning("the stored peers cannot be read, starting without: %s: %s", path, cause)
        return {}
    found: dict[str, StoredPeer] = {}
    for peer in peers:
        addresses = dialable(peer.peer_id, peer.addresses)
        last_seen = min(peer.last_seen, now)  # a clock that was wrong must not keep a peer for ever
        if addresses and is_peer_id(peer.peer_id) and now - last_seen < MAX_AGE_S:
            found[peer.peer_id] = StoredPeer(peer_id=peer.peer_id, addresses=addresses, last_seen=last_seen)
    return found


def write_peers(path: Path, peers: Mapping[str, StoredPeer]) -> None:
    """All of it or nothing; a disk that takes nothing costs a warning."""
    try:
        replace_file(path, _PeerFile(peers=tuple(peers.values())).model_dump_json(indent=1))
    except OSError as error:
        logger.warning("the peers met cannot be stored: %s", error)

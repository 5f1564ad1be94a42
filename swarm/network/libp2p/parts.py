"""The parts of py-libp2p that the network needs, beside hivemind in one process.

hivemind and py-libp2p both register a protobuf file that defines `crypto.pb.KeyType`; in one descriptor pool the second
import fails. py-libp2p's generated modules therefore get a pool of their own. Every other module takes py-libp2p from
here. Importing takes half a second and 50 MB, so only modules that are imported at start may import this one.

py-libp2p asks for fastecdsa, which has no binary for many machines, for keys of a kind (P-256) that only its old secio
security uses, which is not used here. Where fastecdsa is missing, an empty stand-in lets the import pass.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from google.protobuf import descriptor_pool

os.environ.setdefault("PY_YAMUX_RELEASE_ON_READ", "0")  # read at every call; otherwise large transfers crawl


@contextmanager
def _own_descriptor_pool() -> Iterator[None]:
    shared, own = descriptor_pool.Default, descriptor_pool.DescriptorPool()
    descriptor_pool.Default = lambda: own
    try:
        yield
    finally:
        descriptor_pool.Default = shared


class _StandIn(ModuleType):
    """A module in which every name is `object`: enough for annotations, of no use for keys."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@contextmanager
def _without_fastecdsa() -> Iterator[None]:
    names = [] if importlib.util.find_spec("fastecdsa") else ["", ".curve", ".keys", ".point", ".encoding"]
    names += [".encoding.sec1", ".encoding.util"] if names else []
    for name in names:
        module = sys.modules[f"fastecdsa{name}"] = _StandIn(f"fastecdsa{name}")
        module.__path__ = []
    for name in names[1:]:
        parent, _, child = f"fastecdsa{name}".rpartition(".")
        setattr(sys.modules[parent], child, sys.modules[f"fastecdsa{name}"])
    try:
        yield
    finally:
        for name in names:
            del sys.modules[f"fastecdsa{name}"]


with _own_descriptor_pool(), _without_fastecdsa():
    import trio
    from libp2p import new_host
    from libp2p.abc import IHost, IMuxedStream, INetConn, INetStream, INetwork, INotifee, ISecureConn
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.keys import KeyPair
    from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.network.auto_connector import AutoConnector
    from libp2p.network.config import ConnectionConfig
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.network.stream.exceptions import StreamError
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo
    from libp2p.peer.peerstore import PeerStoreError
    from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
    from libp2p.pubsub.pb import rpc_pb2
    from libp2p.pubsub.pubsub import Pubsub
    from libp2p.pubsub.rpc_queue import RpcQueue
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
    from libp2p.security.noise.transport import Transport as NoiseTransport
    from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
    from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
    from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
    from libp2p.tools.anyio_service import background_trio_service
    from multiaddr import Multiaddr

__all__ = [
    "ID",
    "NOISE_PROTOCOL_ID",
    "PROTOCOL_ID_V11",
    "YAMUX_PROTOCOL_ID",
    "AutoConnector",
    "ConnectionConfig",
    "GossipSub",
    "IHost",
    "IMuxedStream",
    "INetConn",
    "INetStream",
    "INetwork",
    "INotifee",
    "ISecureConn",
    "KeyPair",
    "Multiaddr",
    "MuxerMultistream",
    "NoiseTransport",
    "PeerInfo",
    "PeerStoreError",
    "Pubsub",
    "RawConnection",
    "RpcQueue",
    "StreamError",
    "TProtocol",
    "Yamux",
    "YamuxStream",
    "background_trio_service",
    "create_new_key_pair",
    "create_new_x25519_key_pair",
    "new_host",
    "rpc_pb2",
    "trio",
]

"""Imports the parts of py-libp2p that the network needs, in one process with hivemind.

hivemind and py-libp2p both register a protobuf file that defines `crypto.pb.KeyType`, and in one descriptor pool the
second import fails. So py-libp2p's generated modules get a pool of their own, and every other module imports py-libp2p
from here. The import takes half a second and 50 MB, so only modules that are imported at start may import this one.

py-libp2p imports packages that are not used here: requests and httpx for certificates from the Web, zeroconf for
discovery in a local network, fastecdsa (without a binary for many machines) for keys of its old secio security,
certificates and websockets for transports that are not opened, cbor2 for IPNS. Stand-ins let these imports pass and
save 17 MB.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from google.protobuf import descriptor_pool

os.environ.setdefault("PY_YAMUX_RELEASE_ON_READ", "0")  # read at every call; otherwise large transfers are very slow


@contextmanager
def _own_descriptor_pool() -> Iterator[None]:
    shared, own = descriptor_pool.Default, descriptor_pool.DescriptorPool()
    descriptor_pool.Default = lambda: own
    try:
        yield
    finally:
        descriptor_pool.Default = shared


_UNUSED = ("OpenSSL", "cbor2", "fastecdsa", "httpx", "requests", "service_identity", "trio_websocket", "zeroconf")


class _StandIn(ModuleType):
    """A module that has every name: classes are `object`, everything else is another such module. Enough for
    annotations.
    """

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object if name[0].isupper() else _StandIn(f"{self.__name__}.{name}")


class _StandIns(MetaPathFinder, Loader):
    """Finds a stand-in for every module of some packages."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_stand_in = fullname.partition(".")[0] in self._packages
        return ModuleSpec(fullname, self, is_package=True) if is_stand_in else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def _without(*packages: str) -> Iterator[None]:
    """Use stand-ins for packages that are not imported yet. Later imports find the real ones."""
    finder = _StandIns(frozenset(packages) - sys.modules.keys())
    # A new list each time: a thread that is iterating over the old one would skip a finder in it, and miss a module
    # that exists.
    sys.meta_path = [finder, *sys.meta_path]
    try:
        yield
    finally:
        sys.meta_path = [one for one in sys.meta_path if one is not finder]
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandIn):
                del sys.modules[name]


with _own_descriptor_pool(), _without(*_UNUSED):
    import trio
    from libp2p import new_host
    from libp2p.abc import IHost, IMuxedStream, INetConn, INetStream, INetwork, INotifee, ISecureConn
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.keys import KeyPair
    from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.network.auto_connector import AutoConnector
    from libp2p.network.config import ConnectionConfig, RetryConfig
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.network.stream.exceptions import StreamError
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo
    from libp2p.peer.peerstore import PeerStoreError
    from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
    from libp2p.pubsub.pb import rpc_pb2
    from libp2p.pubsub.pubsub import Pubsub
    from libp2p.pubsub.rpc_queue import RpcQueue
    from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
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
    "PeerIDMismatchesPubkey",
    "PeerInfo",
    "PeerStoreError",
    "Pubsub",
    "RawConnection",
    "RetryConfig",
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

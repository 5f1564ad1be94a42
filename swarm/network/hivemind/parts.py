"""Imports the parts of hivemind that the network needs, without torch.

`import hivemind` runs the package's `__init__`, which imports its trainers and so torch: 3 s and 280 MB that a
bootstrap peer on a small server does not need. The DHT and the daemon's client need none of it. So the three packages
on the way to them are created here without running their `__init__`, under the names by which hivemind's own modules
import them. If something else has imported hivemind already, that one is used.

Every other module imports hivemind from here: from swarm.network.hivemind.parts import DHTNode.
"""

import importlib
import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from swarm.errors import NetworkError

_UTILS = ("asyncio", "logging", "networking", "serializer", "timed_storage")
"""Submodules of hivemind.utils whose names hivemind's own modules import from the package."""


def _enter() -> None:
    """Put `hivemind`, `hivemind.utils` and `hivemind.dht` into sys.modules without running their code."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.submodule_search_locations is None:
        raise NetworkError('network.backend "hivemind" needs the package hivemind; install it, or set "off"')
    (root,) = spec.submodule_search_locations
    package = _shell("hivemind", root)
    utils, dht = _shell("hivemind.utils", f"{root}/utils"), _shell("hivemind.dht", f"{root}/dht")
    package.utils, package.dht = utils, dht  # type: ignore[attr-defined]
    for name in _UTILS:
        module = importlib.import_module(f"hivemind.utils.{name}")
        vars(utils).update({key: value for key, value in vars(module).items() if not key.startswith("_")})


def _shell(name: str, folder: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [folder]
    module.__package__ = name
    module.__spec__ = ModuleSpec(name, None, is_package=True)  # others look for it to find hivemind
    module.__spec__.submodule_search_locations = [folder]
    sys.modules[name] = module
    return module


if "hivemind" not in sys.modules:
    _enter()

from hivemind import hivemind_cli  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue  # noqa: E402
from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings import p2pclient  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe  # noqa: E402
from hivemind.proto import dht_pb2, p2pd_pb2  # noqa: E402
from hivemind.utils.logging import use_hivemind_log_handler  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402
from hivemind.utils.timed_storage import HeapEntry, TimedStorage, ValueWithExpiration  # noqa: E402

logging.addLevelName(logging.WARNING, "WARNING")  # the import has renamed it to WARN for the whole process

__all__ = [
    "DHTID",
    "P2P",
    "ControlClient",
    "DHTLocalStorage",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "DictionaryDHTValue",
    "HeapEntry",
    "Multiaddr",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "RecordValidatorBase",
    "StreamInfo",
    "TimedStorage",
    "ValueWithExpiration",
    "dht_pb2",
    "hivemind_cli",
    "p2pclient",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "use_hivemind_log_handler",
]

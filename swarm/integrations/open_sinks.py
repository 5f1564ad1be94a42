"""Opens the sinks that the settings name."""

import time
from collections.abc import Callable
from importlib.util import find_spec

from swarm.config import Config
from swarm.config.shareable import shareable
from swarm.errors import ConfigError
from swarm.integrations.sink import QueuedSink, Sink
from swarm.machine.child_python import install_extra
from swarm.machine.node_folder import NodeFolder
from swarm.records.identity import Identity

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "otel": "opentelemetry.sdk"}
"""Extra of this package → what it brings."""


def open_sinks(config: Config, folder: NodeFolder, identity: Identity) -> list[Sink]:
    """Each on a thread of its own, begun with the first row. Raises ConfigError where an extra is not installed."""
    settings, sinks = config.integrations, dict[str, Callable[[], Sink]]()
    if settings.tensorboard:
        _need("tensorboard", "tensorboard")
        from swarm.integrations.trackers import TensorboardSink

        sinks["tensorboard"] = lambda: TensorboardSink(folder.path / "tensorboard")
    if settings.wandb != "off":
        _need("wandb", "wandb")
        from swarm.integrations.trackers import WandbSink, read_settings

        read_settings()
        mode = settings.wandb
        settings_shown = shareable(config.model_dump(mode="json"))
        sinks["wandb"] = lambda: WandbSink(
            mode, settings.wandb_project, identity.peer_name, folder.path, settings_shown
        )
    if settings.hub_repo:
        from swarm.integrations.hub import HubPush

        sinks["hub"] = lambda: HubPush(config, folder, time.monotonic)
    opened: list[Sink] = [QueuedSink(name, open_sink) for name, open_sink in sinks.items()]
    if settings.otel_endpoint:
        _need("otel", "otel_endpoint")
        from swarm.integrations.otel import OtelTracer

        facts = {"service.name": "swarm", "service.instance.id": identity.peer_id, "swarm.name": config.swarm.name}
        opened.append(OtelTracer(settings.otel_endpoint, facts))  # it queues by itself, and watches from now on
    return opened


def _need(extra: str, setting: str) -> None:
    package = _PACKAGES[extra]
    top, _, rest = package.partition(".")
    if find_spec(top) is None or (rest and find_spec(package) is None):
        raise ConfigError(
            f"integrations.{setting} needs the package {top}, got none; "
            f"{install_extra(extra)}, or leave integrations.{setting} as it was"
        )

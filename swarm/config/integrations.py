"""Settings of tools that may watch a node. Everything is off unless a setting here turns it on."""

from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from swarm.config.section import PositiveInt, Section

_HTTP_ADDRESS = r"^(https?://[^\s/]+(/\S*)?)?$"


class IntegrationsSection(Section):
    """Tools of others that may watch a node. Each needs its package, which docs/integrations.md names."""

    tensorboard: bool = False
    """Write every metrics row to tensorboard/ in the node's folder; view it with `tensorboard --logdir runs`. Extra:
    tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases. offline: write to wandb/ in the node's folder, for `wandb sync`. online: send to their service.
    Extra: wandb."""
    wandb_project: Annotated[str, Field(min_length=1, max_length=128)] = "swarm"
    """Project of the run in Weights & Biases. The run is called by the node's readable name."""
    otel_endpoint: Annotated[str, Field(pattern=_HTTP_ADDRESS)] = ""
    """OpenTelemetry collector for OTLP over HTTP, such as http://127.0.0.1:4318. It gets spans of rounds, rollouts,
    training steps, bodies sent and received, merges and checkpoints. Empty: none. Extra: otel."""
    hub_repo: Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)?$")] = ""
    """OWNER/NAME of a model repository that gets the newest checkpoint's adapter with a model card, by the token of `hf
    auth login`. Empty: none."""
    hub_interval_rounds: PositiveInt = 200
    """Rounds between two uploads. There is one more when the node ends."""
    hub_private: bool = True
    """Create the repository as a private one. An existing repository is not changed."""
    hub_endpoint: Annotated[str, Field(pattern=_HTTP_ADDRESS)] = ""
    """Address of another hub than huggingface.co. Empty: huggingface.co."""

    @field_validator("otel_endpoint", "hub_endpoint")
    @classmethod
    def _names_a_host(cls, address: str) -> str:
        if address and not urlsplit(address).hostname:
            raise ValueError(f"it must name a host, got {address}; write http://HOST:PORT")
        return address

    @property
    def outside(self) -> str | None:
        """The first setting by which something would leave this machine, with its value; None where nothing would."""
        if self.wandb == "online":
            return 'integrations.wandb = "online"'
        if self.otel_endpoint and not _is_loopback(self.otel_endpoint):
            return f'integrations.otel_endpoint = "{self.otel_endpoint}"'
        return f'integrations.hub_repo = "{self.hub_repo}"' if self.hub_repo else None


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The process, the swarm it belongs to, what survives a crash, how it is measured, and what a person sees of it."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm.config.section import PositiveInt, Section, SwarmName


class NodeSection(Section):
    """This process: where it keeps its state and how much of the machine it may take."""

    dir: Path = Path("runs/node")
    """Folder of identity, pool, checkpoints, logs and metrics. One running node per folder."""
    identity: Path | None = None
    """File of the identity's key, which is there already, outside of `dir`; what the node has seen of a silo's rolls is kept
    beside it. Unset: identity.key in `dir`, made at the first start."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds task choice, sampling and adapter training."""
    max_rounds: PositiveInt | None = None
    """Stop after so many rounds, counted from the first start; unset means until interrupted."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the policy runs; auto takes CUDA, then MPS, then CPU."""
    threads: PositiveInt | None = None
    """CPU threads for tensor work; unset leaves the choice to torch."""
    duty_cycle: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of time that the compute thread may work; 0.5 rests as long as it worked, which keeps a laptop usable."""

    @model_validator(mode="after")
    def _key_is_elsewhere(self) -> Self:
        if self.identity is not None and self.identity.resolve().is_relative_to(self.dir.resolve()):
            raise ValueError(
                f"node.identity must be a file outside of node.dir, got {self.identity} in {self.dir}; leave it out for "
                "identity.key in that folder"
            )
        return self


class SwarmSection(Section):
    """The swarm to take part in."""

    name: SwarmName = "local"
    """Nodes of equal name and tasks find each other's records."""
    id: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    """32 hex digits that bind the swarm to its founder; `swarm join` takes them from the manifest. Empty: the name decides."""
    silo_owner: Annotated[str, Field(pattern=r"^([1-9A-HJ-NP-Za-km-z]{40,64})?$")] = ""
    """Peer id of the owner of a silo, from its manifest: nothing leaves the node but sealed, to members. Empty: all may join."""


class CheckpointSection(Section):
    """What survives a crash."""

    interval_rounds: PositiveInt = 10
    """Rounds between two checkpoints."""
    keep: PositiveInt = 3
    """Checkpoints kept; the newest damaged one falls back to the one before."""


class EvaluationSection(Section):
    """Held-out tasks, never trained on by anyone."""

    tasks_per_source: Annotated[int, Field(ge=0)] = 32
    """Tasks per source in one evaluation; 0 turns it off."""
    interval_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds between two evaluations; 0 evaluates at the start and the end only."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """1 measures the policy as it is trained, the mean reward of a sampled answer; 0 decodes greedily."""


class ObservabilitySection(Section):
    """What a person and a monitor can see."""

    http: bool = True
    """Serve the node's page, /metrics (Prometheus) and /health."""
    http_host: str = "127.0.0.1"
    """Address to bind; keep it on loopback unless a firewall guards it."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free port; the node's status file names it."""
    http_names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]{1,253}$")], ...] = ()
    """Host names by which page, metrics and health may be asked for, beside addresses and localhost: of a proxy or a scraper."""
    max_log_mib: PositiveInt = 64
    """Size at which metrics.jsonl and the log each begin anew; one older file of each is kept, ending in .1."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged; debug names every rejected record."""

"""Settings of the process, its swarm, checkpoints, evaluation and observability."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm.config.section import PositiveInt, Section, SwarmName


class NodeSection(Section):
    """This process: where it stores its state, and how much of the machine it uses."""

    dir: Path = Path("runs/node")
    """Folder of identity, pool, checkpoints, logs and metrics. Only one running node may use it."""
    identity: Path | None = None
    """File with an existing key, outside of `dir`. The node's knowledge of a silo's rolls is stored beside it. Unset:
    identity.key in `dir`, created at the first start."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the choice of tasks, of sampling and of adapter training."""
    max_rounds: PositiveInt | None = None
    """Stop after this many rounds, counted from the first start. Unset: run until interrupted."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of the policy. auto: CUDA if available, then MPS, then CPU."""
    threads: PositiveInt | None = None
    """CPU threads for tensor operations. Unset: the default of torch."""
    duty_cycle: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of time in which the compute thread may work. 0.5 rests as long as it works, so that a laptop stays usable."""

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
    """Name of the swarm. Nodes with the same name and the same tasks find each other's records."""
    id: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    """32 hex digits that bind the swarm to its founder; `swarm join` takes them from the manifest. Empty: derived from the
    name."""
    silo_owner: Annotated[str, Field(pattern=r"^([1-9A-HJ-NP-Za-km-z]{40,64})?$")] = ""
    """Peer id of the owner of a silo, from its manifest. Everything that leaves the node is encrypted for members. Empty:
    no silo."""


class CheckpointSection(Section):
    """Checkpoints, from which a node resumes."""

    interval_rounds: PositiveInt = 10
    """Most rounds between two checkpoints."""
    interval_s: Annotated[float, Field(ge=0)] = 60.0
    """The first round that ends so many seconds after the last checkpoint writes one, too, so that little is lost where rounds
    are long; later where training would wait for it for more than a twentieth of the time. 0: interval_rounds alone decides."""
    keep: PositiveInt = 3
    """Number of newest checkpoints that are kept, beside the one that did best on held-out tasks. If the newest is damaged, the
    one before it is used."""


class EvaluationSection(Section):
    """Evaluation on held-out tasks, on which no node trains."""

    tasks_per_source: Annotated[int, Field(ge=0)] = 32
    """Tasks per source in one evaluation, or answers where a source has few tasks. 0: no evaluation. Unless set, 64 in all, and 4
    to 32 per source, if policy.base is not bundled."""
    interval_rounds: Annotated[int, Field(ge=0)] = 50
    """Rounds between two evaluations, which tell what was learned or lost and which checkpoint is the best. Each costs what its
    answers cost to sample, which is much beside very small rounds. 0: only at the start and at the end."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature of evaluations. 1: measures the policy as it is trained. 0: greedy decoding."""


class ObservabilitySection(Section):
    """The page, metrics and logs of a node."""

    http: bool = True
    """Serve the node's page, /metrics (Prometheus) and /health."""
    http_host: str = "127.0.0.1"
    """Address to listen on. Use a loopback address unless a firewall protects it."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on. 0: a free port, which the node's status file names."""
    http_names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]{1,253}$")], ...] = ()
    """Host names that requests may use besides addresses and localhost, for example those of a proxy."""
    max_log_mib: PositiveInt = 64
    """Size in MiB at which metrics.jsonl and the log start a new file. One older file of each is kept, ending in .1."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged. debug reports every rejected record."""

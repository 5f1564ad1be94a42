"""The driving node of a pipeline: what `swarm run` samples and trains with where `policy.pipeline` names machines.

compute thread: Learner ─▶ PipelinePolicy, PipelineEngine, PipelineOptimizer
    ─▶ event loop: PipelineSupervisor ─▶ commands, on one line each ─▶ `swarm stage`
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.config import Config
from swarm.errors import ConfigError
from swarm.network.commands.caller import CommandCaller
from swarm.network.commands.envelope import CommandChannel
from swarm.network.transport import Transport
from swarm.node.stage_process import check_pipeline
from swarm.policy.micro_batch_size import DEFAULT_TOKENS
from swarm.records.identity import Identity

if TYPE_CHECKING:
    from swarm.node.policy_backend import PolicyBackend
    from swarm.pipeline.driver.pipeline_supervisor import PipelineSupervisor


class PipelineDriver:
    """Sends the commands of this node to the machines of its pipeline."""

    def __init__(
        self, config: Config, identity: Identity, transport: Transport | None, clock: Callable[[], float]
    ) -> None:
        """Make it before the transport starts. Raises ConfigError unless this node drives a pipeline that can be reached."""
        check_pipeline(config)
        assert transport is not None, "checked by check_pipeline"
        pipeline = config.policy.pipeline
        if identity.peer_id != pipeline.driver:
            raise ConfigError(
                f"a pipeline's driver must be the named one, got {identity.peer_id}; set policy.pipeline.driver on all "
                "machines"
            )
        self._config = config
        self._deadline_s = pipeline.startup_timeout_s
        """For loading, the longest command; the stage group limits the others."""
        channel = CommandChannel(config.swarm_id, pipeline.name, driver=pipeline.driver, members=pipeline.members)
        self._caller = CommandCaller(channel, identity, transport, clock=clock)
        self._supervisor: PipelineSupervisor | None = None

    async def send(
        self, peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int, relayed_to: Sequence[str] = ()
    ) -> bytes:
        """See `SendCommand`."""
        # a machine imports for seconds when it gets its first command, which has a deadline of its own
        silence_s = None if kind == "machine" else self._config.policy.pipeline.silence_timeout_s
        return await self._caller.send(
            peer_id,
            kind,
            payload,
            max_reply_bytes=max_reply_bytes,
            deadline_s=self._deadline_s,
            silence_s=silence_s,
            relayed_to=relayed_to,
        )

    def bring_up(self, config: Config, loop: asyncio.AbstractEventLoop, hash_cache: Path) -> "PolicyBackend":
        """Wait for the machines, assign and load layers. Blocks; must not run on the loop. Raises SwarmError.

        `config`: as fitted to the base.
        """
        from swarm.node.policy_backend import PolicyBackend
        from swarm.pipeline.commands import StageSettings
        from swarm.pipeline.driver.assignment import Machine
        from swarm.pipeline.driver.pipeline_engine import PipelineEngine
        from swarm.pipeline.driver.pipeline_policy import PipelineOptimizer, pipeline_policy
        from swarm.pipeline.driver.pipeline_supervisor import PipelineSupervisor
        from swarm.pipeline.model_shape import model_cost
        from swarm.pipeline.stage.stage_host import base_model, layers_per_s
        from swarm.policy.device import available_bytes

        num_tokens = micro_batch_tokens(config)
        base = base_model(config.policy, config.node.device)
        pipeline = config.policy.pipeline
        settings = StageSettings(
            weight_decay=config.training.weight_decay,
            max_states=pipeline.max_states,
            max_in_flight=len(pipeline.members) + 1,
        )
        self._supervisor = PipelineSupervisor(
            config.policy.pipeline, base, model_cost(base), settings=settings, send=self.send
        )
        policy = pipeline_policy(
            config.policy, base, self._supervisor, loop=loop, hash_cache=hash_cache, micro_batch_tokens=num_tokens
        )
        speed = layers_per_s(base.folder, base.lora, base.device, dtype=base.dtype)
        policy.wait_for(self._supervisor.start(Machine(speed, available_bytes(base.device))))
        most_prompts = pipeline.max_states // config.policy.max_prompt_tokens
        engine = PipelineEngine(policy, min(config.rollouts.max_batch_sequences, most_prompts))
        return PolicyBackend(policy, engine, PipelineOptimizer(config.training, policy), probe_memory=_nothing_to_probe)

    def stages(self) -> list[dict[str, Any]]:
        """Return who holds which layers now, for the page: {stage, first_layer, end_layer, holder} of each stage."""
        places = self._supervisor.places() if self._supervisor else []
        return [
            {"stage": number, "first_layer": part.start, "end_layer": part.stop, "holder": holder}
            for number, (part, holder) in enumerate(places)
        ]

    def close(self) -> None:
        """End the thread of the driver's own stage."""
        if self._supervisor is not None:
            self._supervisor.close()


def micro_batch_tokens(config: Config) -> int:
    """Return the most tokens of a micro-batch, which every stage accepts. Raises ConfigError where that is impossible."""
    limit, wanted = config.policy.pipeline.max_states, config.training.micro_batch_tokens
    longest = config.policy.max_prompt_tokens + config.rollouts.max_new_tokens
    if longest > limit:
        raise ConfigError(
            f"policy.pipeline.max_states is {limit}; it must be at least {longest}, the tokens of the longest prompt and "
            "answer. Raise it on all machines, or lower policy.max_prompt_tokens or rollouts.max_new_tokens"
        )
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"training.micro_batch_tokens is {wanted}; it must be at most policy.pipeline.max_states = {limit}. Lower it, or "
            "raise max_states on all machines"
        )
    return wanted or min(DEFAULT_TOKENS, limit)


def _nothing_to_probe() -> None:
    """Does nothing: stages refuse what does not fit them, and layers are assigned by memory."""

"""The driving side of a crew: what `swarm run` samples and trains with where policy.pipeline names one.

compute thread: Learner ─▶ PipelinePolicy, PipelineEngine, PipelineOptimizer
    ─▶ loop: PipelineSupervisor ─▶ signed orders ─▶ `swarm stage`
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.config import Config
from swarm.errors import ConfigError
from swarm.network.commands.caller import CommandCaller
from swarm.network.transport import Transport
from swarm.node.stage_process import check_pipeline
from swarm.records.identity import Identity

if TYPE_CHECKING:
    from swarm.node.policy_backend import PolicyBackend
    from swarm.pipeline.driver.pipeline_supervisor import PipelineSupervisor


class PipelineDriver:
    """Gives the orders of one node to its crew."""

    def __init__(
        self, config: Config, identity: Identity, transport: Transport | None, clock: Callable[[], float]
    ) -> None:
        """To be made before the transport starts. Raises ConfigError unless this node is to drive a crew that can be reached."""
        check_pipeline(config)
        assert transport is not None, "checked by check_crew"
        pipeline = config.policy.pipeline
        if identity.peer_id != pipeline.driver:
            raise ConfigError(
                f"a crew's driver must be the one that is named, got {identity.peer_id}; set policy.pipeline.driver on all "
                "machines"
            )
        self._config = config
        self._deadline_s = pipeline.startup_timeout_s  # of loading, the longest order; others have the crew's own
        self._caller = CommandCaller(identity, config.swarm_id, pipeline.name, pipeline.members, transport, clock)
        self._supervisor: PipelineSupervisor | None = None

    async def give(self, peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int) -> bytes:
        """See `remote_link.Give`."""
        # the first question makes a machine import for seconds, and whoever asks it has a deadline of its own
        silence_s = None if kind == "machine" else self._config.policy.pipeline.silence_timeout_s
        return await self._caller.give(
            peer_id,
            kind,
            payload,
            max_reply_bytes=max_reply_bytes,
            deadline_s=self._deadline_s,
            silence_s=silence_s,
        )

    def bring_up(self, loop: asyncio.AbstractEventLoop, hash_cache: Path) -> "PolicyBackend":
        """Wait for the crew, assign and load its layers. Blocks; not on the loop. Raises SwarmError."""
        from swarm.node.policy_backend import PolicyBackend
        from swarm.pipeline.commands import StageSettings
        from swarm.pipeline.driver.assignment import Machine
        from swarm.pipeline.driver.pipeline_engine import PipelineEngine
        from swarm.pipeline.driver.pipeline_policy import PipelineOptimizer, pipeline_policy
        from swarm.pipeline.driver.pipeline_supervisor import PipelineSupervisor
        from swarm.pipeline.model_shape import model_cost
        from swarm.pipeline.stage.stage_host import base_model, layers_per_s
        from swarm.policy.device import available_bytes

        config = self._config
        base = base_model(config.policy, config.node.device)
        pipeline = config.policy.pipeline
        settings = StageSettings(
            weight_decay=config.training.weight_decay,
            max_states=pipeline.max_states,
            max_in_flight=len(pipeline.members) + 1,
        )
        self._supervisor = PipelineSupervisor(config.policy.pipeline, base, model_cost(base), settings, self.give)
        policy = pipeline_policy(config.policy, base, self._supervisor, loop, hash_cache)
        speed = layers_per_s(base.folder, base.lora, base.device, base.dtype)
        policy.wait_for(self._supervisor.start(Machine(speed, available_bytes(base.device))))
        engine = PipelineEngine(policy, config.rollouts.max_batch_sequences)
        return PolicyBackend(policy, engine, PipelineOptimizer(config.training, policy), _nothing_to_probe)

    def stages(self) -> list[dict[str, Any]]:
        """Who holds which layers at this moment, for a page: {stage, first_layer, end_layer, holder} of each."""
        places = self._supervisor.places() if self._supervisor else []
        return [
            {"stage": number, "first_layer": part.start, "end_layer": part.stop, "holder": holder}
            for number, (part, holder) in enumerate(places)
        ]

    def close(self) -> None:
        """End the thread of the driver's own stage."""
        if self._supervisor is not None:
            self._supervisor.close()


def _nothing_to_probe() -> None:
    """Stages refuse what does not fit them, and layers are assigned by memory."""

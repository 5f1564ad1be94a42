"""Chooses the engine for a policy: slots wherever its architecture allows them."""

from swarm.config import RolloutsSection
from swarm.engine.engine import Engine, PruningEngine, ResumingEngine
from swarm.engine.slot_engine import SlotEngine
from swarm.engine.slot_model import supports_slots
from swarm.engine.transformers_engine import TransformersEngine
from swarm.engine.vllm_engine import VllmEngine
from swarm.errors import ConfigError
from swarm.policy.policy import Policy


def make_engine(policy: Policy, config: RolloutsSection) -> Engine:
    """Make the engine of `config.engine`. "auto" is a SlotEngine, or a TransformersEngine for caches without slots.

    Those are recurrent states and chunked attention. Raises ConfigError where the engine cannot do what the settings ask.
    """
    kind = {"transformers": TransformersEngine, "vllm": VllmEngine}.get(config.engine)
    if kind is None:
        kind = SlotEngine if supports_slots(policy) else TransformersEngine
    engine = kind(policy, config.max_batch_sequences, config.cache_bytes)
    if config.over_provision > 1 and not isinstance(engine, ResumingEngine):
        raise ConfigError(
            f"rollouts.over_provision above 1 needs an engine that continues answers, got {kind.__name__}; "
            'set it to 1, or rollouts.engine to "auto" and a base with a standard cache'
        )
    if config.prune and not isinstance(engine, PruningEngine):
        raise ConfigError(
            f"rollouts.prune needs an engine that drops answers in the middle, got {kind.__name__}; "
            'set it to false, or rollouts.engine to "auto" and a base with a standard cache'
        )
    return engine

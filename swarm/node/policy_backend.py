"""What a learner samples and trains with, so that it need not know where the weights are."""

from collections.abc import Callable
from dataclasses import dataclass

from swarm.config import Config
from swarm.engine.engine import Engine
from swarm.engine.make_engine import make_engine
from swarm.engine.pruning import Pruning
from swarm.engine.slot_run import hidden_size
from swarm.limits.weighted_sample import round_seed
from swarm.policy.memory_probe import probe_memory
from swarm.policy.policy import Policy, TextPolicy
from swarm.training.policy_optimizer import LocalOptimizer, PolicyOptimizer


@dataclass(frozen=True, slots=True)
class PolicyBackend:
    """A policy with its engine and its optimizer, wherever its weights are: in this process or on other machines."""

    policy: TextPolicy
    engine: Engine
    optimizer: PolicyOptimizer
    probe_memory: Callable[[], None]
    """Raises MemoryBudgetError before the first round where the longest batch would not fit."""
    pruning: Pruning | None = None


def local_backend(config: Config, policy: Policy, peer_id: str) -> PolicyBackend:
    """The backend of a policy in this process."""
    engine = make_engine(policy, config.rollouts)

    def probe() -> None:
        num_tokens = config.policy.max_prompt_tokens + config.rollouts.max_new_tokens
        probe_memory(
            policy,
            config.rollouts,
            config.training,
            answer_bytes=engine.answer_bytes(num_tokens),
            held_bytes=engine.held_bytes,
            answers_wait=engine.answers_wait,
        )

    seed = round_seed(config, peer_id, "pruning")
    pruning = Pruning(config.rollouts, hidden_size(policy), seed) if config.rollouts.prune else None
    return PolicyBackend(policy, engine, LocalOptimizer(config.training, policy), probe, pruning)

"""What a learner samples and trains with, so that it need not know where the weights are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.admission.admission import Vocabulary, no_replies
from swarm.config import Config
from swarm.engine.engine import Engine
from swarm.engine.make_engine import make_engine
from swarm.engine.pruning import Pruning
from swarm.engine.slot_pruning import hidden_size
from swarm.limits.weighted_sample import round_seed
from swarm.policy.memory_probe import probe_memory
from swarm.policy.policy import Policy, TextPolicy
from swarm.tasks.task_mixture import TaskMixture
from swarm.training.policy_optimizer import LocalOptimizer, PolicyOptimizer
from swarm.types import Role, TaskRef


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


def vocabulary_of(policy: TextPolicy, mixture: TaskMixture) -> Vocabulary:
    """What admission needs of a policy. Admission runs beside the policy's thread, and a tokenizer may encode for one at a time,
    so it gets one of its own."""
    prompts = policy.prompts.copy()
    if mixture.episodic:
        prompts.prepare_replies(mixture.contexts[name] for name in mixture.episodic)

    def encode_reply(task: TaskRef, text: str, role: Role, after_eos: bool) -> Sequence[int]:
        return prompts.encode_reply(text, role, mixture.contexts[task.source], after_eos=after_eos)

    return Vocabulary(
        lineage=policy.lineage,
        size=policy.vocab_size,
        eos_token_ids=frozenset(policy.eos_token_ids),
        decode=policy.decode,
        encode_reply=encode_reply if mixture.episodic else no_replies,
    )

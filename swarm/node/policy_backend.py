"""What a learner samples and trains with, so that it need not know where the weights are."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.admission.admission import Vocabulary, no_replies
from swarm.config import Config
from swarm.engine.engine import Engine
from swarm.engine.make_engine import make_engine
from swarm.engine.pruning import Pruning
from swarm.engine.slot_pruning import hidden_size
from swarm.limits.weighted_sample import round_seed
from swarm.policy.memory_probe import probe_memory
from swarm.policy.policy import Policy, TextPolicy
from swarm.rollouts.engine_process import EngineProcess
from swarm.rollouts.rollouts_ahead import AheadEngine
from swarm.tasks.task_mixture import TaskMixture
from swarm.training.policy_optimizer import LocalOptimizer, PolicyOptimizer
from swarm.types import Role, TaskRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyBackend:
    """A policy with its engine and its optimizer, wherever its weights are: in this process or on other machines."""

    policy: TextPolicy
    engine: Engine
    optimizer: PolicyOptimizer
    probe_memory: Callable[[], None]
    """Raises MemoryBudgetError before the first round where the longest batch would not fit."""
    pruning: Pruning | None = None
    ahead: AheadEngine | None = None
    """With `rollouts.overlap`: samples the next round while this one is trained on."""


def local_backend(config: Config, policy: Policy, peer_id: str, hash_cache: Path | None = None) -> PolicyBackend:
    """The backend of a policy in this process. `hash_cache`: of `load_policy`, for a process that samples."""
    engine = make_engine(policy, config.rollouts)
    ahead = _sampling_process(config, policy, hash_cache) if config.rollouts.overlap else None

    def probe() -> None:
        if ahead is not None:
            ahead.wait_until_ready()  # what it holds is not free
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
    return PolicyBackend(policy, engine, LocalOptimizer(config.training, policy), probe, pruning, ahead)


def _sampling_process(config: Config, policy: Policy, hash_cache: Path | None) -> EngineProcess:
    """Sample on a second GPU where there is one, otherwise beside training; on a CPU each gets half of the cores."""
    device, num_threads = policy.device, None
    if device.type == "cpu":
        num_threads = max(1, torch.get_num_threads() // 2)
        torch.set_num_threads(max(1, torch.get_num_threads() - num_threads))
    elif device.type == "cuda" and torch.cuda.device_count() > 1:
        device = torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
    logger.info("the next round is sampled on %s while this one is trained on", device)
    return EngineProcess(
        policy.config, config.rollouts, device=str(device), num_threads=num_threads, hash_cache=hash_cache
    )


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

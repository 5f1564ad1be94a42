"""One training step of this project on made-up answers, as a process: what it takes at its peak. See benchmarks/memory.py."""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from measuring.peak_memory import forget_peak, peak_mib, resident_mib
from swarm.config import PolicySection, RolloutsSection, TrainingSection
from swarm.machine.memory import keep_heaps_small
from swarm.policy.memory_probe import measure_step, probe_memory
from swarm.policy.policy import load_policy
from swarm.training.experience import TrainingGroup
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from swarm.types import Rollout, RolloutGroup, TaskRef


def main(spec: dict[str, Any]) -> dict[str, Any]:
    keep_heaps_small(computes=True)
    torch.set_num_threads(spec["threads"])
    rng = random.Random(0)
    prompt_tokens, answer_tokens = spec["prompt_tokens"], spec["answer_tokens"]
    section = PolicySection(
        base=spec["base"], gradient_checkpointing=spec["checkpointing"], max_prompt_tokens=prompt_tokens
    )
    policy = load_policy(section, device="cpu")
    training = TrainingSection(mask_truncated=False, groups_per_step=0, micro_batch_tokens=spec["micro_batch_tokens"])
    trainer = Trainer(training, policy, LocalOptimizer(training, policy), temperature=1.0, max_new_tokens=answer_tokens)
    policy.token_logprobs([((5,) * 8, (7,) * 8)])  # files of weights are mapped, and read when they are needed
    loaded = resident_mib()
    forget_peak()
    started = time.perf_counter()
    need = probe_memory(policy, RolloutsSection(max_new_tokens=answer_tokens), training, answer_bytes=1)
    probe_seconds, probe_mib = time.perf_counter() - started, peak_mib() - loaded

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, policy.vocab_size) for _ in range(count))

    rollouts = tuple(
        Rollout("", tokens(answer_tokens), (-1.0,) * answer_tokens, finished=False, reward=float(number % 2))
        for number in range(spec["answers"])
    )
    group = RolloutGroup(TaskRef("made-up", "0" * 16, 16, 0), "0" * 16, rollouts, "me", policy.lineage, 0)
    batch = [TrainingGroup(tokens(prompt_tokens), group, usable_logprobs=True, is_own=True)]
    forget_peak()
    started = time.perf_counter()
    report = trainer.step(batch)
    seconds = time.perf_counter() - started
    assert not report.skipped, report.skip_reason
    at_once = min(spec["answers"], max(1, need.micro_batch_tokens // (prompt_tokens + answer_tokens)))
    predicted = measure_step(policy).of(at_once, prompt_tokens, answer_tokens) / 2**20
    return {
        "loaded_mib": loaded,
        "peak_mib": peak_mib(),
        "predicted_mib": loaded + predicted,
        "probe_mib": probe_mib,
        "probe_seconds": probe_seconds,
        "seconds": seconds,
        "micro_batch_tokens": need.micro_batch_tokens,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))

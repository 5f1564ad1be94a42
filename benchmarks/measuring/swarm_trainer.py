"""This project's rollout worker and trainer as one process. Commands as in `measuring/step_loop.py`."""

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from measuring.peak_memory import peak_mib
from measuring.step_loop import StepLoop, timed
from swarm.config import PolicySection, RolloutsSection, TrainingSection
from swarm.engine.make_engine import make_engine
from swarm.machine.memory import keep_heaps_small
from swarm.policy.logprobs import token_logprobs
from swarm.policy.policy import load_policy
from swarm.rollouts.worker import RolloutWorker
from swarm.training.experience import RolloutConverter
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from swarm.types import Task, TaskRef


class Node:
    """The parts of a node's round that sample and train, and nothing else of it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        length = spec["answer_tokens"]
        rollouts = RolloutsSection(group_size=spec["group_size"], max_new_tokens=length)
        self._policy = load_policy(PolicySection(base=spec["base"]), device=spec["device"])
        self._end_ids = self._policy.eos_token_ids
        self._policy.eos_token_ids = (-1,)  # lengths are given
        self._worker = RolloutWorker(rollouts, self._policy, make_engine(self._policy, rollouts), "me")
        self._translator = RolloutConverter(self._policy, 0.0, length)
        training = TrainingSection(mask_truncated=False, groups_per_step=0)
        self._trainer = Trainer(
            training, self._policy, LocalOptimizer(training, self._policy), temperature=1.0, max_new_tokens=length
        )
        order = itertools.count()
        self._tasks = [
            Task(TaskRef("made-up", "0" * 16, 16, number), text, lambda _: float(next(order) % 2))
            for number, text in enumerate(spec["prompts"])
        ]
        self._seeds = itertools.count()
        self.num_answers = len(self._tasks) * spec["group_size"]

    def step(self) -> None:
        batch = self._worker.rollout(self._tasks, next(self._seeds))
        self._translator.observe_own(batch.likelihoods)
        groups = [
            self._translator.own(task.prompt, group) for task, group in zip(batch.tasks, batch.groups, strict=True)
        ]
        if self._trainer.step(groups).skipped:
            raise RuntimeError("a step was skipped")

    @torch.no_grad()
    def logprobs(self, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """As the trainer computes them: one batch, prompts in common computed once."""
        got = token_logprobs(self._policy.model, pairs, self._policy.pad_token_id).logprobs
        return [row[: len(answer)].tolist() for row, (_, answer) in zip(got, pairs, strict=True)]

    @torch.no_grad()
    def unpadded(self, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """The reference: every sequence alone, by transformers, in double precision after the logits."""
        rows = []
        for prompt, answer in pairs:
            logits = (
                self._policy.model(input_ids=torch.tensor([prompt + answer], device=self._policy.device))
                .logits[0]
                .double()
            )
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            rows.append(logprobs.gather(-1, torch.tensor(answer, device=logprobs.device)[:, None])[:, 0].tolist())
        return rows


def main() -> None:
    keep_heaps_small(computes=True)  # as every node does
    loop = StepLoop()
    node = Node(next(loop))
    loop.answer(ready=True)
    pairs = next(loop)["pairs"]
    loop.answer(logprobs=node.logprobs(pairs), unpadded=node.unpadded(pairs))
    for _ in loop:
        seconds = timed(node.step)
        peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_initialized() else peak_mib()
        loop.answer(seconds=seconds, peak_mib=peak, answers=node.num_answers)


if __name__ == "__main__":
    main()

"""The same answers by `model.generate` and by the project's engine, in turns: what one does to the machine, so does the other.

Lengths are enforced on both sides, so that both owe the same tokens: `generate` gets a stopping criterion by row, and still
computes every row until the longest has ended, as it does.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from swarm.engine.engine import AnswerRequest
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import MergedLayers, SlotEngine
from swarm.policy.policy import Policy

GENERATE, FOLDED, ENGINE = "generate", "generate, adapter folded", "engine"


@dataclass(frozen=True, slots=True)
class Case:
    """Answers to be sampled: `group_size` to each prompt, of exactly the prompt's length."""

    name: str
    group_size: int
    lengths: tuple[int, ...]
    """By prompt."""

    @property
    def num_tokens(self) -> int:
        return self.group_size * sum(self.lengths)


@dataclass(slots=True)
class Times:
    """Seconds by system and turn."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    flops: float = 0.0
    """Of all tokens of answers and, once each, of prompts."""
    num_bytes: float = 0.0
    """Weights once per step of the longest answer, and the keys and values that every token looks at."""

    def tokens_per_s(self, system: str) -> float:
        return self.case.num_tokens / statistics.median(self.seconds[system])

    def ratio(self, system: str) -> float:
        """How many times as long as the engine a system takes: median over the turns."""
        pairs = zip(self.seconds[system], self.seconds[ENGINE], strict=True)
        return statistics.median(other / own for other, own in pairs)

    @property
    def strict_ratio(self) -> float:
        """Against the faster form of `generate`."""
        return min(self.ratio(GENERATE), self.ratio(FOLDED))


class Contest:
    """One policy, both systems."""

    def __init__(self, policy: Policy, max_answers: int) -> None:
        policy.eos_token_ids = (-1,)  # lengths are given
        self._policy = policy
        self._engine = SlotEngine(policy, max_answers)
        self._folded = MergedLayers(policy.model)

    def run(self, case: Case, num_turns: int) -> Times:
        """`num_turns` of each system after one that does not count."""
        prompts = [
            self._policy.encode_prompt(f"What is {7 * i % 90} + {13 * i % 97}?") for i in range(len(case.lengths))
        ]
        requests = [
            AnswerRequest(prompt, case.group_size, length) for prompt, length in zip(prompts, case.lengths, strict=True)
        ]
        systems: dict[str, Callable[[], Any]] = {
            GENERATE: lambda: self._generate(case, prompts, folded=False),
            FOLDED: lambda: self._generate(case, prompts, folded=True),
            ENGINE: lambda: self._engine.generate(requests, Sampling(), seed=0),
        }
        times = Times(case, {name: [] for name in systems}, *self._work(case, prompts))
        for turn in range(num_turns + 1):
            for name, system in systems.items():
                started = time.perf_counter()
                system()
                finish(self._policy.device)
                if turn:
                    times.seconds[name].append(time.perf_counter() - started)
        return times

    @torch.no_grad()
    def _generate(self, case: Case, prompts: Sequence[Sequence[int]], *, folded: bool) -> None:
        rows = [prompt for prompt in prompts for _ in range(case.group_size)]
        lengths = torch.tensor([length for length in case.lengths for _ in range(case.group_size)])
        longest = max(map(len, rows))
        pad, device = self._policy.pad_token_id, self._policy.device
        token_ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)
        mask = (torch.arange(longest) >= longest - torch.tensor([[len(row)] for row in rows])).long().to(device)
        with self._folded if folded else nullcontext():
            self._policy.model.generate(
                input_ids=token_ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(case.lengths),
                stopping_criteria=StoppingCriteriaList([_ByRow(longest, lengths.to(device))]),
                pad_token_id=pad,
                eos_token_id=None,
            )

    def _work(self, case: Case, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
        base = self._policy.model.get_base_model()
        head = base.get_output_embeddings().weight
        linear = [m.weight for m in base.modules() if isinstance(m, torch.nn.Linear) and m.weight is not head]
        linear = [weight for weight in linear if min(weight.shape) > self._policy.config.lora.rank]  # not the factors
        per_prompt_token = 2 * sum(weight.numel() for weight in linear)
        per_token = per_prompt_token + 2 * head.numel()
        flops = float(per_prompt_token * sum(map(len, prompts)) + per_token * case.num_tokens)
        weight_bytes = sum(weight.nbytes for weight in (*linear, head))
        seen = case.group_size * sum(
            length * len(prompt) + length * (length + 1) // 2
            for prompt, length in zip(prompts, case.lengths, strict=True)
        )
        return flops, float(weight_bytes * max(case.lengths) + self._engine.answer_bytes(1) * seen)


class _ByRow(StoppingCriteria):
    """Ends row i after `lengths[i]` tokens; `generate` goes on until all have ended."""

    def __init__(self, prompt_length: int, lengths: Tensor) -> None:
        self._ends_at = prompt_length + lengths

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return input_ids.shape[1] >= self._ends_at


def finish(device: torch.device) -> None:
    """Wait for what a GPU was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_flops_per_s() -> float:
    """Of a float32 matrix product that is large enough to keep all threads busy."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / _best_of(lambda: left @ right)


def peak_bytes_per_s() -> float:
    """Of reading memory that no cache holds."""
    values = torch.ones(64 * 2**20)
    return values.nbytes / _best_of(lambda: values.sum())


def _best_of(work: Callable[[], Any], num_turns: int = 8) -> float:
    best = float("inf")
    for _ in range(num_turns):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best

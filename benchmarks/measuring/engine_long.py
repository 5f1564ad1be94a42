"""Long prompts with answers of log-normal length, sampled by the project's engine and by others.

Every system gets the same prompts and the same length for each answer, and owes the same tokens; EOS ends nothing.
`generate` takes all answers as one batch and computes every row until the longest has ended, as it does for its users too;
only the tokens owed are counted. The others end each answer at its own length.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from measuring.engine_contest import finish
from swarm.engine.engine import AnswerRequest
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import MergedLayers, SlotEngine
from swarm.engine.vllm_engine import VllmEngine
from swarm.policy.policy import Policy

GENERATE, GENERATE_BATCH, ENGINE, VLLM = "generate", "generate_batch", "engine", "vLLM"

_PAGE_TOKENS = 256
"""Of transformers' cache, which has room for all answers here: by default it would take most of the machine's memory."""


@dataclass(frozen=True, slots=True)
class LongCase:
    """`num_prompts` groups of answers whose lengths are the quantiles of a log-normal distribution, in mixed order."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    median: int
    longest: int

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of each answer, by prompt."""
        count = self.num_prompts * self.group_size
        normal = statistics.NormalDist()
        last = normal.inv_cdf(1 - 0.5 / count)
        sigma = math.log(self.longest / self.median) / last
        found = [round(self.median * math.exp(sigma * normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
        random.Random(0).shuffle(found)
        return [found[start : start + self.group_size] for start in range(0, count, self.group_size)]

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.lengths))


@dataclass(slots=True)
class LongTimes:
    """Seconds by system and turn, and why a system is missing."""

    case: LongCase
    seconds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def tokens_per_s(self, system: str) -> float:
        return self.case.num_tokens / statistics.median(self.seconds[system])

    def ratio(self, other: str) -> float:
        """How many times as long as the engine `other` takes: median over the turns."""
        pairs = zip(self.seconds[other], self.seconds[ENGINE], strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)


class LongContest:
    """One policy, all systems that run here. The adapter is folded in for all of them, except that vLLM loads it."""

    def __init__(self, make: Callable[[], Policy], case: LongCase) -> None:
        self._make = make
        policy = make()
        policy.eos_token_ids = (-1,)  # lengths are given
        self._policy = policy
        self._case = case
        self._folded = MergedLayers(policy.model)
        self._engine = SlotEngine(policy, case.num_prompts * case.group_size)
        numbers = random.Random(1)
        vocabulary = range(8, min(policy.vocab_size, 8192))
        prompts = [numbers.choices(vocabulary, k=case.prompt_tokens) for _ in range(case.num_prompts)]
        self._requests = [
            AnswerRequest(prompt, 1, length)
            for prompt, lengths in zip(prompts, case.lengths, strict=True)
            for length in lengths
        ]

    def run(self, num_turns: int, *, with_vllm: bool) -> LongTimes:
        """`num_turns` of each system, in turns, after a short one that does not count."""
        times = LongTimes(self._case)
        systems: dict[str, Callable[[Sequence[AnswerRequest]], Any]] = {
            GENERATE: self._generate,
            GENERATE_BATCH: self._generate_batch,
            ENGINE: lambda requests: self._engine.generate(requests, Sampling(), seed=0),
        }
        if not with_vllm:
            times.missing[VLLM] = "its start takes most of a minute"
        elif find_spec("vllm"):
            shared = self._make()  # a policy of its own, since vLLM replaces its weights
            vllm = VllmEngine(shared, len(self._requests))
            shared.eos_token_ids = ()
            systems[VLLM] = lambda requests: _vllm(vllm, requests)
        else:
            times.missing[VLLM] = 'not installed here: "make vllm" in the clone'
        short = [replace(request, max_new_tokens=4) for request in self._requests[:2]]
        for name, system in list(systems.items()):
            try:
                system(short)
            except Exception as error:  # what another project's engine raises on this machine is reported, not ours
                if name == ENGINE:
                    raise
                times.missing[name] = _first_line(error)
                del systems[name]
        times.seconds = {name: [] for name in systems}
        for _ in range(num_turns):
            for name, system in list(systems.items()):
                started = time.perf_counter()
                try:
                    system(self._requests)
                    finish(self._policy.device)
                except Exception as error:  # as above
                    if name == ENGINE:
                        raise
                    times.missing[name] = _first_line(error)
                    del systems[name], times.seconds[name]
                    continue
                times.seconds[name].append(time.perf_counter() - started)
                print(f"    {name}: {times.seconds[name][-1]:.1f} s", flush=True)
        return times

    @torch.no_grad()
    def _generate(self, requests: Sequence[AnswerRequest]) -> None:
        token_ids = torch.tensor([list(request.prompt) for request in requests], device=self._policy.device)
        with self._folded:
            self._policy.model.generate(
                input_ids=token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(request.max_new_tokens for request in requests),
                pad_token_id=self._policy.pad_token_id,
                eos_token_id=None,
            )

    def _generate_batch(self, requests: Sequence[AnswerRequest]) -> None:
        """Continuous batching of transformers, by the manager behind `generate_batch`: that has one length for all."""
        longest = max(request.max_new_tokens for request in requests)
        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, eos_token_id=-1
        )
        pages = sum(2 + (len(one.prompt) + one.max_new_tokens) // _PAGE_TOKENS for one in requests)
        memory = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS, num_blocks=pages, max_batch_tokens=1024, max_requests_per_batch=len(requests)
        )
        model = self._policy.model.get_base_model()
        owed = 0
        with (
            self._folded,
            model.continuous_batching_context_manager(
                generation_config=config, continuous_batching_config=memory, block=True, timeout=5
            ) as manager,
        ):
            for request in requests:
                manager.add_request(list(request.prompt), max_new_tokens=request.max_new_tokens, eos_token_id=-1)
            finished = 0
            while finished < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    finished += 1
                    owed += len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the generation thread of continuous batching ended early")
        if owed != sum(request.max_new_tokens for request in requests):
            raise RuntimeError(f"continuous batching gave {owed} tokens, not as many as it was asked for")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _vllm(engine: VllmEngine, requests: Sequence[AnswerRequest]) -> None:
    """Sample with vLLM, which ends an answer at the end-of-sequence token of the base: a random base draws that rarely."""
    groups = engine.generate(requests, Sampling(), seed=0)
    drawn = sum(len(answer.token_ids) for group in groups for answer in group)
    owed = sum(request.max_new_tokens for request in requests)
    if drawn < 0.98 * owed:
        raise RuntimeError(f"vLLM gave {drawn} tokens of {owed}")

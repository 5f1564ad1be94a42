"""Sampling with vLLM, which has its own copy of the base and loads every new version of the adapter.

    adapter of the policy ─ changed? ─▶ written to a new folder, under a new id ─▶ vLLM loads it for this call
                              └ same as before: the id that vLLM has

The machine needs memory for both copies. vLLM is an optional extra, installed in the clone:
`.venv/bin/python -m pip install -e ".[vllm]"`, then rollouts.engine = "vllm".
"""

import hashlib
import importlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from swarm.adapters.adapter_state import read_adapter
from swarm.adapters.export import export_adapter
from swarm.engine.engine import AnswerRequest, Completion, End, refuse_nan
from swarm.engine.sampling import Sampling
from swarm.errors import ConfigError, PolicyError
from swarm.machine.child_python import install_from_clone
from swarm.policy.counter_noise import derive_seed
from swarm.policy.logprobs import token_logprobs
from swarm.policy.policy import Policy

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be built for."""
_SCORED_AT_ONCE = 16


class VllmEngine:
    """An engine over a vLLM instance that it owns. Each call compares the adapter's content with the one loaded."""

    def __init__(self, policy: Policy, max_batch_sequences: int, cache_bytes: int | None = None) -> None:
        """Loads the base a second time. Raises ConfigError where vLLM is not installed, PolicyError for its own errors.

        `cache_bytes` limits keys and values on a GPU. Without it, vLLM takes half of the device in all.
        """
        try:
            self._vllm: Any = importlib.import_module("vllm")
            self._lora_request: Any = importlib.import_module("vllm.lora.request").LoRARequest
        except ImportError as error:
            raise ConfigError(
                f'rollouts.engine "vllm" needs the package vllm, got {error}; {install_from_clone("vllm")}, or set "auto"'
            ) from None
        if policy.config.quantization != "none":
            raise ConfigError(
                f'rollouts.engine "vllm" samples from a base as it is, got policy.quantization '
                f'"{policy.config.quantization}"; set it to "none", or the engine to "auto"'
            )
        self._policy = policy
        self._folder = tempfile.TemporaryDirectory(prefix="swarm-adapters-")
        self._digest = b""
        self._adapter: Any = None  # LoRARequest of the digest
        self._num_adapters = 0
        rank = policy.config.lora.rank
        memory = {"gpu_memory_utilization": 0.5} if cache_bytes is None else {"kv_cache_memory_bytes": cache_bytes}
        try:
            self._llm: Any = self._vllm.LLM(
                model=str(policy.base_folder),
                dtype=str(policy.dtype).removeprefix("torch."),
                max_num_seqs=max_batch_sequences,
                enable_lora=True,
                max_loras=1,
                max_lora_rank=min((size for size in _RANKS if size >= rank), default=rank),
                logprobs_mode="processed_logprobs",
                trust_remote_code=False,
                generation_config="vllm",  # only the requested sampling, not what the base recommends
                **memory,
            )
        except (ValueError, RuntimeError) as error:
            raise PolicyError(f'vLLM must take the base, got: {error}; set rollouts.engine = "auto"') from None

    def generate(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """See `Engine.generate`. Answers repeat as far as vLLM's batches do."""
        wanted = [(index, request) for index, request in enumerate(requests) if request.num_answers]
        if not wanted:
            return [[] for _ in requests]
        parameters = [
            self._vllm.SamplingParams(
                # greedy siblings are equal, and vLLM refuses several
                n=request.num_answers if sampling.temperature else 1,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                max_tokens=request.max_new_tokens,
                seed=derive_seed("vllm", seed, index) % 2**31,
                stop=list(stop) or None,
                stop_token_ids=list(self._policy.eos_token_ids),
                logprobs=0,  # only those of the drawn tokens
            )
            for index, request in wanted
        ]
        outputs = self._run([request.prompt for _, request in wanted], parameters)
        groups: list[list[Completion]] = [[] for _ in requests]
        for (index, request), output in zip(wanted, outputs, strict=True):
            completions = self._completions(request.prompt, output.outputs, sampling)
            groups[index] = completions * (request.num_answers // len(completions))
        refuse_nan(completion for group in groups for completion in group)
        return groups

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """See `Engine.score`. Computed in one pass, by the kernels and weights that sample."""
        parameters = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (output,) = self._run([[*prompt, *answer]], [parameters])
        found = output.prompt_logprobs[len(prompt) :]
        return [position[token].logprob for position, token in zip(found, answer, strict=True)]

    def answer_bytes(self, num_tokens: int) -> int:
        """0, since vLLM takes its memory when it starts."""
        return 0

    answers_wait = True
    """See `Engine.answers_wait`."""

    @property
    def held_bytes(self) -> int:
        """0, since vLLM's memory is not in this process's account."""
        return 0

    def _run(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any]) -> Sequence[Any]:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self._llm.generate(requests, list(parameters), use_tqdm=False, lora_request=self._current_adapter())

    def _current_adapter(self) -> Any:
        """Return vLLM's handle of the current adapter. Its tensors decide, because a version number may occur twice."""
        digest = hashlib.sha256()
        for name, tensor in sorted(read_adapter(self._policy.model).items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        if digest.digest() != self._digest:
            shutil.rmtree(
                Path(self._folder.name) / str(self._num_adapters), ignore_errors=True
            )  # there is none before the first
            self._num_adapters += 1
            folder = Path(self._folder.name) / str(self._num_adapters)
            export_adapter(self._policy.model, self._policy.tokenizer, folder)
            self._adapter = self._lora_request(f"adapter-{self._num_adapters}", self._num_adapters, str(folder))
            self._digest = digest.digest()
        return self._adapter

    def _completions(self, prompt: Sequence[int], outputs: Sequence[Any], sampling: Sampling) -> list[Completion]:
        tokens = [tuple(output.token_ids) for output in outputs]
        drawn = [
            tuple(position[token].logprob for position, token in zip(output.logprobs, output.token_ids, strict=True))
            for output in outputs
        ]
        plain = drawn if sampling.is_plain or sampling.temperature == 0 else self._plain(prompt, tokens)
        return [
            Completion(token_ids, drawn_logprobs, plain_logprobs, end=self._end(output))
            for token_ids, drawn_logprobs, plain_logprobs, output in zip(tokens, drawn, plain, outputs, strict=True)
        ]

    def _end(self, output: Any) -> End:
        if output.finish_reason != "stop":
            return "limit"
        return "stop" if isinstance(output.stop_reason, str) else "eos"

    @torch.no_grad()
    def _plain(self, prompt: Sequence[int], answers: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Compute log-probs under the plain policy with the policy's own model: vLLM reports one kind per instance."""
        self._policy.model.eval()
        found: list[tuple[float, ...]] = []
        for start in range(0, len(answers), _SCORED_AT_ONCE):
            part = answers[start : start + _SCORED_AT_ONCE]
            result = token_logprobs(
                self._policy.model, [(prompt, answer) for answer in part], self._policy.pad_token_id
            )
            found += [tuple(row[: len(answer)].tolist()) for row, answer in zip(result.logprobs, part, strict=True)]
        return found

"""Sampling with vLLM, in the process of the node and with the weights of the policy.

    base ─────────────── one copy, of which the policy's weights are views
    adapter, changed? ── its tensors replace those in vLLM, under a new id
             same? ───── the id that vLLM has

vLLM is an optional extra. `make vllm` installs it beside the locked packages, in an environment of its own.
"""

import hashlib
import importlib
import logging
import os
import re
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from swarm.adapters.adapter_state import read_adapter
from swarm.engine.engine import AnswerRequest, Completion, End, capacity_of, refuse_nan
from swarm.engine.sampling import Sampling
from swarm.engine.vllm_weights import hand_over_adapter, share_base
from swarm.errors import ConfigError, MemoryBudgetError, PolicyError
from swarm.machine.child_python import install_extra
from swarm.policy.base_model import one_line
from swarm.policy.counter_noise import derive_seed
from swarm.policy.logprobs import token_logprobs
from swarm.policy.policy import Policy

logger = logging.getLogger(__name__)

_OLDEST = (0, 32)
"""Oldest version of vLLM whose parts for adapters are those that `vllm_weights` calls."""
_INSTALL = f'{install_extra("vllm")}, or run "make vllm" in the clone, or set rollouts.engine = "auto"'
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be built for."""
_SCORED_AT_ONCE = 16


class VllmEngine:
    """An engine over a vLLM instance that it owns. Each call compares the adapter's content with the one handed over."""

    def __init__(self, policy: Policy, max_batch_sequences: int, cache_bytes: int | None = None) -> None:
        """Load the base with vLLM, and free the policy's copy as far as vLLM stores the same weights.

        `cache_bytes` limits keys and values. Without it, vLLM takes half of the device in all. Raises ConfigError where vLLM
        is missing or cannot do what the settings ask, PolicyError where it does not take the base.
        """
        self._vllm: Any = _import_vllm(policy)
        self._lora_request: Any = importlib.import_module("vllm.lora.request").LoRARequest
        self._policy = policy
        self._digest = b""
        self._adapter: Any = None  # LoRARequest of the digest
        self._num_adapters = 0
        self._settings: dict[str, Any] = policy.model.peft_config["default"].to_dict()
        settings = _limits(self._settings, cache_bytes)
        if policy.device.type == "cpu":
            settings["enable_chunked_prefill"] = (
                False  # with it, vLLM moves the offset of generators, which on a CPU have none
            )
        if policy.config.quantization == "4bit":
            settings |= {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
        try:
            _check_implementation(self._vllm, policy)
            with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
                self._llm: Any = self._vllm.LLM(
                    model=str(policy.base_folder),
                    dtype=_dtype(policy),
                    max_num_seqs=max_batch_sequences,
                    enable_lora=True,
                    max_loras=1,
                    logprobs_mode="processed_logprobs",
                    trust_remote_code=False,
                    generation_config="vllm",  # only the requested sampling, not what the base recommends
                    **settings,
                )
                weakref.finalize(self, self._llm.llm_engine.engine_core.shutdown)  # before another one starts
                (self.shared_bytes,) = self._llm.apply_model(lambda model: share_base(policy.model, model))
                self.score(policy.eos_token_ids[:1], policy.eos_token_ids[:1])  # kernels fail here, not in a round
            logger.info("vLLM and the policy hold %.1f MiB of the base once", self.shared_bytes / 2**20)
        except PolicyError:
            raise
        except Exception as error:  # the settings come from strangers, and the library may raise anything over them
            raise PolicyError(
                f"vLLM must take the base, with LoRA and in the free memory, got: {one_line(error)}; "
                'lower rollouts.cache_mib if memory is short, else set rollouts.engine = "auto"'
            ) from None

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
        self._check_length(capacity_of(requests))
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
        """0, since vLLM takes the memory for keys and values when it starts."""
        return 0

    answers_wait = True
    """See `Engine.answers_wait`."""

    @property
    def held_bytes(self) -> int:
        """0, since vLLM takes its memory before the free memory is measured."""
        return 0

    def _run(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any]) -> Sequence[Any]:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self._llm.generate(requests, list(parameters), use_tqdm=False, lora_request=self._current_adapter())

    def _check_length(self, num_tokens: int) -> None:
        limit = self._llm.model_config.max_model_len
        if num_tokens > limit:
            raise MemoryBudgetError(
                f"a prompt with its answer must fit into the {limit} tokens that vLLM has keys and values for, got "
                f"{num_tokens}; raise rollouts.cache_mib, or lower rollouts.max_new_tokens"
            )

    def _current_adapter(self) -> Any:
        """Return vLLM's handle of the current adapter. Its tensors decide, because a version number may occur twice."""
        digest = hashlib.sha256()
        tensors = read_adapter(self._policy.model)
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        if digest.digest() != self._digest:
            self._num_adapters += 1
            self._llm.collective_rpc(hand_over_adapter, args=(self._num_adapters, tensors, self._settings))
            if self._policy.device.type == "cuda":
                torch.cuda.synchronize()  # vLLM computes on a stream of its own
            self._adapter = self._lora_request(f"adapter-{self._num_adapters}", self._num_adapters, "in memory")
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


def _dtype(policy: Policy) -> str:
    return str(policy.dtype).removeprefix("torch.")


def _limits(peft_settings: dict[str, Any], cache_bytes: int | None) -> dict[str, Any]:
    """Return the settings of vLLM's memory: keys and values, and the largest rank of an adapter."""
    rank = max([peft_settings["r"], *peft_settings["rank_pattern"].values()])
    memory = {"gpu_memory_utilization": 0.5} if cache_bytes is None else {"kv_cache_memory_bytes": cache_bytes}
    return {
        **memory,
        "max_model_len": -1,  # as long as keys and values fit
        "max_lora_rank": min((size for size in _RANKS if size >= rank), default=rank),
    }


def _import_vllm(policy: Policy) -> Any:
    """Return the module vllm, which will compute in this process and send no usage statistics.

    Raises ConfigError where it is missing or too old, or cannot sample from this policy.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # another process could not share the policy's weights
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logging.getLogger("vllm").setLevel(logging.WARNING)  # until vLLM reads that level
    try:
        vllm = importlib.import_module("vllm")
        built_for = importlib.import_module("vllm.platforms").current_platform.device_type
    except ImportError as error:
        raise ConfigError(f'rollouts.engine = "vllm" needs the package vllm, got {error}; {_INSTALL}') from None
    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise ConfigError(
            f'rollouts.engine = "vllm" needs vllm {_OLDEST[0]}.{_OLDEST[1]} or newer, got {vllm.__version__}; {_INSTALL}'
        )
    _check_device(policy.device, built_for)
    _check_quantization(policy)
    return vllm


def _check_implementation(vllm: Any, policy: Policy) -> None:
    """Raises PolicyError for architectures that vLLM runs with the classes of transformers.

    It changes these classes, and the policy in this process would no longer compute. Raises anything for a damaged base.
    """
    arguments = vllm.EngineArgs(model=str(policy.base_folder), dtype=_dtype(policy), trust_remote_code=False)
    config = arguments.create_model_config()
    if config.using_transformers_backend():
        raise PolicyError(
            f"vLLM must have an implementation of its own for policy.base, got none for {config.architectures[0]}; "
            'set rollouts.engine = "auto"'
        )


def _check_device(device: torch.device, built_for: str) -> None:
    if device.type != built_for:
        raise ConfigError(
            f'rollouts.engine = "vllm" must compute on the device of the policy, got {device.type} and a vLLM for '
            f"{built_for or 'no device of this machine'}; set node.device, install the vLLM for {device.type}, or set "
            'rollouts.engine = "auto"'
        )
    if device.index:
        raise ConfigError(
            f'rollouts.engine = "vllm" computes on the first visible GPU, got node.device = "{device}"; start the node with '
            f'CUDA_VISIBLE_DEVICES={device.index} and set node.device = "cuda"'
        )


def _check_quantization(policy: Policy) -> None:
    quantization = policy.config.quantization
    if quantization == "8bit":
        raise ConfigError(
            'rollouts.engine = "vllm" samples from bases in 4 bit or without quantization, got policy.quantization = "8bit"; '
            'set policy.quantization = "4bit", or rollouts.engine = "auto"'
        )
    if quantization == "4bit" and policy.dtype == torch.float32:
        raise ConfigError(
            'rollouts.engine = "vllm" computes 4-bit bases in 16 bits, got policy.dtype = "float32"; '
            'set policy.dtype = "bfloat16", or rollouts.engine = "auto"'
        )
    if quantization == "4bit" and find_spec("vllm_bnb_plugin") is None:
        raise ConfigError(
            'rollouts.engine = "vllm" needs the package vllm-bnb-plugin for policy.quantization = "4bit", got no such '
            f"package; {_INSTALL}"
        )

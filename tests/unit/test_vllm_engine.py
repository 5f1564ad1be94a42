"""What only the vLLM engine does: it refuses what it cannot sample from, and holds base and adapter once.

The tests marked `extra` run vLLM itself, in the environment of `make vllm`.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.config import PolicySection, TrainingSection
from swarm.engine.canary import Canary
from swarm.engine.sampling import Sampling
from swarm.engine.vllm_engine import VllmEngine
from swarm.errors import ConfigError, MemoryBudgetError, PolicyError
from swarm.policy.policy import Policy, load_policy
from swarm.training.experience import TrainingGroup
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from swarm.types import Rollout, RolloutGroup, TaskRef
from tests.unit.tiny_models import SHAPE, build_policy, character_tokenizer, perturb, requests

CACHE_BYTES = 64 << 20
needs_vllm = pytest.mark.extra("vllm")


def policy_of(**settings: object) -> Policy:
    return load_policy(PolicySection.model_validate(settings), device="cpu")


def written_policy(folder: Path, kind: str, **settings: object) -> Policy:
    """A tiny policy of an architecture; vLLM has kernels for heads of this width on the CPU."""
    wide = {**SHAPE, "hidden_size": 128, "num_key_value_heads": 4, **settings}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **wide)).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return build_policy(folder)


@pytest.fixture(scope="module")
def rounded() -> Iterator[tuple[Policy, VllmEngine]]:
    """A base in 4 bit: both engines round, and vLLM keeps its weights on the CPU in the form that the policy has."""
    policy = policy_of(quantization="4bit", dtype="bfloat16")
    yield policy, VllmEngine(policy, 8, CACHE_BYTES)


class Installed:
    """Puts a package vllm in place that has a version and a device, and nothing else: the checks come before its use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, version: str = "0.32.0", device: str = "cpu") -> None:
        package, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
        package.__dict__["__version__"] = version
        platforms.__dict__["current_platform"] = SimpleNamespace(device_type=device)
        self._monkeypatch.setitem(sys.modules, "vllm", package)
        self._monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")  # the engine sets them for the whole process
    return Installed(monkeypatch)


@pytest.mark.parametrize("version", ["0.31.9", "0.9.2", "dev"])
def test_a_version_without_the_parts_for_adapters_is_refused(installed: Installed, version: str) -> None:
    installed(version)
    with pytest.raises(ConfigError, match=rf"needs vllm 0\.32 or newer, got {version}; .*pip install .*'vllm<"):
        VllmEngine(policy_of(), 4)


def test_a_build_for_another_device_is_refused(installed: Installed) -> None:
    installed(device="cuda")
    with pytest.raises(ConfigError, match=r"got cpu and a vLLM for cuda; set node\.device"):
        VllmEngine(policy_of(), 4)


def test_a_gpu_that_is_not_the_first_is_refused(installed: Installed) -> None:
    installed(device="cuda")
    policy = policy_of()
    policy.device = torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r'node\.device = "cuda:1"; start the node with CUDA_VISIBLE_DEVICES=1'):
        VllmEngine(policy, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "8bit"}, r'got policy\.quantization = "8bit"; set policy\.quantization = "4bit"'),
        (
            {"quantization": "4bit", "dtype": "float32"},
            r'got policy\.dtype = "float32"; set policy\.dtype = "bfloat16"',
        ),
    ],
)
def test_a_base_that_vllm_cannot_hold_alike_is_refused(installed: Installed, settings: Any, message: str) -> None:
    installed()
    with pytest.raises(ConfigError, match=message):
        VllmEngine(policy_of(**settings), 4)


def test_4_bit_needs_the_plugin(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    monkeypatch.setattr("swarm.engine.vllm_engine.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package vllm-bnb-plugin .*; .*pip install 'vllm-bnb-plugin"):
        VllmEngine(policy_of(quantization="4bit", dtype="bfloat16"), 4)


@needs_vllm
def test_an_answer_beyond_the_cache_is_refused(rounded: tuple[Policy, VllmEngine]) -> None:
    policy, engine = rounded
    prompt = policy.encode_prompt("2")
    with pytest.raises(
        MemoryBudgetError, match=r"tokens that vLLM has keys and values for, got \d+; raise rollouts\.cache_mib"
    ):
        engine.generate(requests([prompt], 1, 1 << 20), Sampling(), seed=1)


@needs_vllm
def test_prompts_that_fill_several_batches_are_sampled_by_their_seeds(tmp_path: Path) -> None:
    """vLLM may cut them into chunks, after which it moves the offset of generators: on a CPU they have none, and it fails."""
    policy = written_policy(tmp_path, "llama", max_position_embeddings=2048)
    engine = VllmEngine(policy, 32, 256 << 20)
    is_on_cpu = policy.device.type == "cpu"
    assert engine._llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill is not is_on_cpu
    prompts = [policy.encode_prompt(str(number % 10) * (1000 + number)) for number in range(12)]
    first, second = (engine.generate(requests(prompts, 2, 4), Sampling(), seed=3) for _ in range(2))
    assert [len(group) for group in first] == [2] * 12
    assert [one.token_ids for group in first for one in group] == [one.token_ids for group in second for one in group]


@needs_vllm
def test_weights_in_4_bit_are_held_once(rounded: tuple[Policy, VllmEngine]) -> None:
    policy, engine = rounded
    attention = policy.model.base_model.model.model.layers[0].self_attn
    q, k, v = (getattr(attention, name).base_layer.weight for name in ("q_proj", "k_proj", "v_proj"))
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert q.data_ptr() < k.data_ptr() < v.data_ptr()
    frozen = [parameter for parameter in policy.model.parameters() if not parameter.requires_grad]
    assert engine.shared_bytes == sum(parameter.nbytes for parameter in frozen)


@needs_vllm
def test_shared_weights_are_the_policys_own(rounded: tuple[Policy, VllmEngine]) -> None:
    policy, _ = rounded
    alone = policy_of(quantization="4bit", dtype="bfloat16")
    prompt, answer = policy.encode_prompt("What is 2 + 3?"), policy.encode_answer("5 and 12")
    with torch.no_grad():
        expected = alone.token_logprobs([(prompt, answer)], without_adapter=True).logprobs
        assert torch.equal(policy.token_logprobs([(prompt, answer)], without_adapter=True).logprobs, expected)


@needs_vllm
def test_an_adapter_replaces_the_one_before(rounded: tuple[Policy, VllmEngine]) -> None:
    policy, engine = rounded
    canary = Canary(policy, engine, tolerance=1e-3)
    loaded = engine._llm.llm_engine.list_loras
    canary.check()
    (first,) = loaded()
    canary.check()
    assert loaded() == {first}  # the same content
    perturb(policy)
    canary.check()
    (second,) = loaded()
    assert second != first


class GradientTap(LocalOptimizer):
    """Keeps the gradient of the last applied step."""

    gradient: torch.Tensor

    def apply(self, lr: float) -> None:
        self.gradient = torch.cat([p.grad.flatten() for p in self._parameters.values() if p.grad is not None])


def gradient_of(policy: Policy, group: TrainingGroup, correction: str) -> torch.Tensor:
    config = TrainingSection.model_validate({"correction": correction, "max_grad_norm": 1e6})
    steps = GradientTap(config, policy)
    Trainer(config, policy, steps, temperature=1.0, max_new_tokens=8).step([group])
    return steps.gradient


@needs_vllm
def test_training_computes_logprobs_itself_and_corrects_for_the_rounding(rounded: tuple[Policy, VllmEngine]) -> None:
    policy, engine = rounded
    perturb(policy)
    prompt = policy.encode_prompt("What is 7 times 8?")
    (answers,) = engine.generate(requests([prompt], 4, 8), Sampling(), seed=1)
    with torch.no_grad():
        computed = policy.token_logprobs([(prompt, one.token_ids) for one in answers]).logprobs
    rounding = [computed[i, : len(one.logprobs)] - torch.tensor(one.logprobs) for i, one in enumerate(answers)]
    assert 0 < max(float(part.abs().max()) for part in rounding) < 0.1  # what the canary allows in 16 bits

    def group(logprobs: list[tuple[float, ...]]) -> TrainingGroup:
        rollouts = tuple(
            Rollout(policy.decode(one.token_ids), one.token_ids, mu, True, float(i == 0))
            for i, (one, mu) in enumerate(zip(answers, logprobs, strict=True))
        )
        task = TaskRef("made-up", "0" * 16, 16, 0)
        found = RolloutGroup(task, "0" * 16, rollouts, "me", policy.lineage, policy.version)
        return TrainingGroup(tuple(prompt), found, usable_logprobs=True, is_own=True)

    of_vllm = group([one.logprobs for one in answers])
    of_trainer = group([tuple(computed[i, : len(one.logprobs)].tolist()) for i, one in enumerate(answers)])
    plain = gradient_of(policy, of_trainer, "none")
    assert torch.equal(gradient_of(policy, of_vllm, "none"), plain)  # no number of vLLM is trained on
    assert torch.allclose(gradient_of(policy, of_trainer, "tis"), plain, rtol=1e-3, atol=1e-6)
    corrected = gradient_of(policy, of_vllm, "tis")  # times e^rounding, token by token
    assert 0 < (corrected - plain).norm() < 0.1 * plain.norm()


@needs_vllm
def test_a_base_without_lora_in_vllm_is_refused(tmp_path: Path) -> None:
    policy = written_policy(tmp_path, "stablelm")
    with pytest.raises(
        PolicyError, match=r"must take the base, with LoRA .*, got: .* does not support LoRA yet.*; lower"
    ):
        VllmEngine(policy, 4, CACHE_BYTES)


@needs_vllm
def test_a_base_that_vllm_would_run_with_the_classes_of_the_policy_is_refused(
    make_policy: Callable[..., Policy],
) -> None:
    policy = make_policy("gpt_neox")
    prompt = policy.encode_prompt("Hi")
    with pytest.raises(
        PolicyError, match=r"implementation of its own for policy\.base, got none for GPTNeoXForCausalLM"
    ):
        VllmEngine(policy, 4, CACHE_BYTES)
    policy.token_logprobs([(prompt, prompt)])


@needs_vllm
def test_a_base_that_vllm_has_no_kernel_for_is_refused(make_policy: Callable[..., Policy]) -> None:
    with pytest.raises(PolicyError, match=r"must take the base, .* got: .*head_dim=8"):
        VllmEngine(make_policy("llama"), 4, CACHE_BYTES)


@needs_vllm
def test_fused_weights_without_quantization_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # on the CPU vLLM repacks matrices for its kernels; without them it keeps them as it does on a GPU
    monkeypatch.setattr(importlib.import_module("vllm._custom_ops"), "_supports_onednn", False)
    monkeypatch.setattr("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", lambda *_: False)
    policy = policy_of()
    frozen = [parameter for parameter in policy.model.parameters() if not parameter.requires_grad]
    before = {parameter.data_ptr() for parameter in frozen}
    engine = VllmEngine(policy, 4, CACHE_BYTES)
    assert engine.shared_bytes == sum(parameter.nbytes for parameter in frozen)
    assert not before & {parameter.data_ptr() for parameter in frozen}
    perturb(policy)
    assert Canary(policy, engine, tolerance=1e-4).check() <= 1e-4


@needs_vllm
def test_starting_vllm_leaves_the_random_state_as_it_was() -> None:
    before = torch.get_rng_state()
    VllmEngine(policy_of(), 4, CACHE_BYTES)
    assert torch.equal(torch.get_rng_state(), before)


@needs_vllm
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_architectures_agree_with_the_trainer(tmp_path: Path, name: str) -> None:
    policy = written_policy(tmp_path, name, head_dim=32, query_pre_attn_scalar=32)
    canary = Canary(policy, VllmEngine(policy, 4, CACHE_BYTES), tolerance=1e-4)
    canary.check()
    perturb(policy)
    canary.check()

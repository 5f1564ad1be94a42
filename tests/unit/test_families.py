"""Every family of models: what is sampled, trained and exported is one and the same policy.

The reference is an unpadded forward pass per answer of plain transformers and peft, over the exported adapter.
"""

import itertools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.adapters.checkpoint import Checkpoint
from swarm.adapters.export import BaseName, export_checkpoint, export_merged
from swarm.adapters.product_merge import LowRank, layers_of, merge_by_layer
from swarm.config import LoraSection, PolicySection, RolloutsSection
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import MergeError, PolicyError
from swarm.policy.logprobs import TokenSequence, token_logprobs
from swarm.policy.lora import check_adapter_runs
from swarm.policy.policy import Policy, load_policy
from tests.unit.families import FAMILIES, write_family
from tests.unit.tiny_models import build_policy, perturb, requests

PROMPTS = ("What is 7 + 5?", "Spell this backward, please: a")
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
"""Largest distance of two gradients, relative to their norm."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_one_policy_in_sampling_training_and_export(name: str, tmp_path: Path) -> None:
    _check_family(name, build_policy(write_family(name, tmp_path / "base")), tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "granitemoehybrid",
        "jamba",
        "lfm2_moe",
        "llama4_text",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
    ],
)
def test_experts_are_trained_where_the_targets_name_them(name: str, tmp_path: Path) -> None:
    lora = LoraSection(rank=4, alpha=8, targets=("all-linear", "experts"))
    config = PolicySection(base=str(write_family(name, tmp_path / "base")), lora=lora)
    policy = load_policy(config, device="cpu")
    perturb(policy)
    _check_family(name, policy, tmp_path)
    layers = {layer.rpartition(".mlp.")[2] for layer in layers_of(read_adapter(policy.model)) if "experts" in layer}
    assert len(layers) >= 2


def _check_family(name: str, policy: Policy, tmp_path: Path) -> None:
    family = FAMILIES[name]
    exported = _exported(policy, tmp_path)
    sequences, sampled = _sampled(policy, is_in_slots=family.is_in_slots)
    expected = [_unpadded(exported["adapter"], sequence) for sequence in sequences]
    assert torch.cat(expected).std() > 0.1, "a uniform policy would hide every difference"
    for got, wanted in zip(sampled, expected, strict=True):
        assert got == pytest.approx(wanted.tolist(), abs=family.sampling_tolerance)
    for sequence, wanted in zip(sequences, expected, strict=True):
        assert (_unpadded(exported["merged"], sequence) - wanted).abs().max() <= TOLERANCE
    _check_training(policy, sequences, expected, itertools.product((False, True), repeat=2))
    two_tokens = [(prompt, answer[:2]) for prompt, answer in sequences]  # many families continue by one token otherwise
    _check_training(policy, two_tokens, [wanted[:2] for wanted in expected], [(False, False), (True, False)])


def _exported(policy: Policy, folder: Path) -> dict[str, Any]:
    """The policy as plain transformers and peft load it: base with adapter, and merged into one model."""
    checkpoint = Checkpoint(0, folder, {"adapter": read_adapter(policy.model)}, {})
    export_checkpoint(checkpoint, BaseName(str(policy.base_folder)), policy.config.lora, folder / "adapter")
    export_merged(policy.model, policy.tokenizer, policy.base_folder, folder / "merged")
    base = AutoModelForCausalLM.from_pretrained(policy.base_folder)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    return {"adapter": PeftModel.from_pretrained(base, str(folder / "adapter")).eval(), "merged": merged.eval()}


def _sampled(policy: Policy, *, is_in_slots: bool) -> tuple[list[TokenSequence], list[tuple[float, ...]]]:
    engine = make_engine(policy, RolloutsSection(cache_mib=64))
    assert isinstance(engine, SlotEngine) == is_in_slots
    prompts = [policy.encode_prompt(prompt) for prompt in PROMPTS]
    groups = engine.generate(requests(prompts, 4, 6), Sampling(), seed=0)
    pairs = [(prompt, answer) for prompt, group in zip(prompts, groups, strict=True) for answer in group]
    return [(prompt, answer.token_ids) for prompt, answer in pairs], [answer.policy_logprobs for _, answer in pairs]


def _check_training(
    policy: Policy,
    sequences: Sequence[TokenSequence],
    expected: Sequence[Tensor],
    ways: Iterable[tuple[bool, bool]],
) -> None:
    """Check log-probs and gradients computed in each of `ways`: (prompts are shared, layers are recomputed)."""
    factors = {name: one for name, one in policy.model.named_parameters() if one.requires_grad}
    first: Tensor | None = None
    for share_prompts, recompute_layers in ways:
        policy.model.zero_grad()
        result = token_logprobs(
            policy.model,
            sequences,
            policy.pad_token_id,
            share_prompts=share_prompts,
            recompute_layers=recompute_layers,
        )
        for row, wanted in enumerate(expected):
            assert (result.logprobs[row, : len(wanted)] - wanted).abs().max() <= TOLERANCE
        result.logprobs.sum().backward()
        without = [name for name, one in factors.items() if one.grad is None or not one.grad.any()]
        assert without == []
        gradient = torch.cat([one.grad.flatten() for one in factors.values() if one.grad is not None])
        first = gradient if first is None else first
        assert (gradient - first).norm() <= GRADIENT_TOLERANCE * first.norm()


def _unpadded(model: Any, sequence: TokenSequence) -> Tensor:
    prompt, answer = sequence
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minimax", "must decode with the standard cache of transformers, got an error of MiniMax"),
        ("recurrent_gemma", "must decode with a cache as in one pass, got other logits of RecurrentGemmaForCausalLM"),
    ],
)
def test_a_family_with_a_cache_of_its_own_is_refused_at_load(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        build_policy(write_family(name, tmp_path))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixtral", "the experts of this mixture (MixtralForCausalLM) get no adapter"),
        ("deepseek_v3", "the experts of this mixture (DeepseekV3ForCausalLM) get an adapter"),
        ("llama", ""),
    ],
)
def test_the_log_says_whether_experts_are_trained(
    name: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="swarm.policy.lora"):
        policy = build_policy(write_family(name, tmp_path))
    assert said in caplog.text if said else caplog.text == ""
    has_factors = any(".experts." in factor for factor in read_adapter(policy.model))
    assert has_factors == (name == "deepseek_v3")


def test_adapters_of_experts_are_merged_by_their_factors(tmp_path: Path) -> None:
    policy = build_policy(write_family("deepseek_v3", tmp_path), rank=2)
    own = read_adapter(policy.model)
    other = {name: torch.randn(one.shape, generator=torch.Generator().manual_seed(1)) for name, one in own.items()}
    both, scaling = [LowRank(own, 2.0), LowRank(other, 2.0)], 2.0
    merged = merge_by_layer(both, [0.5, 0.5], 2, scaling, drift_threshold=0.0)
    experts = [name for name in own if ".experts." in name]
    assert len(experts) == 4
    for name in experts:
        assert torch.allclose(merged.tensors[name], (own[name] + other[name]) / 2)
    products = {name.rpartition(".")[0] for name in own} - {name.rpartition(".")[0] for name in experts}
    assert set(merged.truncation) == products
    write_adapter(policy.model, merged.tensors)
    with pytest.raises(MergeError, match="stacked experts can be averaged, but not merged as products"):
        merge_by_layer(both, [0.5, 0.5], 4, scaling, drift_threshold=0.0)


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        (
            "deepseek_v3",
            {"dropout": 0.1},
            "must fit the layers of DeepseekV3ForCausalLM, got: .* lora_dropout != 0; change",
        ),
        ("deepseek_v3", {"targets": ("gate_proj",)}, "must fit the layers of .* without also targeting up_proj"),
        (
            "falcon_h1",
            {"targets": ("out_proj",)},
            "'out_proj', whose weight the code of falcon_h1 reads directly; leave",
        ),
    ],
)
def test_an_adapter_that_cannot_work_is_refused(name: str, lora: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(PolicySection(base=str(write_family(name, tmp_path)), lora=LoraSection(**lora)), device="cpu")


def test_layer_that_the_base_does_not_call_is_refused(tmp_path: Path) -> None:
    """As with a fused kernel that reads the weight of the last projection."""
    policy = build_policy(write_family("llama", tmp_path))
    layer = policy.model.get_base_model().model.layers[1].self_attn.o_proj
    layer.__class__ = type("Bypassed", (type(layer),), {"__call__": lambda self, x: self.base_layer(x)})
    with pytest.raises(PolicyError, match=r"must be called in training, got model.layers.1.self_attn.o_proj"):
        check_adapter_runs(policy.model)


def test_state_that_a_family_does_not_continue_is_computed_with_each_answer(tmp_path: Path) -> None:
    """Jamba's code ignores the state where several tokens continue it."""
    policy = build_policy(write_family("jamba", tmp_path))
    widths: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda *call: widths.append(call[1][0].shape[0]))
    sequences = [([5, 6, 7, 8] * 4, [9, 10, 2]) for _ in range(4)]
    token_logprobs(policy.model, sequences, policy.pad_token_id)
    assert widths[-1] == 4

"""Every family of models: what is sampled, trained and exported is one and the same policy.

The reference is an unpadded forward pass per answer of plain transformers and peft, over the exported adapter.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm.adapters.adapter_state import read_adapter
from swarm.adapters.checkpoint import Checkpoint
from swarm.adapters.export import export_checkpoint, export_merged
from swarm.config import RolloutsSection
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import PolicyError
from swarm.policy.logprobs import TokenSequence, token_logprobs
from swarm.policy.policy import Policy
from tests.unit.families import FAMILIES, REFUSED, write_family
from tests.unit.tiny_models import build_policy, requests

PROMPTS = ("What is 7 + 5?", "Spell this backward, please: a")
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
"""Largest distance of two gradients, relative to their norm."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_one_policy_in_sampling_training_and_export(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    policy = build_policy(write_family(name, tmp_path / "base"))
    exported = _exported(policy, tmp_path)
    sequences, sampled = _sampled(policy, is_in_slots=family.is_in_slots)
    expected = [_unpadded(exported["adapter"], sequence) for sequence in sequences]
    assert torch.cat(expected).std() > 0.1, "a uniform policy would hide every difference"
    for got, wanted in zip(sampled, expected, strict=True):
        assert got == pytest.approx(wanted.tolist(), abs=family.sampling_tolerance)
    for sequence, wanted in zip(sequences, expected, strict=True):
        assert (_unpadded(exported["merged"], sequence) - wanted).abs().max() <= TOLERANCE
    _check_training(policy, sequences, expected)
    two_tokens = [(prompt, answer[:2]) for prompt, answer in sequences]  # many families continue by one token otherwise
    _check_training(policy, two_tokens, [wanted[:2] for wanted in expected])


def _exported(policy: Policy, folder: Path) -> dict[str, Any]:
    """The policy as plain transformers and peft load it: base with adapter, and merged into one model."""
    checkpoint = Checkpoint(0, folder, {"adapter": read_adapter(policy.model)}, {})
    export_checkpoint(checkpoint, str(policy.base_folder), None, policy.config.lora, folder / "adapter")
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


def _check_training(policy: Policy, sequences: Sequence[TokenSequence], expected: Sequence[Tensor]) -> None:
    factors = {name: one for name, one in policy.model.named_parameters() if one.requires_grad}
    first: Tensor | None = None
    for share_prompts in (False, True):
        for recompute_layers in (False, True):
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


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_with_a_cache_of_its_own_is_refused_at_load(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        PolicyError, match="must decode with the standard cache of transformers, got an error of MiniMax"
    ):
        build_policy(write_family(name, tmp_path))

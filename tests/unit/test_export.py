"""Exports are what Hugging Face loaders give back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.adapters.export import export_adapter, export_merged
from swarm.errors import PolicyError
from swarm.policy.policy import Policy
from tests.unit.tiny_models import ARCHITECTURES

MakePolicy = Callable[..., Policy]
PROMPT = "What is 7 + 5?"


def logits(model: torch.nn.Module, policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([policy.encode_prompt(PROMPT)])).logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_merged_model_computes_what_the_policy_computes(make_policy: MakePolicy, tmp_path: Path, name: str):
    policy = make_policy(name)
    export_merged(policy.model, policy.tokenizer, policy.base_folder, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(merged, policy), logits(policy.model, policy), atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == policy.tokenizer.get_vocab()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_adapter_on_its_base_computes_what_the_policy_computes(make_policy: MakePolicy, tmp_path: Path, name: str):
    policy = make_policy(name)
    export_adapter(policy.model, policy.tokenizer, tmp_path / "out")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(policy.base_folder), str(tmp_path / "out"))
    assert torch.allclose(logits(loaded, policy), logits(policy.model, policy), atol=1e-5)


def test_exporting_leaves_the_policy_as_it_is(make_policy: MakePolicy, tmp_path: Path):
    policy = make_policy()
    before, random_state = logits(policy.model, policy), torch.random.get_rng_state()
    export_merged(policy.model, policy.tokenizer, policy.base_folder, tmp_path / "out")
    assert torch.equal(logits(policy.model, policy), before)
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_a_quantised_policy_is_merged_into_the_full_precision_base(make_policy: MakePolicy, tmp_path: Path):
    full, quantised = make_policy(), make_policy(quantization="4bit")
    export_merged(quantised.model, quantised.tokenizer, quantised.base_folder, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert next(merged.parameters()).dtype == torch.float32
    assert torch.allclose(logits(merged, full), logits(full.model, full), atol=1e-4)


def test_an_export_does_not_overwrite(make_policy: MakePolicy, tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    policy = make_policy()
    with pytest.raises(PolicyError, match="new or empty folder"):
        export_merged(policy.model, policy.tokenizer, policy.base_folder, tmp_path)
    with pytest.raises(PolicyError, match="writable folder"):
        export_adapter(policy.model, policy.tokenizer, tmp_path / "thesis.txt")

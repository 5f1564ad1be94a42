"""Bases in 16, 8 and 4 bits go through sampling, training, merging and export, and are loaded without a second copy."""

import re
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.adapters.export import export_merged
from swarm.adapters.product_merge import LowRank, merge_by_layer
from swarm.config import RolloutsSection
from swarm.engine.canary import Canary
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.policy.policy import Policy
from tests.unit.families import write_family
from tests.unit.tiny_models import SHAPE, build_policy, character_tokenizer, perturb, requests

PROMPT = "What is 7 + 5?"


@pytest.mark.parametrize("setting", [{"dtype": "bfloat16"}, {"quantization": "8bit"}, {"quantization": "4bit"}])
@pytest.mark.parametrize("name", ["gpt_neox", "qwen3", "qwen3_next"])
def test_reduced_base_is_sampled_trained_merged_and_exported(
    name: str, setting: dict[str, str], tmp_path: Path
) -> None:
    full = build_policy(write_family(name, tmp_path / "base"))
    policy = build_policy(tmp_path / "base", **setting)
    engine = make_engine(policy, RolloutsSection(cache_mib=64))
    prompt = policy.encode_prompt(PROMPT)
    (answers,) = engine.generate(requests([prompt], 4, 6), Sampling(), seed=0)
    result = policy.token_logprobs([(prompt, answer.token_ids) for answer in answers])
    for row, answer in enumerate(answers):
        trained = result.logprobs[row, : len(answer.token_ids)].tolist()
        assert answer.policy_logprobs == pytest.approx(trained, abs=0.15)
    Canary(policy, engine, tolerance=0.05).check()
    result.logprobs.sum().backward()
    factors = [one for one in policy.model.parameters() if one.requires_grad]
    assert all(one.dtype == torch.float32 and one.grad is not None and one.grad.any() for one in factors)
    own = read_adapter(policy.model)
    perturb(policy)
    pair = [LowRank(own, 2.0), LowRank(read_adapter(policy.model), 2.0)]
    merged = merge_by_layer(pair, [0.5, 0.5], rank=4, scaling=2.0, drift_threshold=1.0)
    for one in (policy, full):
        write_adapter(one.model, merged.tensors)
    export_merged(policy.model, policy.tokenizer, policy.base_folder, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert next(exported.parameters()).dtype == torch.float32, "as the base was saved, so that nothing is rounded away"
    assert torch.allclose(_logits(exported, full), _logits(full.model, full), atol=1e-4)


def _logits(model: torch.nn.Module, policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([policy.encode_prompt(PROMPT)])).logits


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to measure memory")
@pytest.mark.parametrize(("saved", "most"), [("float32", 0.2), ("bfloat16", 1.2)])
def test_base_in_several_files_is_loaded_without_a_second_copy(saved: str, most: float, tmp_path: Path) -> None:
    """Files in the precision of the policy are mapped into memory; others are converted tensor by tensor."""
    shape = {**SHAPE, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, saved)).save_pretrained(tmp_path, max_shard_size="16MB")
    character_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    before = _own_bytes()
    peak, is_loaded = [before], threading.Event()

    def watch() -> None:
        while not is_loaded.wait(0.001):
            peak[0] = max(peak[0], _own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        policy = build_policy(tmp_path)
    finally:
        is_loaded.set()
        watcher.join()
    weights = sum(one.nbytes for one in policy.model.parameters())
    assert weights > 128 << 20
    assert max(peak[0], _own_bytes()) - before < most * weights


def _own_bytes() -> int:
    """Memory of this process that is not mapped from a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) << 10

"""Policies to measure sampling with: the bundled one, and random weights in the shape of larger ones."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from swarm.config import LoraSection, PolicySection
from swarm.policy.base_folder import BUNDLED_FOLDER
from swarm.policy.base_model import load_tokenizer
from swarm.policy.policy import Policy, load_policy

_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bundled() -> Policy:
    return load_policy(PolicySection(), device="cpu")


def small_llama(folder: Path, rank: int = 16) -> Policy:
    """32 M parameters, and an adapter of this rank."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, **_TOKENS,
    )  # fmt: skip
    return _policy(LlamaForCausalLM, config, folder, rank)


def qwen_half_billion(folder: Path) -> Policy:
    """Qwen2.5-0.5B's shape: 494 M parameters, 2 GB in float32."""
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, **_TOKENS,
    )  # fmt: skip
    return _policy(Qwen2ForCausalLM, config, folder)


def _policy(kind: type[PreTrainedModel], config: LlamaConfig | Qwen2Config, folder: Path, rank: int = 16) -> Policy:
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    load_tokenizer(BUNDLED_FOLDER).save_pretrained(folder)
    return load_policy(PolicySection(base=str(folder), lora=LoraSection(rank=rank)), device="cpu")

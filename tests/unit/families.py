"""Tiny random models of the families of transformers that the node is tested with, by the name of their model type."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.tiny_models import CHARACTERS, character_tokenizer

_COMMON: Mapping[str, Any] = {
    "vocab_size": 4 + len(CHARACTERS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_WINDOW = 8
"""Shorter than the prompts of the tests."""
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": _WINDOW}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA = {"mamba_d_state": 8, "mamba_expand": 2}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its configuration, besides the common settings."""
    is_in_slots: bool = True
    """Whether slots hold its cache; otherwise it is sampled in whole batches."""
    sampling_tolerance: float = 1e-5
    """Largest difference between a log-prob as sampled and that of a forward pass over the whole answer."""


FAMILIES: dict[str, Family] = {
    "apertus": Family(),
    "arcee": Family(),
    "bamba": Family({**_MAMBA, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
                     "mamba_chunk_size": 16}, is_in_slots=False),
    "bitnet": Family(),
    "bloom": Family({"n_layer": 2, "n_head": 4}, is_in_slots=False),
    "codegen": Family({"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 512}),
    "cohere": Family({"logit_scale": 0.5}),
    "cohere2": Family({"logit_scale": 0.5, **_SLIDING}),
    "deepseek_v2": Family({**_EXPERTS, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                           "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                           "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}),
    "deepseek_v3": Family({**_EXPERTS, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                           "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                           "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family({"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1}),
    "exaone4": Family({**_SLIDING}),
    "falcon": Family({"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": Family({"model_type": "falcon", "alibi": True, "multi_query": False}, is_in_slots=False),
    "falcon_h1": Family({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
                         "mamba_n_groups": 1, "mamba_chunk_size": 16}, is_in_slots=False),
    "gemma": Family({"head_dim": 8}),
    "gemma2": Family({"head_dim": 8, "sliding_window": _WINDOW, "attn_logit_softcapping": 5.0,
                      "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 8}),
    "gemma3_text": Family({"head_dim": 8, "query_pre_attn_scalar": 8, **_SLIDING}),
    "glm": Family({"head_dim": 8}),
    "glm4": Family({"head_dim": 8}),
    "glm4_moe": Family({**_EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                        "n_group": 1, "topk_group": 1}),
    "gpt2": Family({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_bigcode": Family({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neo": Family({"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                       "window_size": _WINDOW}, is_in_slots=False),
    "gpt_neox": Family(),
    "gpt_oss": Family({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **_SLIDING}),
    "gptj": Family({"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 512}),
    "granite": Family({"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "granitemoe": Family({"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid": Family({**_MAMBA, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
                                "mamba_n_groups": 1, "mamba_chunk_size": 16, "num_local_experts": 4,
                                "num_experts_per_tok": 2, "shared_intermediate_size": 32}, is_in_slots=False),
    "helium": Family({"head_dim": 8}),
    "hunyuan_v1_dense": Family({"head_dim": 8}),
    "hunyuan_v1_moe": Family({"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "jamba": Family({**_MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                     "expert_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
                    is_in_slots=False),
    "lfm2": Family({"layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "block_multiple_of": 8},
                   is_in_slots=False),
    "lfm2_moe": Family({**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
                       is_in_slots=False),
    "llama": Family(),
    "llama4_text": Family({"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
                          is_in_slots=False),

    "ministral": Family({**_SLIDING, "head_dim": 8}),
    "mistral": Family({"sliding_window": _WINDOW}),
    "mixtral": Family({"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mpt": Family({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}, is_in_slots=False),
    "nemotron": Family(),
    "nemotron_h": Family({**_EXPERTS, "layers_block_type": ["mamba", "attention", "moe", "mlp"], "num_hidden_layers": 4,
                          "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "head_dim": 8,
                          "chunk_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
                          "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1}, is_in_slots=False),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family({**_SLIDING}),
    "olmoe": Family({"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": Family({"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "persimmon": Family(),
    "phi": Family(),
    "phi3": Family({"sliding_window": _WINDOW, "original_max_position_embeddings": 512}),
    "phimoe": Family({"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Family(),
    "qwen2_moe": Family({**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3": Family({"head_dim": 8}),
    "qwen3_5_text": Family({**_LINEAR, "head_dim": 8}, is_in_slots=False),
    "qwen3_moe": Family({**_EXPERTS, "head_dim": 8, "num_experts": 4}),
    "qwen3_next": Family({**_LINEAR, **_EXPERTS, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 32},
                         is_in_slots=False),
    "seed_oss": Family({"head_dim": 8}),
    "smollm3": Family({"no_rope_layers": [1, 0]}),
    "stablelm": Family(),
    "starcoder2": Family({"sliding_window": _WINDOW}),
    "zamba2": Family({"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "mamba_expand": 2, "mamba_ngroups": 1,
                      "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16, "attention_hidden_size": 64,
                      "attention_head_dim": 16, "num_mem_blocks": 1, "use_shared_attention_adapter": False,
                      "adapter_rank": 4, "num_key_value_heads": 4, "use_mem_rope": True}, is_in_slots=False,
                     # transformers bounds the time step from below in a pass over many tokens, and not in one over one
                     sampling_tolerance=1e-3),
}  # fmt: skip
REFUSED: dict[str, Family] = {
    "minimax": Family({"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 8,
                       "num_experts_per_tok": 2, "head_dim": 8}),
    "recurrent_gemma": Family({"head_dim": 8, "lru_width": 32, "attention_window_size": 8,
                               "block_types": ["recurrent", "attention"]}),
}  # fmt: skip
"""Families that transformers has and that this node cannot use."""


def write_family(name: str, folder: Path) -> Path:
    """Write a random model of two layers and width 32 with a character tokenizer, and return its folder."""
    settings = {"model_type": name, **_COMMON, **(FAMILIES | REFUSED)[name].settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # large enough for uneven distributions
                    parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder

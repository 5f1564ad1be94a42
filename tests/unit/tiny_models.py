"""Tiny models of three architectures with a character tokenizer, and rollout groups to train them on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from swarm.config import LoraSection, PolicySection
from swarm.engine.engine import AnswerRequest
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.policy.policy import Policy, load_policy
from swarm.training.experience import TrainingGroup
from swarm.types import Rollout, RolloutGroup, TaskRef

ARCHITECTURES = ("llama", "qwen2", "gpt_neox")
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
RAGGED_PROMPTS = ("Hi", "What is 7 + 5?", "Spell this backward, please: swarm", "a")


def of_one_layer(make_model: Callable[[], LlamaForCausalLM]) -> LlamaForCausalLM:
    """What `make_model` makes, less all its layers but the first."""
    model = make_model()
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return model


def character_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


SHAPE: dict[str, Any] = {
    "vocab_size": 4 + len(CHARACTERS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_models(folder: Path) -> dict[str, Path]:
    """{architecture: folder}; two layers, width 32; weights large enough for uneven distributions."""
    built = {
        "llama": LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2)),
        "gpt_neox": GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, attention_dropout=0.1, hidden_dropout=0.1)),
        # not one of ARCHITECTURES: for the cases where a sliding window, shorter than the prompts, matters
        "mistral": MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=8)),
        # layers of two kinds in turn and soft caps in attention and head, which SDPA cannot do
        "gemma2": Gemma2ForCausalLM(
            Gemma2Config(
                **SHAPE,
                num_key_value_heads=2,
                head_dim=8,
                sliding_window=8,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=4.0,
                query_pre_attn_scalar=8,
            )
        ),
        # a recurrent state next to keys and values: what slots cannot hold
        "falcon_h1": FalconH1ForCausalLM(
            FalconH1Config(
                **SHAPE,
                num_key_value_heads=2,
                mamba_d_ssm=32,
                mamba_n_heads=4,
                mamba_d_head=8,
                mamba_d_state=8,
                mamba_n_groups=1,
                mamba_chunk_size=16,
            )
        ),
    }
    for seed, (name, model) in enumerate(built.items()):
        _fill(model, seed)
        model.save_pretrained(folder / name)
        character_tokenizer(CHAT_TEMPLATE if name == "qwen2" else None).save_pretrained(folder / name)
    return {name: folder / name for name in built}


def build_policy(
    folder: Path, *, trained: bool = True, rank: int = 4, init_seed: int = 0, **settings: object
) -> Policy:
    """A policy on CPU; `trained` gives B values, so that the adapter has something to say. The rest is `policy.*`."""
    lora = LoraSection(rank=rank, alpha=2.0 * rank, init_seed=init_seed)
    policy = load_policy(PolicySection.model_validate({"base": str(folder), "lora": lora, **settings}), device="cpu")
    if trained:
        perturb(policy)
    return policy


def perturb(policy: Policy, scale: float = 0.05) -> None:
    """Move every B factor by seeded noise."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def requests(
    prompts: Sequence[Sequence[int]], num_answers: int | Sequence[int], max_new_tokens: int | Sequence[int]
) -> list[AnswerRequest]:
    """One for each prompt; a single number counts for all of them."""
    sizes = [num_answers] * len(prompts) if isinstance(num_answers, int) else num_answers
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    return [AnswerRequest(*one) for one in zip(prompts, sizes, limits, strict=True)]


def sampled_groups(
    policy: Policy,
    prompts: tuple[str, ...] = RAGGED_PROMPTS,
    *,
    group_size: int = 4,
    max_new_tokens: int = 6,
    seed: int = 0,
) -> list[TrainingGroup]:
    """Own groups with made-up rewards 1, 0, 0, … that are all finished, whether EOS was sampled or not."""
    encoded = [tuple(policy.encode_prompt(prompt)) for prompt in prompts]
    answers = SlotEngine(policy, 64).generate(requests(encoded, group_size, max_new_tokens), Sampling(), seed=seed)
    groups: list[TrainingGroup] = []
    for index, (prompt_ids, completions) in enumerate(zip(encoded, answers, strict=True)):
        rollouts = tuple(
            Rollout(policy.decode(c.token_ids), c.token_ids, c.logprobs, True, 1.0 if i == 0 else 0.0)
            for i, c in enumerate(completions)
        )
        task = TaskRef("made-up", "0" * 16, 16, index)
        group = RolloutGroup(task, "0" * 16, rollouts, "me", policy.lineage, policy.version)
        groups.append(TrainingGroup(prompt_ids, group, usable_logprobs=True, is_own=True))
    return groups


def _fill(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 0.4 if "embed" in name or "head" in name else 0.2
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

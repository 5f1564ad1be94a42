"""Models of five layers cut into stage groups of this process, and the single model that they must equal."""

import copy
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from swarm.adapters.adapter_state import adapter_parameters
from swarm.config import LoraSection
from swarm.pipeline.commands import StageSettings
from swarm.pipeline.driver.pipeline_policy import PipelineModel
from swarm.pipeline.driver.stage_group import StageGroup, StageGroupSettings
from swarm.pipeline.model_shape import stage_parts
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage.stage_model import StageModel, load_stage
from swarm.pipeline.stage_link import InProcessLink
from swarm.pipeline.tensor_bundle import WirePrecision
from swarm.policy.logprobs import TokenLogprobs, TokenSequence, token_logprobs
from swarm.policy.lora import attach_adapter

ARCHITECTURES = ("llama", "qwen2", "gpt_neox")
NUM_LAYERS = 5
VOCAB_SIZE = 90
PAD = 0
LORA = LoraSection(rank=3, alpha=6.0, init_seed=11)
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
}


def write_models(folder: Path) -> dict[str, Path]:
    """Write models as {architecture: folder}: a tied head, layers of two kinds (short windows), dropout to switch off."""
    torch.set_num_threads(1)
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    torch.manual_seed(0)
    built = {
        "llama": LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2, **windows)),
        "gpt_neox": GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, attention_dropout=0.1, hidden_dropout=0.1)),
    }
    for seed, (name, model) in enumerate(built.items()):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
        model.save_pretrained(folder / name, max_shard_size="20KB")  # one or two layers a file
    return {name: folder / name for name in built}


def single_model(folder: Path, lora: LoraSection | None) -> Any:
    """Return a copy of the model in one piece, with the adapter moved away from its initial values."""
    model = copy.deepcopy(_single_model(folder, cast(Any, lora)))
    if lora is None:
        model.get_base_model = lambda: model  # log-probs ask a peft model for it
    return model


@cache  # loading takes most of the time of these tests
def _single_model(folder: Path, lora: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if lora is None:
        return model
    model.requires_grad_(False)
    adapted = attach_adapter(model, lora).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in adapter_parameters(adapted):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


def trainable(model: Any, lora: LoraSection | None) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters by the names that stages use."""
    return dict(model.named_parameters() if lora is None else adapter_parameters(model))


def load_stages(
    folder: Path, sizes: Sequence[int], lora: LoraSection | None, *, replicate_edges: bool = False
) -> list[StageModel]:
    return copy.deepcopy(_load_stages(folder, tuple(sizes), cast(Any, lora), replicate_edges))


@cache
def _load_stages(folder: Path, sizes: tuple[int, ...], lora: Any, replicate_edges: bool) -> list[StageModel]:
    parts = stage_parts(sizes, replicate_edges=replicate_edges)
    return [load_stage(folder, part, lora=lora, device=CPU, dtype=torch.float32) for part in parts]


@dataclass
class TestStageGroup:
    """A stage group with its models, stages and links."""

    __test__ = False

    models: list[StageModel]
    stages: list[Stage]
    links: list[InProcessLink]
    stage_group: StageGroup
    policy: PipelineModel


@asynccontextmanager
async def open_stage_group(
    folder: Path,
    sizes: Sequence[int],
    lora: LoraSection | None,
    *,
    like: Any = None,
    precision: WirePrecision = "fp32",
    stage_settings: StageSettings | None = None,
    group_settings: StageGroupSettings | None = None,
    replicate_edges: bool = False,
    wrap: Callable[[int, InProcessLink], Any] = lambda _, link: link,
) -> AsyncIterator[TestStageGroup]:
    """Yield a started stage group, with the weights of the single model `like` where one is given."""
    models = load_stages(folder, sizes, lora, replicate_edges=replicate_edges)
    if like is not None:
        source = trainable(like, lora)
        with torch.no_grad():
            for model in models:
                for name, parameter in model.trainable.items():
                    parameter.copy_(source[name])
    stages = [Stage(model, stage_settings or StageSettings()) for model in models]
    links = [InProcessLink(stage, precision=precision) for stage in stages]
    stage_group = StageGroup([wrap(i, link) for i, link in enumerate(links)], group_settings or StageGroupSettings())
    try:
        await stage_group.start()
        yield TestStageGroup(models, stages, links, stage_group, PipelineModel(stage_group, PAD))
    finally:
        for link in links:
            link.close()


def made_up_parts(num_parts: int, seed: int = 3) -> list[list[TokenSequence]]:
    """Make micro-batches of two or three sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()

    return [[(tokens(2, 12), tokens(1, 9)) for _ in range(2 + index % 2)] for index in range(num_parts)]


def loss_of(micro_batch: int, result: TokenLogprobs) -> Tensor:
    """A loss with weights of both signs, different for every token, and not linear in the log-probs."""
    generator = torch.Generator().manual_seed(100 + micro_batch)
    weights = torch.randn(result.logprobs.shape, generator=generator)
    ratio = (result.logprobs - result.logprobs.detach()).exp()
    return -(ratio * weights * result.mask).sum() / 10


def single_gradients(
    model: Any, lora: LoraSection | None, parts: Sequence[Sequence[TokenSequence]]
) -> dict[str, Tensor]:
    """Return the gradients of the single model, summed over the parts."""
    model.zero_grad()
    for index, part in enumerate(parts):
        loss_of(index, token_logprobs(model, part, PAD, share_prompts=False)).backward()
    return {name: p.grad for name, p in trainable(model, lora).items() if p.grad is not None}


def norm_of(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference over all tensors, relative to the largest value of each."""
    assert set(found) == set(wanted)
    return max(
        ((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-3)).item() for name in wanted
    )

"""The trainable part: LoRA factors B·A on the base's linear layers (peft), with equal initial values in a lineage."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from swarm.config import LoraSection
from swarm.errors import PolicyError
from swarm.policy.counter_noise import uniform


def attach_adapter(model: Any, config: LoraSection) -> Any:
    """Wrap `model` with an adapter in float32: A from `config.init_seed` and the layer's name, B zero.

    Torch's random state stays as it was. Raises PolicyError for a target that names no linear layer.
    """
    from peft import LoraConfig, get_peft_model

    targets = resolve_targets(model, config.targets)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only divides it by r
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws A and B, which are replaced below
        peft_model = get_peft_model(model, lora)
    for name, layer in adapted_layers(peft_model):
        _start_factors(name, layer, config.init_seed)
    return peft_model


def adapted_layers(peft_model: Any) -> Iterable[tuple[str, Any]]:
    """Yield (name inside the base model, LoRA layer) of every adapted layer, in the order of the model."""
    for name, module in peft_model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            yield name, module


def adapter_shape(peft_model: Any) -> list[tuple[str, int, int]]:
    """Return (name, inputs, outputs) of every adapted layer."""
    return [(name, layer.in_features, layer.out_features) for name, layer in adapted_layers(peft_model)]


def _start_factors(name: str, layer: Any, init_seed: int) -> None:
    """Set A uniform in ±1/sqrt(inputs), which is peft's default (Kaiming with a = √5), and B zero."""
    factor_a, factor_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    bound = 1.0 / math.sqrt(layer.in_features)
    noise = uniform(factor_a.numel(), "lora-a", init_seed, name)
    with torch.no_grad():
        factor_a.copy_(torch.from_numpy((noise * 2.0 - 1.0) * bound).view(factor_a.shape))
        factor_b.zero_()


def resolve_targets(model: Any, targets: str | tuple[str, ...]) -> list[str]:
    """Return full names of the layers to adapt: all linear ones but the head, or those that end with a name of `targets`."""
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if _is_linear(module) and module is not head]
    if targets == "all-linear":
        return linear
    chosen: set[str] = set()
    for target in targets:
        matching = {name for name in linear if name == target or name.endswith("." + target)}
        if not matching:
            leaves = sorted({name.rpartition(".")[2] for name in linear})
            near = difflib.get_close_matches(target, leaves, n=3, cutoff=0.4) or leaves
            raise PolicyError(
                f"policy.lora.targets must name linear layers of the base, got {target!r}; "
                f"did you mean {', '.join(near)}?"
            )
        chosen |= matching
    if not chosen:
        raise PolicyError(
            "policy.lora.targets must name at least one layer, got none; set policy.lora.targets = all-linear"
        )
    return [name for name in linear if name in chosen]


def _is_linear(module: nn.Module) -> bool:
    # bitsandbytes layers derive from nn.Linear; GPT-2 style Conv1D is a linear layer with its weight transposed
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"

"""The trainable part: LoRA factors B·A on the base's linear layers (peft), with equal initial values in a lineage."""

import difflib
import logging
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from swarm.adapters.export import stacked_settings
from swarm.config import LoraSection
from swarm.errors import PolicyError
from swarm.policy.base_model import one_line
from swarm.policy.counter_noise import uniform
from swarm.policy.logprobs import PromptCache

logger = logging.getLogger(__name__)

_MAX_DEVIATION = 0.2
"""Largest distance of logits with a cache from those without, relative to their norm, that 16-bit numbers can explain."""
ALL_LINEAR, EXPERTS = "all-linear", "experts"
"""Names in `policy.lora.targets` that are not those of layers."""
_BYPASSED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("falcon_h1", "nemotron_h", "mamba", "mamba2", "falcon_mamba"), frozenset({"out_proj"})),
    "jamba": frozenset({"dt_proj"}),
}
"""Linear layers by model type whose weight the model's code reads directly, so that an adapter on them has no effect.

The first five are those of peft: fused kernels compute `out_proj`. The layers to adapt must not depend on the machine.
"""


def attach_adapter(model: Any, config: LoraSection) -> Any:
    """Wrap `model` with an adapter in float32: A from `config.init_seed` and the layer's name, B zero.

    Torch's random state stays as it was. Raises PolicyError for a target that names no linear layer, and for settings that
    peft refuses.
    """
    targets = resolve_targets(model, config.targets)
    of_experts = stacked_settings(config) if EXPERTS in config.targets else {}
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only divides it by r
        lora_dropout=config.dropout,
        target_modules=targets,
        **of_experts,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):  # peft draws A and B, which are replaced below
            peft_model = get_peft_model(model, lora)
    except ValueError as error:
        raise PolicyError(
            f"policy.lora must fit the layers of {type(model).__name__}, got: {one_line(error).rstrip('.')}; change policy.lora"
        ) from None
    for name, layer in adapted_layers(peft_model):
        _start_factors(name, layer, config.init_seed)
        use_fewer_passes(layer)
    _tell_of_experts(peft_model)
    return peft_model


def _tell_of_experts(peft_model: Any) -> None:
    """Log whether the stacked experts of a mixture get an adapter: peft adapts them for some families and not for others.

    peft adapts them where the targets hold the names that their weights had one by one (gate_proj, up_proj, down_proj), and
    then in place of the plain layers of these names. `experts` among the targets adapts them for any family.
    """
    stacked = [name for name, one in peft_model.named_parameters() if one.dim() == 3 and ".experts." in name]
    if not stacked:
        return
    num_adapted = sum("experts" in name and hasattr(layer, "num_experts") for name, layer in adapted_layers(peft_model))
    family = type(peft_model.get_base_model()).__name__
    if num_adapted:
        logger.info("the experts of this mixture (%s) get an adapter", family)
    else:
        logger.info("the experts of this mixture (%s) get no adapter; policy.lora.targets can name them", family)


def adapted_layers(peft_model: Any) -> Iterable[tuple[str, Any]]:
    """Yield (name inside the base model, LoRA layer) of every adapted layer, in the order of the model."""
    for name, module in peft_model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            yield name, module


@torch.no_grad()
def check_adapter_runs(peft_model: Any) -> None:
    """Raises PolicyError unless the base decodes with a standard cache, and calls every adapted layer without one.

    Some families have a cache of their own. They raise an error with another, or ignore it, and their answers would be sampled
    from another policy than the trained one. Fused kernels may read the weights of a layer without calling it: its adapter
    would be trained and have no effect. Experts to which no token goes are not called, so they do not count.
    """
    base = peft_model.get_base_model()
    called: set[str] = set()
    layers = [(name, layer) for name, layer in adapted_layers(peft_model) if ".experts." not in name]
    handles = [layer.register_forward_hook(partial(_note_call, called, name)) for name, layer in layers]
    prompt, answer = [0, 1, 1, 0, 1], [0, 0]
    token_ids = torch.tensor([prompt + answer], device=next(base.parameters()).device)
    has_dropout = peft_model.peft_config["default"].lora_dropout > 0  # only then is training done in train mode
    try:
        peft_model.train(has_dropout)(input_ids=token_ids, use_cache=False)
        uncalled = [name for name, _ in layers if name not in called]
        cache = PromptCache(peft_model.eval(), pad_token_id=0)
        cache.start([prompt[:2], prompt], token_ids.device)
        cache.select(torch.tensor([1, 0], device=token_ids.device))
        steps = [cache.extend(torch.tensor([[token]] * 2, device=token_ids.device)) for token in answer]
        decoded = torch.stack([logits[0, -1] for logits in steps])
        expected = peft_model(input_ids=token_ids, use_cache=False).logits[0, len(prompt) :]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a family's own code and kernels may fail in any way
        raise PolicyError(
            f"policy.base must decode with the standard cache of transformers, got an error of {type(base).__name__}: "
            f"{one_line(error)}; set policy.base to a model of another family"
        ) from None
    finally:
        peft_model.eval()
        for handle in handles:
            handle.remove()
    if not (decoded - expected).float().norm() <= _MAX_DEVIATION * expected.float().norm():
        raise PolicyError(
            f"policy.base must decode with a cache as in one pass, got other logits of {type(base).__name__}, whose code stores "
            "states elsewhere; set policy.base to a model of another family"
        )
    if uncalled:
        raise PolicyError(
            f"every layer of policy.lora.targets must be called in training, got {uncalled[0]}, whose weight "
            f"{type(base).__name__} reads directly on this machine; list the other layers in policy.lora.targets"
        )


def _note_call(called: set[str], name: str, *_: Any) -> None:
    called.add(name)


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
    """Return full names of the layers to adapt: all linear ones but the head, or those that end with a name of `targets`.

    `experts` among the targets adds no name, as the weights of experts are not layers. Layers whose adapter would have no
    effect are left out. Raises PolicyError for a target that names none of the others.
    """
    head = model.get_output_embeddings()
    kind = model.config.model_type
    bypassed = _BYPASSED.get(kind, frozenset())
    names = [name for name, module in model.named_modules() if _is_linear(module) and module is not head]
    linear = [name for name in names if name.rpartition(".")[2] not in bypassed]
    if targets == ALL_LINEAR:
        return linear
    chosen: set[str] = set(linear if ALL_LINEAR in targets else ())
    for target in targets:
        if target == EXPERTS:
            _check_has_stacked_experts(model)
        if target in (ALL_LINEAR, EXPERTS):
            continue
        matching = {name for name in linear if name == target or name.endswith("." + target)}
        if target.rpartition(".")[2] in bypassed:
            raise PolicyError(
                f"policy.lora.targets must name layers that an adapter can change, got {target!r}, whose weight the code of "
                f"{kind} reads directly; leave it out"
            )
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
            "policy.lora.targets must name at least one linear layer, got none; set policy.lora.targets = all-linear"
        )
    return [name for name in linear if name in chosen]


def _check_has_stacked_experts(model: Any) -> None:
    stacked = {
        name.rpartition(".")[2] for name, one in model.named_parameters() if one.dim() == 3 and ".experts." in name
    }
    if stacked != {"gate_up_proj", "down_proj"}:
        raise PolicyError(
            "policy.lora.targets may name experts where a base stacks them as gate_up_proj and down_proj, got "
            f"{', '.join(sorted(stacked)) or 'none'} in {type(model).__name__}; leave it out"
        )


def _is_linear(module: nn.Module) -> bool:
    # bitsandbytes layers derive from nn.Linear; GPT-2 style Conv1D is a linear layer with its weight transposed. Some
    # routers of experts derive from nn.Linear, too, but return several tensors, which peft cannot add to.
    kind = type(module).__name__
    return kind == "Conv1D" or (isinstance(module, nn.Linear) and "Router" not in kind)


class LoraLinear(Linear):
    """peft's layer, in three products forward and backward where the base is a plain layer of the adapter's type.

    peft multiplies by the scaling, adds, and has autograd add two gradients, each in a pass over all activations. In training a
    small model on a CPU these passes took a sixth of the time.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return [..., outputs] of inputs [..., inputs]."""
        if args or kwargs or not self._is_plain(x):
            return super().forward(x, *args, **kwargs)
        base, factor_a, factor_b = self.base_layer, self.lora_A["default"], self.lora_B["default"]
        return _LoraProduct.apply(x, base.weight, base.bias, factor_a.weight, factor_b.weight, self.scaling["default"])

    def _is_plain(self, x: Tensor) -> bool:
        base, has_dropout = self.base_layer, self.training and not isinstance(self.lora_dropout["default"], nn.Identity)
        return (
            not (self.disable_adapters or self.merged or has_dropout or self.lora_variant)
            and self.active_adapters == ["default"]
            and type(base) is nn.Linear
            and not base.weight.requires_grad
            and x.dtype == base.weight.dtype == self.lora_A["default"].weight.dtype
            and x.device == base.weight.device  # weights that are elsewhere are fetched by a hook of the layer
            and not torch.is_autocast_enabled(x.device.type)
        )


def use_fewer_passes(layer: Any) -> None:
    """Let an adapted layer of peft, over a plain linear layer, compute as `LoraLinear`. Its weights and names stay."""
    if type(layer) is Linear and type(layer.base_layer) is nn.Linear:
        layer.__class__ = LoraLinear


class _LoraProduct(torch.autograd.Function):
    """W x + bias + s·B (A x), with gradients for x, A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factor_a: Tensor, factor_b: Tensor, scaling: float
    ) -> Tensor:
        low = functional.linear(x, factor_a).mul_(scaling)
        result = functional.linear(x, weight, bias)
        result.view(-1, result.shape[-1]).addmm_(low.view(-1, low.shape[-1]), factor_b.t())
        ctx.save_for_backward(x, low, weight, factor_a, factor_b)
        ctx.scaling = scaling
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, factor_a, factor_b = ctx.saved_tensors
        of_result = gradient.reshape(-1, gradient.shape[-1])
        of_low = (of_result @ factor_b).mul_(ctx.scaling)
        needs_x, _, _, needs_a, needs_b, _ = ctx.needs_input_grad
        of_x = (of_result @ weight).addmm_(of_low, factor_a).view(x.shape) if needs_x else None
        of_a = of_low.t() @ x.reshape(-1, x.shape[-1]) if needs_a else None
        of_b = of_result.t() @ low.view(-1, low.shape[-1]) if needs_b else None
        return of_x, None, None, of_a, of_b, None

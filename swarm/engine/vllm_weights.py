"""The weights of a policy and of a vLLM instance in the same process: one base for both, and adapters handed over as tensors.

vLLM keeps some weights side by side in one tensor (queries, keys and values; gates and inputs). The policy's weights become
views of it:

    vLLM     [  q_proj  |  k_proj  |  v_proj  ]        its memory stays where it is: recorded CUDA graphs point there
    policy     view        view       view             its own copies are freed
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swarm.errors import PolicyError


def share_base(policy_model: Any, vllm_model: nn.Module) -> int:
    """Make the policy's frozen weights views of vLLM's and return the bytes that are now held once.

    Weights that vLLM stores in another form remain in two copies. Those in 4 bits get the policy's numbers first, because
    vLLM rounds the scales of its own. Raises PolicyError where a weight has 4 bits in one of the two only.
    """
    own = {
        _plain(name): parameter
        for name, parameter in policy_model.base_model.model.named_parameters()
        if not parameter.requires_grad
    }
    num_bytes = 0
    in_4_bits = {name for name, parameter in own.items() if getattr(parameter, "quant_state", None) is not None}
    shared: set[str] = set()
    for parts, fused in _fused_weights(vllm_model):
        states = getattr(fused, "bnb_quant_state", None)
        if states is not None:
            in_4_bits.update(parts)
        start = 0
        for index, part in enumerate(parts):
            if part not in own:
                break
            rows = fused.data[start : start + len(own[part])]
            start += len(own[part])
            if _view(own[part], rows, None if states is None else states[index]):
                shared.add(part)
                num_bytes += rows.nbytes
    if odd := sorted(in_4_bits - shared):
        raise PolicyError(
            f"vLLM and the policy must have the same weights in 4 bits, got {odd[0]} in one of them only; "
            'set policy.quantization = "none", or rollouts.engine = "auto"'
        )
    return num_bytes


def hand_over_adapter(worker: Any, adapter_id: int, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Replace the adapter of vLLM's worker. `tensors` are named as in `adapter_state`, and vLLM may overwrite them.

    `settings` are those of peft. Raises PolicyError where vLLM has no place for one of its layers, ValueError for settings
    that it does not know.
    """
    lora_model = importlib.import_module("vllm.lora.lora_model").LoRAModel
    helper = importlib.import_module("vllm.lora.peft_helper").PEFTHelper.from_dict(dict(settings))
    manager = worker.model_runner.lora_manager
    helper.validate_legal(manager.lora_config)
    layers = manager._adapter_manager
    names = getattr(layers.model, "hf_to_vllm_mapper", None)
    adapter = lora_model.from_lora_tensors(
        adapter_id,
        {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()},
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=names.get_rename_mapper() if names is not None else None,
    )
    manager.remove_all_adapters()
    layers.add_adapter(adapter)
    layers.activate_adapter(adapter_id)
    unused = [name for name in adapter.loras if name.removesuffix(".base_layer") not in layers.modules]
    if unused:
        raise PolicyError(
            f"vLLM must apply the adapter to all layers of policy.lora.targets, got none for {unused[0]}; "
            'set other targets, or rollouts.engine = "auto"'
        )


def _fused_weights(model: Any) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield every weight of vLLM with the names that its parts have in transformers, from its first row on."""
    packed = getattr(model, "packed_modules_mapping", None) or {}
    for name, parameter in model.named_parameters():
        path = _plain(name).split(".")
        modules = packed.get(path[-2], path[-2:-1]) if len(path) > 1 else []
        yield [".".join([*path[:-2], module, path[-1]]) for module in modules], parameter


def _view(parameter: nn.Parameter, rows: Tensor, state: Any) -> bool:
    """Make `parameter` a view of `rows` if both hold the same weight; `state` has the scales of rows in 4 bits."""
    if (parameter.dtype, parameter.device, parameter.shape) != (rows.dtype, rows.device, rows.shape):
        return False
    if state is None:
        if not torch.equal(parameter.data, rows):
            return False
    else:
        own: Any = getattr(parameter, "quant_state", None)
        if own is None or own.nested or (own.quant_type, own.blocksize) != (state.quant_type, state.blocksize):
            return False
        rows.copy_(parameter.data)
        state.absmax.copy_(own.absmax)
        own.absmax = state.absmax
    parameter.data = rows
    return True


def _plain(name: str) -> str:
    """The name of a weight without the layer that an adapter wraps around it."""
    return name.replace(".base_layer.", ".")

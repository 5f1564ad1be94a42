"""The frozen base: a Hugging Face causal language model in the configured precision, checked before it is used."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm.adapters.load_pretrained import load_pretrained
from swarm.config import PolicySection
from swarm.errors import MemoryBudgetError, PolicyError
from swarm.policy.base_folder import read_base_json, weight_files
from swarm.policy.recomputed_layers import checkpointed_layers

_ID_SPAN = 2**31


def load_base(config: PolicySection, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the base in `folder`, frozen, with dropout off, on `device`.

    Raises PolicyError for damaged or missing weights, a decoder without a standard key/value cache, or a quantization that
    is not possible here; MemoryBudgetError where the weights do not fit.
    """
    from transformers import AutoModelForCausalLM

    quantization = _quantization(config, dtype)
    try:
        loaded: Any = load_pretrained(
            AutoModelForCausalLM,
            folder,
            dtype=dtype,
            device_map={"": device},
            quantization_config=quantization,
            use_safetensors=weight_files(folder)[0].suffix == ".safetensors",  # the files that the lineage hashes
            output_loading_info=True,
        )
        model, report = loaded
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(
            f"the base must fit into the memory of {device}, got {config.base} in {dtype}; "
            "set policy.quantization = 4bit or take a smaller base"
        ) from None
    except Exception as error:  # the settings come from strangers, and the library may raise anything over them
        raise PolicyError(
            f"policy.base must load as a causal language model, got {folder}: {one_line(error)}; check the folder"
        ) from None
    _check_is_complete(report, folder)
    _check_has_cache(model, folder)
    _use_one_weight_layout(model)
    model.requires_grad_(False)
    switch_dropout_off(model)
    if config.gradient_checkpointing and not checkpointed_layers(model):
        raise PolicyError(
            f"policy.gradient_checkpointing needs a base whose layers can be computed again, got {type(model).__name__}; set "
            "policy.gradient_checkpointing = false"
        )
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in `folder`, with a padding token. Raises PolicyError where none loads."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # for some architectures AutoTokenizer replaces the splitting rules of a custom tokenizer.json; a folder that declares
    # the generic class means its tokenizer.json as it is
    loader = PreTrainedTokenizerFast if _declares_generic_tokenizer(folder) else AutoTokenizer
    try:
        tokenizer = load_pretrained(loader, folder)
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token  # padding is always masked, so any id works
    except Exception as error:  # as for models
        raise PolicyError(
            f"policy.base must come with a tokenizer, got none that loads in {folder} ({one_line(error)}); "
            "add its tokenizer files"
        ) from None
    return tokenizer


def eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return all tokens that end an answer; chat models often have several. Raises PolicyError where there is none."""
    return _eos_ids(tokenizer, model.generation_config, model.config)


def folder_eos_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return `eos_token_ids` of the model in a folder, without loading it."""
    import transformers

    try:
        config = load_pretrained(transformers.AutoConfig, folder)
        if (folder / "generation_config.json").is_file():
            generation_config = load_pretrained(transformers.GenerationConfig, folder)
        else:
            generation_config = transformers.GenerationConfig.from_model_config(config)
    except Exception as error:  # as for models
        raise PolicyError(f"policy.base must hold a valid config.json, got {folder}: {one_line(error)}") from None
    return _eos_ids(tokenizer, generation_config, config)


def _eos_ids(tokenizer: Any, generation_config: Any, config: Any) -> tuple[int, ...]:
    found: list[int] = []
    for source in (tokenizer.eos_token_id, generation_config.eos_token_id, config.get_text_config().eos_token_id):
        found += source if isinstance(source, list) else [source] if source is not None else []
    if not found:
        raise PolicyError(
            "policy.base must define an end-of-text token, got none; set eos_token in its tokenizer_config.json"
        )
    if odd := [token_id for token_id in found if type(token_id) is not int or not 0 <= token_id < _ID_SPAN]:
        raise PolicyError(
            f"policy.base must end answers with token ids, got {ascii(odd[0])[:80]}; fix eos_token_id in its "
            "generation_config.json"
        )
    return tuple(dict.fromkeys(found))


def switch_dropout_off(model: nn.Module) -> None:
    """Set every dropout rate of the base to 0: log-probabilities must not depend on train or eval mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def check_is_causal(folder: Path) -> None:
    """Raises PolicyError unless config.json names a causal language model that transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    try:
        data = read_base_json(folder / "config.json")
        kind, architectures = data.get("model_type"), data.get("architectures") or []
    except (OSError, ValueError, AttributeError):
        raise PolicyError(
            f"policy.base must hold a valid config.json, got a damaged one in {folder}; fetch the model again"
        ) from None
    known = {name for name in CAUSAL.values() if isinstance(name, str)}
    is_causal = isinstance(kind, str) and kind in CAUSAL and not data.get("is_encoder_decoder", False)
    names = {name for name in architectures if isinstance(name, str)} if isinstance(architectures, list) else set()
    if not is_causal or (architectures and not known & names):
        raise PolicyError(
            f"policy.base must be a causal language model, got {architectures or kind} in {folder}; set policy.base"
        )


def _declares_generic_tokenizer(folder: Path) -> bool:
    try:
        declared = read_base_json(folder / "tokenizer_config.json").get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return False
    return declared in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()


def _check_is_complete(report: dict[str, Any], folder: Path) -> None:
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise PolicyError(
            f"policy.base must hold all weights, got {len(absent)} missing such as {absent[0]} in {folder}; "
            "fetch it again"
        )


def _check_has_cache(model: Any, folder: Path) -> None:
    if "past_key_values" not in inspect.signature(model.forward).parameters or model.get_output_embeddings() is None:
        raise PolicyError(
            f"policy.base must decode with a standard key/value cache, got {type(model).__name__} in {folder}; "
            "set policy.base"
        )


def _quantization(config: PolicySection, dtype: torch.dtype) -> Any:
    if config.quantization == "none":
        return None
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise PolicyError(
            f"policy.quantization = {config.quantization} needs bitsandbytes, got no such package; "
            "`pip install bitsandbytes` or set policy.quantization = none"
        ) from None
    from transformers import BitsAndBytesConfig

    if config.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _use_one_weight_layout(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on CPU at the first forward pass in eval mode.

    The packed form rounds its scales to bfloat16, and the training pass does not read it. Sampling would silently use
    another policy than training, and the result would depend on which of the two ran first.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def one_line(error: BaseException) -> str:
    """Return the beginning of an error's text without line breaks."""
    return " ".join(str(error).split())[:200]

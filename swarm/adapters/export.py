"""Exports a trained adapter in common formats, with its model loaded or straight from a checkpoint, on any thread."""

import json
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.adapters.checkpoint import Checkpoint
from swarm.adapters.load_pretrained import load_pretrained
from swarm.adapters.product_merge import stacked_layers
from swarm.config import LoraSection
from swarm.errors import PolicyError
from swarm.machine.safe_files import SHARED, read_json, replace_file
from swarm.observability.progress import progress

BASE_FACTS = "swarm_base.json"
"""File beside an exported adapter: {"weights": hash of the base's weights}, which does not depend on the base's place."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
"""All files that a tokenizer of transformers is stored in."""
_TOKENIZER_KEYS = frozenset({
    "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens", "backend",
    "bos_token", "chat_template", "clean_up_tokenization_spaces", "cls_token", "do_lower_case", "eos_token", "errors",
    "extra_special_tokens", "legacy", "mask_token", "model_input_names", "model_max_length", "model_specific_special_tokens",
    "pad_token", "padding_side", "sep_token", "sp_model_kwargs", "spaces_between_special_tokens", "split_special_tokens",
    "tokenizer_class", "truncation_side", "unk_token", "use_default_system_prompt",
})  # fmt: skip
_NAMES_OF_CODE = frozenset({
    "auto_map", "custom_pipelines", "custom_generate", "attn_implementation", "_attn_implementation", "experts_implementation",
    "trust_remote_code",
})  # fmt: skip
"""Settings of a model that lead to code; all others belong to its architecture."""
_MAX_JSON_BYTES = 64 << 20
_GATES_AND_INPUTS = r".*\.gate_up_proj"


def export_adapter(model: Any, tokenizer: Any, folder: Path, base_hash: str | None = None) -> Path:
    """Write the adapter in peft format, for `PeftModel.from_pretrained(base, folder)`. `model` is a peft model.

    `base_hash` is `lineage.hash_weights` of the base, by which `swarm merge` tells that two adapters have one base. Raises
    PolicyError if `folder` is not empty or cannot be written.
    """
    prepare_folder(folder)
    try:
        # False: otherwise peft would ask the hub whether the base's vocabulary was resized
        model.save_pretrained(folder, save_embedding_layers=False)
        tokenizer.save_pretrained(folder)
        keep_known_settings(folder)
        if base_hash is not None:
            replace_file(folder / BASE_FACTS, json.dumps({"weights": base_hash}) + "\n", SHARED)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


def export_merged(model: Any, tokenizer: Any, base_folder: Path, folder: Path) -> Path:
    """Write base and adapter as one model, for `AutoModelForCausalLM.from_pretrained(folder)`.

    The base is loaded a second time from `base_folder`, on the CPU and in the precision of its files, which needs memory:
    merging into a quantized base would round the adapter away, and the running policy must not change. Raises PolicyError
    if `folder` is not empty or cannot be written.
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    prepare_folder(folder)
    with progress("exporting: load, merge, write", 3) as add:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            base = load_pretrained(AutoModelForCausalLM, base_folder, dtype="auto")
            copy = get_peft_model(base, model.peft_config["default"])
        add(1)
        write_adapter(copy, read_adapter(model))
        try:
            merged = copy.merge_and_unload()
            add(1)
            merged.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            keep_known_settings(folder)
        except OSError as error:
            raise _unwritable(folder, error) from None
    return folder


def keep_known_settings(folder: Path) -> None:
    """Remove settings of tokenizer and model that transformers does not know from an exported folder.

    A base, or another adapter's author, may have set them; `auto_map`, above all, has the next reader run code. Raises
    OSError.
    """
    for name, known in (
        ("tokenizer_config.json", _TOKENIZER_KEYS),
        ("config.json", None),
        ("generation_config.json", None),
    ):
        path = folder / name
        try:
            settings = read_json(path, _MAX_JSON_BYTES)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise OSError(f"{name} must be valid JSON: {error}") from None
        allowed = {
            key: value for key, value in settings.items() if (key in known if known else key not in _NAMES_OF_CODE)
        }
        if allowed != settings:
            replace_file(path, json.dumps(allowed, indent=2) + "\n", SHARED)


def prepare_folder(folder: Path) -> None:
    """Make an empty folder. Raises PolicyError if it is not empty or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise _unwritable(folder, error) from None
    if not is_empty:
        raise PolicyError(f"an export must go to a new or empty folder, got {folder}; choose another one")


def _unwritable(folder: Path, error: OSError) -> PolicyError:
    return PolicyError(f"an export must go to a writable folder, got {folder}: {error}; choose another one")


def export_checkpoint(checkpoint: Checkpoint, base: str, revision: str | None, lora: LoraSection, folder: Path) -> None:
    """Write a checkpoint's adapter for `PeftModel.from_pretrained(base, folder)`. It reads one file and writes two.

    `base` is the base's name in the adapter's configuration. Raises PolicyError if `folder` is not empty or cannot be
    written.
    """
    from peft import LoraConfig

    adapter = checkpoint.tensors["adapter"]
    stacked = stacked_layers(adapter)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only divides it by r
        lora_dropout=lora.dropout,
        target_modules=sorted({name.rpartition(".")[0] for name in adapter} - stacked),
        **(stacked_settings(lora) if stacked else {}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision,
        inference_mode=True,
    )
    prepare_folder(folder)
    try:
        config.save_pretrained(str(folder))
        named = {f"base_model.model.{name}.weight": tensor for name, tensor in adapter.items()}
        safetensors.torch.save_file(named, folder / "adapter_model.safetensors")
    except OSError as error:
        raise PolicyError(f"an adapter must be writable, got {error} in {folder}; free some space") from None


def stacked_settings(lora: LoraSection) -> dict[str, Any]:
    """Return the settings of peft for the stacked experts of a mixture.

    Gates and inputs of an expert are one weight there. It gets twice the rank, as peft does it for checkpoints with one weight
    for each of the two.
    """
    return {
        "target_parameters": ["down_proj", "gate_up_proj"],
        "rank_pattern": {_GATES_AND_INPUTS: 2 * lora.rank},
        "alpha_pattern": {_GATES_AND_INPUTS: 2 * lora.alpha},
    }

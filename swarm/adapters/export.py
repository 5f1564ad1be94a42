"""Take a trained adapter out of the node, in the formats that everyone reads."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.errors import PolicyError

BASE_FACTS = "swarm_base.json"
"""Beside an exported adapter: {"weights": hash of the base's weights}, which holds wherever the base lies."""


def export_adapter(model: Any, tokenizer: Any, folder: Path, base_hash: str | None = None) -> Path:
    """Write the adapter in peft format, for `PeftModel.from_pretrained(base, folder)`. `model` is a peft model.

    `base_hash` is `lineage.hash_weights` of the base, for `swarm merge` to tell that two adapters have one base.
    Raises PolicyError if `folder` holds something already or cannot be written.
    """
    prepare_folder(folder)
    try:
        # False: peft would otherwise ask the hub whether the base's vocabulary was resized
        model.save_pretrained(folder, save_embedding_layers=False)
        tokenizer.save_pretrained(folder)
        if base_hash is not None:
            (folder / BASE_FACTS).write_text(json.dumps({"weights": base_hash}) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


def export_merged(model: Any, tokenizer: Any, base_folder: Path, folder: Path) -> Path:
    """Write base and adapter as one model, for `AutoModelForCausalLM.from_pretrained(folder)`.

    The base is loaded a second time from `base_folder`, on the CPU and in the precision of its files: merging into a
    quantised base would round the adapter away, and the running policy stays untouched. Needs memory for that copy.
    Raises PolicyError if `folder` holds something already or cannot be written.
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    prepare_folder(folder)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(base_folder, dtype="auto", local_files_only=True)
        copy = get_peft_model(base, model.peft_config["default"])
    write_adapter(copy, read_adapter(model))
    try:
        copy.merge_and_unload().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


def prepare_folder(folder: Path) -> None:
    """Make an empty folder. Raises PolicyError if it holds something already or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise _unwritable(folder, error) from None
    if not is_empty:
        raise PolicyError(f"an export must go to a new or empty folder, got {folder}; choose another one")


def _unwritable(folder: Path, error: OSError) -> PolicyError:
    return PolicyError(f"an export must go to a writable folder, got {folder}: {error}; choose another one")

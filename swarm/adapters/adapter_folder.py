"""Reads, checks and writes an exported adapter: a folder in peft format, without peft and without its base."""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from swarm.adapters.adapter_state import is_finite_float
from swarm.adapters.export import ADAPTER_CONFIG, BASE_FACTS, TOKENIZER_FILES, keep_known_settings, new_folder
from swarm.adapters.product_merge import LowRank, check_layers
from swarm.config.shareable import base_name
from swarm.errors import MergeError
from swarm.machine.safe_files import SHARED, check_no_links, read_file, read_json, replace_file

_WEIGHTS = "adapter_model.safetensors"
_HASH = re.compile(r"[0-9a-f]{64}")
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_KEPT: dict[str, Any] = {
    "base_model_name_or_path": str, "revision": str, "use_rslora": bool, "fan_in_fan_out": bool, "lora_dropout": (int, float),
}  # fmt: skip
"""The settings of adapter_config.json that are copied."""
_MAX_ALPHA = 1e6
_MAX_JSON_BYTES = 64 << 20
_MAX_TENSORS_BYTES = 64 << 30
_MUST_BE_UNSET = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "lora_bias")
"""Options of peft that make a layer more than scaling · B·A of one rank."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An exported LoRA adapter."""

    path: Path
    low_rank: LowRank
    """Tensors under the names of `adapter_state`, float32 on the CPU, and their scaling."""
    rank: int
    config: dict[str, Any]
    """The content of adapter_config.json."""
    base_hash: str | None
    """Hash of the base's weights, where `swarm export` wrote it."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.low_rank.tensors

    @property
    def base_name(self) -> str:
        return str(self.config.get("base_model_name_or_path"))


def read_adapter_folder(path: Path) -> AdapterFolder:
    """Read an exported adapter.

    Raises MergeError for a folder that is not a plain LoRA adapter in safetensors, that is damaged, or that holds a link:
    the file behind it would be copied into the folder that is written.
    """
    try:
        check_no_links(path)
    except OSError as error:
        raise MergeError(
            f"an adapter folder must hold files only, got {error.filename}: {error.strerror}; copy it with `cp -rL`"
        ) from None
    config = _read_json(path / ADAPTER_CONFIG)
    unsupported = [key for key in _MUST_BE_UNSET if config.get(key)]
    if config.get("peft_type") != "LORA" or unsupported or config.get("bias", "none") != "none":
        what = unsupported[0] if unsupported else f"peft_type {config.get('peft_type')} with bias {config.get('bias')}"
        raise MergeError(f"an adapter to merge must be plain LoRA, got {what} in {path}; export it as such")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or not 0 < alpha <= _MAX_ALPHA:
        got = f"{str(rank)[:20]} and {str(alpha)[:20]}"
        raise MergeError(
            f"an adapter must have a rank of 1 or more and an alpha in (0, {_MAX_ALPHA:g}], got {got} in {path}"
        )
    tensors = _read_tensors(path / _WEIGHTS)
    check_layers([tensors])
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora_A")}
    if ranks != {rank}:
        raise MergeError(
            f"factors must have the rank of {ADAPTER_CONFIG}, got {sorted(ranks)} and {rank} in {path}; export again"
        )
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    facts = _read_json(path / BASE_FACTS) if (path / BASE_FACTS).is_file() else {}
    base_hash = facts.get("weights")
    if base_hash is not None and not (isinstance(base_hash, str) and _HASH.fullmatch(base_hash)):
        raise MergeError(f"{BASE_FACTS} must hold 64 hex digits, got another value in {path}; export the adapter again")
    return AdapterFolder(path, LowRank(tensors, scaling), rank, config=config, base_hash=base_hash)


def check_one_base(first: AdapterFolder, other: AdapterFolder) -> None:
    """Raises MergeError unless both adapt the same layers of one base, by its hash, or by its name where one lacks a hash."""
    one, two = (first.base_hash, other.base_hash) if first.base_hash and other.base_hash else (None, None)
    if one is None or two is None:
        one, two = first.base_name, other.base_name
    if one != two:
        raise MergeError(
            f"adapters to merge must have one base, got {one[:64]} in {first.path} and {two[:64]} in {other.path}; "
            "across bases only experience can be shared"
        )
    check_layers([first.tensors, other.tensors])


def write_adapter_folder(
    folder: Path, tensors: Mapping[str, Tensor], rank: int, scaling: float, like: AdapterFolder
) -> Path:
    """Write merged tensors in peft format, with the base and the tokenizer that `like` names.

    The folder is meant to be published, so it gets only known content: the configuration is written anew, and of the
    tokenizer only files and settings that transformers itself has. Raises PolicyError if `folder` is not empty or cannot be
    written.
    """
    alpha = scaling * (math.sqrt(rank) if like.config.get("use_rslora") else rank)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "inference_mode": True, "bias": "none",
        "target_modules": sorted({name.rpartition(".")[0] for name in tensors}),
        **{key: like.config[key] for key, kinds in _KEPT.items() if isinstance(like.config.get(key), kinds)},
    }  # fmt: skip
    config["base_model_name_or_path"] = base_name(like.base_name)  # those of others may hold a path of their machine
    named = {f"{_PREFIX}{name}{_SUFFIX}": tensor.contiguous() for name, tensor in tensors.items()}
    with new_folder(folder) as scratch:
        for name in TOKENIZER_FILES:
            with contextlib.suppress(FileNotFoundError):
                replace_file(scratch / name, read_file(like.path / name, _MAX_JSON_BYTES), SHARED)
        keep_known_settings(scratch)
        if like.base_hash is not None:
            replace_file(scratch / BASE_FACTS, json.dumps({"weights": like.base_hash}) + "\n", SHARED)
        replace_file(scratch / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n", SHARED)
        replace_file(scratch / _WEIGHTS, safetensors.torch.save(named, {"format": "pt"}), SHARED)
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, _MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise MergeError(f"an adapter folder must hold a readable {path.name}, got {error}; see swarm export") from None
    if not isinstance(content, dict):
        raise MergeError(f"{path} must hold a JSON object, got {type(content).__name__}; export the adapter again")
    return content


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        loaded = safetensors.torch.load(read_file(path, _MAX_TENSORS_BYTES))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise MergeError(
            f"an adapter folder must hold a readable {path.name}, got {error}; export with --format adapter"
        ) from None
    tensors: dict[str, Tensor] = {}
    for name, tensor in loaded.items():
        if not (name.startswith(_PREFIX) and name.endswith((".lora_A.weight", ".lora_B.weight"))):
            raise MergeError(
                f"an adapter to merge must hold LoRA factors only, got {name} in {path}; export it as such"
            )
        if not is_finite_float(tensor):
            raise MergeError(
                f"an adapter to merge must be finite numbers in float32, got {tensor.dtype} with others in {name} of "
                f"{path}; leave it out"
            )
        tensors[name.removeprefix(_PREFIX).removesuffix(_SUFFIX)] = tensor.float()
    if not tensors:
        raise MergeError(f"an adapter to merge must adapt a layer, got none in {path}; leave it out")
    return tensors

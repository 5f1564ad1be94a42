"""Exports a trained adapter in common formats, with its model loaded or straight from a checkpoint, on any thread."""

import json
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.adapters.checkpoint import Checkpoint
from swarm.adapters.load_pretrained import load_pretrained
from swarm.adapters.product_merge import stacked_layers
from swarm.config import LoraSection
from swarm.config.shareable import base_name
from swarm.errors import PolicyError
from swarm.machine.safe_files import SHARED, read_json, replace_file
from swarm.observability.progress import progress

ADAPTER_CONFIG, CARD = "adapter_config.json", "README.md"
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
_UNWANTED = frozenset({
    "_name_or_path", "name_or_path",  # of the machine that exports
    "auto_map", "custom_pipelines", "custom_generate", "attn_implementation", "_attn_implementation", "experts_implementation",
    "trust_remote_code",
})  # fmt: skip
"""Settings of a model that lead to code, or to a path; all others belong to its architecture."""
_MAX_JSON_BYTES = 64 << 20
_GATES_AND_INPUTS = r".*\.gate_up_proj"


@dataclass(frozen=True, slots=True)
class BaseName:
    """What an exported adapter calls its base: a name that means the same on every machine, never a path of this one."""

    name: str
    revision: str | None = None


def published_base(base: str, revision: str | None, folder: Path) -> BaseName:
    """Return the name of a base for others. `base` and `revision` are as in the settings, `folder` has its files.

    A folder of the hub's cache tells name and commit. Of any other folder only the last part of its path is given.
    """
    repository, snapshots = folder.parent.parent.name, folder.parent.name
    if snapshots == "snapshots" and repository.startswith("models--"):
        return BaseName(repository.removeprefix("models--").replace("--", "/"), folder.name)
    return BaseName(base_name(base), revision)


def export_adapter(
    model: Any,
    tokenizer: Any,
    folder: Path,
    base_hash: str | None = None,
    *,
    base: BaseName | None = None,
    card: str = "",
) -> Path:
    """Write the adapter in peft format, for `PeftModel.from_pretrained(base, folder)`. `model` is a peft model.

    `base_hash` is `lineage.hash_weights` of the base, by which `swarm merge` tells that two adapters have one base. `base`:
    its name for others; by default what its files tell. `card`: content of README.md. Raises PolicyError if `folder` is not
    empty or cannot be written.
    """
    path = Path(model.peft_config["default"].base_model_name_or_path or "base")
    base = base or published_base(str(path), None, path)
    with new_folder(folder) as scratch:
        # False: otherwise peft would ask the hub whether the base's vocabulary was resized
        model.save_pretrained(scratch, save_embedding_layers=False)
        tokenizer.save_pretrained(scratch)
        settings = read_json(scratch / ADAPTER_CONFIG, _MAX_JSON_BYTES)
        settings |= {"base_model_name_or_path": base.name, "revision": base.revision}
        replace_file(scratch / ADAPTER_CONFIG, json.dumps(settings, indent=2) + "\n", SHARED)
        _finish(scratch, card)
        if base_hash is not None:
            replace_file(scratch / BASE_FACTS, json.dumps({"weights": base_hash}) + "\n", SHARED)
    return folder


def merged_model(model: Any, base_folder: Path) -> Any:
    """Return base and adapter as one model. `model` is a peft model and stays as it is.

    The base is loaded a second time from `base_folder`, on the CPU and in the precision of its files, which needs memory:
    merging into a quantized base would round the adapter away, and the running policy must not change.
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        base = load_pretrained(AutoModelForCausalLM, base_folder, dtype="auto")
        copy = get_peft_model(base, model.peft_config["default"])
    write_adapter(copy, read_adapter(model))
    return copy.merge_and_unload()


def export_merged(model: Any, tokenizer: Any, base_folder: Path, folder: Path, *, card: str = "") -> Path:
    """Write base and adapter as one model, for `AutoModelForCausalLM.from_pretrained(folder)`.

    Memory: as `merged_model`. `card`: content of README.md. Raises PolicyError if `folder` is not empty or cannot be written.
    """
    with new_folder(folder) as scratch, progress("exporting: merge, write", 2) as add:
        merged = merged_model(model, base_folder)
        add(1)
        merged.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        _finish(scratch, card)
    return folder


def _finish(folder: Path, card: str) -> None:
    """Keep only known settings, and the own model card: that of peft names the path of the base. Raises OSError."""
    keep_known_settings(folder)
    (folder / CARD).unlink(missing_ok=True)
    if card:
        replace_file(folder / CARD, card, SHARED)


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
        allowed = {key: value for key, value in settings.items() if (key in known if known else key not in _UNWANTED)}
        if allowed != settings:
            replace_file(path, json.dumps(allowed, indent=2) + "\n", SHARED)


def check_new_folder(folder: Path) -> None:
    """Raise PolicyError if a folder to write to is there and not empty. Nothing is made."""
    try:
        is_free = not folder.exists() or not any(folder.iterdir())
    except OSError as error:
        raise _unwritable(folder, error) from None
    if not is_free:
        raise PolicyError(f"an export must go to a new or empty folder, got {folder}; choose another one")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write to within this context, whose files are in `folder` afterwards: all of them, or none.

    Raises PolicyError if `folder` is not new or empty, and where writing fails, as on a full disk.
    """
    check_new_folder(folder)
    scratch, is_new = folder / f".{secrets.token_hex(8)}.new", not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        yield scratch
        for path in sorted(scratch.iterdir()):
            path.replace(folder / path.name)
        scratch.rmdir()
    except BaseException as error:
        shutil.rmtree(folder if is_new else scratch, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise _unwritable(folder, error) from None
        raise


def _unwritable(folder: Path, error: OSError | SafetensorError) -> PolicyError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return PolicyError(
        f"an export must go to a writable folder with room for it, got {folder}: {reason}; choose another one, or free space"
    )


def export_checkpoint(
    checkpoint: Checkpoint, base: BaseName, lora: LoraSection, folder: Path, *, card: str = ""
) -> None:
    """Write a checkpoint's adapter for `PeftModel.from_pretrained(base, folder)`, without loading its base.

    `base` is the base's name in the adapter's configuration, `card` the content of README.md.
    Raises PolicyError if `folder` is not empty or cannot be written.
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
        base_model_name_or_path=base.name,
        revision=base.revision,
        inference_mode=True,
    )
    with new_folder(folder) as scratch:
        config.save_pretrained(str(scratch))
        named = {f"base_model.model.{name}.weight": tensor for name, tensor in adapter.items()}
        safetensors.torch.save_file(named, scratch / "adapter_model.safetensors")
        _finish(scratch, card)


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

"""The adapter of a checkpoint in peft format, without its model: a file is read and two are written, on any thread."""

from pathlib import Path

import safetensors.torch

from swarm.adapters.checkpoint import Checkpoint
from swarm.adapters.export import prepare_folder
from swarm.config import LoraSection
from swarm.errors import PolicyError


def export_checkpoint(checkpoint: Checkpoint, base: str, revision: str | None, lora: LoraSection, folder: Path) -> None:
    """For `PeftModel.from_pretrained(base, folder)`. `base`: what to call it in the adapter's configuration.

    Raises PolicyError if `folder` holds something already or cannot be written.
    """
    from peft import LoraConfig

    adapter = checkpoint.tensors["adapter"]
    layers = sorted({name.rpartition(".")[0] for name in adapter})
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only divides it by r
        lora_dropout=lora.dropout,
        target_modules=layers,
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

"""`swarm export`: writes the trained adapter or the merged model in Hugging Face format."""

from enum import StrEnum
from pathlib import Path

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config
from swarm.cli.policy.saved_policy import config_arguments, load_saved_policy


class Form(StrEnum):
    """What to write."""

    adapter = "adapter"
    merged = "merged"


def export(
    out: Path = typer.Argument(..., help="New or empty folder to write to."),
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    folder: Path = typer.Option(
        None, "--dir", metavar="DIR", help="A node's folder: use its configuration and newest checkpoint."
    ),
    form: Form = typer.Option(
        Form.merged, "--format", help="merged: a model for AutoModelForCausalLM. adapter: LoRA weights for peft."
    ),
) -> None:
    """Write the trained policy for use elsewhere.

    Reads: CONFIG, or config.toml of --dir; the newest checkpoint; the base.
    Writes: the folder OUT.

    Examples:
      swarm export out --dir runs/mine
      swarm export out --dir runs/mine --format adapter

    Exit codes: 0 done, 3 configuration, 5 policy or folder, 8 no checkpoint.
    """
    resolved = load_config(config_arguments(config, folder), ("--dir", "--format"))
    from swarm.adapters.export import export_adapter, export_merged
    from swarm.adapters.load_pretrained import quiet_libraries
    from swarm.machine.node_folder import NodeFolder
    from swarm.policy.lineage import hash_weights

    policy, trained_rounds = load_saved_policy(resolved)
    with quiet_libraries():
        if form is Form.adapter:
            base_hash = hash_weights(policy.base_folder, NodeFolder(resolved.node.dir).hash_cache)
            export_adapter(policy.model, policy.tokenizer, out, base_hash)
        else:
            export_merged(policy.model, policy.tokenizer, policy.base_folder, out)
    what = "adapter" if form is Form.adapter else "model"
    print(f"{what} of round {trained_rounds} written to {out}")

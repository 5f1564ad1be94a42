"""`swarm export`: writes what was trained for use elsewhere, and uploads it to a hub."""

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, load_config
from swarm.cli.policy.saved_policy import BEST, config_arguments, load_saved_policy
from swarm.errors import ConfigError, NetworkError

if TYPE_CHECKING:
    from swarm.adapters.export import BaseName
    from swarm.adapters.gguf_export import GgufFacts
    from swarm.config import Config
    from swarm.integrations.hub import ModelRepository
    from swarm.policy.policy import Policy


class Form(StrEnum):
    """What to write."""

    adapter = "adapter"
    merged = "merged"
    gguf = "gguf"


_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_OPTIONS = ("--dir", "--best", "--format", "--push", "--public")
_WRITTEN = {
    Form.adapter: ("adapter_config.json", "adapter_model.safetensors"),
    Form.merged: ("model",),
    Form.gguf: ("model.gguf",),
}
"""How the names of the weights begin that each form writes."""


def export(
    out: Path = typer.Argument(..., help="New or empty folder to write to."),
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
    folder: Path = typer.Option(
        None, "--dir", metavar="DIR", help="A node's folder: use its configuration and newest checkpoint."
    ),
    form: Form = typer.Option(
        Form.merged,
        "--format",
        help="merged: a model for AutoModelForCausalLM. adapter: LoRA weights for peft. gguf: a file for llama.cpp, and a "
        "Modelfile for Ollama.",
    ),
    best: bool = typer.Option(False, "--best", help=BEST),
    push: str = typer.Option(
        None,
        "--push",
        metavar="OWNER/NAME",
        help="Upload OUT to this model repository, by the token of `hf auth login`.",
    ),
    public: bool = typer.Option(
        False, "--public/--private", help="Of a repository that --push creates. An existing one is not changed."
    ),
) -> None:
    """Write the trained policy for use elsewhere, and upload it.

    Also while the node runs: the newest checkpoint counts. A model card says
    what was trained how; nothing tells of this machine or its identity.

    Reads: CONFIG, or config.toml of --dir; the newest checkpoint; the base.
    Writes: the folder OUT, completely or not at all.

    Examples:
      swarm export out --dir runs/mine
      swarm export out --dir runs/mine --best
      swarm export out --dir runs/mine --format gguf && ollama create mine -f out/Modelfile
      swarm export out --dir runs/mine --format adapter --push me/adapter

    Exit codes: 0 done, 3 configuration, 5 policy or folder, 7 hub, 8 no checkpoint.
    """
    resolved = load_config(config_arguments(config, folder), _OPTIONS)
    if push is not None and not _REPOSITORY.fullmatch(push):
        raise ConfigError(f"--push must be OWNER/NAME, got {push}; correct it")
    if push is not None and resolved.swarm.silo_owner:
        raise ConfigError(
            "what a silo trains stays with its members, got --push; leave it out, and give OUT to members"
        )
    from swarm.adapters.export import check_new_folder, published_base
    from swarm.adapters.load_pretrained import quiet_libraries
    from swarm.integrations.model_card import licence_in, model_card, trained_facts
    from swarm.machine.node_folder import NodeFolder

    check_new_folder(out)
    repository = _repository(resolved, push, form, public=public) if push is not None else None
    policy, trained_rounds = load_saved_policy(resolved, best=best)
    base = published_base(resolved.policy.base, resolved.policy.revision, policy.base_folder)
    licence = licence_in(policy.base_folder)
    if licence is None and repository is not None and "/" in base.name:
        licence = repository.licence_of(base)
    facts = trained_facts(
        resolved, NodeFolder(resolved.node.dir), form=form.value, base=base, lineage=policy.lineage.policy,
        round=trained_rounds or 0, policy_version=policy.version, licence=licence,
    )  # fmt: skip
    with quiet_libraries():
        _write(form, policy, resolved, out, base=base, card=model_card(facts))
    what = {Form.adapter: "adapter", Form.merged: "model", Form.gguf: "GGUF model"}[form]
    print(f"{what} of round {trained_rounds} written to {out}")
    if repository is not None:
        _push(repository, out, f"Round {trained_rounds}")


def _write(form: Form, policy: "Policy", config: "Config", out: Path, *, base: "BaseName", card: str) -> None:
    from swarm.adapters.export import export_adapter, export_merged, merged_model
    from swarm.machine.node_folder import NodeFolder
    from swarm.policy.lineage import hash_weights

    if form is Form.adapter:
        base_hash = hash_weights(policy.base_folder, NodeFolder(config.node.dir).hash_cache)
        export_adapter(policy.model, policy.tokenizer, out, base_hash, base=base, card=card)
    elif form is Form.merged:
        export_merged(policy.model, policy.tokenizer, policy.base_folder, out, card=card)
    else:
        from swarm.adapters.gguf_export import check_gguf, export_gguf

        check_gguf(policy.model.config, policy.tokenizer, policy.vocab_size)  # before the base is loaded once more
        facts = gguf_facts(policy, config, base, card)
        export_gguf(merged_model(policy.model, policy.base_folder), policy.tokenizer, out, facts)


def gguf_facts(policy: "Policy", config: "Config", base: "BaseName", card: str) -> "GgufFacts":
    """Return what a GGUF file needs besides the model, so that Ollama asks it as the node does."""
    from dataclasses import replace

    from swarm.adapters.gguf_export import GGUF_FILE, GgufFacts, modelfile
    from swarm.policy.base_folder import fitted_to_base
    from swarm.tasks.prompted_source import shared_context

    fitted = fitted_to_base(config)
    rollouts, context = fitted.rollouts, shared_context(fitted.tasks.sources)
    bos_id = policy.tokenizer.bos_token_id
    adds_bos = bos_id is not None and policy.encode_prompt("1", context)[:1] == [bos_id]
    ends = [str(one) for one in policy.tokenizer.convert_ids_to_tokens(list(policy.eos_token_ids))]
    text = modelfile(
        GGUF_FILE,
        policy.prompts.turns(replace(context, tools="")),
        bos=policy.tokenizer.bos_token if adds_bos else "",
        system=context.system,
        parameters={
            "temperature": rollouts.temperature, "top_k": rollouts.top_k, "top_p": rollouts.top_p, "min_p": rollouts.min_p,
            "repeat_penalty": 1, "num_predict": rollouts.max_new_tokens,
            "num_ctx": fitted.policy.max_prompt_tokens + rollouts.max_new_tokens,
        },
        stop=[*ends, *rollouts.stop],
    )  # fmt: skip
    return GgufFacts(f"{base.name} after {policy.version} steps", text, policy.eos_token_ids, adds_bos, card)


def _repository(config: "Config", name: str, form: Form, *, public: bool) -> "ModelRepository":
    """The repository to push to, once the hub has been asked whether that can work. Raises NetworkError."""
    from swarm.integrations.hub import ModelRepository

    repository = ModelRepository(name, endpoint=config.integrations.hub_endpoint, is_private=not public)
    repository.check(lambda file: file.startswith(_WRITTEN[form]) and (form is Form.gguf) == file.endswith(".gguf"))
    return repository


def _push(repository: "ModelRepository", out: Path, message: str) -> None:
    try:
        address = repository.push(out, message)
    except NetworkError as error:
        raise NetworkError(
            f"{error}; {out} is complete, and `hf upload {repository.name} {out}` uploads it later"
        ) from None
    print(f"uploaded to {address}")

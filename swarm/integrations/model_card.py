"""The model card of what a node exports: facts that the node knows, and nothing that tells of its machine or its identity."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import tomli_w
from huggingface_hub import ModelCard, ModelCardData

from swarm import __version__
from swarm.adapters.export import CARD, BaseName
from swarm.config import BUNDLED_BASES, Config
from swarm.config.shareable import base_name, shareable
from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import read_file
from swarm.observability.metrics import read_rows

Form = Literal["adapter", "merged", "gguf"]

_TITLES: Mapping[Form, str] = {"adapter": "LoRA adapter for", "merged": "Trained from", "gguf": "GGUF, trained from"}
_SETTINGS: Any = {"rollouts": True, "sharing": True, "training": True, "policy": {"lora", "quantization", "dtype"}}
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_MAX_CARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What the card of one export states."""

    form: Form
    base: BaseName
    lineage: str
    """Of the policy, 32 hex digits."""
    swarm_name: str
    swarm_id: str
    tasks: tuple[str, ...]
    made: str
    """How it was made, in one sentence."""
    rows: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further rows of the table."""
    rewards: str = ""
    """Markdown: the reward on held-out tasks."""
    settings_toml: str = ""
    """Of rollouts, sharing, training and the adapter."""
    licence: str | None = None
    """Of the base, as hubs name licences; None where it is not known."""
    base_is_folder: bool = False
    """Whether the base is a folder of whoever trained: its name alone leads nobody to it."""

    @property
    def is_bundled(self) -> bool:
        return self.base.name in BUNDLED_BASES


def trained_facts(
    config: Config,
    folder: NodeFolder,
    *,
    form: Form,
    base: BaseName,
    lineage: str,
    round: int,
    policy_version: int,
    licence: str | None = None,
) -> CardFacts:
    """Return the facts of a node's policy after `round` rounds and `policy_version` optimizer steps."""
    rows = [row for row in read_rows(folder.metrics) if row.get("round", round + 1) <= round]
    totals = next((row for row in reversed(rows) if "train/own_groups_total" in row), {})
    own, others = totals.get("train/own_groups_total", 0), totals.get("train/swarm_groups_total", 0)
    share = f"{others / (own + others):.0%}: {others} of {own + others} groups" if own + others else "not known"
    evaluations = [row for row in rows if row.get("kind") == "evaluation"]
    return CardFacts(
        form=form,
        base=base,
        lineage=lineage,
        swarm_name=config.swarm.name,
        swarm_id=config.swarm_id,
        tasks=tuple(source.label or source.name for source in config.tasks.sources),
        made=_made(config.swarm.name, totals),
        rows={"rounds": f"{round}, {policy_version} optimizer steps", "training groups of peers": share},
        rewards=_rewards(evaluations, config.evaluation.tasks_per_source),
        settings_toml=tomli_w.dumps(shareable(config.model_dump(mode="json", include=_SETTINGS))),
        licence=licence,
        base_is_folder=_is_folder(config.policy.base, base),
    )


def model_card(facts: CardFacts) -> str:
    """Return Markdown with the front matter that hubs read."""
    data = ModelCardData(
        base_model=facts.base.name if "/" in facts.base.name else None,  # hubs link it
        license=facts.licence,
        library_name={"adapter": "peft", "merged": "transformers", "gguf": "gguf"}[facts.form],
        pipeline_tag="text-generation",
        tags=[*(("lora",) if facts.form == "adapter" else ()), "reinforcement-learning", "swarm"],
    )
    sections = [
        f"# {_TITLES[facts.form]} {facts.base.name}",
        facts.made,
        _table(facts),
        f"## Reward on held-out tasks\n\n{facts.rewards}" if facts.rewards else "",
        f"## Use\n\n{_use(facts)}",
        f"## Settings\n\n```toml\n{facts.settings_toml.strip()}\n```" if facts.settings_toml else "",
        f"## Licence\n\n{_licence(facts)}",
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"))


def licence_in(folder: Path) -> str | None:
    """Return the licence that the model card in a folder names, as hubs name licences; None where it names none."""
    with contextlib.suppress(Exception):  # a card of strangers: a parser may raise anything over it
        return known_licence(ModelCard(read_file(folder / CARD, _MAX_CARD_BYTES).decode()).data.get("license"))
    return None


def known_licence(licence: object) -> str | None:
    """Return `licence` if it has the form in which hubs name licences, such as `apache-2.0`."""
    return licence if isinstance(licence, str) and _LICENCE.fullmatch(licence) else None


def _made(swarm_name: str, totals: Mapping[str, Any]) -> str:
    """How a node trained, by the totals of its last round."""
    own, others = totals.get("train/own_groups_total", 0), totals.get("train/swarm_groups_total", 0)
    merges = totals.get("merge/merges_total", 0)
    is_alone = own and not others and not merges
    learned = (
        "its own answers"
        if own and not others
        else "its own answers and on those of peers, whose rewards it computed again"
    )
    return (
        f"Trained by {'one node' if is_alone else f'a node of the swarm `{swarm_name}`'} with swarm-rl {__version__}: "
        f"reinforcement learning on {learned}{', merged with adapters of peers' if merges else ''}."
    )


def _is_folder(setting: str, base: BaseName) -> bool:
    """Whether policy.base is a folder other than one of the hub's cache, which the hub's name stands for."""
    is_path = base_name(setting) != setting or Path(setting).expanduser().is_dir()
    return is_path and setting not in BUNDLED_BASES and base.name == base_name(setting)


def _table(facts: CardFacts) -> str:
    base = facts.base.name + (", a small policy that comes with swarm-rl" if facts.is_bundled else "")
    rows = {
        "base": base + (f", revision {facts.base.revision}" if facts.base.revision else ""),
        "lineage": f"`{facts.lineage}`",
        "swarm": f"{facts.swarm_name}, id `{facts.swarm_id}`",
        "tasks": ", ".join(facts.tasks),
        **facts.rows,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _rewards(evaluations: list[dict[str, Any]], tasks_per_source: int) -> str:
    if not evaluations:
        return "Not measured: no evaluation has run."
    chosen = [evaluations[0], *evaluations[1:][-1:]]
    sources = sorted({source for row in chosen for source in row["accuracy"]})
    lines = [
        "| after round | tasks | mean | " + " | ".join(sources) + " |",
        "|---" * (len(sources) + 3) + "|",
        *(
            f"| {row['round']} | {row.get('num_tasks', f'at most {tasks_per_source} a source')} | {row['accuracy_mean']:.3f} | "
            + " | ".join(f"{row['accuracy'][name]:.3f}" if name in row["accuracy"] else "" for name in sources)
            + " |"
            for row in chosen
        ),
    ]
    return "\n".join(lines) + (
        "\n\nMean reward of sampled answers. No node of the swarm trains on these tasks; they are of the same kinds as those "
        "that it trains on, so they tell what was learned, not what else changed."
    )


def _use(facts: CardFacts) -> str:
    if facts.form == "gguf":
        return "```sh\nollama create mine -f Modelfile\nollama run mine\n```"
    if facts.form == "merged":
        return (
            "```python\nfrom transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("this/repository")\n```'
        )
    if facts.is_bundled:
        return "Its base has no address of its own: `swarm export` writes base and adapter as one model."
    if facts.base_is_folder:
        name = PurePath(facts.base.name).name
        return (
            f"Its base is a folder with the name {name}, which no hub has. Write the path of your copy in place of PATH:\n\n"
            "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("PATH/{name}")\n'
            'model = PeftModel.from_pretrained(base, "this/repository")\n```'
        )
    return (
        "```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
        'model = AutoPeftModelForCausalLM.from_pretrained("this/repository")\n```'
    )


def _licence(facts: CardFacts) -> str:
    named = f" ({facts.licence})" if facts.licence else ""
    return (
        f"The licence of {facts.base.name}{named} holds for what was trained from it: read it, name it in this card, and keep "
        "to it, before you pass this on. The software's own licence, Apache-2.0, says nothing of weights."
    )

"""The README.md of a pushed adapter: facts, and nothing that the node does not know."""

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardFacts:
    base: str
    """As in policy.base."""
    revision: str | None
    lineage: str
    """Of the policy, 32 hex digits."""
    swarm_name: str
    swarm_id: str
    peer_id: str
    tasks: tuple[str, ...]
    round: int
    policy_version: int
    rewards: tuple[tuple[int, float, Mapping[str, float]], ...]
    """(round, mean, by task source) of every evaluation on held-out tasks that is known, in order."""
    settings_toml: str
    """Of rollouts, sharing, training and the adapter."""
    version: str
    """Of this software."""

    @property
    def is_bundled(self) -> bool:
        return self.base == "bundled"


def model_card(facts: CardFacts) -> str:
    """Markdown with the front matter that hubs read."""
    return "\n".join(
        [
            "---",
            *(f"{name}: {json.dumps(value)}" for name, value in _front_matter(facts).items()),  # JSON is YAML
            "---",
            "",
            f"# LoRA adapter for {facts.base}, {facts.round} rounds",
            "",
            f"Trained by a node of the swarm `{facts.swarm_name}` with swarm-rl {facts.version}: reinforcement learning on its "
            "own answers and on those of peers, whose rewards it computed again.",
            "",
            _table(facts),
            "",
            "## Reward on held-out tasks",
            "",
            _rewards(facts),
            "",
            "Mean reward of one sampled answer per task. No node of the swarm trains on these tasks; they are of the same kinds "
            "as those that it trains on, so they tell what was learned, not what else changed.",
            "",
            "## Use",
            "",
            _use(facts),
            "",
            "## Settings",
            "",
            "```toml",
            facts.settings_toml.strip(),
            "```",
            "",
            "## Licence",
            "",
            f"An adapter is of use with its base only, and the licence of {facts.base} holds for both together: read it, name "
            "it in this card, and keep to it, before you pass this on. The software's own licence, Apache-2.0, says nothing of "
            "weights.",
            "",
        ]
    )


def _front_matter(facts: CardFacts) -> dict[str, object]:
    base = {} if facts.is_bundled else {"base_model": facts.base}
    return {
        **base,
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "reinforcement-learning", "swarm"],
    }


def _table(facts: CardFacts) -> str:
    base = f"{facts.base}, a small policy that comes with swarm-rl" if facts.is_bundled else facts.base
    rows = {
        "base": base + (f", revision {facts.revision}" if facts.revision else ""),
        "lineage": f"`{facts.lineage}`",
        "swarm": f"{facts.swarm_name}, id `{facts.swarm_id}`",
        "node": f"`{facts.peer_id}`",
        "tasks": ", ".join(facts.tasks),
        "rounds": f"{facts.round}, {facts.policy_version} optimizer steps",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _rewards(facts: CardFacts) -> str:
    if not facts.rewards:
        return "Not measured yet: no evaluation has run."
    chosen = [facts.rewards[0], *facts.rewards[1:][-1:]]
    sources = sorted({source for _, _, by_source in chosen for source in by_source})
    head = "| after round | mean | " + " | ".join(sources) + " |"
    lines = [
        f"| {number} | {mean:.3f} | " + " | ".join(f"{by[name]:.3f}" if name in by else "" for name in sources) + " |"
        for number, mean, by in chosen
    ]
    return "\n".join([head, "|---" * (len(sources) + 2) + "|", *lines])


def _use(facts: CardFacts) -> str:
    if facts.is_bundled:
        return "Its base has no address of its own: `swarm export` writes base and adapter as one model."
    return (
        "```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
        'model = AutoPeftModelForCausalLM.from_pretrained("this/repository")\n```'
    )

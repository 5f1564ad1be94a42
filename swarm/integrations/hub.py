"""Uploads adapter and model card to a model repository, from the newest checkpoint on disk and never from memory.

The model card states only facts that the node knows.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from swarm import __version__
from swarm.adapters.checkpoint import Checkpoint, CheckpointStore
from swarm.adapters.export import export_checkpoint
from swarm.config import BUNDLED_BASES, Config
from swarm.config.shareable import base_name, shareable
from swarm.machine.node_folder import NodeFolder
from swarm.observability.metrics import read_rows

logger = logging.getLogger(__name__)


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
        return self.base in BUNDLED_BASES


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
            f"An adapter works only with its base, and the licence of {facts.base} holds for both together: read it, name "
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


FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
_SETTINGS: Any = {"rollouts": True, "sharing": True, "training": True, "policy": {"lora", "quantization", "dtype"}}


class HubPush:
    """A sink: rounds are counted, and at their interval a push is made, on the sink's thread."""

    def __init__(self, config: Config, folder: NodeFolder, peer_id: str, clock: Callable[[], float]) -> None:
        """`clock`: seconds, monotonic."""
        self._config = config
        self._settings = config.integrations
        self._folder = folder
        self._peer_id = peer_id
        self._clock = clock
        self._pushed_round = 0
        self._due_round = self._settings.hub_interval_rounds
        self._not_before_s = 0.0
        self.num_failures = 0
        """In a row; each doubles the pause before the next try."""

    def write(self, row: dict[str, Any]) -> None:
        is_due = row["kind"] == "round" and row["round"] >= self._due_round and self._clock() >= self._not_before_s
        if is_due or row["kind"] == "end":
            self._try()

    def close(self) -> None:
        """What is to be pushed at the end, the row of the end has."""

    def _try(self) -> None:
        """A hub that refuses, or cannot be reached, costs this push."""
        try:
            self._push()
        except Exception as error:  # errors of the hub's HTTP client, another in each version, have no base
            self.num_failures += 1
            pause_s = min(FIRST_PAUSE_S * 2 ** (self.num_failures - 1), LONGEST_PAUSE_S)
            self._not_before_s = self._clock() + pause_s
            reason = " ".join(str(error).split())[:300]
            repo = self._settings.hub_repo
            logger.error("push to %s failed, the next try is in %.0f s at the earliest: %s", repo, pause_s, reason)

    def _push(self) -> None:
        checkpoint = CheckpointStore(self._folder.checkpoints, 1).load_newest()
        if checkpoint is None or checkpoint.round <= self._pushed_round:
            return
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._settings.hub_endpoint or None, library_name="swarm-rl", library_version=__version__)
        policy = self._config.policy
        with tempfile.TemporaryDirectory(prefix="swarm-push-") as scratch:
            folder = Path(scratch) / "adapter"
            export_checkpoint(checkpoint, base_name(policy.base), policy.revision, policy.lora, folder)
            (folder / "README.md").write_text(model_card(self._facts(checkpoint)), encoding="utf-8")
            api.create_repo(self._settings.hub_repo, private=self._settings.hub_private, exist_ok=True)
            api.upload_folder(
                repo_id=self._settings.hub_repo, folder_path=folder, commit_message=f"Round {checkpoint.round}"
            )
        self._pushed_round = checkpoint.round
        self._due_round = checkpoint.round + self._settings.hub_interval_rounds
        self.num_failures = 0
        logger.info("round %d pushed to %s", checkpoint.round, self._settings.hub_repo)

    def _facts(self, checkpoint: Checkpoint) -> CardFacts:
        config = self._config
        rewards = tuple(
            (row["round"], row["accuracy_mean"], row["accuracy"])
            for row in read_rows(self._folder.metrics)
            if row.get("kind") == "evaluation" and row["round"] <= checkpoint.round
        )
        settings = shareable(config.model_dump(mode="json", include=_SETTINGS))
        return CardFacts(
            base=base_name(config.policy.base), revision=config.policy.revision, lineage=checkpoint.state["lineage"]["policy"],
            swarm_name=config.swarm.name, swarm_id=config.swarm_id, peer_id=self._peer_id,
            tasks=tuple(source.label or source.name for source in config.tasks.sources),
            round=checkpoint.round, policy_version=checkpoint.state["policy_version"], rewards=rewards,
            settings_toml=tomli_w.dumps(settings), version=__version__,
        )  # fmt: skip

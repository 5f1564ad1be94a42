"""Adapter and model card to a model repository, from the newest checkpoint on disk: the policy in memory is never touched."""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from swarm import __version__
from swarm.adapters.checkpoint import Checkpoint, CheckpointStore
from swarm.adapters.checkpoint_export import export_checkpoint
from swarm.config import Config
from swarm.config.shareable import base_name, shareable
from swarm.integrations.model_card import CardFacts, model_card
from swarm.node_folder import NodeFolder
from swarm.observability.metrics_log import read_rows

logger = logging.getLogger(__name__)

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

"""Uploads what a node has trained to a model repository: by itself while the node runs, or for `swarm export --push`.

Either way it reads the newest checkpoint on disk and never memory. All files of an upload become visible in one commit, or none.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from swarm import __version__
from swarm.adapters.checkpoint import CheckpointStore
from swarm.adapters.export import BaseName, export_checkpoint
from swarm.config import Config
from swarm.config.shareable import base_name
from swarm.errors import NetworkError
from swarm.integrations.model_card import known_licence, model_card, trained_facts
from swarm.machine.hub_requests import bound_hub_requests
from swarm.machine.node_folder import NodeFolder

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", ".bin", "adapter_config.json")
"""Ends of names by which a reader of a repository chooses what to load."""
_TIMEOUT_S = 20.0


class ModelRepository:
    """One model repository of a hub, by the token of `hf auth login` or HF_TOKEN."""

    def __init__(self, name: str, *, endpoint: str = "", is_private: bool = True) -> None:
        """`endpoint`: address of another hub than that of HF_ENDPOINT, or huggingface.co. `is_private`: of a new repository."""
        self.name = name
        self._is_private = is_private
        bound_hub_requests()
        self._api = HfApi(endpoint=endpoint or None, library_name="swarm-rl", library_version=__version__)

    def check(self, kept: Callable[[str], bool]) -> None:
        """Raise NetworkError unless the hub knows the token, and the repository is new or holds no other weights.

        `kept`: whether the next push replaces a file, or leaves it as a part of the whole. Nothing is changed on the hub.
        """
        with self._errors():
            self._api.whoami()
            try:
                files = self._api.list_repo_files(self.name)
            except RepositoryNotFoundError:
                return
        if other := sorted(one for one in files if one.endswith(_WEIGHTS) and not kept(one)):
            raise NetworkError(
                f"--push must name a repository that is new or holds the same kind of export, got {other[0]} in {self.name}; "
                "name another one"
            )

    def licence_of(self, base: BaseName) -> str | None:
        """Return the licence of a base as its card on the hub names it; None where that is not known."""
        try:
            info = self._api.model_info(base.name, revision=base.revision, timeout=_TIMEOUT_S)
        except Exception as error:  # whatever the client raises: the card does without
            logger.info("the licence of %s is not known: %s", base.name, error)
            return None
        return known_licence(getattr(info.card_data, "license", None))

    def push(self, folder: Path, message: str) -> str:
        """Upload a folder as one commit, and return the repository's address.

        Raises NetworkError; the repository then holds what it held before.
        """
        with self._errors():
            address = self._api.create_repo(self.name, private=self._is_private, exist_ok=True)
            self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
            return str(address)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except NetworkError:
            raise
        except Exception as error:  # errors of the hub's HTTP client, another in each version, have no base
            rule, fix = _explained(error)
            reason = " ".join(str(error).split())
            if token := get_token():
                reason = reason.replace(token, "…")
            raise NetworkError(f"{rule}, got {self.name}: {type(error).__name__}: {reason[:200]}; {fix}") from None


def _explained(error: Exception) -> tuple[str, str]:
    """Return the rule that was broken, and the fix."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return "a push needs a token that the hub knows", "log in with `hf auth login`, or set HF_TOKEN"
    if status == 403 or isinstance(error, RepositoryNotFoundError):
        return (
            "a push needs a token that may write to the repository",
            "take a token with write access, or another name",
        )
    if isinstance(error, HFValidationError):
        return "a repository must be named OWNER/NAME", "correct the name"
    if isinstance(error, OfflineModeIsEnabled):
        return "a push needs the hub", "unset HF_HUB_OFFLINE"
    if status:
        return "the hub must take the upload", "try again later"
    return "the hub must be reachable", "connect, or set HF_ENDPOINT to the hub's address, and try again"


class HubPush:
    """A sink: rounds are counted, and at their interval a push is made, on the sink's thread."""

    def __init__(self, config: Config, folder: NodeFolder, clock: Callable[[], float]) -> None:
        """`clock`: seconds, monotonic."""
        self._config = config
        self._settings = settings = config.integrations
        self._folder = folder
        self._clock = clock
        self._repository = ModelRepository(
            settings.hub_repo, endpoint=settings.hub_endpoint, is_private=settings.hub_private
        )
        self._pushed_round = 0
        self._due_round = settings.hub_interval_rounds
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
        except Exception as error:  # of the client, the disk or the checkpoint: the node goes on
            self.num_failures += 1
            pause_s = min(FIRST_PAUSE_S * 2 ** (self.num_failures - 1), LONGEST_PAUSE_S)
            self._not_before_s = self._clock() + pause_s
            reason = " ".join(str(error).split())[:400]
            repo = self._settings.hub_repo
            logger.error("push to %s failed, the next try is in %.0f s at the earliest: %s", repo, pause_s, reason)

    def _push(self) -> None:
        checkpoint = CheckpointStore(self._folder.checkpoints, 1).load_newest()
        if checkpoint is None or checkpoint.round <= self._pushed_round:
            return
        policy = self._config.policy
        base = BaseName(base_name(policy.base), policy.revision)
        facts = trained_facts(
            self._config, self._folder, form="adapter", base=base, lineage=checkpoint.state["lineage"]["policy"],
            round=checkpoint.round, policy_version=checkpoint.state["policy_version"],
            licence=self._repository.licence_of(base) if "/" in base.name else None,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="swarm-push-") as scratch:
            folder = Path(scratch) / "adapter"
            export_checkpoint(checkpoint, base, policy.lora, folder, card=model_card(facts))
            self._repository.push(folder, f"Round {checkpoint.round}")
        self._pushed_round = checkpoint.round
        self._due_round = checkpoint.round + self._settings.hub_interval_rounds
        self.num_failures = 0
        logger.info("round %d pushed to %s", checkpoint.round, self._settings.hub_repo)

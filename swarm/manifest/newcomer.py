"""A node that joins the swarm of a manifest: its configuration on this machine, and what must hold before it runs."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarm.config import Config, Layer, Origin, adjusted, merged, origin_in, resolve
from swarm.errors import ManifestError, SwarmError
from swarm.machine.hardware import Hardware, hardware_config
from swarm.machine.node_folder import NodeFolder
from swarm.manifest.files import check_joined, read_manifest
from swarm.manifest.joining import (
    advice,
    check_lineage,
    check_tasks,
    choose,
    compose,
    decisions,
    missing_base,
    missing_files,
    needs_lineage,
)
from swarm.manifest.manifest import Manifest
from swarm.observability.plain_text import plain


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """Copies of the files that the manifest names by their content."""

    tasks: dict[str, Path] = field(default_factory=dict[str, Path])
    """By the name of their task."""
    rewards: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A manifest, and what its user gave beside it."""

    manifest: Manifest
    folder: Path
    """Where the node's folder is unless node.dir says otherwise."""
    user: Sequence[Layer]
    """Settings, the ones that win last."""
    own_files: OwnFiles = field(default_factory=OwnFiles)
    accepted_edition: int | None = None

    def is_joined(self) -> bool:
        """Whether the node's folder, or that of a GPU in it, has joined this swarm before, and so trusts its founder."""
        try:
            node = merged(self.user).get("node")
            chosen = node.get("dir") if isinstance(node, dict) else None
            folder = Path(chosen) if isinstance(chosen, str) else self.folder
            found = next((one for one in (folder, *folder.glob("gpu-*")) if NodeFolder(one).manifest.exists()), folder)
            return read_manifest(str(NodeFolder(found).manifest)).id == self.manifest.id
        except SwarmError:  # of the manifest that lies there: reported where the folder is checked
            return False

    def resolve(self, hardware: Hardware) -> tuple[Config, Origin]:
        """The node's configuration. Raises SwarmError: contradictions, files that are missing or others."""
        mine = merged(self.user)
        choice = choose(self.manifest, mine, hardware)
        defaults = tomllib.loads(hardware_config(hardware, choice, self.folder, self.manifest.name))
        tasks, rewards = self.own_files.tasks, self.own_files.rewards
        config = compose(self.manifest, defaults, mine, tasks, origin_in(self.user), reward_files=rewards)
        decided = Layer("manifest", decisions(self.manifest, tasks, rewards))
        layers = [Layer("hardware", defaults), Layer("manifest", advice(self.manifest)), *self.user, decided]
        return config, adjusted(origin_in(layers), resolve(layers), config, "manifest")

    def missing(self) -> list[str]:
        """What the user must still give: base, task files and reward files. Raises TaskError for an unreadable file."""
        base = missing_base(self.manifest, merged(self.user))
        files = missing_files(self.manifest, self.own_files.tasks, self.own_files.rewards)
        return [base, *files] if base else files

    def check_folder(self, config: Config, *, is_new: bool = False) -> tuple[NodeFolder, list[str]]:
        """The node's folder, which may join, and what the user should know of the manifest: its tasks or changes, and merging.

        `is_new`: an earlier run is moved aside. Raises ManifestError.
        """
        files = NodeFolder(config.node.dir, config.node.identity)
        if not is_new:
            self._check_no_other_run(files)
        changed = check_joined(files.manifest, self.manifest, self.accepted_edition)
        tasks = [f"task {task.source_name}: {task.settings}" for task in self.manifest.tasks]
        merging = [f"merging: {said}"] if (said := self.said_of_merging(config)) else []
        return files, [plain(line) for line in (*(changed if self.is_joined() else tasks), *merging)]

    def said_of_merging(self, config: Config) -> str:
        """What the user should know of the manifest's `merging`; empty where there is nothing to decide."""
        if not self.manifest.merging or config.merging.enabled != bool(self.manifest.silo):
            return ""
        if self.manifest.silo:
            return "members merge their adapters, which leave the machine for it; with --merging.enabled false this one's stays"
        return "the founder advises it, also with strangers; with --merging.enabled true this node does"

    def check_learning(self, config: Config) -> None:
        """Check what takes seconds: tasks, and the lineage where it decides. Raises SwarmError."""
        check_tasks(config.tasks)
        if needs_lineage(self.manifest, config):
            check_lineage(self.manifest, config)

    def _check_no_other_run(self, files: NodeFolder) -> None:
        """A founder chooses the swarm's name, and with it the folder: it must not take up a run that has joined no swarm.

        Its adapter would be shared. Raises ManifestError.
        """
        base = files.path.parent if files.path.name.startswith("gpu-") else files.path
        is_named_by_manifest = base == self.folder
        if is_named_by_manifest and files.checkpoints.exists() and not files.manifest.exists():
            raise ManifestError(
                f"a folder that a manifest names must be new or of its swarm, got the run in {files.path}, which has joined "
                "none; set another node.dir, or start anew with --fresh"
            )

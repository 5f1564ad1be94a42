"""How a node of Python joins by a manifest: the configuration that it gets, and the `swarm join` that runs it."""

import tempfile
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from swarm.api.own_tasks import OwnTasks
from swarm.config import Config, Layer, dump_toml, merge, parse
from swarm.errors import ConfigError
from swarm.machine.hardware import detect
from swarm.manifest.files import fetch
from swarm.manifest.manifest import check_protocol
from swarm.manifest.manifest import parse as parse_manifest
from swarm.manifest.newcomer import Newcomer, OwnFiles
from swarm.records.codec import PROTOCOL_VERSION
from swarm.silo.silo_files import folder_to_join


class Joining:
    """One manifest with the settings and files of a node that joins by it. It is immutable."""

    def __init__(self, source: str, founder: str | None, settings: dict[str, Any], tasks: OwnTasks) -> None:
        """`source`: file or address of the manifest. `tasks` has the copies of what it names by SHA-256. Raises ManifestError."""
        self._manifest = parse_manifest(fetch(source), founder)
        check_protocol(self._manifest, PROTOCOL_VERSION)
        self._source = str(Path(source).absolute()) if Path(source).exists() else source
        self._founder = [] if founder is None else ["--founder", founder]
        self._settings = settings
        self._tasks = tasks
        needed = [one.source_name for one in self._manifest.tasks if one.sha256 and not one.hub]
        if self._path and len(needed) != 1:
            raise ConfigError(
                f"dataset is the one file that a manifest names, got a manifest with {', '.join(needed) or 'none'}; leave "
                "dataset out, or use swarm join with --task-file"
            )
        self._task = needed[0] if needed else ""

    @property
    def _path(self) -> str:
        return next((str(one["path"]) for one in self._tasks.sources if "path" in one), "")

    def _own_files(self, folder: Path) -> OwnFiles:
        """`folder`: where files of Python objects lie."""
        functions = [one.get("function", "") for source in self._tasks.sources for one in source.get("signals", ())]
        paths = dict.fromkeys(one.rpartition(":")[0] for one in functions if ".py:" in one)
        tasks = {self._task: self._place(self._path, folder)} if self._path else {}
        return OwnFiles(tasks, [self._place(path, folder) for path in paths])

    def _place(self, path: str, folder: Path) -> Path:
        return folder / path if path in self._tasks.files else Path(path).absolute()

    def config(self) -> Config:
        """The configuration with which the node takes part; nothing is kept. Raises SwarmError, such as ManifestError."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch).resolve()
            self._tasks.write(folder)
            user = [Layer("a keyword", self._settings)]
            home = folder_to_join(self._manifest, self._source)
            config, _ = Newcomer(self._manifest, home, user, self._own_files(folder)).resolve(detect())
        in_place = dump_toml(config).replace(str(folder), str(config.node.dir.absolute()))
        return parse(tomllib.loads(in_place))

    def words(self, file: str, folder: Path) -> list[str]:
        """The command line after `swarm`, with the settings in `file` and the files of rewards and data in `folder`."""
        own = self._own_files(folder)
        rewards = [word for path in own.rewards for word in ("--reward-file", str(path))]
        tasks = [word for name, path in own.tasks.items() for word in ("--task-file", f"{name}={path}")]
        return ["join", self._source, file, *self._founder, *rewards, *tasks]

    def settings_for(self, config: Config) -> str:
        """The settings of the user, and the folder and the last round of `config`, as TOML."""
        node = {"dir": str(config.node.dir)}
        last = {} if config.node.max_rounds is None else {"max_rounds": config.node.max_rounds}
        return tomli_w.dumps(merge(self._settings, {"node": node | last}))

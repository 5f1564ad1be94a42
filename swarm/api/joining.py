"""What a node of Python gives to `swarm join`, which checks the manifest and composes the configuration."""

import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from swarm.api.own_tasks import OwnTasks
from swarm.config import Config, merge, parse
from swarm.errors import ConfigError, error_of_exit_code
from swarm.machine.child_python import swarm_command
from swarm.machine.safe_files import replace_file

_TIMEOUT_S = 600.0
"""For the checks of `swarm join --dry-run`, a manifest to fetch included."""


class Joining:
    """One manifest with the settings and files of a node that joins by it. It is immutable."""

    def __init__(self, manifest: str, founder: str | None, settings: dict[str, Any], tasks: OwnTasks) -> None:
        """`tasks` has the copies of what the manifest names by SHA-256. Raises ManifestError."""
        from swarm.manifest.files import fetch
        from swarm.manifest.manifest import parse as parse_manifest

        is_file = Path(manifest).exists()
        self._manifest = str(Path(manifest).absolute()) if is_file else manifest
        self._founder = [] if founder is None else ["--founder", founder]
        self._settings = settings
        self._tasks = tasks
        needed = [one for one in parse_manifest(fetch(manifest), founder).tasks if one.sha256 and not one.hub]
        if self._path and len(needed) != 1:
            names = ", ".join(one.source_name for one in needed) or "none"
            raise ConfigError(
                f"dataset is the one file that a manifest names, got a manifest with {names}; leave dataset out, or use "
                "swarm join with --task-file"
            )
        self._task = needed[0].source_name if needed else ""

    @property
    def _path(self) -> str:
        return next((str(one["path"]) for one in self._tasks.sources if "path" in one), "")

    def words(self, file: str, folder: Path) -> list[str]:
        """The command line after `swarm`, with the settings in `file` and the files of rewards and data in `folder`."""
        functions = [one.get("function", "") for source in self._tasks.sources for one in source.get("signals", ())]
        paths = dict.fromkeys(one.rpartition(":")[0] for one in functions if ".py:" in one)
        files = [word for path in paths for word in ("--reward-file", self._place(path, folder))]
        files += ["--task-file", f"{self._task}={self._place(self._path, folder)}"] if self._path else []
        return ["join", self._manifest, file, *self._founder, *files]

    def _place(self, path: str, folder: Path) -> str:
        return str(folder / path if path in self._tasks.files else Path(path).absolute())

    def settings_for(self, config: Config) -> str:
        """The settings of the user, and the folder and the last round of `config`, as TOML."""
        node = {"dir": str(config.node.dir)}
        last = {} if config.node.max_rounds is None else {"max_rounds": config.node.max_rounds}
        return tomli_w.dumps(merge(self._settings, {"node": node | last}))

    def config(self) -> Config:
        """The configuration that `swarm join` composes. Raises its SwarmError."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            self._tasks.write(folder)
            file = folder / "settings.toml"
            replace_file(file, tomli_w.dumps(self._settings))
            command = swarm_command(*self.words(str(file), folder), "--dry-run")
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if ended.returncode:
            said = [line for line in ended.stderr.splitlines() if line.strip()] or [f"exit code {ended.returncode}"]
            raise error_of_exit_code(ended.returncode, said[-1].removeprefix("error: "))
        target = tomllib.loads(ended.stdout)["node"]["dir"]
        own = str(Path(target).absolute())
        return parse(tomllib.loads(ended.stdout.replace(str(folder.resolve()), own).replace(str(folder), own)))

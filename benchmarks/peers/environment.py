"""Another system in a virtual environment of its own, made once and kept."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_STAMP = ".ready"
_TIMEOUT_S = 1200.0


class PeerUnavailable(Exception):
    """The other system cannot be installed here; the message says why."""


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """Packages as pip names them, and the folder under ~/.cache/swarm-benchmarks."""

    name: str
    packages: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    """Installed alone: their own dependencies conflict, or are not needed here."""
    made_by: str = ""
    """Command that makes it, for the message."""

    @property
    def folder(self) -> Path:
        return Path.home() / ".cache" / "swarm-benchmarks" / self.name

    def python_of(self, folder: Path) -> Path:
        """The environment's Python. Raises PeerUnavailable where it was not made yet."""
        if not self._is_ready(folder):
            raise PeerUnavailable(f"there is no environment for it in {folder}; make it by `{self.made_by}`")
        return folder / "bin" / "python"

    def make(self, folder: Path) -> None:
        """Make it, unless it is there. Raises PeerUnavailable; what was loaded by then is kept by pip."""
        if self._is_ready(folder):
            return
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([*pip, *self.packages])
        if self.without_dependencies:
            _run([*pip, "--no-deps", *self.without_dependencies])
        (folder / _STAMP).write_text(self._wanted)

    @property
    def _wanted(self) -> str:
        return "\n".join((*self.packages, *self.without_dependencies))

    def _is_ready(self, folder: Path) -> bool:
        stamp = folder / _STAMP
        return stamp.is_file() and stamp.read_text() == self._wanted


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"{command[-1]} was not ready within {_TIMEOUT_S:.0f} s; run again") from None
    except OSError as error:
        raise PeerUnavailable(str(error)) from None
    if result.returncode:
        raise PeerUnavailable(f"pip failed: {result.stderr.strip()[-300:]}")

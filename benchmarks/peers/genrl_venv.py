"""genrl in a virtual environment of its own, made once and kept."""

import subprocess
import sys
from pathlib import Path

PACKAGES = ("hivemind==1.1.12", "torch==2.13.0")
WITHOUT_DEPENDENCIES = ("gensyn-genrl==0.3.0",)
"""Its own dependencies (web servers, chain clients) conflict with hivemind's and are not needed to exchange."""

_WANTED = "\n".join((*PACKAGES, *WITHOUT_DEPENDENCIES))
_STAMP = ".ready"
_TIMEOUT_S = 1200.0


class PeerUnavailable(Exception):
    """The other system cannot be installed here; the message says why."""


def default_folder() -> Path:
    return Path.home() / ".cache" / "swarm-benchmarks" / "genrl-0.3.0"


def python_of(folder: Path) -> Path:
    """The environment's Python. Raises PeerUnavailable where it was not made yet."""
    if not _is_ready(folder):
        raise PeerUnavailable(
            f"there is no environment for it in {folder}; make it by `benchmarks/exchange.py --prepare`"
        )
    return folder / "bin" / "python"


def make(folder: Path) -> None:
    """Make the environment, unless it is there. Raises PeerUnavailable; what was loaded by then is kept by pip."""
    if _is_ready(folder):
        return
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([*pip, *PACKAGES])
    _run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES])
    (folder / _STAMP).write_text(_WANTED)


def _is_ready(folder: Path) -> bool:
    stamp = folder / _STAMP
    return stamp.is_file() and stamp.read_text() == _WANTED


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"{command[-1]} was not ready within {_TIMEOUT_S:.0f} s; run again") from None
    except OSError as error:
        raise PeerUnavailable(str(error)) from None
    if result.returncode:
        raise PeerUnavailable(f"pip failed: {result.stderr.strip()[-300:]}")

"""genrl in a virtual environment of its own, made once and kept."""

import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ("hivemind==1.1.12", "torch==2.13.0")
WITHOUT_DEPENDENCIES = ("gensyn-genrl==0.3.0",)
"""Its own dependencies (web servers, chain clients) conflict with hivemind's and are not needed to exchange."""


class PeerUnavailable(Exception):
    """The other system cannot be installed here; the message says why."""


def default_folder() -> Path:
    return Path.home() / ".cache" / "swarm-benchmarks" / "genrl-0.3.0"


def python_of(folder: Path, timeout_s: float) -> Path:
    """The environment's Python; made first where it is not there yet, within `timeout_s`. Raises PeerUnavailable."""
    python, stamp = folder / "bin" / "python", folder / ".ready"
    wanted = "\n".join((*PACKAGES, *WITHOUT_DEPENDENCIES))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    until = time.monotonic() + timeout_s
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, *PACKAGES],
        [*pip, "--no-deps", *WITHOUT_DEPENDENCIES],
    ):
        _run(command, until - time.monotonic())
    stamp.write_text(wanted)
    return python


def _run(command: list[str], timeout_s: float) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=max(timeout_s, 1.0))
    except subprocess.TimeoutExpired:
        raise PeerUnavailable("its environment was not ready in time; run again, what was loaded is kept") from None
    except OSError as error:
        raise PeerUnavailable(str(error)) from None
    if result.returncode:
        raise PeerUnavailable(f"pip failed: {result.stderr.strip()[-300:]}")

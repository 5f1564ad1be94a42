"""genrl in a virtual environment of its own, made once and kept."""

from pathlib import Path

from peers.environment import PeerEnvironment, PeerUnavailable

__all__ = ["PeerUnavailable", "default_folder", "make", "python_of"]

# its own dependencies (web servers, chain clients) conflict with hivemind's and are not needed to exchange
_ENVIRONMENT = PeerEnvironment(
    "genrl-0.3.0",
    packages=("hivemind==1.1.12", "torch==2.13.0"),
    without_dependencies=("gensyn-genrl==0.3.0",),
    made_by="benchmarks/exchange.py --prepare",
)


def default_folder() -> Path:
    return _ENVIRONMENT.folder


def python_of(folder: Path) -> Path:
    """The environment's Python. Raises PeerUnavailable where it was not made yet."""
    return _ENVIRONMENT.python_of(folder)


def make(folder: Path) -> None:
    """Make the environment, unless it is there. Raises PeerUnavailable; what was loaded by then is kept by pip."""
    _ENVIRONMENT.make(folder)

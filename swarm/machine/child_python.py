"""Builds every command line with which this software starts Python.

`python -m` and `python -c` put the current folder first on the import path. A `swarm` package or a `resource.py` in a
folder of somebody else would then run as code of this software. `-P` leaves that entry out.
"""

import os
import re
import shlex
import sys

DISTRIBUTION = "swarm-rl"
SAFE_PATH = "-P"


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs `module` of this package in this interpreter, from any folder."""
    return [sys.executable, SAFE_PATH, "-m", module, *arguments]


def swarm_command(*arguments: str) -> list[str]:
    """Return the command line of `swarm ARGUMENT...` in this interpreter, from any folder."""
    return module_command("swarm.cli.main", *arguments)


def keep_current_folder_off_the_path() -> None:
    """Make all interpreters that this process starts leave out the current folder.

    Libraries start some, too: multiprocessing starts workers, resource trackers and fork servers.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def pip_install(what: str) -> str:
    """Return what a person types to install `what` for this interpreter, also without the current folder on the path."""
    return f"{shlex.quote(sys.executable)} {SAFE_PATH} -m pip install {what}"


def install_from_clone(lock: str = "requirements.lock") -> str:
    """Return what a person types in a clone to install the packages of a lock file.

    Without what they name as their own requirements: some of that is of no use here, and needs a C compiler.
    """
    return f"in the clone: {pip_install(f'--no-deps -r {lock}')}"


def install_extra(extra: str) -> str:
    """Return what a person types to install the packages of the optional `extra`.

    This software itself is on no index: whoever registered its name there would decide what `NAME[EXTRA]` installs.
    """
    import importlib.metadata  # here, as it takes a tenth of the time of `swarm --help`

    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # sources that are run without being installed
        requirements = []
    marker = re.compile(rf"""(.+?) ?; ?extra == ["']{extra}["']""")
    found = [match[1] for match in map(marker.fullmatch, requirements) if match]
    return pip_install(" ".join(map(shlex.quote, found)) if found else f"the packages of the extra {extra}")

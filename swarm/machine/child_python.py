"""Builds every command line with which this software starts Python.

`python -m` and `python -c` put the current folder first on the import path. A `swarm` package or a `resource.py` in a
folder of somebody else would then run as code of this software. `-P` leaves that entry out.
"""

import os
import shlex
import sys

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


def install_from_clone(extra: str = "") -> str:
    """Return what a person types in a clone to install this software, with the optional `extra`.

    The package is on no index: whoever registered its name there would decide what such a command installs.
    """
    what = f'".[{extra}]"' if extra else "."
    return f"in the clone: {pip_install(f'-e {what}')}"

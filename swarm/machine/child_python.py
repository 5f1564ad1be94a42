"""Starts of this software by itself: the one place that builds a command line of Python.

`python -m` and `python -c` put the current folder first on the path of imports. A folder of somebody else that holds a
`swarm` package or a `resource.py` would then run as code of this software. `-P` leaves that entry out.
"""

import os
import shlex
import sys

SAFE_PATH = "-P"


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module` of this package as a program, in this interpreter and from any folder."""
    return [sys.executable, SAFE_PATH, "-m", module, *arguments]


def swarm_command(*arguments: str) -> list[str]:
    """The command line of `swarm ARGUMENT...`, in this interpreter and from any folder."""
    return module_command("swarm.cli.main", *arguments)


def keep_current_folder_off_the_path() -> None:
    """Make all interpreters that this process starts leave out the current folder.

    Libraries start some, too: multiprocessing its workers, resource trackers and fork servers.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def pip_install(what: str) -> str:
    """What a person types to install `what` for this interpreter, with the current folder off the path here, too."""
    return f"{shlex.quote(sys.executable)} {SAFE_PATH} -m pip install {what}"


def install_from_clone(extra: str = "") -> str:
    """What a person types in a clone to install this software there, with one of its extras where `extra` names it.

    The package is on no index: whoever registered its name there would decide what such a command installs.
    """
    what = f'".[{extra}]"' if extra else "."
    return f"in the clone: {pip_install(f'-e {what}')}"

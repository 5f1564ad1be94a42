"""Errors in the words of the command: a setting that was given with a flag is told by the name of that flag."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from swarm.errors import ConfigError, NetworkError


@contextmanager
def told_by_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Errors of the block name `flags`, {setting: flag}: `set observability.http_port = 0` becomes `set --port 0`."""
    try:
        yield
    except (ConfigError, NetworkError) as error:
        text = str(error)
        for setting, flag in flags.items():
            name = rf"(?<![\w.]){re.escape(setting)}(?:\.\d+)?(?![\w.]*\w)"  # with the place in a list, never a longer name
            text = re.sub(name, flag, re.sub(rf"{name} = ", f"{flag} ", text))
        error.args = (text,)
        raise

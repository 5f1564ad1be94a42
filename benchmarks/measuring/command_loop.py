"""The node's side of `node_processes`: commands in, replies out. Standard library only: peers' environments run it too."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


def take_over_stdout() -> TextIO:
    """The stream for replies. Whatever else prints to standard output now goes to standard error."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def take_over_stdin() -> TextIO:
    """The stream of commands, for a thread to read. A child that is forked meanwhile closes its `sys.stdin`, and would
    wait for ever for the thread that reads it: so that one is empty now.
    """
    commands = os.fdopen(os.dup(0), "r")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return commands


def reply(replies: TextIO, answer: Mapping[str, Any]) -> None:
    replies.write(json.dumps(answer) + "\n")
    replies.flush()

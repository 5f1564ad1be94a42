"""Landlock: a process gives up all files but those beneath some folders, for good, without any privilege (Linux 5.13)."""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from swarm.sandbox.inside import libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every processor
_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
"""Everything that one can do with files, by version; later versions know one right more."""
_NEWEST_FILE_RIGHTS = (1 << 16) - 1
_CONNECTIONS = 3
"""Binding and connecting of TCP, from version 4 on."""
_SCOPES = 3
"""Abstract unix sockets and signals to processes outside, from version 6 on."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("connections", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def read_only_beneath(folders: Iterable[Path]) -> None:
    """From here on this thread, and what it starts, can read files beneath `folders` and open no others.

    Files that are open stay open. Raises OSError where the kernel has no Landlock.
    """
    version = libc.system_call(_CREATE_RULESET, None, 0, _VERSION)
    files = _FILE_RIGHTS.get(version, _NEWEST_FILE_RIGHTS)
    rules = _Ruleset(files, _CONNECTIONS if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.system_call(_CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for folder in folders:
            _allow(ruleset, folder)
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        libc.system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, folder: Path) -> None:
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Beneath(_READ_FILE | _READ_DIR, descriptor)
        libc.system_call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)

"""The result of one check."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    """Works, but worse than it could."""
    PROBLEM = "problem"
    """Something that was asked for cannot work."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Level
    text: str
    """One line: what was measured."""
    fix: str = ""
    """The command or setting that mends it; empty only where the level is OK."""


def ok(name: str, text: str) -> Finding:
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, fix: str) -> Finding:
    return Finding(name, Level.WARNING, text, fix)


def problem(name: str, text: str, fix: str) -> Finding:
    return Finding(name, Level.PROBLEM, text, fix)

"""The result of one check of this machine, of its network, or of what a swarm needs."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Not checked or not a matter of right and wrong; a person may want to know it."""
    WARNING = "warning"
    """Works, but worse than it could."""
    PROBLEM = "problem"
    """Something that was asked for cannot work."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    level: Level
    text: str
    """One line: what was found. It says how to fix a problem where `fix` does not."""
    fix: str = ""
    """The command or setting that fixes it."""


def ok(name: str, text: str) -> CheckResult:
    return CheckResult(name, Level.OK, text)


def note(name: str, text: str) -> CheckResult:
    return CheckResult(name, Level.NOTE, text)


def warning(name: str, text: str, fix: str) -> CheckResult:
    return CheckResult(name, Level.WARNING, text, fix)


def problem(name: str, text: str, fix: str = "") -> CheckResult:
    return CheckResult(name, Level.PROBLEM, text, fix)

"""`--help` of every command is a page that a person can work from, 80 columns wide."""

import re

import click
import pytest
import typer.main
from typer.testing import CliRunner

from swarm.cli.main import EPILOG, app
from swarm.errors import SwarmError
from tests.unit.test_docs import error_classes

OBSERVERS = {"status", "peers", "top", "logs", "dashboard", "report"}
"""Only look: their pages say what they show, and need no more."""


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        inner = commands(command, (*path, name)) if hasattr(command, "commands") else [(*path, name)]
        found += inner
    return found


ALL = commands(typer.main.get_command(app))  # type: ignore[arg-type]
CODES = {str(error.exit_code) for error in [SwarmError, *error_classes()]} | {"0", "2", "130"}


def page(words: tuple[str, ...]) -> list[str]:
    told = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})
    assert told.exit_code == 0, told.output
    return [line.rstrip() for line in told.output.splitlines()]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_fits_80_columns_and_begins_with_one_line(words: tuple[str, ...]) -> None:
    lines = page(words)
    assert max(map(len, lines)) <= 80
    summary = next(index for index, line in enumerate(lines) if line.strip() and not line.strip().startswith("Usage:"))
    if words[0] not in OBSERVERS:
        assert lines[summary].rstrip().endswith("."), "a summary is one sentence on one line"
        assert not lines[summary + 1].strip()


@pytest.mark.parametrize("words", [words for words in ALL if words[0] not in OBSERVERS], ids=" ".join)
def test_help_says_what_it_reads_and_writes_with_examples_and_exit_codes(words: tuple[str, ...]) -> None:
    text = "\n".join(page(words))
    for heading in (" Reads: ", " Writes: ", " Examples:", " Exit codes: "):
        assert heading in text, heading
    example = re.search(r"Examples:\n   (swarm .*)", text)
    assert example is not None
    assert example[1].startswith(" ".join(["swarm", *words]))
    told = re.search(r"Exit codes: (.*?)\n\s*\n", text, re.S)
    assert told is not None
    assert set(re.findall(r"\b\d+\b", told[1])) <= CODES


@pytest.mark.essential
@pytest.mark.parametrize("words", [words for words in ALL if words[0] not in OBSERVERS], ids=" ".join)
def test_examples_use_options_that_exist(words: tuple[str, ...]) -> None:
    text = "\n".join(page(words))
    examples = text.split("Examples:\n")[1].split("\n\n")[0]
    options = set(re.findall(r"(?<!\S)(--[a-z-]+)(?=[\s=]|$)", examples))
    offered = text.split("Options")[1]
    assert all(option in offered for option in options), options


def test_epilog_names_every_exit_code() -> None:
    assert set(re.findall(r"\b\d+\b", EPILOG)) == CODES

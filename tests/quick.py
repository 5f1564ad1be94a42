"""Prints the tests of `make quick`: files of `tests/unit` that load no model or network library and start no process, and SAMPLE.

The imports of a file decide, so that no list has to be kept. A file is quick where its imports, followed through the
modules of this project, reach none of `LARGE`, and where neither the file, nor a module that it imports, nor a module
that one of those imports, can start processes. `make quick` bounds the time of each test, too.
"""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests import house

LARGE = {"transformers", "peft", "hivemind", "libp2p", "matplotlib", "reasoning_gym"}
PROCESSES = {"subprocess", "multiprocessing"}
STEPS_TO_PROCESSES = 2
_FAMILY = "tests/unit/test_families.py::test_a_family_is_one_policy_in_sampling_training_and_export"
SAMPLE = tuple(f"{_FAMILY}[{name}]" for name in ("deepseek_v3", "falcon_h1", "gemma3_text", "gpt2", "llama"))
"""Tests that load tiny models: families with experts, recurrent states, windows, other linear layers, and none of these."""


def quick_files() -> list[Path]:
    return [
        file
        for file in sorted((house.ROOT / "tests" / "unit").glob("test_*.py"))
        if not _reaches_large(file) and not _starts_processes(file, STEPS_TO_PROCESSES)
    ]


@functools.cache
def _reaches_large(file: Path) -> bool:
    """Imports inside of functions count in tests only: few tests come to those of the sources."""
    names = _all_imported(file) if _is_test(file) else set(_imported(house.at_import(_tree(file).body)))
    return bool(_roots(names) & LARGE) or any(_reaches_large(found) for found in _files(names) - {file})


@functools.cache
def _starts_processes(file: Path, steps: int) -> bool:
    """Whether `file` can, or a module of `swarm` that is at most `steps` imports away."""
    names = _all_imported(file)
    near = {found: steps - (not _is_test(found)) for found in _files(names) - {file}}
    return bool(_roots(names) & PROCESSES) or any(
        left >= 0 and _starts_processes(one, left) for one, left in near.items()
    )


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def _all_imported(file: Path) -> frozenset[str]:
    return frozenset(_imported(ast.walk(_tree(file))))


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def _roots(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _files(names: Iterable[str]) -> set[Path]:
    """Those of the names that are modules of this project."""
    own = [house.ROOT / name.replace(".", "/") for name in names if name.startswith(("swarm.", "tests."))]
    return {file for path in own for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()}


def _is_test(file: Path) -> bool:
    return file.is_relative_to(house.ROOT / "tests")


if __name__ == "__main__":
    print(*(file.relative_to(house.ROOT) for file in quick_files()), *SAMPLE)

"""Changes the code in small ways and reports the changes that no test notices: `make mutants SEED=1 SAMPLE=60`.

A sample of comparisons, arithmetic operators and boolean conditions is drawn. Each one is changed in a copy of
the tree, and the tests nearest to its module run there (`nearest_tests`). A change that they do not notice is a survivor.
Texts for people, annotations and assertions are not changed. Exit code 1 where fewer than `REQUIRED_SHARE` are noticed.

mutmut and cosmic-ray have neither a seeded sample nor a choice of tests for each module, and start Python with torch for
every change. Here each change is tested in a fork of a process that has imported the large libraries already.
"""

import ast
import contextlib
import copy
import difflib
import functools
import multiprocessing
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import house

SUBJECTS = (
    "records/*.py",
    "training/*.py",
    "silo/*.py",
    "limits/*.py",
    "sharing/reputation*.py",
    "admission/admission.py",
)
REQUIRED_SHARE = 0.9
TEST_TIMEOUT_S = 180
MAX_TEST_FILES = 12
"""For each module."""
NUM_FIRST_FILES = 2
"""Test files that run first. Most changes are noticed by them, and then the others are not even imported."""
_sound = set[tuple[str, ...]]()
"""Tests that are known to pass without a change."""
_PRELOADED = ["torch", "transformers", "peft", "pytest", "hypothesis", "cryptography", "pydantic", "msgpack"]
_SWAPPED = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or),
]  # fmt: skip
_OTHER: dict[type, type] = dict(_SWAPPED) | {b: a for a, b in _SWAPPED} | {ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    path: Path
    """Relative to the root of the tree."""
    line: int
    source: str
    """The whole file with one change."""

    def diff(self) -> str:
        before = (house.ROOT / self.path).read_text().splitlines()
        changes = difflib.unified_diff(before, self.source.splitlines(), lineterm="", n=0)
        return "\n".join(change for change in list(changes)[3:])


def mutants_of(path: Path) -> Iterator[Mutant]:
    text = (house.ROOT / path).read_text()
    for node in _changeable(ast.parse(text)):
        for changed in _changes(node):
            new = ast.unparse(changed) if isinstance(changed, ast.Constant) else f"({ast.unparse(changed)})"
            yield Mutant(path, node.lineno, _with(text, node, new))


def _changeable(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions below `node` besides texts for people, annotations, decorators and assertions."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert):
                continue
            if isinstance(child, ast.Call) and ast.unparse(child.func).startswith("logger."):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _changeable(child)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _OTHER:
        changed = copy.copy(node)
        changed.op = _OTHER[type(node.op)]()
        yield changed
    elif isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            changed = copy.copy(node)
            changed.ops = [*node.ops[:index], _OTHER[type(operator)](), *node.ops[index + 1 :]]
            yield changed


def _with(text: str, node: ast.expr, replacement: str) -> str:
    lines = text.encode().splitlines(keepends=True)  # the columns of `ast` count bytes
    assert node.end_lineno is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + (node.end_col_offset or 0)
    return (text.encode()[:start] + replacement.encode() + text.encode()[end:]).decode()


@functools.cache
def _imports(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Modules of `swarm` that a test file imports itself, and those that other modules of `tests` import for it."""
    own, through_helpers = set[str](), set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        own |= set(house.imported(node)) & house.modules().keys()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            helper = house.ROOT / f"{(node.module or '').replace('.', '/')}.py"
            if helper.exists() and helper != path:
                through_helpers |= frozenset[str]().union(*_imports(helper))
    return frozenset(own), frozenset(through_helpers)


@functools.cache
def nearest_tests(path: Path) -> tuple[str, ...]:
    """Test files that import the module at `path`, then those that import a module that does. Namesakes come first."""
    name = house.name_of(house.ROOT / path)
    users = {user for user, imported in house.graph().items() if name in imported}

    def distance(file: Path) -> int:
        own, through_helpers = _imports(file)
        return [name in own, name in through_helpers, bool(users & (own | through_helpers)), True].index(True)

    def order(file: Path) -> tuple[bool, int, bool, bool, int, str]:
        is_namesake_of_user = any(user.rpartition(".")[2] in file.stem for user in users)
        near = distance(file), not is_namesake_of_user, file.parent.name != "unit", len(_imports(file)[0]), file.name
        return path.stem not in file.stem, *near

    files = [file for folder in ("unit", "swarm", "fuzz") for file in (house.ROOT / "tests" / folder).glob("test_*.py")]
    near = sorted((file for file in files if distance(file) < 3), key=order)
    return tuple(str(file.relative_to(house.ROOT)) for file in near[:MAX_TEST_FILES])


def _copied_tree(folder: Path) -> Path:
    """A copy of what git tracks or would track, which has the environment of the original."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=house.ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (house.ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(house.ROOT / name, folder / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    return folder


def _run_tests(tree: Path, tests: tuple[str, ...]) -> None:
    """In the fork: run tests of `tree`, with their output in its output.txt, and exit with pytest's code."""
    os.setsid()  # what the tests start ends with them
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "swarm")]:
        del sys.modules[name]
    with (tree / "output.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    # by a thread that ends the process: an event loop that spins swallows the exception of a signal handler
    limits = ["-o", f"timeout={TEST_TIMEOUT_S}", "-o", "timeout_method=thread"]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not alone", *limits]
    os._exit(pytest.main([*options, f"--rootdir={tree}", *tests]))


def _pass(tree: Path, tests: tuple[str, ...]) -> bool:
    process = multiprocessing.get_context("forkserver").Process(target=_run_tests, args=(tree, tests))
    process.start()
    process.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    return process.exitcode in (0, 5)  # 5: all tests of these files are to run alone


def survives(mutant: Mutant, trees: "queue.Queue[Path]") -> bool:
    """Whether the nearest tests pass. Raises RuntimeError where one of them fails without the change, too."""
    tree = trees.get()
    try:
        (tree / mutant.path).write_text(mutant.source)
        near = nearest_tests(mutant.path)
        if all(_pass(tree, some) for some in (near[:NUM_FIRST_FILES], near[NUM_FIRST_FILES:]) if some):
            return True
        output = (tree / "output.txt").read_text()
        shutil.copy2(house.ROOT / mutant.path, tree / mutant.path)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[| - |$)", output, re.MULTILINE)
        suspect = (failed[1],) if failed else near
        if suspect not in _sound:
            if not _pass(tree, suspect):
                raise RuntimeError(f"{suspect} fails without a change:\n{(tree / 'output.txt').read_text()[-2000:]}")
            _sound.add(suspect)
        return False
    finally:
        shutil.copy2(house.ROOT / mutant.path, tree / mutant.path)
        trees.put(tree)


def main(seed: int, sample: int) -> int:
    paths = [path for subject in SUBJECTS for path in sorted(house.SOURCE.glob(subject))]
    possible = [mutant for path in paths for mutant in mutants_of(path.relative_to(house.ROOT))]
    chosen = random.Random(seed).sample(possible, min(sample, len(possible)))
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    num_trees = os.cpu_count() or 1
    survivors = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_trees) as threads:
        trees = queue.Queue[Path]()
        for index in range(num_trees):
            trees.put(_copied_tree(Path(folder) / str(index)))
        for mutant, fate in zip(chosen, threads.map(functools.partial(survives, trees=trees), chosen), strict=True):
            if fate:
                survivors += 1
                print(f"{mutant.path}:{mutant.line}: no test notices\n{mutant.diff()}", flush=True)
    share = 1 - survivors / max(1, len(chosen))
    print(f"seed {seed}: {share:.0%} of {len(chosen)} changes are noticed, {REQUIRED_SHARE:.0%} are required")
    return int(share < REQUIRED_SHARE)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

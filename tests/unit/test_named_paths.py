"""Every file, folder and module of this project that a docstring, a comment or a page names is there."""

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.config.reference import settings

ROOT = Path(__file__).parents[2]
_ROOMS = "swarm|tests|benchmarks|docs|docker|packaging|node_configs"
_FILE = re.compile(r"(?<![\w/.:~-])((?:[\w.-]+/)*[\w-]+\.py)\b")
_FOLDER = re.compile(rf"(?<![\w/.:~-])((?:{_ROOMS})/[\w./-]*[\w])")
_DOTTED = re.compile(r"(?<![\w/.-])((?:swarm|tests|benchmarks)(?:\.[A-Za-z_]\w*)+)")
_NOT_OURS = {
    "FILE.py",
    "convert_hf_to_gguf.py",
    "exact.py",
    "NAME.py",
    "mine.py",
    "make_rows.py",
    "my_reward.py",
    "near.py",
    "nice_rewards.py",
    "resource.py",
    "style.py",
}
"""Files of examples."""
_NO_MODULES = ("toml", "example", "md", "html", "key", "rewards", "task_sources", "advantages")
"""Ends of names of files, and of groups of entry points."""


@functools.cache
def tracked() -> frozenset[str]:
    """Every end of the path of every file and folder, such as `report/plot.py` and `plot.py`."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    paths = {part for file in files for part in (file, *file.parents)}
    return frozenset("/".join(path.parts[start:]) for path in paths for start in range(len(path.parts)))


def sources() -> list[Path]:
    found = [path for room in ("swarm", "tests", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    return sorted([*found, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def prose(path: Path) -> Iterator[str]:
    """Comments and docstrings of a module, or a page."""
    text = path.read_text(encoding="utf-8")
    if path.name == "extending.md":  # its examples are files that a reader would add
        text = re.sub(r"^```.*?^```|^    [^\n]*", "", text, flags=re.M | re.S)
    if path.suffix == ".md":
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.string.lstrip("rRfF").startswith('"""')
        if is_docstring or token.type == tokenize.COMMENT:
            yield token.string


@functools.cache
def names_in(module: Path) -> frozenset[str]:
    """Top-level names of a module, and those that it imports."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {
        node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    found |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return frozenset(found)


def exists(dotted: str) -> bool:
    """Whether a dotted name leads to a package, a module, or a name in one."""
    place = ROOT
    parts = dotted.split(".")
    for position, part in enumerate(parts):
        if (place / part).is_dir():
            place /= part
            continue
        module = place / f"{part}.py"
        if module.is_file():
            rest = parts[position + 1 : position + 2]
            return not rest or rest[0] in names_in(module)
        return (place / "__init__.py").is_file() and part in names_in(place / "__init__.py")
    return True


@functools.cache
def keys() -> frozenset[str]:
    return frozenset(key for key, *_ in settings())


def missing(text: str) -> Iterator[str]:
    for name in _FILE.findall(text):
        if name not in tracked() and name not in _NOT_OURS:
            yield name
    for name in _FOLDER.findall(text):
        if name.rstrip("/.") not in tracked() and not name.endswith(".py") and "." in name.rpartition("/")[2][1:]:
            yield name
    for name in _DOTTED.findall(text):
        is_setting = any(key == name or key.startswith(f"{name}.") for key in keys())
        is_no_module = name.rpartition(".")[2] in _NO_MODULES
        if not (is_setting or exists(name) or is_no_module):
            yield name


@pytest.mark.essential
def test_files_and_modules_that_texts_name_are_there() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        if path.name != "CHANGELOG.md" and path != Path(__file__)
        if any(missing(path.read_text(encoding="utf-8")))  # to take all files apart would take ten seconds
        for text in prose(path)
        for name in missing(text)
    }
    assert not found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("as `swarm/report/gone.py` does", "swarm/report/gone.py"),
        ("see report/gone.py", "report/gone.py"),
        ("`gone_for_good.py` reads it", "gone_for_good.py"),
        ("`swarm.report.gone`", "swarm.report.gone"),
        ("`swarm.report.tables.Gone`", "swarm.report.tables.Gone"),
        ("kept in docs/gone.md", "docs/gone.md"),
    ],
)
def test_a_stale_name_is_found(text: str, name: str) -> None:
    assert list(missing(text)) == [name]


@pytest.mark.parametrize(
    "text", ["`swarm/report/tables.py`", "tables.py", "`swarm.report.tables.Table`", "swarm.name", "docs/security.md"]
)
def test_a_name_that_is_there_is_fine(text: str) -> None:
    assert not list(missing(text))

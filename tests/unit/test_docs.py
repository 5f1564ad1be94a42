"""The documentation is whole, true where that can be checked, and makes a site that asks nothing of anybody."""

import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import typer.main
import yaml

from swarm import errors
from swarm.cli.main import EPILOG, INTERRUPTED, app
from swarm.config import Config
from swarm.config.reference import settings
from swarm.config.section import RENAMED
from swarm.errors import SwarmError
from swarm.records.rejection import Rejection

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def text(page: str) -> str:
    return (DOCS / page).read_text()


def rows(page: str, first_cell: str) -> dict[str, list[str]]:
    """{first cell: other cells} of the table whose head begins with `first_cell`."""
    table = text(page).split(f"| {first_cell} |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]
    return {row[0].strip("` |"): row[1:] for row in cells}


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text(page), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def error_classes() -> list[type[SwarmError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SwarmError)]
    return [error for error in found if error is not errors.RequestError]


def test_troubleshooting_has_every_exit_code_with_its_error() -> None:
    table = rows("troubleshooting.md", "exit code")
    for error in error_classes():
        name, causes, fix, _ = table[str(error.exit_code)]
        assert f"`{error.__name__}`" in name
        assert causes
        assert fix
    codes = {int(code) for code in table}
    assert codes == {error.exit_code for error in error_classes()} | {0, errors.WRONG_USAGE, INTERRUPTED}
    assert codes == {int(code) for code in re.findall(r"(\d+) [a-z]", EPILOG)}, "swarm --help names the same codes"
    not_restarted = {int(code) for code, cells in table.items() if cells[-1].strip(" |") == "no"}
    assert not_restarted == errors.NEEDS_A_PERSON | {0, INTERRUPTED}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "troubleshooting.md"])
def test_exit_codes_have_one_table(page: str) -> None:
    """Codes are told in troubleshooting.md; other pages link to it where they name one."""
    assert not re.search(r"^\| (?:exit )?code \|", text(page), re.M)
    if re.search(r"\bcode \d+\b", text(page)):
        assert "troubleshooting.md#exit-codes" in text(page)


def test_troubleshooting_tells_every_reason_of_rejection() -> None:
    told = rows("troubleshooting.md", "reason")
    assert list(told) == [reason.value for reason in Rejection], "all of them, in the order of the checks"
    assert all(cause and fix for cause, fix in told.values())


def test_benchmarks_begin_with_claims_that_lead_to_their_sections_and_commands() -> None:
    page = text("benchmarks.md")
    claims = rows("benchmarks.md", "claim")
    linked = set(re.findall(r"\]\(#([\w-]+)\)", "".join(claims)))
    assert len(linked) > 15
    assert linked <= anchors("benchmarks.md")
    for figure, _, date, command in claims.values():
        assert figure and re.fullmatch(r"20\d\d-\d\d-\d\d", date)
        told = command.strip(" |`")
        assert told == "the same" or page.count(told) > 1, f"{told}: its section says how to repeat it"


def test_glossary_explains_each_word_once_in_sentences() -> None:
    words = [re.split(r" \| ", row, maxsplit=1) for row in text("glossary.md").splitlines() if row.startswith("| ")]
    terms = [(word.strip("| "), meaning.strip(" |")) for word, meaning in words if word != "| word"]
    assert len(terms) > 80
    assert len({word for word, _ in terms}) == len(terms)
    for word, meaning in terms:
        assert meaning.endswith("."), word
        assert len(meaning) < 200, word


def test_references_are_those_that_code_and_docs_name() -> None:
    pages = [path for path in DOCS.rglob("*.md") if path.name != "references.md"]
    sources = "\n".join(path.read_text() for path in [*(ROOT / "swarm").rglob("*.py"), *pages])
    named = set(re.findall(r"(?<![\d.])\d{4}\.\d{5}(?!\d)", sources))
    listed = re.findall(r"\[(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/\1\)", text("references.md"))
    assert set(listed) == named
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("page", PAGES)
def test_links_stay_in_the_documentation_and_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (DOCS / page).parent / path if path else DOCS / page
        assert linked.resolve().is_relative_to(DOCS), f"{target}: the site has nothing outside docs/"
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.resolve().relative_to(DOCS).as_posix()), target


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page: str) -> None:
    known = {key.replace("[]", "") for key, *_ in settings()}
    known |= RENAMED.keys() if page == "configuration.md" else set()  # where its table of old names is
    sections = "|".join(Config.model_fields)
    for name in re.findall(rf"`((?:{sections})\.[a-z_.]+[a-z])(?: =[^`]*)?`", text(page)):
        if not name.endswith((".py", ".md", ".toml", ".json", ".log")):
            assert name in ("swarm.rewards", "swarm.testbed", "swarm.train") or any(
                key == name or key.startswith(f"{name}.") for key in known
            ), name


def commands(page: str) -> list[str]:
    """Of blocks that are fenced or indented."""
    joined = text(page).replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"```sh\n(.*?)```", joined, re.S))
    lines = re.findall(r"^(swarm [^#\n]*)", fenced, re.M) + re.findall(r"^    (?:\$ )?(swarm [^#\n]*)", joined, re.M)
    return [re.split(r" {2,}\(| \| ", line)[0].strip() for line in lines]


USED = [(page, line) for page in PAGES for line in commands(page)]


@pytest.mark.essential
@pytest.mark.parametrize(("page", "line"), USED)
def test_command_of_a_page_is_understood(page: str, line: str) -> None:
    words = shlex.split(line.replace("…", ""))
    command = typer.main.get_command(app)
    position = 1
    while hasattr(command, "commands") and not words[position].startswith("-"):
        command = command.commands[words[position]]  # type: ignore[attr-defined]
        position += 1
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    for word in words[position:]:
        option = word.strip("[]").partition("=")[0]
        if option.startswith("--") and "." not in option:
            assert option in known | {"--help"}, f"{page}: {line}"
        if word.startswith("node_configs/"):
            assert (ROOT / word).exists(), word


def test_integrations_page_tells_every_setting_and_every_span() -> None:
    page = text("integrations.md")
    for key, *_ in settings():
        if key.startswith("integrations.") and key != "integrations.hub_endpoint":
            assert key in page, key
    spans = re.findall(r'@traced\(\s*"(\w+)"', "\n".join(path.read_text() for path in (ROOT / "swarm").rglob("*.py")))
    assert set(rows("integrations.md", "span")) == set(spans)


def test_contributing_names_packages_files_and_markers_that_exist() -> None:
    page = text("contributing.md")
    for path in re.findall(r"`((?:swarm|tests)/[\w/.]+)`", page):
        assert (ROOT / path.replace("/VERSION", "")).exists(), path
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    assert set(rows("contributing.md", "marker")) == {re.split(r"[:(]", marker)[0] for marker in markers}


PROSE = [DOCS / page for page in PAGES if page != "configuration.md"] + sorted(ROOT.glob("*.md"))


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_wraps_at_100_characters(path: Path) -> None:
    """Tables, headings, code, pictures and single words may be longer; configuration.md is generated."""
    without_code = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.S | re.M)
    lines = [line for line in without_code.splitlines() if not re.match(r" {4}|\||#|!\[|<", line)]
    assert [line for line in lines if len(line) > 100 and " " in line.strip(" -*")] == []


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_configurations_of_a_page_are_toml(path: Path) -> None:
    """Indented blocks that begin with a table's head, where no part of them is left out."""
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", path.read_text(), re.M):
        lines = textwrap.dedent(block).strip()
        if re.match(r"\[+[\w.]+\]+\s", lines) and not re.search(r"^\s*…$|= …", lines, re.M):
            tomllib.loads(lines)


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(_pages_of(nav)) == PAGES


def _pages_of(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    children = entries.values() if isinstance(entries, dict) else entries
    return [page for child in children for page in _pages_of(child)]  # type: ignore[union-attr]


@pytest.mark.extra("material")
def test_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        html = page.read_text()
        assert not re.search(r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//', html), page
        assert not re.search(r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="(?:https?:)?//', html), page
        assert '<pre class="mermaid">' not in html, "the theme would fetch a library to draw it"

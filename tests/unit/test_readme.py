"""README and docs speak of what is there."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.records.rejection import Rejection
from swarm.sharing.reputation import Reputation

ROOT = Path(__file__).parents[2]
SECURITY = "\n".join(
    path.read_text() for path in [ROOT / "docs" / "security.md", *sorted((ROOT / "docs" / "security").glob("*.md"))]
)
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {command.split()[1] for command in COMMANDS if command.startswith("make ")}
    assert named == {"demo", "test"}
    assert named <= targets


@pytest.mark.essential
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("swarm ")])
def test_command_of_the_readme_is_understood(command: str) -> None:
    words = shlex.split(command)
    named = words[1:3] if words[1] == "silo" else words[1:2]
    told = CliRunner().invoke(app, [*named, "--help"], env={"COLUMNS": "200"}, prog_name="swarm")
    assert told.exit_code == 0, told.output
    options = [word for word in words[2:] if word.startswith("--") and "." not in word]
    assert all(option in told.stdout for option in options), told.stdout
    for word in words[2:]:
        if word.startswith("node_configs/"):
            assert (ROOT / word).exists()


def test_map_names_what_exists_and_all_of_it() -> None:
    block = README.split("```\nswarm/\n")[1].split("```")[0]
    inner = re.findall(r"^  (\S+)", block, re.M)
    top = re.findall(r"^(\S+)", block, re.M)
    assert all((ROOT / "swarm" / name).exists() for name in inner)
    assert all((ROOT / name).exists() for name in top)
    packages = {f"{path.parent.name}/" for path in (ROOT / "swarm").glob("*/__init__.py")}
    assert packages <= set(inner)


def test_links_and_pictures_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_tests_named_in_the_security_model_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", SECURITY):
        assert f"def {name}(" in sources, name
    for name in re.findall(r"`(tests/\S+)`", SECURITY):
        assert (ROOT / name).exists(), name


def test_every_promise_of_the_security_model_is_a_sentence_with_its_tests() -> None:
    promises = [section for section in re.split(r"^#+ ", SECURITY, flags=re.M) if "- **Tests:**" in section]
    assert len(promises) > 100
    for promise in promises:
        title, _, own = promise.partition("\n\n")
        assert re.match(r"[^-\n].*\.\s", own.split("\n- **", 1)[0] + " ", re.S), f"{title}: its promise is a sentence"
        assert re.search(r"- \*\*Tests:\*\*\s+`", own), title


def test_every_reason_of_admission_is_documented() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert all(f"| `{reason.value}` |" in page for reason in Rejection)


def test_the_security_model_says_of_every_reason_what_it_is_evidence_of() -> None:
    rows = [
        row for row in SECURITY.split("| reason | evidence |")[1].split("\n\n")[0].splitlines() if row.startswith("| `")
    ]
    told = {reason: row for row in rows for reason in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert set(told) == {reason.value for reason in Rejection}
    for reason in Rejection:
        reputation = Reputation(3600.0, lambda: 0.0)
        is_banned = reputation.refused("author", reason)
        bad = 1 / reputation.weight("author") - 2  # mean of Beta(1, 1 + bad)
        named = {"a false claim: bad 4": 4.0, "bad 1": 1.0, "bad ¼": 0.25, "none": 0.0}
        (expected,) = [
            value for words, value in named.items() if told[reason.value].split("|")[2].strip().startswith(words)
        ]
        assert bad == pytest.approx(expected), reason
        assert is_banned == (expected == 4.0)

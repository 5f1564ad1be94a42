"""The tools of a contributor: quick tests, mutants, hooks before a commit, and the hosted workflow."""

import re
from pathlib import Path

import pytest
import yaml

from tests import house, long, mutants, quick

TARGETS = set(re.findall(r"^([a-z]+):", (house.ROOT / "Makefile").read_text(), re.MULTILINE))


def test_quick_files_are_those_that_load_no_model_and_start_no_process() -> None:
    names = {file.name for file in quick.quick_files()}
    assert {"test_codec.py", "test_losses.py", "test_reputation.py", "test_token_bucket.py"} <= names
    assert not names & {
        "test_trainer.py",
        "test_cli.py",
        "test_sandbox.py",
        "test_index_guard.py",
        "test_import_rules.py",
    }
    models = re.compile(r"\b(make_policy|tiny_models|pipeline_models)\b")  # fixtures that load transformers
    assert [file.name for file in quick.quick_files() if models.search(file.read_text())] == []


def test_hooks_call_tools_of_the_environment_and_targets_that_exist() -> None:
    hooks = yaml.safe_load((house.ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"], "nothing is downloaded"
    entries = [hook["entry"].split() for repository in hooks["repos"] for hook in repository["hooks"]]
    assert entries and all(
        hook["language"] == "system" for repository in hooks["repos"] for hook in repository["hooks"]
    )
    for entry in entries:
        assert entry[1] in TARGETS if entry[0] == "make" else (house.ROOT / entry[0]).exists()


def test_workflows_run_what_everyone_runs_with_no_right_to_write() -> None:
    found: dict[str, list[str]] = {}
    for name in ("ci", "nightly"):
        workflow = yaml.safe_load((house.ROOT / f".github/workflows/{name}.yml").read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job, parts in workflow["jobs"].items():
            assert parts["timeout-minutes"] <= 60
            steps = parts["steps"]
            assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
            found[job] = [step["run"] for step in steps if "run" in step]
    assert found == {
        "check": [".ci/run"],
        "vllm": ["make vllm VLLM=cpu"],
        "lmeval": ["make lmeval"],
        "all": [".ci/run check"],
    }
    assert (house.ROOT / ".ci/run").read_text().splitlines()[-1] == 'make "${1:-test}"'
    assert {"test", "check"} <= TARGETS


def test_tests_that_are_listed_as_long_exist() -> None:
    listed = long.listed()
    assert sorted(listed.keys() - long.existing()) == [], "write tests/long.txt anew, as tests/long.py says"
    assert min(listed.values()) >= long.LIMIT_S
    assert long.name_of("tests/unit/test_x.py::TestZ::test_y[a::b]") == "tests.unit.test_x.TestZ.test_y"


def test_images_of_a_release_are_published_with_pinned_actions_and_least_rights() -> None:
    text = (house.ROOT / ".github/workflows/images.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}, "YAML reads `on` as true"
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "build": {"contents": "read", "packages": "write"},
        "publish": {"packages": "write"},
    }
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step)
    assert not [step for step in steps if "${{" in step.get("run", "")], "text of others would run as a command"
    assert all("GITHUB_TOKEN" not in str(step) or "docker login" in step["run"] for step in steps)
    built = {(one["kind"], one["arch"]) for one in jobs["build"]["strategy"]["matrix"]["include"]}
    assert built == {("cpu", "amd64"), ("cpu", "arm64"), ("gpu", "amd64")}
    assert all(f'"$image-{kind}-{arch}"' in text for kind, arch in built)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x = a < b", ["x = (a <= b)"]),
        ("x = a * b + 1", ["x = (a * b - 1)", "x = (a / b) + 1"]),
        ("if not a and b: pass", ["if (not a or b): pass", "if (a) and b: pass"]),
        ("x = 'ä' == b", ["x = ('ä' != b)"]),
        ("x = 0.5", []),
        ("assert a < 1", []),
        ("raise ValueError(a < 1)", []),
        ("logger.info('%d', 1 + 1)", []),
        ("def f(a: X | Y = True) -> X | Y: pass", ["def f(a: X | Y = False) -> X | Y: pass"]),
    ],
)
def test_changes_by_hand(line: str, changed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module.py").write_text(f"{line}\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert sorted(mutant.source.strip() for mutant in mutants.mutants_of(Path("module.py"))) == sorted(changed)


def test_a_module_is_tested_by_its_own_tests_first() -> None:
    for path in ("swarm/limits/token_bucket.py", "swarm/sharing/reputation.py", "swarm/records/codec.py"):
        assert mutants.nearest_tests(Path(path))[0] == f"tests/unit/test_{Path(path).name}"
    for subject in mutants.SUBJECTS:
        for path in house.SOURCE.glob(subject):
            assert path.name == "__init__.py" or mutants.nearest_tests(path.relative_to(house.ROOT)), path

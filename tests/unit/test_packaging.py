"""What is installed is whole: version, licence, data files, ready configurations, citation."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import trove_classifiers
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from swarm import __version__
from swarm.config import load
from swarm.config.load import ready_configs
from swarm.machine.child_python import DISTRIBUTION, install_extra

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
_SPEC = spec_from_file_location("lock", ROOT / "packaging" / "lock.py")  # `packaging` is also the name of a library
assert _SPEC and _SPEC.loader
lock = sys.modules["lock"] = module_from_spec(_SPEC)
_SPEC.loader.exec_module(lock)
SOURCES = ("swarm", "node_configs", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, to which a page is added that git would ignore."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    page = copy / "swarm" / "dashboard" / "static" / "added.js"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("// a page")
    (copy / ".gitignore").write_text("static/\n")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert built.returncode == 0, built.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return path


SAFE_SINCE = {
    "cryptography": "50.0",  # 44 to 49: padding oracle of PKCS#7
    "msgpack": "1.2.1",  # reads out of bounds where an unpacker is used again after an error
    "starlette": "1.3.1",  # the path of a request that the Host header decides; limits of forms
    "torch": "2.11",  # up to 2.9 memory corruption by weights_only files; 2.10 has a hole of its own
    "transformers": "5.14",  # up to 5.2 code of a config.json, to 5.12 files that a tokenizer names, to 5.13 that a config names
}
"""The first version of each package without a hole that was known when this was written."""


def test_no_version_is_allowed_that_is_known_to_have_a_hole() -> None:
    allowed = {name: minimum for name, _, minimum in (one.partition(">=") for one in PROJECT["dependencies"])}
    for name, first in SAFE_SINCE.items():
        assert Version(allowed[name]) >= Version(first), name


@pytest.mark.essential
def test_wheel_holds_every_data_file_and_the_ready_configurations(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    data = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "swarm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert data <= held
    assert "swarm/dashboard/static/added.js" in held
    assert {f"swarm/node_configs/{path.name}" for path in (ROOT / "node_configs").glob("*.toml")} <= held
    assert "swarm/py.typed" in held
    assert not any(name.startswith(("tests/", "runs/")) for name in held)


def test_wheel_tells_version_licence_and_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    folder = f"swarm_rl-{__version__}.dist-info"
    metadata = archive.read(f"{folder}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "swarm = swarm.cli.main:main" in archive.read(f"{folder}/entry_points.txt").decode()


def test_installed_wheel_runs_a_ready_configuration_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import swarm; assert 'site' in swarm.__file__\n"
        "from swarm.config import load; print(load(['node_configs/gpu-8gb.toml']).policy.quantization)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=60, env={}
    )
    assert ran.stdout.strip() == "4bit", ran.stderr


def test_ready_configurations_are_found_outside_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(["node_configs/silo.toml"]).network.backend == "off"
    assert (ready_configs() / "testbed.toml").exists()


def test_version_stands_in_one_place() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert "version" not in PROJECT


def test_classifiers_exist() -> None:
    assert set(PROJECT["classifiers"]) <= trove_classifiers.classifiers
    assert not any(
        classifier.startswith("License ::") for classifier in PROJECT["classifiers"]
    )  # refused beside an expression


def test_citation_has_the_needed_keys() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert all(set(author) & {"name", "family-names"} for author in citation["authors"])
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"


def test_changelog_begins_with_what_comes_or_is() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] in ("Unreleased", __version__)
    assert __version__ in headings


LOCKS = {
    "requirements.lock": 50,
    "requirements-dev.lock": 50,
    "requirements-build.lock": 5,
    "requirements-lmeval.lock": 25,
    "requirements-vllm.lock": 50,
    "requirements-vllm-cuda.lock": 40,
    "requirements-vllm-cpu.lock": 2,
}
"""{lock: fewer pins than it has}"""


def pins_of(lock: str) -> dict[str, str]:
    """{NAME==VERSION: the lines of its hashes}"""
    lines = [line for line in (ROOT / lock).read_text().splitlines() if not line.startswith("#")]
    hashes = r"((?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+)"
    pins = re.findall(rf"^(\S+==\S+)(?: ; [^\n]+?)? \\{hashes}$", "\n".join(lines), re.MULTILINE)
    assert len(pins) == sum("==" in line for line in lines)
    return dict(pins)


@pytest.mark.parametrize(("lock", "least"), LOCKS.items())
def test_every_pin_names_the_hashes_of_its_files(lock: str, least: int) -> None:
    """pip installs nothing else then, whichever index or mirror it asks."""
    pins = pins_of(lock)
    assert len(pins) > least and not any(pin.startswith("torch==") for pin in pins)


def test_the_tools_that_build_packages_are_pinned_as_elsewhere() -> None:
    build, others = pins_of("requirements-build.lock"), pins_of("requirements.lock") | pins_of("requirements-dev.lock")
    assert build.items() <= others.items()
    assert {"setuptools", "hatchling"} <= {pin.partition("==")[0] for pin in build}


def test_the_lock_of_vllm_has_only_what_the_others_do_not_have() -> None:
    others = pins_of("requirements.lock") | pins_of("requirements-dev.lock")
    shared, cpu, cuda = (pins_of(f"requirements-vllm{build}.lock") for build in ("", "-cpu", "-cuda"))
    assert not (shared.keys() | cpu.keys() | cuda.keys()) & others.keys()
    names = [pin.partition("==")[0] for pin in (*shared, *cuda)]
    assert len(set(names)) == len(names)


def test_both_builds_of_vllm_are_the_version_of_the_extra() -> None:
    (build,) = (pin for pin in pins_of("requirements-vllm-cpu.lock") if pin.startswith("vllm-cpu=="))
    version = build.partition("==")[2]
    assert f"vllm=={version}" in pins_of("requirements-vllm-cuda.lock")
    extra = {Requirement(text).name: Requirement(text) for text in PROJECT["optional-dependencies"]["vllm"]}
    assert extra["vllm"].specifier.contains(version)
    (plugin,) = (pin for pin in pins_of("requirements-vllm.lock") if pin.startswith("vllm-bnb-plugin=="))
    assert extra["vllm-bnb-plugin"].specifier.contains(plugin.partition("==")[2])


def locked_versions() -> dict[str, str]:
    """{name: version} of what `make setup` installs on this machine, torch included."""
    texts = ((ROOT / f"requirements{part}.lock").read_text() for part in ("", "-dev", "-torch"))
    return {
        canonicalize_name(name): version
        for text in texts
        for name, version, marker in re.findall(r"^([\w.-]+)==([^\s\\]+)(?: ; ([^\n]+?))?(?: \\)?$", text, re.M)
        if not marker or Marker(marker).evaluate()
    }


def installed(name: str) -> tuple[bool, set[str]]:
    """(whether it is pure Python, tags of the wheel that it was installed from; none where an old pip installed a source)."""
    text = importlib.metadata.distribution(name).read_text("WHEEL") or ""
    return "Root-Is-Purelib: false" not in text, set(re.findall(r"^Tag: (\S+)", text, re.M))


def test_the_locks_have_what_the_project_requires() -> None:
    locked = locked_versions()
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["dev"], *extras["wandb"], *PYPROJECT["dependency-groups"]["build"]):
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), f"{text}; run `make lock`"


def test_every_compiled_package_came_as_a_wheel() -> None:
    """What pip compiles itself has a platform without manylinux: such a package would need a compiler everywhere."""
    hashes = {pin.partition("==")[0]: lines.count("sha256") for pin, lines in pins_of("requirements.lock").items()}
    for name in locked_versions().keys() - {"torch"}:
        is_pure, tags = installed(name)
        platforms = {part for tag in tags for part in tag.rpartition("-")[2].split(".")}
        assert all(platform == "any" or platform.startswith(("manylinux", "macosx")) for platform in platforms), (
            name,
            tags,
        )
        if not is_pure and platforms != {"any"} and name in hashes:
            assert hashes[name] >= 3, (
                f"{name} must have a wheel for Linux on x86-64, Linux on ARM and macOS; run `make lock`"
            )


def test_what_is_built_from_source_is_pure_python() -> None:
    for name in lock.PURE_SOURCES:
        files = importlib.metadata.files(name) or []
        assert installed(name)[0] and files, name
        assert not [file for file in files if file.suffix in (".so", ".pyd", ".dylib", ".c")], name


def package_of(*platforms: str, **more: object) -> dict[str, Any]:
    wheels = [
        {"url": f"https://x/y/p-1.0-cp311-abi3-{platform}.whl", "hashes": {"sha256": f"{number:064d}"}}
        for number, platform in enumerate(platforms)
    ]
    return {"name": "p", "version": "1.0", "wheels": wheels, "sdist": {"hashes": {"sha256": "f" * 64}}, **more}


def test_a_lock_holds_the_wheels_for_our_machines_and_no_source() -> None:
    here = ("manylinux_2_17_x86_64", "manylinux2014_aarch64", "macosx_11_0_arm64")
    lines = lock.locked(package_of(*here, "win_amd64", "musllinux_1_2_x86_64", "macosx_10_9_x86_64")).splitlines()
    assert lines[0] == "p==1.0 \\"
    assert [int(line.strip(" \\").removeprefix("--hash=sha256:")) for line in lines[1:]] == [0, 1, 2]
    elsewhere = lock.locked(package_of(*here[:2], marker="sys_platform == 'linux'")).splitlines()
    assert elsewhere[0] == "p==1.0 ; sys_platform == 'linux' \\" and len(elsewhere) == 3


@pytest.mark.parametrize(
    "platforms",
    [
        (),  # as pycosat and fastecdsa
        ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64"),
        ("manylinux_2_17_x86_64", "macosx_11_0_arm64"),
        ("manylinux_2_39_x86_64", "manylinux_2_17_aarch64", "macosx_11_0_arm64"),  # too new a glibc
        ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64", "macosx_26_0_arm64"),
    ],
)
def test_no_package_is_locked_that_would_have_to_be_compiled(platforms: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match=r"p==1\.0 must have a wheel for every machine .* has none for Target"):
        lock.locked(package_of(*platforms))


def test_uv_is_told_what_the_two_packages_without_wheels_are_needed_for() -> None:
    """What stands in for reasoning-gym's own metadata differs from it by pycosat alone."""
    stated = PYPROJECT["tool"]["uv"]
    (gym,) = stated["dependency-metadata"]
    own = {Requirement(text) for text in importlib.metadata.requires("reasoning-gym") or [] if "extra ==" not in text}
    without = {Requirement(text) for text in gym["requires-dist"]}
    assert {one.name for one in own - without} == {"pycosat"} and without < own
    assert f"reasoning-gym=={gym['version']}" in PROJECT["dependencies"]
    excluded = [line for line in (ROOT / "packaging/excludes.txt").read_text().splitlines() if not line.startswith("#")]
    assert excluded == ["fastecdsa", "pycosat"]
    assert [Requirement(text).name for text in stated["override-dependencies"]] == ["fastecdsa"]
    assert not {"fastecdsa", "pycosat"} & locked_versions().keys()


def test_nothing_tells_anybody_to_install_a_package_that_is_not_ours() -> None:
    """swarm is on no index, and its distribution has another name than its command: whoever has that name gets no visitors."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "swarm").rglob("*.py"), ROOT / "Makefile"]
    by_name = re.compile(
        r"\b(?:pip|pipx|uv)3? [^\n`]*\b(?:install|inject|add|run)\b[^\n`]*[ '\"]swarm(?:[-_]rl)?(?:\[|==|>=|['\"`]|$)",
        re.M,
    )
    for path in texts:
        found = by_name.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name}: {found and found[0]}"
    assert PROJECT["name"] == DISTRIBUTION


def test_what_extras_need_is_said_as_the_project_has_it() -> None:
    assert install_extra("tensorboard").endswith(" -m pip install 'tensorboardx>=2.6'")
    for page, extra in (
        ("data", "data"),
        ("integrations", "wandb"),
        ("integrations", "otel"),
        ("integrations", "tensorboard"),
    ):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        assert all(f'"{package}"' in text for package in PROJECT["optional-dependencies"][extra]), extra


def test_the_environment_is_set_up_with_hashes() -> None:
    """Also of what runs while a package is built: pip checks no hash of what an isolated build fetches."""
    for name in ("Makefile", "Dockerfile", "docs/operations/running.md"):
        text = " ".join(
            re.sub("^PIP = .*", "", (ROOT / name).read_text(), flags=re.M).replace("$(PIP)", "pip install").split()
        )
        commands = re.findall(r"pip install ((?:(?!pip install)[^&#@])*)", text)
        assert any("-r requirements.lock" in command.replace("/src/", "") for command in commands), name
        for command in commands:
            if "requirements-torch.lock" not in command:
                built = "--no-build-isolation" in command or "requirements-build.lock" in command
                assert built and "--no-deps" in command, (name, command)
                assert "--require-hashes" in command or "lock" not in command, (name, command)

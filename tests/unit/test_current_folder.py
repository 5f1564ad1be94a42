"""What lies in the current folder is somebody else's: no command runs code of it."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from swarm.cli.main import app
from swarm.diagnostics.accelerator import PROBE
from swarm.machine import tethered
from swarm.machine.child_python import module_command, pip_install, swarm_command
from tests.swarm_process import swarm

SOURCE = Path(__file__).parents[2] / "swarm"
SHADOWED = (
    "swarm", "sitecustomize", "usercustomize", "resource", "json", "typing", "ctypes", "signal", "multiprocessing", "subprocess",
    "torch", "numpy", "pydantic", "typer", "rich", "matplotlib", "hivemind", "reasoning_gym", "pip",
)  # fmt: skip
MARK = "code-of-the-folder-ran"
ARGUMENTS: dict[str, list[str]] = {
    "bootstrap": ["--listen", "nonsense"],
    "chat": ["node"],
    "config schema": [],
    "config show": [],
    "create": ["mine", "--any-base"],
    "dashboard": [],
    "doctor": ["--no-network", "--network.backend", "libp2p"],
    "eval": ["--tasks", "1", "--policy.base", "absent/"],
    "experiment attacks": ["--arms", "nonsense"],
    "experiment heterogeneous": ["--seeds", "nonsense"],
    "experiment merging": ["--seeds", "nonsense"],
    "experiment offpolicy": ["--seeds", "nonsense"],
    "experiment recovery": ["--seeds", "nonsense"],
    "experiment sharing": ["--seeds", "nonsense"],
    "export": ["out", "--dir", "node"],
    "identity export": ["backup"],
    "identity import": ["backup"],
    "identity lock": [],
    "identity rotate": [],
    "identity show": [],
    "identity unlock": [],
    "init": ["node"],
    "join": ["absent.swarm.toml"],
    "logs": ["node"],
    "merge": ["one", "two", "--out", "both"],
    "peers": ["node"],
    "pull": ["absent.swarm.toml", "out"],
    "report": ["node"],
    "run": ["--supervised", "--node.dir", "matplotlibrc"],
    "sample": ["--prompt", "x", "--policy.base", "absent/"],
    "serve": ["node"],
    "silo init": ["quiet"],
    "silo invite": ["nonsense"],
    "silo join": ["nonsense"],
    "silo members": [],
    "silo request": [],
    "silo revoke": ["nonsense"],
    "silo rotate": [],
    "stage": ["--node.device", "nonsense"],
    "status": ["node"],
    "tasks check": ["--tasks", "1", "--json"],
    "testbed": ["--nodes", "1", "--node.device", "nonsense"],
    "top": ["node"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that shadows what this software imports, in packages and in modules."""
    code = f"import os\nos.close(os.open({str(tmp_path / MARK)!r}, os.O_CREAT))\nos._exit(77)\n"
    for name in SHADOWED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
        (tmp_path / name / "__main__.py").write_text(code)
    (tmp_path / "matplotlibrc").write_text("font.size: 77\n")
    return tmp_path


def commands() -> Iterator[str]:
    top = get_command(app)
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        yield from (f"{name} {part}" for part in inner) if inner else (name,)


def test_every_command_is_tried() -> None:
    assert set(commands()) == ARGUMENTS.keys()


@pytest.mark.parametrize("command", ARGUMENTS)
def test_no_command_runs_code_of_the_current_folder(folder: Path, command: str) -> None:
    ended = swarm(*command.split(), *ARGUMENTS[command], cwd=folder)
    assert not (folder / MARK).exists() and ended.returncode != 77, ended.stderr


@pytest.mark.parametrize(
    "command",
    [
        swarm_command("--version"),
        tethered.command(os.getpid(), swarm_command("--version")),
        module_command("swarm.experiments.cell_process", "absent", "absent"),
        module_command("swarm.tasks.verifier_process"),
        [*PROBE[:-1], "swarm.diagnostics.machine"],  # without torch, which takes seconds
        [*pip_install("--help").split()],
    ],
)
def test_no_start_of_ourselves_takes_a_module_of_the_current_folder(folder: Path, command: list[str]) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert not (folder / MARK).exists() and ended.returncode != 77, ended.stderr


def test_interpreters_that_libraries_start_leave_the_current_folder_out(folder: Path) -> None:
    """As the processes of multiprocessing, which begin with `python -c`."""
    script = "import os, subprocess, sys; from swarm.machine.child_python import keep_current_folder_off_the_path; "
    script += "keep_current_folder_off_the_path(); "
    script += "sys.exit(subprocess.run([sys.executable, '-c', 'import multiprocessing.spawn']).returncode)"
    ended = subprocess.run([sys.executable, "-P", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and not (folder / MARK).exists(), ended.stderr


def test_drawing_reads_no_settings_of_the_current_folder(folder: Path) -> None:
    script = "from swarm.report import plot; plot.new_figure(1); import matplotlib; "
    script += "print(matplotlib.rcParams['font.size'])"
    command = [sys.executable, "-P", "-c", script]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "10.0", ended.stderr


@pytest.mark.essential
def test_only_one_place_starts_python() -> None:
    """Beside the sandbox and the helper that ends a stuck process, which isolate more, and the processes that answer lines."""
    known = {
        SOURCE / name
        for name in (
            "machine/child_python.py",
            "sandbox/runner.py",
            "machine/stop_signals.py",
            "sandbox/line_process.py",
        )
    }
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert path in known or "sys.executable" not in names, (
            f"{path} must start Python with swarm.machine.child_python"
        )
        starting = ("multiprocessing", "concurrent.futures.process")
        started = {name for name in imported if name.startswith(starting)}
        assert started <= {"multiprocessing.connection"}, path  # which only connects
        assert "ProcessPoolExecutor" not in path.read_text(), path

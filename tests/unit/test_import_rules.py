"""Who may import whom, read from the source; and which commands start without torch."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "swarm"
EVERYONE = {"types", "errors", "config", "extensions", "limits", "machine", "observability", "__init__", "__version__"}
ALLOWED: dict[str, set[str]] = {
    "api": {
        "adapters", "engine", "manifest", "node", "policy", "records", "report", "sandbox", "silo", "tasks", "testbeds",
        "warm_start",
    },
    "machine": set(),
    "limits": set(),
    "config": set(),
    "extensions": set(),
    "observability": set(),
    "records": set(),
    "sandbox": set(),
    "adapters": set(),
    "tasks": {"sandbox"},
    "warm_start": {"adapters", "policy", "tasks", "training"},
    "admission": {"records", "tasks"},
    "network": {"records"},  # the identity is the libp2p key
    "pool": {"records"},  # groups are kept in the wire format
    "policy": {"adapters", "sandbox"},  # a base's chat template is a program
    "engine": {"policy", "adapters"},
    "rollouts": {"tasks", "policy", "engine", "adapters"},
    "training": {"policy", "adapters"},
    "pipeline": {"policy", "adapters", "engine"},
    "sharing": {"tasks", "records", "admission", "network", "pool"},
    "merging": {"adapters", "records", "network", "sharing", "tasks", "policy", "rollouts", "training", "node"},
    "merging/exchange": {"merging", "records", "network", "sharing"},  # adapters are bytes here
    "manifest": {"records", "tasks", "network", "policy", "warm_start"},
    "silo": {"records", "network", "manifest"},
    "node": {
        "adapters", "admission", "dashboard", "engine", "integrations", "merging", "network", "pipeline", "policy", "pool",
        "records", "rollouts", "sharing", "silo", "tasks", "training", "warm_start",
    },
    "serving": {"api", "dashboard", "engine", "policy", "tasks"},
    "integrations": {"adapters", "records"},
    "dashboard": {"records", "node"},
    "report": {"dashboard", "records"},
    "testbeds": {"records", "report"},
    "diagnostics": {"records", "network", "silo"},  # torch in a program of its own only
    "simulation": {"tasks", "records", "admission", "network", "pool", "sharing"},
    "experiments": {
        "tasks", "policy", "engine", "rollouts", "records", "admission", "pool", "training", "sharing", "adapters", "merging",
        "pipeline", "node", "report", "assets",
        "network", "simulation",  # in memory, for hostile names, on the virtual clock
    },
}  # fmt: skip
TORCH_FREE = {
    "config", "extensions", "machine", "limits", "observability", "sandbox", "tasks", "records", "admission",
    "network", "pool", "sharing", "merging/exchange", "silo", "simulation", "cli", "testbeds", "dashboard", "report",
}  # fmt: skip


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Dotted modules that a file imports anywhere, function bodies included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.essential
@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_package_imports_only_what_it_may(package: str) -> None:
    may = ALLOWED[package] | EVERYONE | {package.split("/")[0]}
    for path in (ROOT / package).rglob("*.py"):
        used = {name.split(".")[1] for name in imports_of(path) if name.startswith("swarm.")}
        assert used <= may, f"{path.relative_to(ROOT)} imports {sorted(used - may)}"


@pytest.mark.parametrize("library", ["hivemind", "libp2p", "trio"])
def test_each_network_library_stays_in_its_own_package(library: str) -> None:
    home = ROOT / "network" / ("libp2p" if library == "trio" else library)
    users = {path for path in ROOT.rglob("*.py") if library in {name.split(".")[0] for name in imports_of(path)}}
    assert users and all(path.is_relative_to(home) for path in users), users


def test_every_package_has_a_rule() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == {name for name in ALLOWED if "/" not in name} | {"cli", "assets"}, (
        "a package without a rule, or a rule without a package"
    )


@pytest.mark.parametrize("package", sorted(TORCH_FREE))
def test_torch_is_not_imported_by_the_network_side(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        heavy = {name.split(".")[0] for name in imports_of(path)} & {"torch", "transformers", "peft", "safetensors"}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"


COMMANDS = [
    ["--help"], ["run", "--help"], ["config", "show"], ["run", "--dry-run"], ["status", "--help"], ["dashboard", "--help"],
    ["report", "--help"], ["doctor", "--help"], ["join", "--help"], ["create", "--help"], ["stage", "--help"],
    ["serve", "--help"], ["chat", "--help"],
]  # fmt: skip


@pytest.mark.essential
def test_commands_start_without_torch() -> None:
    """One after the other in one process, in which each must end well with none of the large libraries imported."""
    script = (
        "import sys\nfrom swarm.cli.main import _run\n"
        f"for words in {COMMANDS!r}:\n"
        "    sys.argv = ['swarm', *words]\n    code = _run()\n"
        "    heavy = {'torch', 'transformers', 'hivemind', 'reasoning_gym', 'matplotlib'} & set(sys.modules)\n"
        "    if heavy or code:\n        sys.exit(f'{words}: code {code}, imports {sorted(heavy)}')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-500:]

"""The unit for systemd agrees with what the node's exit codes mean, and leaves the sandbox what it needs."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import NEEDS_A_PERSON, StuckError
from swarm.node.node import _STOP_GRACE_S
from tests.swarm_process import swarm
from tests.unit.test_join import ADDRESS

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "packaging" / "systemd" / "swarm-node.service").read_text()
SETTINGS = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.M))


def test_the_unit_starts_again_exactly_what_another_start_may_mend() -> None:
    kept_down = {int(code) for code in SETTINGS["RestartPreventExitStatus"].split()}
    assert kept_down == NEEDS_A_PERSON
    assert SETTINGS["Restart"] == "on-failure"
    assert SETTINGS["SuccessExitStatus"] == "130"
    assert StuckError.exit_code not in kept_down and "--end-when-stuck" in SETTINGS["ExecStart"]


def test_a_stop_leaves_the_node_the_time_it_takes() -> None:
    assert SETTINGS["KillSignal"] == "SIGTERM"
    assert float(SETTINGS["TimeoutStopSec"]) > 4 * _STOP_GRACE_S


def test_the_unit_is_hardened_but_for_what_the_sandbox_for_code_needs() -> None:
    assert SETTINGS["NoNewPrivileges"] == "yes" and SETTINGS["ProtectSystem"] == "strict"
    assert not {"RestrictNamespaces", "PrivateUsers", "SystemCallFilter"} & SETTINGS.keys()


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """Where its checker is installed; everywhere, no key stands there twice without a meaning."""
    keys = re.findall(r"^(\w+)=", UNIT, re.M)
    assert len(keys) == len(set(keys))
    if checker := shutil.which("systemd-analyze"):
        (tmp_path / "swarm-node.service").write_text(UNIT.replace("/opt/swarm/bin/swarm", sys.executable))
        command = [checker, "verify", "--man=no", str(tmp_path / "swarm-node.service")]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert told.returncode == 0 and "swarm-node" not in told.stderr, told.stderr


def recipe() -> list[list[str]]:
    """The commands of the page, in the order in which they are typed."""
    page = (ROOT / "docs" / "operations" / "running.md").read_text()
    section = page.partition("## With systemd")[2].partition("\n## ")[0]
    return [shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", section, re.S) for line in block.splitlines()]


def named(*words: str) -> list[str]:
    """The one command of the recipe that has all these words."""
    (found,) = (command for command in recipe() if set(words) <= set(command))
    return found


def test_the_recipe_makes_what_the_unit_names() -> None:
    state = f"/var/lib/{SETTINGS['StateDirectory']}"
    assert named("useradd")[-1] == SETTINGS["User"] == SETTINGS["Group"]
    assert {state, "--user-group"} <= set(named("useradd"))
    assert named("--directory")[-1] == state == SETTINGS["WorkingDirectory"]
    assert named("--directory")[-2].lstrip("0") == SETTINGS["StateDirectoryMode"].lstrip("0")
    assert f"{named('venv')[-1]}/bin/swarm" == SETTINGS["ExecStart"].split()[0]
    assert (ROOT / named("--mode", "644", "/etc/systemd/system/")[4]).is_file()
    assert named("tee")[-1] == SETTINGS["EnvironmentFile"].lstrip("-")
    order = [" ".join(command) for command in recipe()]
    steps = [
        "useradd",
        "-m venv",
        "requirements-build.lock",
        "requirements.lock",
        "--no-deps .",
        "daemon-reload",
        "enable --now",
    ]
    places = [next(place for place, command in enumerate(order) if step in command) for step in steps]
    assert places == sorted(places)


@pytest.mark.parametrize("joins", [False, True])
def test_the_recipe_and_then_the_command_of_the_unit_start_a_node(tmp_path: Path, joins: bool) -> None:
    """As typed and as systemd runs it, with its folders elsewhere; the node itself only says what it would do."""

    def here(*words: str) -> list[str]:
        moved = [re.sub("^(/var/lib/swarm|/etc/swarm)", str(tmp_path), word) for word in words]
        return moved[moved.index("/opt/swarm/bin/swarm") + 1 :]

    settings = re.search(r'"SWARM_NODE=(.*)"', SETTINGS["Environment"])
    assert settings is not None
    chosen = settings[1]
    if joins:
        assert swarm("create", "friends", "--bootstrap", ADDRESS, cwd=tmp_path).returncode == 0
        chosen = named("tee")[1].partition("=")[2]
        manifest = named("install", "-D")
        assert manifest[-1] in chosen and (tmp_path / manifest[-2]).is_file()
        checked = swarm(*here(*named("--check")), "--network.listen", '["/ip4/127.0.0.1/tcp/0"]', cwd=tmp_path)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    else:
        assert swarm(*here(*named("init")), cwd=tmp_path).returncode == 0
    command = shlex.split(SETTINGS["ExecStart"].replace("$SWARM_NODE", chosen))
    ended = swarm(*here(*command), "--dry-run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f'dir = "{tmp_path}/node"' in ended.stdout

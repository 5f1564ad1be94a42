"""The unit for systemd agrees with what the node's exit codes mean, and leaves the sandbox what it needs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from swarm.errors import NEEDS_A_PERSON, StuckError
from swarm.node.node import _STOP_GRACE_S

UNIT = (Path(__file__).parents[2] / "packaging" / "systemd" / "swarm-node.service").read_text()
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

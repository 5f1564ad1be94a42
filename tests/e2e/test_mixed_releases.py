"""A node of the first release and nodes of this one in one swarm: they go on with what both know, and say what they do not."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from swarm.observability.status_file import read_status
from tests.e2e.node_process import NodeProcess, Process, node_settings, wait_for

ROOT = Path(__file__).parents[2]
FIRST_RELEASE = "d76962c"
"""The commit whose formats are those of 0.1.0."""
DEADLINE_S = 240.0


class ReleasedNode(NodeProcess):
    """`swarm run` of a released version, with the packages of this environment."""

    process: Process

    def __init__(self, release: Path, settings: dict[str, Any]) -> None:
        self.folder = Path(settings["node"]["dir"])
        self.folder.mkdir(mode=0o700)
        config = self.folder.with_suffix(".toml")
        config.write_text(tomli_w.dumps(settings))
        self.output = self.folder.with_suffix(".out")
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swarm.cli.main", "run", str(config)], stdout=output, stderr=output, cwd=release,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(release)},
            )  # fmt: skip


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its source. Skips where the clone does not have it, as a shallow one."""
    archive = subprocess.run(["git", "archive", FIRST_RELEASE, "swarm"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history of this clone does not reach back to {FIRST_RELEASE}")
    folder = tmp_path_factory.mktemp("release")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    # It imports this package, which has to be compiled, for a task that is not used here.
    (folder / "pycosat.py").write_text("")
    return folder


def settings(folder: Path, *initial_peers: str) -> dict[str, Any]:
    return node_settings(folder, network={"poll_interval_s": 0.2, "initial_peers": list(initial_peers)})


@pytest.mark.timeout(600)
def test_the_first_release_and_this_one_stay_connected_and_train_on_what_both_can_check(
    tmp_path: Path, release: Path
) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(ReleasedNode(release, settings(tmp_path / "old")))
        address = old.address()  # the swarm is one that the old release founded
        new = [stack.enter_context(NodeProcess(settings(tmp_path / name, address))) for name in ("new0", "new1")]
        old_id = read_status(old.folder / "status.json").peer_id

        def is_told() -> bool:
            statuses = [node.status() for node in new]
            return all(
                status is not None
                and status.last_round.get("train/swarm_groups_total", 0) > 0
                and any("score them by other rules" in line for line in status.contribution.get("advice", ()))
                for status in statuses
            )

        wait_for(
            lambda: is_told() or None, "exchange, and advice about the old release", old, *new, deadline_s=DEADLINE_S
        )
        num_rounds = len(old.rounds)
        wait_for(lambda: len(old.rounds) > num_rounds or None, "round of the old release", old, deadline_s=DEADLINE_S)
        for node in new:
            status = read_status(node.folder / "status.json")
            (of_old,) = [peer for peer in status.peers if peer["peer_id"] == old_id]
            assert of_old["banned_until"] <= time.time(), "other rules are no offence"
        new_ids = {read_status(node.folder / "status.json").peer_id for node in new}

        def seen_by_old() -> dict[str, float] | None:
            until = {peer["peer_id"]: peer["banned_until"] for peer in read_status(old.folder / "status.json").peers}
            return until if new_ids <= until.keys() else None

        banned_until = wait_for(seen_by_old, "headers of the new ones at the old one", old, deadline_s=DEADLINE_S)
        assert all(banned_until[peer] <= time.time() for peer in new_ids)
        for node in new:
            node.signal(2)
            assert node.wait() in (0, 130)

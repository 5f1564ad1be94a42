"""A policy over several processes: one of them is killed, a spare takes its layers, and nothing else starts anew."""

import signal
import tomllib
from pathlib import Path

import pytest

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import PolicySection
from swarm.observability.status_file import read_status
from swarm.policy.policy import load_policy
from tests.e2e.crew_processes import crew_processes
from tests.e2e.node_process import NodeProcess, wait_for

SETTINGS = {
    "rollouts": {"groups_per_round": 2, "group_size": 4, "max_new_tokens": 6},
    "sharing": {"own_groups": 2, "swarm_groups": 0, "publish": False},
    "training": {"filter_groups": False, "mask_truncated": False, "correction": "none"},
    "checkpoint": {"interval_rounds": 1},
}


@pytest.mark.alone
def test_a_killed_stage_is_taken_over_by_a_spare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = {"spares": 1, "copy_interval_steps": 1}
    with crew_processes(tmp_path, 4, layers=("0:1", "1:2", "2:3"), pipeline=pipeline, **SETTINGS) as crew:
        crew.step_after(2)
        middle = crew.holders()[1]
        took_s, row = crew.lose(middle)
        with capsys.disabled():
            print(f"\nkilled to next completed step: {took_s:.1f} s")
        assert crew.holders()[1] is not middle
        assert [stage.process.poll() is None for stage in crew.stages].count(False) == 1, "only the killed one ended"
        lost = [row for row in crew.driver.rounds if "stage 1" in str(row.get("train/skip_reason"))]
        assert len(lost) <= 1
        crew.step_after(row["policy_version"] + 1)
        crew.driver.signal(signal.SIGINT)
        assert crew.driver.wait(30) in (0, 130)
        told = read_status(middle.folder / "status.json")
        assert told.command == "stage", "how to start it again"
        for stage in crew.stages:
            if stage is not middle:
                stage.process.send_signal(signal.SIGINT)
                assert stage.process.wait(10) == 0
                assert "stopped" in stage.output.read_text()
    checkpoint = CheckpointStore(tmp_path / "driver" / "checkpoints", 3).load_newest()
    assert checkpoint is not None
    single = load_policy(PolicySection(), device="cpu")
    assert checkpoint.state["lineage"]["policy"] == single.lineage.policy
    assert any(tensor.abs().max() > 0 for name, tensor in checkpoint.tensors["adapter"].items() if "lora_B" in name)


def test_a_killed_driver_takes_its_crew_over_from_the_last_checkpoint(tmp_path: Path) -> None:
    with crew_processes(tmp_path, 2, layers=("0:1", "1:3"), **SETTINGS) as crew:
        crew.step_after(2)
        crew.driver.kill_9()
        before = CheckpointStore(crew.driver.folder / "checkpoints", 3).load_newest()
        assert before is not None
        with NodeProcess(tomllib.loads(crew.driver.folder.with_suffix(".toml").read_text())) as again:
            version = before.state["policy_version"]
            row = wait_for(
                lambda: row if (row := again.last_round).get("policy_version", 0) > version + 1 else None,
                "steps of the crew under its new driver", again, deadline_s=180.0,
            )  # fmt: skip
            assert row["round"] > before.round
            rounds = [row["round"] for row in again.rounds]
            assert sorted(set(rounds)) == list(range(1, rounds[-1] + 1)), "it goes on where the checkpoint stands"
        assert all(stage.process.poll() is None for stage in crew.stages), "no machine of the crew started anew"

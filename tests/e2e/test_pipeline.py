"""A policy over several processes: one of them is killed, a spare takes its layers, and nothing else starts anew."""

import signal
import tomllib
from pathlib import Path

import pytest

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import PolicySection
from swarm.observability.status_file import read_status
from swarm.policy.policy import load_policy
from tests.e2e.node_process import NodeProcess, wait_for
from tests.e2e.pipeline_processes import pipeline_processes

SETTINGS = {
    "rollouts": {"groups_per_round": 2, "group_size": 4, "max_new_tokens": 6},
    "sharing": {"own_groups": 2, "swarm_groups": 0, "publish": False},
    "training": {"filter_groups": False, "mask_truncated": False, "correction": "none"},
    "checkpoint": {"interval_rounds": 1},
}


@pytest.mark.alone
def test_a_killed_stage_is_taken_over_by_a_spare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = {"spares": 1, "copy_interval_steps": 1}
    with pipeline_processes(tmp_path, 4, layers=("0:1", "1:2", "2:3"), pipeline=pipeline, **SETTINGS) as machines:
        machines.step_after(2)
        middle = machines.holders()[1]
        took_s, row = machines.lose(middle)
        with capsys.disabled():
            print(f"\nkilled to next completed step: {took_s:.1f} s")
        assert machines.holders()[1] is not middle
        assert [stage.process.poll() is None for stage in machines.stages].count(False) == 1, (
            "only the killed one ended"
        )
        lost = [row for row in machines.driver.rounds if "stage 1" in str(row.get("train/skip_reason"))]
        assert len(lost) <= 1
        machines.step_after(row["policy_version"] + 1)
        machines.driver.signal(signal.SIGINT)
        assert machines.driver.wait(30) in (0, 130)
        status = read_status(middle.folder / "status.json")
        assert status.command == "stage", "how to start it again"
        for stage in machines.stages:
            if stage is not middle:
                stage.process.send_signal(signal.SIGINT)
                assert stage.process.wait(10) == 0
                assert "stopped" in stage.output.read_text()
    checkpoint = CheckpointStore(tmp_path / "driver" / "checkpoints", 3).load_newest()
    assert checkpoint is not None
    single = load_policy(PolicySection(), device="cpu")
    assert checkpoint.state["lineage"]["policy"] == single.lineage.policy
    assert any(tensor.abs().max() > 0 for name, tensor in checkpoint.tensors["adapter"].items() if "lora_B" in name)


@pytest.mark.essential
def test_a_killed_driver_takes_its_pipeline_over_from_the_last_checkpoint(tmp_path: Path) -> None:
    with pipeline_processes(tmp_path, 2, layers=("0:1", "1:3"), **SETTINGS) as machines:
        machines.step_after(2)
        store = CheckpointStore(machines.driver.folder / "checkpoints", 3)
        wait_for(store.newest_round, "a checkpoint", machines.driver)
        machines.driver.kill_9()
        before = store.load_newest()
        assert before is not None
        with NodeProcess(tomllib.loads(machines.driver.folder.with_suffix(".toml").read_text())) as again:
            version = before.state["policy_version"]
            row = wait_for(
                lambda: row if (row := again.last_round).get("policy_version", 0) > version + 1 else None,
                "steps of the pipeline under its new driver", again, deadline_s=180.0,
            )  # fmt: skip
            assert row["round"] > before.round
            rounds = [row["round"] for row in again.rounds]
            assert sorted(set(rounds)) == list(range(1, rounds[-1] + 1)), "it goes on where the checkpoint stands"
        assert all(stage.process.poll() is None for stage in machines.stages), "no machine of the pipeline started anew"

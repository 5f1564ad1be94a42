"""`swarm.Node`: a real node process behind the Python interface."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

import swarm
from swarm.errors import CheckpointError, PolicyError

SMALL = {
    "network": {"backend": "off"},
    "sharing": {"swarm_groups": 0, "publish": False},
    "rollouts": {"groups_per_round": 2, "group_size": 4, "max_new_tokens": 8},
    "evaluation": {"tasks_per_source": 0},
}


def node_in(folder: Path, **sections: dict[str, object]) -> swarm.Node:
    return swarm.Node.from_config(**SMALL | {"node": {"dir": str(folder), "seed": 3}} | sections)


@pytest.mark.timeout(180)
def test_a_node_learns_goes_on_answers_and_is_saved(tmp_path: Path) -> None:
    node = node_in(tmp_path / "node")
    with pytest.raises(CheckpointError, match="none in"):
        _ = node.policy
    first = list(node.run(rounds=2))
    assert [done.number for done in first] == [1, 2]
    assert all(0 <= done.reward <= 1 and done.own_groups <= 2 and done.swarm_groups == 0 for done in first)

    async def cell_of_a_notebook() -> list[swarm.Round]:
        """A loop runs already."""
        return list(node.run(rounds=1))

    assert [done.number for done in asyncio.run(cell_of_a_notebook())] == [3]
    records = node.metrics()
    assert [row["round"] for row in records] == [1, 2, 3] == [*range(1, node.num_rounds + 1)]
    assert records[0]["rollout/reward_mean"] == first[0].reward == first[0].metrics["rollout/reward_mean"]

    policy = node.policy
    answers = policy.sample("2 + 2 = ", n=3, seed=5, max_new_tokens=4)
    assert (
        policy.round == 3 and len(answers) == 3 and answers == policy.sample("2 + 2 = ", n=3, seed=5, max_new_tokens=4)
    )
    assert len({*policy.sample("2 + 2 = ", n=2, temperature=0)}) == 1
    assert json.loads((policy.save(tmp_path / "adapter") / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (policy.save(tmp_path / "merged", merged=True) / "config.json").exists()
    with pytest.raises(PolicyError, match="adapter"):
        policy.save(tmp_path / "adapter")

    again = list(node.run(rounds=1, fresh=True))
    assert [done.number for done in again] == [1] and [row["round"] for row in node.metrics()] == [1]
    assert (tmp_path / "node" / "previous-001").is_dir()


@pytest.mark.timeout(120)
def test_a_loop_that_is_left_ends_the_node_in_good_order(tmp_path: Path) -> None:
    node = node_in(tmp_path / "node")
    started = psutil.Process()
    for done in node.run():
        running = [one for one in started.children(recursive=True) if "run" in one.cmdline()]
        assert done.number == 1 and running
        break
    assert not any(one.is_running() for one in running)
    assert [done.number for done in node.run(rounds=1)] == [node.num_rounds]
    assert "end" in [json.loads(line)["kind"] for line in (node.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(120)
def test_what_ends_a_node_is_raised_with_its_own_kind(tmp_path: Path) -> None:
    node = node_in(tmp_path / "node", policy={"base": str(tmp_path / "no-model")})
    with pytest.raises(PolicyError, match="no-model"):
        next(node.run(rounds=1))

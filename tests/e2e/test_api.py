"""`swarm.Node`: a real node process behind the Python interface."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import swarm
from swarm.errors import CheckpointError, PolicyError, SwarmError

SMALL = {
    "network": {"backend": "off"},
    "sharing": {"swarm_groups": 0, "publish": False},
    "rollouts": {"groups_per_round": 2, "group_size": 4, "max_new_tokens": 8},
    "evaluation": {"tasks_per_source": 0},
}


def node_in(folder: Path, **sections: dict[str, object]) -> swarm.Node:
    return swarm.Node.from_config(**SMALL | {"node": {"dir": str(folder), "seed": 3}} | sections)


@pytest.mark.essential
@pytest.mark.timeout(180)
def test_a_node_learns_goes_on_answers_and_is_saved(tmp_path: Path) -> None:
    node = node_in(tmp_path / "node")
    with pytest.raises(CheckpointError, match="none in"):
        _ = node.policy
    first = list(node.run(rounds=2))
    assert [done.number for done in first] == [1, 2]
    assert all(0 <= done.reward <= 1 and done.own_groups <= 2 and done.swarm_groups == 0 for done in first)

    records = node.metrics()
    assert [row["round"] for row in records] == [1, 2] == [*range(1, node.num_rounds + 1)]
    assert records[0]["rollout/reward_mean"] == first[0].reward == first[0].metrics["rollout/reward_mean"]

    policy = node.policy
    answers = policy.sample("2 + 2 = ", n=3, seed=5, max_new_tokens=4)
    assert (
        policy.round == 2 and len(answers) == 3 and answers == policy.sample("2 + 2 = ", n=3, seed=5, max_new_tokens=4)
    )
    assert len({*policy.sample("2 + 2 = ", n=2, temperature=0)}) == 1
    assert json.loads((policy.save(tmp_path / "adapter") / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (policy.save(tmp_path / "merged", merged=True) / "config.json").exists()
    with pytest.raises(PolicyError, match="adapter"):
        policy.save(tmp_path / "adapter")

    async def cell_of_a_notebook() -> list[swarm.Round]:
        """A loop runs already."""
        return list(node.run(rounds=1, fresh=True))

    assert [done.number for done in asyncio.run(cell_of_a_notebook())] == [1]
    assert [row["round"] for row in node.metrics()] == [1]
    assert (tmp_path / "node" / "previous-001").is_dir()


@pytest.mark.timeout(120)
def test_what_ends_a_node_is_raised_with_its_own_kind(tmp_path: Path) -> None:
    node = node_in(tmp_path / "node", policy={"base": str(tmp_path / "no-model")})
    with pytest.raises(PolicyError, match="no-model"):
        next(node.run(rounds=1))


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.timeout(600)
def test_every_example_of_the_page_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer rounds. The functions are those of a module, as those of a script are."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text(re.sub(r"rounds=\d+", "rounds=3", "\n".join(blocks)))
    ended = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True, timeout=580)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(list((tmp_path / "runs").glob("train-*"))) == 2, "another reward has another folder"
    for folder in ("from-python", "bed/node-1", "bed/node-2"):
        assert '"round": 3' in (tmp_path / "runs" / folder / "metrics.jsonl").read_text()
    assert (tmp_path / "out" / "adapter_config.json").exists() and (tmp_path / "runs/bed/summary.json").exists()
    assert "reward/exact" in ended.stdout and "node-1 listens on" in ended.stdout


SCRIPT = """
import swarm
rows = [{"prompt": f"{a} + {b} = ", "answer": a + b} for a in range(9) for b in range(9)]
def my_reward(task, answer):
    return float(answer[:1] == task.answer[:1])
trained = swarm.train("bundled", my_reward, rows, rounds=ROUNDS, evaluation={"tasks_per_source": 2},
                      rollouts={"groups_per_round": 2, "group_size": 4, "max_new_tokens": 8}, network={"backend": "off"})
print("done", len(trained.metrics()), trained.evaluation.before is not None)
"""
"""Without `if __name__ == "__main__"`."""


def last_round(folder: Path) -> int:
    files = [*folder.glob("runs/train-*/metrics.jsonl")]
    rows = [json.loads(line) for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    return max((row["round"] for row in rows if row["kind"] == "round"), default=0)


def wait_for_round(folder: Path, number: int, is_alive: Any) -> None:
    until = time.monotonic() + 200
    while last_round(folder) < number:
        assert is_alive() and time.monotonic() < until
        time.sleep(0.1)  # between two looks at another process's file


@pytest.mark.timeout(300)
def test_a_script_that_is_interrupted_goes_on_when_it_runs_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace("ROUNDS", "100000"))
    first = subprocess.Popen([sys.executable, "mine.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    family: list[psutil.Process] = []
    try:
        wait_for_round(tmp_path, 2, lambda: first.poll() is None)
        family = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=40)
        assert first.returncode == -signal.SIGINT and said.rstrip().endswith("KeyboardInterrupt")
        assert psutil.wait_procs(family, timeout=5)[1] == []
    finally:
        first.kill()
        for left in psutil.wait_procs(family, timeout=0)[1]:
            left.kill()
    done = last_round(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT.replace("ROUNDS", str(done + 2)))
    again = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.rstrip().endswith(f"done {done + 2} True")
    assert len([*tmp_path.glob("runs/train-*")]) == 1, "the same call has the same folder"
    assert f"{done + 2}/{done + 2}" in again.stdout


@pytest.mark.extra("ipykernel")
@pytest.mark.timeout(400)
def test_a_cell_that_is_interrupted_goes_on_when_it_runs_again(tmp_path: Path) -> None:
    """With a real kernel: the reward is a function of a cell, and a loop that a cell has left does not block the next."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(tmp_path), env=os.environ | {"OMP_NUM_THREADS": "1"})
    told: list[str] = []

    def heard(message: Any) -> None:
        told.append(str(message["content"]))

    def run(code: str) -> str:
        reply = client.execute_interactive(code, output_hook=heard, timeout=200)
        return reply["content"].get("ename", reply["content"]["status"])

    try:
        assert run(SCRIPT.partition("trained =")[0]) == "ok"
        call = f"trained ={SCRIPT.partition('trained =')[2]}"
        client.execute(call.replace("ROUNDS", "100000"), stop_on_error=False)  # or the kernel may refuse the next cell
        wait_for_round(tmp_path, 1, manager.is_alive)
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=60)
        while "ename" not in reply["content"]:
            reply = client.get_shell_msg(timeout=60)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        done = last_round(tmp_path)
        assert run(call.replace("ROUNDS", str(done + 1))) == "ok"
        assert last_round(tmp_path) == done + 1 and f"done {done + 1} True" in "".join(told)
        assert run("for done in trained.node.run():\n    raise ValueError") == "ValueError"
        code = "[done.number for done in trained.node.run(rounds=1)]"
        assert run(code) == "ok", "the traceback keeps the first loop, and its node"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.extra("nbclient")
@pytest.mark.timeout(400)
def test_the_notebook_runs_again_with_outputs_of_the_same_shape(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    def shape(notebook: Any) -> list[list[tuple[str, list[str]]]]:
        """The kinds of what each cell returned; what it showed on the way depends on the pace."""
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        results = [[one for one in cell.outputs if one.output_type in ("execute_result", "error")] for cell in cells]
        return [[(one.output_type, sorted(one.get("data", {}))) for one in outputs] for outputs in results]

    known = nbformat.read(DOCS / "notebooks" / "first_swarm.ipynb", 4)
    again = nbformat.read(DOCS / "notebooks" / "first_swarm.ipynb", 4)
    for cell in again.cells:
        cell.source = re.sub(r"rounds=\d+", "rounds=2", cell.source)
    NotebookClient(again, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert shape(known) == shape(again) and any(shape(known))
    assert all(cell.get("execution_count") for cell in known.cells if cell.cell_type == "code"), "outputs are included"


@pytest.mark.timeout(200)
def test_a_loop_that_is_left_ends_its_node_and_a_folder_has_one_program_at_a_time(tmp_path: Path) -> None:
    sections = {"node": {"dir": str(tmp_path / "node"), "seed": 3, "duty_cycle": 0.1}}
    node = node_in(tmp_path / "node", **sections)
    started = psutil.Process()
    for done in node.run():
        running = [one for one in started.children(recursive=True) if "run" in one.cmdline()]
        assert done.number == 1 and running
        break
    assert not any(one.is_running() for one in running)
    assert "end" in [json.loads(line)["kind"] for line in (node.folder / "metrics.jsonl").read_text().splitlines()]
    loop = node.run()
    assert next(loop).number == node.num_rounds == 2, "it goes on"
    script = f"import swarm\nlist(swarm.Node.from_config(**{SMALL | sections}).run(rounds=1))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert "IdentityError" in ended.stderr and "in use" in ended.stderr
    again = node_in(tmp_path / "node", **sections).run(rounds=1)  # as a cell that is run again makes it
    assert [done.number for done in again] == [node.num_rounds]
    assert list(loop) == [], "it was closed"


@pytest.mark.timeout(300)
def test_a_swarm_with_rewards_and_rows_of_a_program_is_founded_and_joined(tmp_path: Path) -> None:
    """The manifest names both by SHA-256, and the same objects in another program have the same."""
    small = {name: SMALL[name] for name in ("rollouts", "evaluation")}
    rows = [{"prompt": f"{a} + 1 = ", "answer": a + 1} for a in range(20)]
    founder = swarm.train(
        None, first_digit, rows, rounds=1, progress=False, node={"dir": str(tmp_path / "one")}, **small
    )
    words = [sys.executable, "-m", "swarm.cli.main", "create", "friends", str(founder.node.folder / "config.toml")]
    made = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    manifest = tmp_path / "friends.swarm.toml"
    joined = swarm.train(
        None, first_digit, rows, swarm=manifest, rounds=1, progress=False, node={"dir": str(tmp_path / "two")}, **small
    )
    assert joined.node.config.swarm.name == "friends" and len(joined.metrics()) == 1
    assert joined.node.config.tasks.sources[0].path == next((tmp_path / "two" / "tasks").glob("*/rows.jsonl"))
    with pytest.raises(SwarmError, match="SHA-256"):
        swarm.Node.join(manifest, reward=first_digit, dataset=rows[1:])
    with pytest.raises(SwarmError, match="needs"):
        swarm.Node.join(manifest)


def first_digit(task: Any, answer: str) -> float:
    return float(answer[:1] == task.answer[:1])

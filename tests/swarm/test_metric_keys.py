"""The table of keys in docs/operations/monitoring.md names whatever nodes write to metrics.jsonl, and nothing else."""

import ast
import asyncio
import random
import re
import time
from pathlib import Path

import torch

from swarm.config import Config
from swarm.network.memory.transport import MemoryNetwork
from swarm.observability.metrics import read_rows
from tests.swarm.whole_nodes import make_node, node_config, run_all

ROOT = Path(__file__).parents[2]
AREAS = ("rollout", "train", "health", "time", "exchange", "network", "pool", "merge", "final")
WRITERS = ("node", "rollouts", "training", "sharing", "merging", "network")
NO_KEYS = {"exchange/rejected_records", "exchange/bodies_by_beacon", "merge/outer_steps_by_reason"}
"""Names of gauges for Prometheus."""


def documented() -> set[str]:
    page = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Keys of `metrics.jsonl`\n")
    rows = [line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    found = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    assert len(found) == len(set(found)), "a key stands twice"
    return set(found)


def config_of(folder: Path, **rollouts: int | str) -> Config:
    config = node_config(folder, max_rounds=4, **rollouts).model_dump(mode="json")
    merging = {"enabled": True, "inner_steps": 1, "search_timeout_s": 1.0, "gate_tasks": 0}
    more = {"merging": config["merging"] | merging, "evaluation": config["evaluation"] | {"tasks_per_source": 1}}
    return Config.model_validate(config | more)


def test_whatever_a_real_round_writes_is_documented(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time)
    pruning = {"prune": True, "task_choice": "weighted", "group_sizes": "equal", "extra_rollouts": "off"}
    configs = [config_of(tmp_path / "0", hints=1), config_of(tmp_path / "1", **pruning)]
    nodes = [make_node(network, config, number) for number, config in enumerate(configs)]
    assert asyncio.run(run_all(nodes)) == [True, True]
    rows = [row for node in nodes for row in read_rows(node.folder.metrics)]
    assert {row["kind"] for row in rows} >= {"round", "evaluation", "end"}
    written = {re.sub(r"^reward/.*", "reward/NAME", key) for row in rows for key in row}
    some = (
        "train/loss",
        "exchange/records_published",
        "merge/outer_steps",
        "rollout/hinted_groups",
        "rollout/pruned_answers",
    )
    assert set(some) <= written
    assert written - documented() == set()


def test_the_table_names_every_key_of_the_source_and_no_other() -> None:
    """Also those that few rounds have."""
    pattern = re.compile(rf"({'|'.join(AREAS)})/[a-z_]+")
    literals = {
        node.value
        for package in WRITERS
        for path in (ROOT / "swarm" / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
    }
    assert {key for key in documented() if "/" in key} - {"reward/NAME"} == literals - NO_KEYS

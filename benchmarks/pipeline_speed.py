"""What cutting a policy into stages costs on one machine: the bundled policy in one process, and over two and four.

    python benchmarks/pipeline_speed.py            eight rounds each, some minutes
    python benchmarks/pipeline_speed.py --quick    three rounds each, one and two stages, under a minute

Real nodes as users start them; the driver is one stage of the pipeline, the others are `swarm stage` over py-libp2p on loopback.
Medians over all rounds but the first. Bytes are all that the driver sends and receives in a round, for sampling and for
training, per sampled token. The policy is so small that nothing here says how a large model fares: it shows what commands and
hops cost. The last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.e2e.node_process import NodeProcess, node_settings, wait_for
from tests.e2e.pipeline_processes import pipeline_processes

NUM_LAYERS = 4
SETTINGS: dict[str, Any] = {
    "rollouts": {"groups_per_round": 4, "group_size": 8, "max_new_tokens": 24},
    "sharing": {"own_groups": 4, "swarm_groups": 0, "publish": False},
    "training": {"filter_groups": False, "mask_truncated": False, "correction": "none", "micro_batch_sequences": 8},
    "checkpoint": {"interval_rounds": 1000},
}


def measured(folder: Path, num_stages: int, num_rounds: int) -> dict[str, float]:
    """Medians of a node with the policy in one process, or of the driver of a pipeline."""
    if num_stages == 1:
        settings = node_settings(folder / "single", network={"backend": "libp2p", "gossip": "off"}, **SETTINGS)
        with NodeProcess(settings) as node:
            return medians(rounds_of(node, num_rounds))
    size = NUM_LAYERS // num_stages
    layers = [f"{size * number}:{size * (number + 1)}" for number in range(num_stages - 1)]
    with pipeline_processes(folder, num_stages - 1, layers=layers, **SETTINGS) as machines:
        return medians(rounds_of(machines.driver, num_rounds))


def rounds_of(node: NodeProcess, num_rounds: int) -> list[dict[str, Any]]:
    return wait_for(
        lambda: rounds if len(rounds := node.rounds) > num_rounds else None, "rounds", node, deadline_s=400.0
    )


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    later = rounds[1:]
    first, last = rounds[0], rounds[-1]
    num_bytes = sum(last[f"exchange/bytes_{way}"] - first[f"exchange/bytes_{way}"] for way in ("sent", "received"))
    return {
        "sampled_tokens_per_s": statistics.median(row["rollout/tokens_per_s"] for row in later),
        "training_step_s": statistics.median(row["time/train_s"] for row in later),
        "line_bytes_per_token": num_bytes / sum(row["rollout/tokens"] for row in later),
    }


def figures(found: dict[int, dict[str, float]]) -> dict[str, float]:
    """Ratios to one process: sampling speed (below 1), time of a step (above 1); and bytes per token."""
    one, ratios = found[1], dict[str, float]()
    for num_stages, of in found.items():
        if num_stages > 1:
            ratios[f"ratio_sampling_{num_stages}_stages"] = of["sampled_tokens_per_s"] / one["sampled_tokens_per_s"]
            ratios[f"ratio_step_{num_stages}_stages"] = of["training_step_s"] / one["training_step_s"]
            ratios[f"bytes_per_token_{num_stages}_stages"] = of["line_bytes_per_token"]
    return {name: round(value, 3) for name, value in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    num_rounds, sizes = (3, (1, 2)) if parser.parse_args().quick else (8, (1, 2, 4))
    found: dict[int, dict[str, float]] = {}
    for num_stages in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            found[num_stages] = measured(Path(scratch), num_stages, num_rounds)
        one = found[num_stages]
        print(
            f"{num_stages} stages: {one['sampled_tokens_per_s']:.0f} tokens/s sampled, {one['training_step_s']:.2f} s a step, "
            f"{one['line_bytes_per_token']:,.0f} bytes per token on the driver's line",
            flush=True,
        )
    print(json.dumps(figures(found)))


if __name__ == "__main__":
    main()

"""Merging without an all-reduce: what it is worth, and what a sync costs.

    python benchmarks/merging.py            three seeds, 2 to 16 real nodes; about ten minutes of one quiet core
    python benchmarks/merging.py --quick    under a minute: one short seed of the main arms, 2 and 4 real nodes

Learning: eight replicas of the bundled policy's adapter in supervised training, arm by arm; the same cells as those of
`swarm experiment merging`, which has faults, liars and RL as well. Latency: real nodes on loopback, and a model for more nodes
than a machine has, labelled as such. With --drift also: averaging factors against merging products. The last line of the output
is one JSON object.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch
from measuring.merge_drift import measure_drift
from measuring.merge_latency import Sync, made_up_adapter, measure_syncs
from measuring.merge_model import Line, ModelledSync, modelled_sync

from swarm.experiments.cell_process import run_cell
from swarm.experiments.cells import Result
from swarm.experiments.merging.arms import DILOCO, EQUAL_HOPS, LEARNING, NOLOCO, SILO
from swarm.experiments.merging.figures import figures, loss_table, mean_value
from swarm.experiments.merging.merging_plan import MergingPlan
from swarm.merging.adapter_wire import encoded_bytes

RANK = 16
SEARCH_S = 8.0
"""Of the real nodes, shorter than a node's default: all are ready at once, and loopback is near."""
MODELLED_SEARCH_S = 30.0
MODELLED_NODES = tuple(2**k for k in range(1, 11))


def main() -> None:
    """Measure what was asked for, print tables, print the figures."""
    options = _options()
    torch.set_num_threads(1)
    results = _learn(options)
    print(f"\n{_table(results)}")
    syncs = [sync for count in options.nodes for sync in measure_syncs(count, options.syncs, RANK, SEARCH_S)]
    num_bytes = encoded_bytes({name: tuple(t.shape) for name, t in made_up_adapter(RANK).items()}, "bf16")
    _print_real(syncs, num_bytes)
    modelled = [modelled_sync(count, num_bytes, MODELLED_SEARCH_S, Line()) for count in MODELLED_NODES]
    _print_modelled(modelled, num_bytes)
    rows = measure_drift(options.steps) if options.drift else []
    if rows:
        _print_drift(rows)
    print(json.dumps(_figures(results, syncs, modelled) | {"drift": rows, "settings": vars(options)}))


def _learn(options: argparse.Namespace) -> list[Result]:
    plan = MergingPlan(
        ("learning",),
        tuple(range(options.first_seed, options.first_seed + options.seeds)),
        tuple(options.arms),
        num_steps=options.steps,
        inner_steps=options.inner_steps,
        num_examples=options.examples,
    )
    results: list[Result] = []
    for cell in plan.all_cells():
        results.append(run_cell(cell))
        print(f"{cell.name}: {mean_value(results[-1]):.4f}", file=sys.stderr, flush=True)
    return results


def _table(results: Sequence[Result]) -> str:
    arms = [arm for arm in LEARNING if any(result["arm"] == arm for result in results)]
    return loss_table(results, arms, "learning").markdown()


def _print_real(syncs: Sequence[Sync], num_bytes: int) -> None:
    print(f"\nreal nodes on loopback, {num_bytes / 1e6:.1f} MB each, search {SEARCH_S:g} s; mean over syncs")
    print("| nodes | offer to outer step | slowest node | training waits | processor time of that | with a partner |")
    print("|---|---|---|---|---|---|")
    for count in dict.fromkeys(sync.num_nodes for sync in syncs):
        some = [sync for sync in syncs if sync.num_nodes == count]
        names = ("sync_s", "slowest_s", "blocking_s", "blocking_cpu_s")
        cells = (statistics.fmean(getattr(one, name) for one in some) for name in names)
        share = statistics.fmean(one.merged_share for one in some)
        print(f"| {count} | " + " | ".join(f"{value:.2f} s" for value in cells) + f" | {share:.0%} |")


def _print_modelled(modelled: Sequence[ModelledSync], num_bytes: int) -> None:
    print(f"\nMODELLED: {num_bytes / 1e6:.1f} MB, {Line()}, search {MODELLED_SEARCH_S:g} s")
    print("| nodes | pair | training waits | tree all-reduce | training waits |\n|---|---|---|---|---|")
    for one in modelled:
        print(f"| {one.num_nodes} | {one.pair_s:.1f} s | 0 | {one.tree_s:.1f} s | {one.tree_s:.1f} s |")


def _print_drift(rows: Sequence[dict[str, float]]) -> None:
    print("\n| drift | silos' loss | factors averaged | product merged | product − factors |\n|---|---|---|---|---|")
    for row in rows:
        gain = row["product"] - row["factors"]
        print(
            f"| {row['drift']:.4f} | {row['alone']:.4f} | {row['factors']:.4f} | {row['product']:.4f} | {gain:+.4f} |"
        )


def _figures(results: Sequence[Result], syncs: Sequence[Sync], modelled: Sequence[ModelledSync]) -> dict[str, object]:
    """Ratios of means over seeds first; None where their arms were not measured."""
    found = figures(results)
    ratios = (
        "loss_ratio_diloco_equal_h",
        "loss_ratio_diloco_equal_hops",
        "loss_ratio_silo",
        "merged_over_mean_replica",
    )
    return {
        **{name: found[name] and found[name]["mean"] for name in ratios},
        "blocking_s": round(statistics.fmean(sync.blocking_s for sync in syncs), 4),
        "blocking_cpu_s": round(statistics.fmean(sync.blocking_cpu_s for sync in syncs), 4),
        "sync_s": {sync.num_nodes: round(sync.sync_s, 3) for sync in syncs},
        "syncs": [asdict(sync) for sync in syncs],
        "modelled": [asdict(one) for one in modelled],
        "arms": found["arms"],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short seed of silo, NoLoCo and DiLoCo; 2 and 4 nodes")
    parser.add_argument("--arms", nargs="+", choices=list(LEARNING), default=list(LEARNING))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120, help="inner steps of a replica")
    parser.add_argument("--inner-steps", type=int, default=10, help="H")
    parser.add_argument("--examples", type=int, default=128, help="training examples per replica and task")
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4, 8, 16], help="real nodes of each measurement")
    parser.add_argument("--syncs", type=int, default=3, help="outer steps of each measurement")
    parser.add_argument("--drift", action="store_true", help="averaging factors against merging products")
    options = parser.parse_args()
    if options.quick:
        options.arms, options.seeds, options.nodes, options.syncs = [SILO, NOLOCO, DILOCO, EQUAL_HOPS], 1, [2, 4], 1
        options.steps, options.inner_steps, options.examples = 36, 6, 48
    return options


if __name__ == "__main__":
    main()

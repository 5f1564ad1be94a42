"""Merging without an all-reduce: what it is worth, what it bears, and what a liar can do to it.

    python benchmarks/merging.py            three seeds of every table; about a quarter of an hour of one quiet core
    python benchmarks/merging.py --tables three-liars --seeds 1
    python benchmarks/merging.py --quick    under a minute: one short seed of the main arms

Eight replicas of the bundled policy's adapter (rank 4, two of seven kinds of layers) learn three tasks from right answers, in a
wording that the policy does not know, each from a shard of its own, in one process and on one base. Arms differ only in how
replicas merge every H steps; the learning rate falls to a tenth in all. NoLoCo and DiLoCo share the outer step and its
settings. Loss is per answer token on held-out tasks. Nothing goes over a network here: bytes are those of the encoded adapters,
and hops are counted, not timed; `blocking_s` is null for that reason. Every run is a line on standard error; the last line of
the output is one JSON object.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from measuring.merge_run import Arm, Data, MergeRun, Outcome, Scale
from measuring.replicas import Adapter, Example, Replicas, draw, make_examples

from swarm.adapters.product_merge import LowRank, average_factors, drift, merge_products
from swarm.config import LoraSection, PolicySection, TasksSection
from swarm.policy.policy import Policy, load_policy
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import EVALUATION_SEED, FIRST_TRAINING_SEED

NUM_REPLICAS = 8
TASKS = ("lcm", "spelling", "longer_spelling")
"""The first is what a poison aims at."""
LR = 1e-2
LORA = LoraSection(rank=4, alpha=8, targets=("v_proj", "down_proj"))
SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25)
ATTACKS = ("random", "sign-flip", "x100", "poison", "nan")
SAFETY = ("off", "clip", "trimmed", "centered")

LEARNING = {
    "silo": Arm("silo"),
    "NoLoCo": Arm("pairs"),
    "DiLoCo": Arm("mean"),
    "data parallel": Arm("gradients"),
    "pairs, plain average": Arm("average"),
    "NoLoCo, int4": Arm("pairs", "int4"),
    "NoLoCo, int4 from the start": Arm("pairs", "int4", from_origin=True),
    "NoLoCo, late": Arm("pairs", late=True),
}
FAULTS = {
    "NoLoCo, 10 % of exchanges fail": Arm("pairs", drop_rate=0.1),
    "NoLoCo, 30 % fail": Arm("pairs", drop_rate=0.3),
    "DiLoCo, 10 % absent": Arm("mean", drop_rate=0.1),
    "DiLoCo, 30 % absent": Arm("mean", drop_rate=0.3),
    "silo, unlike speeds": Arm("silo", speeds=SPEEDS),
    "NoLoCo, unlike speeds": Arm("pairs", speeds=SPEEDS),
    "DiLoCo, unlike speeds": Arm("mean", speeds=SPEEDS),
}
ONE_LIAR = {
    **{f"nobody lies, {safety}": Arm("pairs", safety=safety) for safety in SAFETY},
    **{
        f"{attack}, 1 of 8, {safety}": Arm("pairs", attack=attack, num_liars=1, safety=safety)
        for attack in ATTACKS
        for safety in ("off", "clip")
    },
}
THREE_LIARS = {
    f"{attack}, 3 of 8, {safety}": Arm("pairs", attack=attack, num_liars=3, safety=safety)
    for attack in ATTACKS
    for safety in SAFETY
    if safety != "centered" or attack == "poison"
}
TABLES: dict[str, Mapping[str, Arm]] = {
    "learning": LEARNING,
    "faults": FAULTS,
    "one-liar": ONE_LIAR,
    "three-liars": THREE_LIARS,
}
QUICK = ("silo", "NoLoCo", "DiLoCo")


def main() -> None:
    """Measure what was asked for, print tables, print the figures."""
    options = _options()
    torch.set_num_threads(1)
    policy = load_policy(PolicySection(lora=LORA), device="cpu")
    mixture = TaskMixture(TasksSection())
    results: dict[str, list[Outcome]] = {}
    for table in [name for name in TABLES if name in options.tables]:
        arms = {name: arm for name, arm in TABLES[table].items() if not options.quick or name in QUICK}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            scale = Scale(options.steps, options.inner_steps, options.batch, seed)
            data = _data(policy, mixture, seed, options.examples)
            for name, arm in arms.items():
                outcome = MergeRun(Replicas(policy, NUM_REPLICAS, LR), arm, data, scale).run()
                results.setdefault(name, []).append(outcome)
                row = {"seed": seed, "arm": name, "loss": outcome.loss, **asdict(outcome)}
                print(json.dumps(row), file=sys.stderr, flush=True)
        _print(table, {name: results[name] for name in arms})
    drifts = _measure_drift(policy, mixture, options) if "drift" in options.tables else []
    print(json.dumps({**_figures(results), "drift": drifts, "settings": vars(options)}))


def _data(policy: Policy, mixture: TaskMixture, seed: int, num_examples: int) -> Data:
    """Streams of different seeds and replicas never overlap."""
    shards: list[list[Example]] = []
    poisoned: list[list[Example]] = []
    private: list[list[Example]] = []
    for replica in range(NUM_REPLICAS):
        stream = FIRST_TRAINING_SEED + seed * NUM_REPLICAS + replica
        by_task = [make_examples(policy, mixture, task, stream, num_examples + 4) for task in TASKS]
        shards.append([example for some in by_task for example in some[4:]])
        private.append([example for some in by_task for example in some[:4]])
        wrong = by_task[0][4][1]  # one answer to everything
        poisoned.append([(p, wrong) for p, _ in by_task[0][4:]] + [e for some in by_task[1:] for e in some[4:]])
    held_out = {task: make_examples(policy, mixture, task, EVALUATION_SEED, 24) for task in TASKS}
    return Data(shards, private, held_out, poisoned)


def _measure_drift(policy: Policy, mixture: TaskMixture, options: argparse.Namespace) -> list[dict[str, float]]:
    """Pairs of silos of one start, the longer and the faster they learn alone the further apart; and pairs of two starts."""
    rows: list[dict[str, float]] = []
    data = _data(policy, mixture, 0, options.examples)
    held_out = [example for examples in data.held_out.values() for example in examples]
    for lr, own_start in ((LR, False), (5 * LR, False), (15 * LR, False), (LR, True)):
        replicas = Replicas(policy, NUM_REPLICAS, lr)
        if own_start:
            for i in range(NUM_REPLICAS):
                replicas.set_weights(i, _other_start(replicas.start, i))
        rng = random.Random(0)
        for step in range(1, options.steps + 1):
            replicas.train({i: draw(data.shards[i], options.batch, rng) for i in range(NUM_REPLICAS)})
            if step % (options.steps // 4) == 0:
                rows.append(
                    {"lr": lr, "own_start": own_start, "step": step, **_pair_losses(policy, replicas, held_out)}
                )
                print(rows[-1], file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row["drift"])
    print("\n| drift | silos' loss | factors averaged | product merged | product − factors |\n|---|---|---|---|---|")
    for row in rows:
        gain = row["product"] - row["factors"]
        print(
            f"| {row['drift']:.4f} | {row['alone']:.4f} | {row['factors']:.4f} | {row['product']:.4f} | {gain:+.4f} |"
        )
    return rows


def _other_start(start: Adapter, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t if name.endswith("lora_B") else t.flatten()[torch.randperm(t.numel(), generator=generator)].view_as(t)
        for name, t in start.items()
    }


def _pair_losses(policy: Policy, replicas: Replicas, held_out: Sequence[Example]) -> dict[str, float]:
    scaling = policy.config.lora.alpha / policy.config.lora.rank
    drifts: list[float] = []
    losses: list[list[float]] = []
    for first in range(0, NUM_REPLICAS, 2):
        one, two = replicas.weights(first), replicas.weights(first + 1)
        drifts.append(statistics.fmean(drift(one, two).values()))
        pair = [LowRank(one, scaling), LowRank(two, scaling)]
        product = merge_products(pair, [0.5, 0.5], policy.config.lora.rank, scaling, like=one).tensors
        candidates = [one, two, average_factors([one, two], [0.5, 0.5]), product]
        losses.append(replicas.loss(candidates, [held_out] * 4))
    one, two, factors, product = (statistics.fmean(column) for column in zip(*losses, strict=True))
    return {"drift": statistics.fmean(drifts), "alone": (one + two) / 2, "factors": factors, "product": product}


def _print(table: str, results: Mapping[str, Sequence[Outcome]]) -> None:
    print(f"\n{table}: mean over {len(next(iter(results.values())))} seeds (± their standard deviation)")
    if table.endswith(("liar", "liars")):
        print("| what is sent | honest replicas' loss | their loss on the poisoned task | mean share that gates gave |")
    else:
        print("| arm | replicas' loss | worst | merged | spread | drift | inner steps | MB sent | blocking hops |")
    print("|---|---|---|---|" + ("---|---|---|---|---|" if not table.endswith(("liar", "liars")) else ""))
    for name, outcomes in results.items():
        loss = _mean_and_deviation([outcome.loss for outcome in outcomes])
        if table.endswith(("liar", "liars")):
            shares = [share for outcome in outcomes for share in outcome.shares]
            given = f"{statistics.fmean(shares):.2f}" if shares else ""
            print(f"| {name} | {loss} | {_mean(outcomes, 'target_loss'):.4f} | {given} |")
            continue
        worst = statistics.fmean(max(outcome.losses) for outcome in outcomes)
        print(
            f"| {name} | {loss} | {worst:.4f} | {_mean_and_deviation([o.merged_loss for o in outcomes])} | "
            f"{_mean(outcomes, 'consensus'):.3f} | {_mean(outcomes, 'drift'):.4f} | {_mean(outcomes, 'num_inner_steps'):.0f} | "
            f"{_mean(outcomes, 'sent_bytes') / 1e6:.1f} | {_mean(outcomes, 'blocking_hops'):.0f} |"
        )


def _figures(results: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    """Ratios of means over seeds; None where their arms were not measured."""
    pairs, diloco = results.get("NoLoCo"), results.get("DiLoCo")
    arms = {
        name: {
            **{k: _rounded(_mean(o, k)) for k in asdict(o[0]) if k not in ("losses", "shares")},
            "loss": _rounded(_mean(o, "loss")),
        }
        for name, o in results.items()
    }
    return {
        "loss_ratio_diloco_equal_h": round(_mean(pairs, "loss") / _mean(diloco, "loss"), 4)
        if pairs and diloco
        else None,
        "merged_over_mean_replica": round(_mean(pairs, "merged_loss") / _mean(pairs, "loss"), 4) if pairs else None,
        "blocking_s": None,
        "blocking_hops_modelled": {name: arms[name]["blocking_hops"] for name in ("NoLoCo", "DiLoCo") if name in arms},
        "arms": arms,
    }


def _mean(outcomes: Sequence[Outcome], field: str) -> float:
    return statistics.fmean(getattr(outcome, field) for outcome in outcomes)


def _mean_and_deviation(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short seed of silo, NoLoCo and DiLoCo")
    parser.add_argument("--tables", nargs="+", choices=[*TABLES, "drift"], default=[*TABLES, "drift"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="inner steps of a replica")
    parser.add_argument("--inner-steps", type=int, default=10, help="H")
    parser.add_argument("--batch", type=int, default=2, help="answers per replica and step")
    parser.add_argument("--examples", type=int, default=128, help="training examples per replica and task")
    options = parser.parse_args()
    if options.quick:
        options.tables, options.seeds, options.steps, options.inner_steps, options.examples = ["learning"], 1, 24, 6, 32
    return options


if __name__ == "__main__":
    main()

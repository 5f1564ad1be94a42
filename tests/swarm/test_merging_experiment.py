"""The merging experiment: arms, replicas side by side, partners in memory, lies, figures."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import ConfigError
from swarm.experiments.merging.arms import (
    ATTACKS,
    DILOCO,
    EQUAL_HOPS,
    HOSTILE,
    LEARNING,
    NOLOCO,
    NUM_REPLICAS,
    PARTS,
    SAFE,
    SILO,
    TREE_HOPS,
    MergingArm,
    attack_name,
)
from swarm.experiments.merging.backdoor import lie
from swarm.experiments.merging.figures import attack_table, figures, part_tables, write_all
from swarm.experiments.merging.memory_pairing import MemoryPairing, Terms
from swarm.experiments.merging.merging_cell import MergeRun, Scale, hypercube_mean
from swarm.experiments.merging.merging_plan import COMPANIES, QUIET, STAGES, MergingPlan, chosen_parts
from swarm.experiments.merging.replicas import Adapter
from swarm.merging.adapter_wire import decode_adapter, encode_adapter
from swarm.types import Alone, Partner, Snapshot

SHAPES = {"x.lora_A": (2, 3), "x.lora_B": (4, 2)}


def adapter(seed: int, scale: float = 1.0) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Drifters:
    """A population without a model: each inner step moves a replica by a step of its own; its value is its distance to zero."""

    def __init__(self) -> None:
        self.num = NUM_REPLICAS
        self.start = adapter(0)
        self.scaling = 2.0
        self.steps = [0] * self.num
        self.candidates = 0
        self._weights = [self.start for _ in range(self.num)]

    def train(self, active: Any, progress: float, average_gradients: bool) -> list[float]:
        for i in active:
            self.steps[i] += 1
            push = adapter(100 * i + self.steps[i], 0.01)
            self._weights[i] = {name: 0.98 * tensor + push[name] for name, tensor in self._weights[i].items()}
        return [1.0 - progress] * len(active)

    def weights(self, replica: int) -> Adapter:
        return {name: tensor.clone() for name, tensor in self._weights[replica].items()}

    def set_weights(self, replica: int, weights: Any) -> None:
        self._weights[replica] = dict(weights)

    def reset_moments(self, replica: int, names: Any) -> None: ...

    def gate_score(self, replica: int, candidate: Adapter) -> list[float]:
        self.candidates += 1
        return [-self.measure([candidate])[0]["size"]]

    def measure(self, adapters: Any) -> list[dict[str, float]]:
        return [{"size": sum(t.abs().sum().item() for t in one.values())} for one in adapters]


def ran(arm: MergingArm, num_steps: int = 40) -> tuple[Any, Drifters]:
    population = Drifters()
    return MergeRun(population, arm, Scale(num_steps, 10, 4, seed=0)).run(), population


def result(arm: str, seed: int, values: list[float], learning: str = "supervised", **changes: Any) -> dict[str, Any]:
    """As a cell gives it."""
    return {
        "learning": learning, "arm": arm, "seed": seed, "values": values, "merged": min(values), "target": 2 * values[0],
        "consensus": 0.1, "sent_bytes": 1000.0, "hops": 6.0, "blocking_hops": 6.0, "num_inner_steps": 8.0, "drift": 0.1,
        "product_layers": 0.0, "reasons": {"merged": 8}, "training": [0.1, 0.2, 0.3, 0.4], "curve": [0.5, 0.4], **changes,
    }  # fmt: skip


def test_cells_of_all_parts_are_there_once_and_data_is_the_same_in_all_arms() -> None:
    plan = MergingPlan(seeds=(0, 1))
    cells = plan.all_cells()
    assert len(cells) == len({cell.digest for cell in cells}) == len({cell.slug for cell in cells})
    assert {cell.settings["arm"] for cell in plan.cells("rl")} == set(PARTS["rl"])
    for cell in (cell for cell in cells if cell.kind == "merging"):
        rest = {key: value for key, value in cell.settings.items() if key not in ("arm", "how", "seed")}
        assert rest in [
            {key: value for key, value in other.settings.items() if key not in ("arm", "how", "seed")}
            for other in (plan.cells("learning")[0], plan.cells("rl")[0])
        ]


def test_hostile_names_are_met_at_every_stage_in_every_company() -> None:
    cells = MergingPlan(("hostile",), seeds=(0, 1)).all_cells()
    assert len(cells) == 2 * len(STAGES) * len(COMPANIES) and {cell.kind for cell in cells} == {"hostile_merging"}
    found = [
        {"learning": "hostile", "arm": cell.settings["arm"], "stage": cell.settings["stage"], "seed": cell.settings["seed"],
         "hostile_part": 0.25, "trigger_rate": 0.0, "worst_trigger_rate": 0.1, "held_out_reward": 0.5, "held_out_loss": 1.5,
         "merges_per_offer": 0.9, "hostile_merges": 0.2}
        for cell in cells
    ]  # fmt: skip
    (table,) = part_tables(found, "hostile")
    assert len(table.rows) == len(STAGES) * len(COMPANIES) and table.rows[0][1] == "0.250 ± 0.000"
    assert figures(found)["hostile"][f"live: {QUIET}"]["worst_trigger_rate"]["mean"] == 0.1
    assert part_tables([], "hostile") == []


def test_every_attack_meets_every_number_of_liars_with_and_without_safety() -> None:
    assert len(HOSTILE) == 3 + 2 * sum(len(kinds) for kinds in ATTACKS.values())
    assert HOSTILE[attack_name("nan", 3, "clip and gate")].num_liars == 3
    assert HOSTILE[SAFE].gate_tasks > 0 and HOSTILE[NOLOCO].gate_tasks == 0


def test_unknown_parts_are_named() -> None:
    assert chosen_parts("rl, learning,rl") == ("rl", "learning")
    with pytest.raises(ConfigError, match="speed"):
        chosen_parts("rl,speed")


def test_pairs_take_one_hop_where_a_tree_takes_six_and_equal_hops_are_equal() -> None:
    pairs, _ = ran(LEARNING[NOLOCO], 60)
    tree, _ = ran(LEARNING[DILOCO], 60)
    seldom, _ = ran(LEARNING[EQUAL_HOPS], 60)
    assert (pairs.hops, tree.hops, TREE_HOPS) == (6, 36, 6)
    assert seldom.hops == pairs.hops and seldom.consensus == tree.consensus == 0
    assert pairs.reasons == {"merged": 6 * NUM_REPLICAS}
    assert pairs.sent_bytes == 6 * 2 * sum(t.numel() for t in adapter(0).values())


def test_overlapped_exchanges_block_nothing_and_merge_as_often() -> None:
    overlapped, _ = ran(MergingArm("pairs", overlap=0.5), 65)
    assert overlapped.blocking_hops == 0 and overlapped.hops == 6
    assert overlapped.reasons == {"merged": 6 * NUM_REPLICAS}


def test_merging_holds_replicas_together_and_a_silo_does_not() -> None:
    silo, _ = ran(LEARNING[SILO])
    pairs, _ = ran(LEARNING[NOLOCO])
    assert pairs.consensus < silo.consensus / 2 and silo.reasons == {} and silo.sent_bytes == 0


def test_plain_average_is_the_mean_of_both() -> None:
    population = Drifters()
    run = MergeRun(population, LEARNING["pairs, plain average"], Scale(10, 10, 0, seed=0))
    alone = Drifters()
    for _ in range(10):
        alone.train(range(NUM_REPLICAS), 0.0, False)
    run.run()
    own = [alone.weights(i)["x.lora_B"] for i in range(NUM_REPLICAS)]
    for i in range(NUM_REPLICAS):
        new = population.weights(i)["x.lora_B"]
        nearest = min((new - (own[i] + other) / 2).abs().max().item() for j, other in enumerate(own) if j != i)
        assert nearest < 2e-3  # bf16 on the wire


def test_slow_replicas_take_fewer_steps_and_a_barrier_takes_those_of_the_slowest() -> None:
    speeds = (1.0,) * 6 + (0.5, 0.25)
    pairs, population = ran(MergingArm("pairs", speeds=speeds, patience=0.5))
    assert population.steps == [40] * 6 + [20, 10]
    assert pairs.reasons["merged"] >= 6 * 4
    _, waiting = ran(MergingArm("mean", speeds=speeds))
    assert max(waiting.steps) <= min(waiting.steps) + 10
    by_time, _ = ran(MergingArm("pairs", speeds=speeds, by_time=True))
    assert by_time.reasons == {"merged": 4 * NUM_REPLICAS}


def test_failed_exchanges_are_steps_alone() -> None:
    outcome, _ = ran(MergingArm("pairs", drop_rate=1.0))
    assert outcome.reasons == {"unreachable": 4 * NUM_REPLICAS} and outcome.sent_bytes == 0


def test_liars_do_not_count_and_nan_is_refused_by_all() -> None:
    free, _ = ran(MergingArm("pairs"))
    attacked, _ = ran(MergingArm("pairs", attack="nan", num_liars=3))
    assert len(attacked.values) == NUM_REPLICAS - 3 and all(value < 1e3 for value in attacked.values)
    assert attacked.reasons["unusable"] > 0
    harmed, _ = ran(MergingArm("pairs", attack="x100", num_liars=3))
    assert min(harmed.values) > 2 * max(free.values)
    guarded, population = ran(MergingArm("pairs", attack="x100", num_liars=3, clip_factor=2.0, gate_tasks=3))
    assert max(guarded.values) < 1.5 * max(free.values) and population.candidates > 0


def test_lies_are_adapters_that_a_partner_can_open() -> None:
    start, slow, fast = adapter(0), adapter(1), adapter(2)
    snapshot = Snapshot("ab" * 16, "bf16", 0, 0, encode_adapter(fast, "bf16", start))
    noise = torch.Generator().manual_seed(0)
    assert (
        lie("silent", snapshot, start, slow, noise) is None and lie("poison", snapshot, start, slow, noise) == snapshot
    )
    for kind, wanted in (("sign-flip", 2 * slow["x.lora_A"] - fast["x.lora_A"]),):
        told = lie(kind, snapshot, start, slow, noise)
        assert told is not None
        torch.testing.assert_close(
            decode_adapter(told.payload, SHAPES, "bf16", start)["x.lora_A"], wanted, atol=0.05, rtol=0
        )


def offers_of(pairing: MemoryPairing, rounds: dict[int, int]) -> dict[int, Any]:
    return {
        replica: pairing.pairer(replica).offer(Snapshot("ab" * 16, "bf16", number, 0, b"12"))
        for replica, number in rounds.items()
    }


def test_partners_wait_for_each_other_as_long_as_they_may() -> None:
    pairing = MemoryPairing(Terms(0.0, delay=2, patience=3), random.Random(0), lambda _, snapshot: snapshot)
    first = offers_of(pairing, {0: 0})[0]
    pairing.advance(1)
    assert not first.done()
    second = offers_of(pairing, {1: 1})[1]
    pairing.advance(2)
    assert not first.done(), "the exchange takes two units of time"
    pairing.advance(4)
    assert isinstance(first.result(0), Partner) and second.result(0).peer_id == "replica 0"
    alone = offers_of(pairing, {2: 0})[2]
    pairing.advance(7)
    assert alone.result(0) == Alone("nobody")


def test_partners_too_many_rounds_apart_are_not_paired() -> None:
    pairing = MemoryPairing(Terms(0.0, 0, 0), random.Random(0), lambda _, snapshot: snapshot)
    apart = offers_of(pairing, {0: 0, 1: 5})
    pairing.advance(1)
    assert {future.result(0) for future in apart.values()} == {Alone("nobody")}


def partners_of(pairing: MemoryPairing, number: int, replica: int = 0) -> str:
    """Whom a replica met in round `number`; the reason where nobody."""
    offers = offers_of(pairing, dict.fromkeys(range(4), number))
    pairing.advance(number)
    outcome = offers[replica].result(0)
    return outcome.peer_id if isinstance(outcome, Partner) else outcome.reason


def test_recent_partners_wait_their_turn() -> None:
    pairing = MemoryPairing(Terms(0.0, 0, 0), random.Random(0), lambda _, snapshot: snapshot)
    met = [partners_of(pairing, number) for number in range(1, 13)]
    assert all(first != second for first, second in itertools.pairwise(met))
    assert set(met) == {"replica 1", "replica 2", "replica 3"}


def test_who_is_distrusted_or_sent_nothing_is_left_alone_for_eight_offers() -> None:
    pairing = MemoryPairing(Terms(0.0, 0, 0), random.Random(0), lambda one, snapshot: snapshot if one != 1 else None)
    partners_of(pairing, 1)
    pairing.pairer(0).report_unusable("replica 2")
    met = [partners_of(pairing, number) for number in range(2, 10)]
    assert "replica 2" not in met and "replica 3" in met
    assert met.count("unreachable") <= 1


def test_hypercube_exchanges_give_the_mean() -> None:
    for count in (8, 5):
        mean = hypercube_mean([adapter(seed) for seed in range(count)])
        wanted = torch.stack([adapter(seed)["x.lora_A"] for seed in range(count)]).mean(0)
        torch.testing.assert_close(mean["x.lora_A"], wanted)


def test_ratios_are_paired_by_seed_and_missing_arms_are_none() -> None:
    results = [
        result(NOLOCO, 0, [1.0, 2.0]), result(DILOCO, 0, [1.0, 1.0]),
        result(NOLOCO, 1, [4.0, 4.0]), result(DILOCO, 1, [2.0, 2.0]), result(NOLOCO, 2, [9.0, 9.0]),
        result(NOLOCO, 0, [0.5, 0.5], "rl"), result(SILO, 0, [0.4, 0.4], "rl", training=[0.1, 0.1, 0.2, 0.1]),
    ]  # fmt: skip
    found = figures(results)
    assert found["loss_ratio_diloco_equal_h"] == {"mean": 1.75, "std": 0.3536}
    assert found["loss_ratio_diloco_equal_hops"] is None
    assert found["merged_over_mean_replica"]["mean"] == pytest.approx((1 / 1.5 + 1 + 1) / 3, abs=1e-4)
    assert found["reward_ratio_silo"]["mean"] == 2.0
    assert found["arms"]["RL, NoLoCo"]["value"]["mean"] == 0.5
    json.dumps(found)


def test_attacks_are_compared_with_the_run_of_the_same_safety() -> None:
    random_off, random_safe = attack_name("random", 1, "off"), attack_name("random", 1, "clip and gate")
    results = [
        result(NOLOCO, 0, [1.0]), result(SAFE, 0, [2.0]), result(random_off, 0, [3.0]), result(random_safe, 0, [2.2]),
    ]  # fmt: skip
    rows = {row[0]: row[2] for row in attack_table(results).rows}
    assert rows[random_off] == "3.000" and rows[random_safe] == "1.100"
    assert figures(results)["attacks"][random_safe]["mean"] == 1.1


def test_report_has_a_table_for_each_part_that_was_computed(tmp_path: Path) -> None:
    results = [
        result(arm, seed, [1.0 + seed, 2.0], learning)
        for arm in (NOLOCO, DILOCO) for seed in (0, 1) for learning in ("supervised", "rl")
    ]  # fmt: skip
    page, tables = write_all(tmp_path, ("learning", "faults", "rl"), results)
    assert [table.title for table in tables] == ["Ways of merging, supervised", "Ways of merging, under RL"]
    assert [row[0] for row in tables[0].rows] == [NOLOCO, DILOCO]
    assert "data:image/png;base64," in page.read_text() and part_tables(results, "faults") == []


def test_a_cell_is_the_same_twice_and_poison_changes_the_liars_alone() -> None:
    from swarm.experiments.cell_process import run_cell

    torch.set_num_threads(1)
    plan = MergingPlan(num_steps=4, inner_steps=2, num_examples=4, held_out_examples=2, batch=1)
    cell = plan._supervised(NOLOCO, LEARNING[NOLOCO], 0)
    first, second = run_cell(cell), run_cell(cell)
    assert first == second and len(first["values"]) == NUM_REPLICAS
    silo = run_cell(plan._supervised(SILO, MergingArm("silo"), 0))
    poisoned = run_cell(plan._supervised("x", MergingArm("silo", attack="poison", num_liars=3), 0))
    assert poisoned["values"] == pytest.approx(silo["values"][:-3], rel=1e-5)


def test_replicas_side_by_side_learn_as_one_alone_would() -> None:
    from swarm.config import PolicySection
    from swarm.experiments.merging.replicas import Replicas
    from swarm.experiments.merging.supervised import LORA
    from swarm.policy.policy import load_policy

    torch.set_num_threads(1)

    def trained(num: int, batches: dict[int, list[Any]]) -> Adapter:
        replicas = Replicas(load_policy(PolicySection(lora=LORA), device="cpu"), num, 1e-2)
        for _ in range(2):
            replicas.train(batches)
        return replicas.weights(0)

    short, long = ([5, 6, 7], [8, 9, 2]), ([10, 11], [12, 13, 14, 15, 2])
    together, alone = trained(2, {0: [short], 1: [long]}), trained(1, {0: [short]})
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, atol=1e-4, rtol=1e-4)


def test_learners_under_rl_merge_and_keep_their_own_weights_while_others_are_measured() -> None:
    from swarm.experiments.merging.supervised import LearnerReplicas

    torch.set_num_threads(1)
    population = LearnerReplicas(
        MergingArm("pairs", gate_tasks=2), seed=0, groups_per_round=2, group_size=4, held_out_tasks=1
    )
    rewards = population.train([0, 1], 0.0, False)
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)
    before = population.weights(0)
    other = {name: tensor + 1 for name, tensor in before.items()}
    assert population.measure([other])[0].keys() == population.measure([before])[0].keys()
    population.gate_score(0, other)
    assert all(torch.equal(population.weights(0)[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(population.weights(7)[name], tensor) for name, tensor in population.start.items())

"""The recovery experiment: traces of failures, modelled clocks, ways of rebuilding a stage, tables."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.experiments.recovery import clocks
from swarm.experiments.recovery.figures import Runs, figures, hours_to_target, step_reaching, write_all
from swarm.experiments.recovery.plan import (
    ADAPTER,
    CHECKFREE,
    CHECKFREE_PLUS,
    FULL,
    NONE,
    NUM_STAGES,
    OWN_COPY,
    POOR,
    REDUNDANT,
    STEP_S,
    TUNED,
    RecoveryPlan,
)
from swarm.experiments.recovery.recovery_cell import ALPHABET, Toy, language, run, token_ids
from swarm.pipeline.driver.recovery import average_weights


def made_run(arm: str, curve: list[float], rate: float = 0.0, seed: int = 0, training: str = "full") -> dict[str, Any]:
    steps = 10 * (len(curve) - 1)
    jumps = [{"step": 3, "stage": 0, "before": 1.0, "after": 1.5}] if rate else []
    return {
        "training": training, "arm": arm, "rate": rate, "seed": seed, "check_interval": 10, "num_steps": steps,
        "curve": curve, "jumps": jumps,
    }  # fmt: skip


def test_every_arm_meets_every_rate_at_every_seed() -> None:
    plan = RecoveryPlan("base", seeds=(0, 1))
    cells = plan.cells()
    assert len(cells) == len({cell.digest for cell in cells}) == 2 * (len(FULL) + len(ADAPTER))
    rates = {cell.settings["arm"]: cell.settings["rates"] for cell in cells if cell.settings["training"] == "full"}
    assert rates[NONE] == [0.0] and rates[CHECKFREE] == [0.05, 0.10, 0.16]
    adapters = [cell for cell in cells if cell.settings["training"] == "adapter"]
    assert {cell.settings["base"] for cell in adapters} == {plan.base_cell().digest}


def test_a_rate_per_hour_is_the_share_of_machines_lost_in_one() -> None:
    lost = [0] * 2000
    for seed in range(2000):
        for failure in clocks.failures(seed, 0.16):
            if failure.work_s > clocks.HOUR_S:
                break
            lost[seed] |= 1 << failure.stage
    share = sum(bin(stages).count("1") for stages in lost) / (2000 * NUM_STAGES)
    assert share == pytest.approx(0.16, abs=0.012)


def test_another_rate_stretches_the_same_trace() -> None:
    slow, fast = clocks.failures(3, 0.05), clocks.failures(3, 0.16)
    for _ in range(5):
        one, other = next(slow), next(fast)
        assert one.stage == other.stage
        assert one.work_s / other.work_s == pytest.approx(math.log1p(-0.16) / math.log1p(-0.05))
    assert clocks.lost_stages(3, 0.0, 100) == {}


def test_clocks_count_what_was_said() -> None:
    assert clocks.redundant(2) == pytest.approx([1.65 * STEP_S / 3600, 3.3 * STEP_S / 3600])
    pause_s = STEP_S / 2 + clocks.REPLACE_S + 1e8 * 8 / 1e8
    assert clocks.replacing(3, [1], 1e8, 100.0) == pytest.approx(
        [STEP_S / 3600, (2 * STEP_S + pause_s) / 3600, (3 * STEP_S + pause_s) / 3600]
    )
    # δ = 1 GB at 100 Mbit/s = 80 s; M = 1 h / (6·0.10536) = 5695 s; √(2·80·5695) = 954.6 s = 10.6 steps
    assert clocks.young_daly_steps(0.10, 100.0) == 11


def test_checkpoints_cost_their_saving_and_what_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    save_s = clocks.transfer_s(clocks.STATE_BYTES, 100.0)
    # lost in the middle of step 4; the checkpoint after step 2 stands
    trace = [clocks.Failure(3.5 * STEP_S + save_s, 0), clocks.Failure(1e9, 0)]
    monkeypatch.setattr(clocks, "failures", lambda seed, rate: iter(trace))
    reached = clocks.checkpointing(4, 0, 0.1, 2, 100.0)
    lost_s = 1.5 * STEP_S + clocks.REPLACE_S + save_s
    wanted = [STEP_S, 2 * STEP_S, 3 * STEP_S + save_s, 4 * STEP_S + save_s + lost_s]
    assert reached == pytest.approx([one / 3600 for one in wanted])


def test_frequent_losses_need_frequent_checkpoints() -> None:
    tuned = clocks.checkpointing(300, 1, 0.16, clocks.young_daly_steps(0.16, 100.0), 100.0)[-1]
    assert tuned < clocks.checkpointing(300, 1, 0.16, 100, 100.0)[-1]
    assert tuned < clocks.checkpointing(300, 1, 0.16, 1, 100.0)[-1]


def test_text_follows_its_language() -> None:
    first = language("first")
    assert first == language("first") != language("second")
    text = first.text(random.Random(0), 400)
    assert len(text) == 400 and max(token_ids(text)) < len(ALPHABET)
    words = text.split(" ")[:-1]
    assert all(after in first.followers[word] for word, after in itertools.pairwise(words))


def test_a_rebuilt_stage_is_the_weighted_average_and_an_edge_is_a_copy() -> None:
    torch.set_num_threads(1)
    toy = Toy("full", 0)
    for _ in range(2):
        toy.step(swaps=False)
    low, high = average_weights(toy.norms[1], toy.norms[3])
    name = "model.layers.{}.mlp.up_proj.weight"
    before, after = (toy.parameters[name.format(stage)].detach() for stage in (1, 3))
    assert torch.allclose(toy.average(2)[name.format(2)], low * before + high * after, atol=1e-6)
    assert torch.equal(toy.average(0)[name.format(0)], before)
    others = toy.stage_weights([0, 1, 3, 4, 5])
    toy.rebuild(2, toy.average(2))
    assert torch.allclose(toy.parameters[name.format(2)].detach(), low * before + high * after, atol=1e-6)
    assert all(torch.equal(value, toy.parameters[key]) for key, value in others.items()), "nobody is rolled back"
    rebuilt = toy.stage_weights([2])
    toy.step(swaps=False)
    # fresh moments: the first step of AdamW is one learning rate, raised by a tenth, wherever there is a gradient
    moved = (toy.parameters[name.format(2)].detach() - rebuilt[name.format(2)]).abs()
    lr = 4e-3 * 3 / 20
    assert moved.median().item() == pytest.approx(1.1 * lr, rel=0.02)


def test_swapped_order_changes_what_is_learned_and_not_what_is_measured() -> None:
    torch.set_num_threads(1)
    straight, swapped = Toy("full", 0), Toy("full", 0)
    for step in range(2):  # the first one goes straight in both
        straight.step(swaps=False)
        swapped.step(swaps=True)
        edge = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(straight.parameters[edge], swapped.parameters[edge]) == (step == 0)
        assert (straight.held_out_loss() == swapped.held_out_loss()) == (step == 0)
    with torch.no_grad():
        for name, parameter in swapped.parameters.items():
            parameter.copy_(straight.parameters[name])
    assert straight.held_out_loss() == swapped.held_out_loss()


def test_cells_lose_the_same_stages_whatever_rebuilds_them(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rest = {"seed": 0, "num_steps": 44, "check_interval": 22}
    whole = [run({"training": "full", "arm": arm, "rates": [0.16], **rest})["runs"][0] for arm in (CHECKFREE, OWN_COPY)]
    assert [[(j["step"], j["stage"]) for j in one["jumps"]] for one in whole] == [[(42, 0)]] * 2
    assert whole[0]["curve"][:2] == whole[1]["curve"][:2] and whole[0]["curve"][2] != whole[1]["curve"][2]
    base = str(tmp_path / "base")
    run({"training": "full", "arm": NONE, "rates": [0.0], "write_to": base, **rest, "num_steps": 3})
    settings = {"training": "adapter", "arm": "base alone", "rates": [0.16], "folder": base, **rest}
    (found,) = run(settings)["runs"]
    assert len(found["curve"]) == 3 and [jump["step"] for jump in found["jumps"]] == [42]


def test_steps_are_read_between_measurements() -> None:
    found = made_run(NONE, [3.0, 2.0, 1.0])
    assert [step_reaching(found, loss) for loss in (2.5, 2.0, 1.25, 0.5)] == [5, 10, 18, None]


def test_tables_and_figures_hold_what_was_found(tmp_path: Path) -> None:
    none = [made_run(NONE, [3.0, 2.0, 1.5, 1.0], seed=seed) for seed in (0, 1)]
    lossy = [made_run(CHECKFREE_PLUS, [3.0, 2.2, 1.8, 1.4 + seed], 0.10, seed) for seed in (0, 1)]
    adapters = [
        made_run(NONE, [2.0, 1.0], training="adapter"),
        made_run(OWN_COPY, [2.0, 1.2], 0.16, training="adapter"),
    ]
    runs = Runs.of_cells([{"runs": none}, {"runs": lossy}, {"runs": adapters}])
    hours = hours_to_target(runs, CHECKFREE_PLUS, 0.10, 100.0)
    assert hours[0] is not None and hours[1] is None, "the second never gets down to 1.5"
    assert hours_to_target(runs, REDUNDANT, 0.10, 100.0) == pytest.approx([20 * 1.65 * STEP_S / 3600] * 2)
    found = json.loads(json.dumps(figures(runs)))
    assert found["full"][CHECKFREE_PLUS]["10%"]["excess"]["mean"] == pytest.approx((0.225 + 0.475) / 2, abs=1e-3)
    assert set(found["hours_to_target"]) == {NONE, CHECKFREE_PLUS, TUNED, POOR, REDUNDANT}
    assert found["adapter"][OWN_COPY]["end_loss"]["mean"] == 1.2
    report, tables = write_all(tmp_path, runs)
    assert len(tables) == 5 and "(1 of 2)" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert (tmp_path / "curves.png").stat().st_size > 10_000 and "CheckFree+" in report.read_text(encoding="utf-8")

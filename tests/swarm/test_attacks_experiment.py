"""Hostile nodes among learners: what each sends, what a node makes of it, and what the tables say."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from swarm.errors import ConfigError
from swarm.experiments.attacks.attacks_report import attack_table, figures, final_reward, in_turn_table, memory_table
from swarm.experiments.attacks.hostile import Attack
from swarm.experiments.attacks.plan import ALL, ATTACKS, DEFENCES, DEFENDED, EPISODES, OPEN, AttackPlan, chosen_attacks
from swarm.extensions import points
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.rejection import Rejection
from tests.unit.test_extending_page import load_examples

SMALL: dict[str, Any] = {
    "num_hostile": 1, "seed": 0, "num_nodes": 3, "num_rounds": 1, "groups_per_round": 6, "swarm_groups": 6, "group_size": 6,
    "hostile_groups": 6, "num_sybils": 5, "held_out_tasks": 1,
}  # fmt: skip


EXAMPLE = "all right"
"""The attack of docs/extending.md."""


class Bench:
    """Two honest learners and a hostile node, with a reader of each kind that owns nothing."""

    def __init__(self) -> None:
        import torch

        from swarm.experiments.attacks import attacks_cell
        from swarm.experiments.attacks.readers import GuardedReader, OpenReader
        from swarm.experiments.learner_swarm import LearnerSwarm

        torch.set_num_threads(1)
        settings = SMALL | {"attack": ALL, "defence": DEFENDED}
        self.doors: list[Any] = []
        config = attacks_cell._config(settings)

        def make_reader(door: Any) -> GuardedReader:
            self.doors.append(door)
            return GuardedReader(door)

        self.swarm = LearnerSwarm([config] * 2, 0, make_reader)
        (self.hostile,) = attacks_cell._hostile_nodes(settings, config, self.swarm)
        reader = self.doors[0].context.identity.peer_id  # which does not even read what bears its own name
        others = [name for name in self.hostile.setup.honest if name != reader]
        self.hostile.setup = replace(self.hostile.setup, honest=others)
        self.swarm.run_round()
        self.kinds = {DEFENDED: GuardedReader, OPEN: OpenReader}

    def reader(self, defence: str) -> Any:
        """That knows nobody yet, with an empty pool."""
        door = self.doors[0]
        pool = ExperiencePool(":memory:", door.config.sharing, door.context.clock)
        made = self.kinds[defence](replace(door, pool=pool))
        made._book._gets_other = True
        return made


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("attack", [*ATTACKS, EXAMPLE])
def test_what_an_attack_sends_is_told_for_what_it_is_and_no_honest_node_pays(
    bench: Bench, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attack == EXAMPLE:
        monkeypatch.setitem(points.ATTACKS._loaded, EXAMPLE, load_examples(monkeypatch)[EXAMPLE])
    guarded, unguarded = bench.reader(DEFENDED), bench.reader(OPEN)
    honest = {identity.peer_id for identity in bench.swarm.identities}
    offers = bench.swarm.exchange._offers
    for poster in [name for name in offers if name not in honest]:
        del offers[poster]  # of the attacks before
    guarded.pull(10_000)  # what honest nodes have sent so far
    before = Counter(guarded.rejected)
    for _ in range(2):  # what is repeated shows at the second time
        bench.hostile.act(attack, bench.swarm.now_s)
        guarded.pull(10_000)
        bench.swarm._now_s += 40.0  # whoever was silent is asked again
        guarded.pull(10_000)
        bench.swarm._now_s -= 39.0
    told = Counter(guarded.rejected) - before
    expected: Attack = points.ATTACKS.load(attack)
    assert expected.rejected_as & set(told) or not expected.rejected_as, told
    assert expected.rejected_as <= {reason.value for reason in Rejection}
    assert not any(guarded.reputation.is_banned(author) for author in honest)
    hostile_bodies = sum(n for author, n in guarded.num_admitted.items() if author not in honest)
    assert hostile_bodies == 0 or expected.admits_bodies
    assert any(poster not in honest for poster in offers), "every attack sends something"
    unguarded.pull(10_000)  # raises nothing, whatever it was


def test_every_attack_meets_both_defences_and_the_control_comes_first() -> None:
    plan = AttackPlan(seeds=(0, 1))
    cells = plan.cells()
    assert len({cell.digest for cell in cells}) == len(cells) == 3 + 2 + 2 + 3 * 3 + 3 * len(ATTACKS)
    assert [cell.settings["attack"] for cell in cells[:2]] == ["none", "none"]
    assert {cell.settings["defence"] for cell in cells[:2]} == {DEFENDED}
    assert {cell.settings["seed"] for cell in cells if cell.settings["defence"] == OPEN} == {0}
    assert len(AttackPlan(seeds=(0, 1, 2, 3), numbers=(4,)).cells()) == 5 + 4 + 4 + 5 + 5 * len(ATTACKS)
    assert {c.settings["num_hostile"] for c in cells if c.settings["attack"] in ATTACKS} == {0, 4}
    quiet = [c.settings["attack"] for c in cells if not c.settings["num_hostile"]]
    assert sorted(quiet) == [*[EPISODES] * 2, *["none"] * 3], "a game without an attack beside forged episodes"


def test_names_of_attacks_are_checked() -> None:
    assert chosen_attacks("spam, replay") == ("spam", "replay")
    with pytest.raises(ConfigError, match="attacks must be among"):
        chosen_attacks("spam,bribes")


def outcome(attack: str, number: int, defence: str, reward: float, seed: int = 0) -> dict[str, Any]:
    nodes = 8 - number
    return {
        "attack": attack, "num_hostile": number, "defence": defence, "seed": seed,
        "rewards": [[0.1] * nodes] * 4 + [[reward] * nodes] * 2, "held_out": [reward] * nodes, "hostile_bodies": 1,
        "honest_bodies": 3, "rejected": {"copied": 2}, "banned_honest": 0, "memory_mib": [1.0, 2.0, 5.0, 5.0, 6.0, 9.0],
    }  # fmt: skip


def test_rewards_are_compared_seed_by_seed_with_the_same_nodes_without_attack() -> None:
    quiet = outcome("none", 0, DEFENDED, 0.4)
    quiet["rewards"] = [[0.4] * 4 + [0.8] * 4] * 6  # the last four are hostile in the other runs
    results = [
        quiet, outcome(ALL, 4, DEFENDED, 0.38), outcome(ALL, 4, OPEN, 0.2), outcome("spam", 4, DEFENDED, 0.4),
        outcome("spam", 4, OPEN, 0.1),
    ]  # fmt: skip
    assert final_reward(results[1]) == pytest.approx(0.38), "of the last third"
    found = figures(results)
    assert found["in_turn"]["4 defended"]["mean"] == pytest.approx(0.95)
    assert found["in_turn"]["4 undefended"]["mean"] == pytest.approx(0.5)
    assert found["alone"]["spam undefended"]["mean"] == pytest.approx(0.25)
    assert found["copied_without_attack"] == 2 and found["memory_growth_mib"] == 4.0
    assert in_turn_table(results).rows[1][:3] == ["4", "0.380", "0.95"]
    (row,) = attack_table(results).rows
    assert row[0] == "spam" and row[1] == "1.00" and row[5] == "0.25" and row[4] == "25%"
    assert len(memory_table(results).rows) == 5
    assert figures([])["in_turn"] == {} and DEFENCES == (DEFENDED, OPEN)

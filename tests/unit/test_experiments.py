"""Experiments: the exchange in memory, cells that are computed once, names that are chosen."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.config import Config
from swarm.errors import ConfigError, SwarmError
from swarm.experiments.cells import Cell, CellStore, chosen_names, compute
from swarm.experiments.learner_swarm import LearnerSwarm
from swarm.experiments.sharing.arms import MemberKind
from swarm.experiments.sharing.cell import node_config
from swarm.report.tables import Spread


def sharing_config() -> Config:
    """Of a node with four groups of four answers a round, in a swarm of two."""
    settings = {
        "arm": "8/8", "seed": 0, "lr_factor": 1.0, "regime": "short", "num_members": 2, "groups_per_round": 4, "group_size": 4,
        "held_out_tasks": 1,
    }  # fmt: skip
    return node_config(settings, MemberKind("", 2))


@pytest.mark.parametrize("text", ["4/4, 8/0 + filter,4/4", " 4/4 ,, 8/0 + filter"])
def test_each_chosen_name_counts_once(text: str) -> None:
    assert chosen_names(text, ["8/0 + filter", "4/4"], "arms") == ["4/4", "8/0 + filter"]


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"arms must be among a; b, got c; set --arms with ';'"):
        chosen_names("a;c", iter(["a", "b"]), "arms", ";")
    with pytest.raises(ConfigError, match="got none"):
        chosen_names(" , ", ["a"], "arms")


def test_a_forged_reward_is_turned_away_in_memory_as_on_the_wire() -> None:
    swarm = LearnerSwarm([sharing_config()] * 2, seed=0)
    publish = swarm.exchange.publish

    def forge(identity: Any, groups: Any) -> None:
        publish(
            identity,
            [
                replace(group, rollouts=(replace(group.rollouts[0], reward=0.77), *group.rollouts[1:]))
                for group in groups
            ],
        )

    swarm.exchange.publish = forge  # type: ignore[method-assign]
    rows = [swarm.run_round() for _ in range(2)]
    assert swarm.rejected["reward_mismatch"] > 0 and sum(row.swarm_groups for row in rows) == 0


def test_engine_and_trainer_are_compared_where_nothing_is_filtered() -> None:
    config = sharing_config()
    cut = config.model_copy(update={"rollouts": config.rollouts.model_copy(update={"top_p": 0.5})})
    for node, is_compared in ((config, True), (cut, False)):
        swarm = LearnerSwarm([node], seed=0)
        swarm.run_round()
        (row,) = swarm.last_rows
        assert (row["train/engine_kl"] is not None) == is_compared and row["train/sampler_kl"] is not None
        assert (row["train/engine_kl"] or 0.0) < 1e-6


def test_spread_of_one_seed_has_no_deviation() -> None:
    assert Spread.of([0.25]).text(2) == "0.25" and Spread.of([1.0, 3.0]).text(1) == "2.0 ± 1.4"


def test_a_finished_cell_is_never_computed_again(tmp_path: Path) -> None:
    store, said = CellStore(tmp_path), list[str]()
    cell = Cell("no-such-kind", "4/4, seed 0", {"seed": 0})
    store.write(cell, {"answer": 42})
    assert compute([cell], store, 2, said.append) == [{"answer": 42}]
    assert said == ["1 of 1 cells were finished earlier"]
    assert store.read(Cell("no-such-kind", "4/4, seed 0", {"seed": 1})) is None, "other settings are another cell"


def test_a_damaged_result_is_computed_again(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path), Cell("sharing", "x", {})
    store.write(cell, {})
    store.result_path(cell).write_text('{"result": {"rew')
    assert store.read(cell) is None


def test_a_cell_that_fails_ends_the_experiment_and_keeps_the_others(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    done, broken = Cell("sharing", "done", {"seed": 1}), Cell("no-such-kind", "broken", {})
    store.write(done, {"fine": True})
    with pytest.raises(SwarmError, match="no-such-kind"):
        compute([done, broken], store, 1, lambda _: None)
    assert store.read(done) == {"fine": True}

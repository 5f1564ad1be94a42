"""Off-policy data and unlike models: what is old is old, what is foreign is foreign, and the tables say so."""

from typing import Any

import pytest

from swarm.experiments.heterogeneous.heterogeneous import MIXED, MODELS, SILOS, HeterogeneousPlan, model_table
from swarm.experiments.heterogeneous.heterogeneous import figures as model_figures
from swarm.experiments.offpolicy import CORRECTIONS, FOREIGN, OffPolicyPlan, figures, has_collapsed, reward_table

SETTINGS = {
    "correction": "tis", "seed": 0, "num_steps": 3, "groups_per_round": 6, "group_size": 8, "held_out_tasks": 1,
}  # fmt: skip


def run_of(correction: str, data: str, end: float, curve: tuple[float, ...] = (), seed: int = 0) -> dict[str, Any]:
    return {
        "correction": correction,
        "data": data,
        "seed": seed,
        "start": 0.2,
        "end": end,
        "curve": list(curve),
        "every": 16,
    }


def mixed_run(arm: str, seed: int, rewards: tuple[float, float]) -> dict[str, Any]:
    by_model = dict(zip(MODELS, rewards, strict=True))
    return {
        "arm": arm, "seed": seed, "rewards": {model: [value, value] for model, value in by_model.items()},
        "held_out_start": by_model, "held_out_end": by_model,
    }  # fmt: skip


def test_every_correction_meets_every_kind_of_data_once_per_seed() -> None:
    cells = OffPolicyPlan(seeds=(0, 1)).cells()
    assert len(cells) == len({cell.digest for cell in cells}) == 2 * 5 * len(CORRECTIONS) == 80


def test_delayed_data_is_sampled_by_the_version_of_then() -> None:
    import torch

    from swarm.adapters.adapter_state import read_adapter
    from swarm.experiments.bare_learner import BareLearner
    from swarm.experiments.offpolicy_cell import _config, _source

    torch.set_num_threads(1)
    settings = {**SETTINGS, "data": "1"}
    learner = BareLearner(_config(settings, init_seed=0), "learner", 0)
    source = _source(settings, learner)
    versions = list[tuple[int, int]]()
    while learner.policy.version < 3:
        before = read_adapter(learner.policy.model)
        rollouts = source.next()
        after = read_adapter(learner.policy.model)
        assert all(torch.equal(before[name], after[name]) for name in before), "sampling left another adapter behind"
        versions.append((learner.policy.version, rollouts.groups[0].policy_version))
        learner.train(rollouts, is_own=source.is_own)
        source.advance(rollouts)
    assert dict(versions) == {0: 0, 1: 0, 2: 1}


def test_a_stranger_shares_the_tokenizer_and_not_the_lineage() -> None:
    from swarm.experiments.bare_learner import BareLearner
    from swarm.experiments.offpolicy_cell import _config

    own = BareLearner(_config(SETTINGS, init_seed=0), "learner", 0).policy.lineage
    other = BareLearner(_config(SETTINGS, init_seed=1), "stranger", 0).policy.lineage
    assert own.tokenizer == other.tokenizer and own.policy != other.policy


@pytest.mark.parametrize(
    ("end", "curve", "collapsed"),
    [(0.3, (0.3, 0.4), False), (0.19, (0.3,), True), (0.3, (0.7, 0.2), True), (0.2, (), False)],
)
def test_collapse_is_an_end_below_the_start_or_half_the_best(
    end: float, curve: tuple[float, ...], collapsed: bool
) -> None:
    assert has_collapsed(run_of("none", "8", end, curve)) is collapsed


def test_the_winner_is_chosen_on_data_that_is_off_policy() -> None:
    results = [
        run_of("none", "0", 0.9), run_of("none", "8", 0.3), run_of("none", FOREIGN, 0.1),
        run_of("tis", "0", 0.1), run_of("tis", "8", 0.4), run_of("tis", FOREIGN, 0.2),
    ]  # fmt: skip
    found = figures(results)
    assert found["winner"] == "tis" and found["corrections"]["none"][FOREIGN]["collapse_rate"] == 1.0
    assert reward_table(results).rows[0] == ["none", "0.900", "0.300", "0.100 (1 collapsed)", "0.200"]


def test_each_model_is_compared_with_its_own_silo() -> None:
    results = [
        mixed_run(SILOS, 0, (1.0, 2.0)), mixed_run(MIXED, 0, (2.0, 1.0)),
        mixed_run(SILOS, 1, (1.0, 2.0)), mixed_run(MIXED, 1, (1.0, 3.0)),
    ]  # fmt: skip
    found = model_figures(results)
    assert (found["ratio_bundled"], found["ratio_second"]) == (1.5, 1.0)
    assert [row[0] for row in model_table(results).rows] == [
        f"{model}: {arm}" for model in MODELS for arm in (SILOS, MIXED)
    ]


def test_arms_with_unlike_models_differ_in_sharing_only(tmp_path: Any) -> None:
    silo, mixed = HeterogeneousPlan(tmp_path, seeds=(3,)).cells()
    assert {**silo.settings, "arm": MIXED} == mixed.settings


def test_second_tokenizer_spells_numbers_by_digit_and_words_in_pieces() -> None:
    from swarm.experiments.heterogeneous.second_policy import make_model, make_tokenizer

    tokenizer = make_tokenizer(["State the final answer to the following: 12 + 7 ="] * 50)
    text = "State the answer: 4711 über"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text and len(ids) < len(text)
    assert len(tokenizer("4711", add_special_tokens=False).input_ids) == 4
    assert tokenizer.convert_tokens_to_ids("<|end|>") == 2
    assert make_model(len(tokenizer)).config.model_type == "qwen2"

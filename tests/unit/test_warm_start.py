"""What a policy begins with before RL."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from swarm.adapters.adapter_state import read_adapter
from swarm.adapters.export import export_adapter
from swarm.config import Config, TrainingSection
from swarm.errors import PolicyError, TaskError
from swarm.policy.lineage import hash_weights
from swarm.policy.policy import Policy, load_policy
from swarm.tasks.final_answers import answer_rule, final_answer, written_by
from swarm.tasks.task_mixture import TaskMixture
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.warm_start.start_digest import start_digest
from swarm.warm_start.supervised_steps import WarmStart, begin_from

GAME = {"kind": "game", "name": "guess_number", "parameters": {"highest": 7, "max_turns": 3}}
SUMS = {"name": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def config_of(*sources: dict[str, object], **start: object) -> Config:
    tasks = {"sources": list(sources or [GAME])}
    rollouts = {"max_new_tokens": 80}
    return Config.model_validate({"tasks": tasks, "warm_start": {"steps": 3, **start}, "rollouts": rollouts})


def policy_of(config: Config) -> Policy:
    return load_policy(config.policy, device="cpu", start=start_digest(config))


def test_examples_are_episodes_of_right_answers_and_only_own_tokens_are_learned() -> None:
    config = config_of(GAME, {**SUMS, "tools": [{"name": "calculator"}], "answer": "tag"}, batch_size=4)
    policy = policy_of(config)
    seen: list[tuple[str, str]] = []

    class Watched(LocalOptimizer):
        def accumulate(self, parts, loss_of, temperature):  # type: ignore[no-untyped-def]
            seen.extend((policy.decode(prompt), policy.tokenizer.decode(ids)) for part in parts for prompt, ids in part)
            return super().accumulate(parts, loss_of, temperature)

    before = read_adapter(policy.model)
    loss = WarmStart(config, policy, Watched(TrainingSection(), policy), TaskMixture(config.tasks)).run()
    assert policy.version == 3 and 0 < loss < 20
    assert any(not torch.equal(before[name], one) for name, one in read_adapter(policy.model).items())
    games = [text for prompt, text in seen if "drawn" in prompt]
    sums = [text for prompt, text in seen if "drawn" not in prompt]
    assert len(games) == len(sums) == 6
    assert all(text.startswith("4") for text in games)
    assert any("lower" in text or "higher" in text for text in games)
    assert all("calculator: " in text and "answer" in text for text in sums)


def test_the_loss_falls_and_every_node_takes_the_same_steps() -> None:
    config = config_of(steps=12, batch_size=8, lr=5e-3)
    losses: list[float] = []
    adapters: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        policy = policy_of(config)
        first = WarmStart(
            config_of(steps=1, batch_size=8, lr=1e-9),
            policy,
            LocalOptimizer(TrainingSection(), policy),
            TaskMixture(config.tasks),
        ).run()
        policy = policy_of(config)
        losses += [
            first,
            WarmStart(config, policy, LocalOptimizer(TrainingSection(), policy), TaskMixture(config.tasks)).run(),
        ]
        adapters.append(read_adapter(policy.model))
    assert losses[1] < 0.7 * losses[0]
    assert all(torch.equal(one, adapters[1][name]) for name, one in adapters[0].items())


def test_what_begins_a_policy_is_part_of_its_lineage() -> None:
    plain = config_of(steps=0)
    assert start_digest(plain) == ""
    assert policy_of(plain).lineage == load_policy(plain.policy, device="cpu").lineage
    others = [config_of(), config_of(steps=4), config_of(lr=1e-4), config_of(SUMS), config_of(batch_size=2)]
    digests = [start_digest(config) for config in (*others, config_of())]
    assert len(set(digests)) == len(others) and digests[0] == digests[-1]
    assert policy_of(others[0]).lineage.policy != policy_of(plain).lineage.policy
    assert policy_of(others[0]).lineage.tokenizer == policy_of(plain).lineage.tokenizer


def test_an_exported_adapter_is_the_beginning(make_policy: Callable[..., Policy], tmp_path: Path) -> None:
    trained, fresh = make_policy(trained=True), make_policy()
    folder = tmp_path / "adapter"
    export_adapter(trained.model, trained.tokenizer, folder, hash_weights(trained.base_folder))
    lora = fresh.config.lora
    begin_from(folder, LocalOptimizer(TrainingSection(), fresh), lora.alpha / lora.rank)
    for name, factor in read_adapter(fresh.model).items():
        assert torch.allclose(factor, read_adapter(trained.model)[name], atol=1e-6), name
    config = config_of(steps=0, adapter=str(folder))
    assert start_digest(config) not in ("", start_digest(config_of()))
    other = make_policy(rank=2)
    with pytest.raises(
        PolicyError, match=r"warm_start.adapter must fit policy.base and policy.lora: .*policy.lora.rank"
    ):
        begin_from(folder, LocalOptimizer(TrainingSection(), other), 1.0)
    with pytest.raises(PolicyError, match=r"it has rank 4, got 2; set policy.lora.rank = 4"):
        begin_from(folder, LocalOptimizer(TrainingSection(), other), 1.0)
    with pytest.raises(PolicyError, match=r"it was trained on another base, .*; set policy.base to that"):
        begin_from(folder, LocalOptimizer(TrainingSection(), fresh), 1.0, lambda: "0" * 64)
    narrow = export_adapter(trained.model, trained.tokenizer, tmp_path / "narrow")
    kept = {
        name: one
        for name, one in safetensors.torch.load_file(narrow / "adapter_model.safetensors").items()
        if "q_proj" in name
    }
    safetensors.torch.save_file(kept, narrow / "adapter_model.safetensors")
    with pytest.raises(PolicyError, match=r"it has other layers, .*; set policy\.lora\.targets = \['q_proj'\]"):
        begin_from(narrow, LocalOptimizer(TrainingSection(), fresh), 1.0)
    with pytest.raises(PolicyError, match=r"warm_start.adapter must be a folder with an adapter in peft format, got"):
        start_digest(config_of(steps=0, adapter=str(tmp_path)))


def test_examples_that_do_not_fit_are_an_error_that_names_the_setting() -> None:
    config = config_of().model_copy(update={"rollouts": config_of().rollouts.model_copy(update={"max_new_tokens": 1})})
    policy = policy_of(config)
    with pytest.raises(TaskError, match=r"fit into rollouts.max_new_tokens, got 200 others in a row of 'guess_number'"):
        WarmStart(config, policy, LocalOptimizer(TrainingSection(), policy), TaskMixture(config.tasks)).run()


@pytest.mark.parametrize("rule", ["whole", "last_line", "last_number", "tag", "boxed", "after_think"])
def test_answers_are_written_in_a_form_that_the_rule_finds(rule: str) -> None:
    found = answer_rule(config_of({**SUMS, "answer": rule}).tasks.sources[0])
    assert final_answer(found, written_by(found, "42")) == "42"


def test_an_answer_is_written_in_the_tag_that_the_source_names() -> None:
    found = answer_rule(config_of({**SUMS, "answer": "tag", "answer_parameters": {"tag": "result"}}).tasks.sources[0])
    assert written_by(found, "42") == "<result>42</result>"


def test_a_step_without_a_finite_gradient_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(steps=3)
    policy = policy_of(config)

    class Overflowing(LocalOptimizer):
        num_batches = 0

        def accumulate(self, parts, loss_of, temperature):  # type: ignore[no-untyped-def]
            self.num_batches += 1
            factor = math.inf if self.num_batches == 2 else 1.0
            return super().accumulate(parts, lambda part, result: loss_of(part, result) * factor, temperature)

    WarmStart(config, policy, Overflowing(TrainingSection(), policy), TaskMixture(config.tasks)).run()
    assert policy.version == 2
    assert all(torch.isfinite(one).all() for one in read_adapter(policy.model).values())
    assert [record.message for record in caplog.records if "left out: its loss" in record.message]

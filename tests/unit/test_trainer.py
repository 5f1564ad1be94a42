"""The step as a whole: against an independent computation, in micro-batches, interrupted, fed with bad data."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.adapters.adapter_state import adapter_parameters, read_adapter
from swarm.config import LoraSection, TrainingSection
from swarm.engine.canary import Canary
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import CheckpointError, TrainingError
from swarm.extensions.points import ADVANTAGES, CORRECTIONS
from swarm.policy.logprobs import TokenLogprobs, TokenSequence
from swarm.policy.policy import Policy, load_policy
from swarm.training.experience import TrainingGroup
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from swarm.types import Rollout
from tests.unit.tiny_models import ARCHITECTURES, requests, sampled_groups

MakePolicy = Callable[..., Policy]
MAX_NEW_TOKENS = 6


class GradientTap(LocalOptimizer):
    """Keeps the gradient of the last applied step."""

    gradient: Tensor

    def apply(self, lr: float) -> None:
        self.gradient = torch.cat([p.grad.flatten() for p in self._parameters.values() if p.grad is not None])
        super().apply(lr)


def trainer_of(
    policy: Policy,
    kind: type[LocalOptimizer] = LocalOptimizer,
    temperature: float = 1.0,
    stop: tuple[str, ...] = (),
    **settings: Any,
) -> Trainer:
    config = TrainingSection.model_validate({"warmup_steps": 0, "max_grad_norm": 1e6, **settings})
    steps = kind(config, policy)
    return Trainer(config, policy, steps, temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, stop=stop)


def gradient_of(policy: Policy, groups: list[TrainingGroup], **settings: Any) -> Tensor:
    trainer = trainer_of(policy, GradientTap, **settings)
    trainer.step(groups)
    assert isinstance(trainer._steps, GradientTap)
    return trainer._steps.gradient


def with_rollouts(group: TrainingGroup, change: Callable[[int, Rollout], Rollout]) -> TrainingGroup:
    rollouts = tuple(change(i, rollout) for i, rollout in enumerate(group.group.rollouts))
    return replace(group, group=replace(group.group, rollouts=rollouts))


def of_others(group: TrainingGroup) -> TrainingGroup:
    """The same group, as if another node had sampled it: no token of it is fresh."""
    return replace(group, is_own=False)


def answer_logprobs(policy: Policy, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """[T] by one unpadded forward pass."""
    logits = policy.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
    return logits.log_softmax(-1)[torch.arange(len(prompt) - 1, len(prompt) - 1 + len(answer)), torch.tensor(answer)]


def plain_loss(policy: Policy, groups: list[TrainingGroup], kl_coef: float = 0.0) -> Tensor:
    """DAPO aggregation, grpo advantage, tis with C = 2, π_old = π: one answer at a time, in float64."""
    terms: list[Tensor] = []
    for group in groups:
        rewards = [rollout.reward for rollout in group.group.rollouts]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for rollout in group.group.rollouts:
            logprobs = answer_logprobs(policy, group.prompt_ids, rollout.token_ids)
            with policy.model.disable_adapter(), torch.no_grad():
                base = answer_logprobs(policy, group.prompt_ids, rollout.token_ids)
            for t, logprob in enumerate(logprobs):
                old = logprob.detach()
                weight = min(math.exp(old.item() - rollout.logprobs[t]), 2.0) if group.usable_logprobs else 1.0
                weight = weight * (logprob - old).exp()  # π/μ
                term = -weight * (rollout.reward - mean) / (std + 1e-6)
                if kl_coef:
                    difference = base[t] - logprob
                    term = term + kl_coef * weight * (difference.exp() - difference - 1)
                terms.append(term)
    return torch.stack(terms).sum() / len(terms)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_step_follows_the_gradient_of_the_plain_loss(make_policy: MakePolicy, name: str):
    policy = make_policy(name)
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    # another policy sampled the second group, a text-only author the third
    groups[1] = of_others(
        with_rollouts(groups[1], lambda i, r: replace(r, logprobs=tuple(p - 0.2 * i for p in r.logprobs)))
    )
    groups[2] = replace(groups[2], usable_logprobs=False)
    loss = plain_loss(policy, groups, kl_coef=0.1)
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, [p for _, p in adapter_parameters(policy.model)])]
    )

    trainer = trainer_of(policy, GradientTap, correction="tis", kl_coef=0.1)
    report = trainer.step(groups)
    assert isinstance(trainer._steps, GradientTap)
    assert (trainer._steps.gradient - expected).norm() < 1e-4 * expected.norm()
    assert report.loss == pytest.approx(loss.item(), abs=1e-5)
    assert report.grad_norm == pytest.approx(expected.norm().item(), rel=1e-4)
    assert report.num_tokens == sum(len(r.token_ids) for g in groups for r in g.group.rollouts)
    assert report.mean_ratio == pytest.approx(1.0)
    assert report.kl is not None and report.kl > 0
    assert report.ess_fraction < 1
    assert not report.skipped


@pytest.mark.parametrize("aggregation", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_do_not_change_the_gradient(make_policy: MakePolicy, aggregation: str):
    gradients: list[Tensor] = []
    for size in (64, 5, 1):
        policy = make_policy()
        groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
        gradients.append(gradient_of(policy, groups, micro_batch_sequences=size, aggregation=aggregation))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() < 2e-6 * gradients[0].norm()


def test_micro_batches_do_not_change_the_report(make_policy: MakePolicy):
    reports = []
    for size in (64, 3):
        policy = make_policy()
        groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
        reports.append(trainer_of(policy, micro_batch_sequences=size, inner_epochs=2, kl_coef=0.01).step(groups))
    for field in ("loss", "grad_norm", "clip_fraction", "entropy", "ess_fraction", "kl", "mean_ratio", "num_tokens"):
        assert getattr(reports[1], field) == pytest.approx(getattr(reports[0], field), rel=1e-3, abs=1e-5)


@pytest.mark.essential
@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "8bit"}, {"quantization": "4bit"}, {"gradient_checkpointing": True}]
)
def test_steps_move_the_adapter_and_make_rewarded_answers_likelier(
    make_policy: MakePolicy, settings: dict[str, object]
):
    policy = make_policy(trained=False, **settings)
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    trainer = trainer_of(policy, lr=3e-3)
    canary = Canary(policy, SlotEngine(policy, 8), tolerance=1e-3)

    before = lead_of(policy, groups)
    for step in range(4):
        assert not trainer.step(groups).skipped
        assert policy.version == step + 1
        canary.check()
    assert lead_of(policy, groups) > before + 0.5


def test_truncated_answers_are_left_out_but_count_in_the_mean(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    cut = [with_rollouts(group, lambda i, r: replace(r, finished=i != 3)) for group in groups]
    other_tokens = [
        with_rollouts(g, lambda i, r: replace(r, token_ids=(5, 6), logprobs=(-1.0, -1.0)) if i == 3 else r) for g in cut
    ]
    other_reward = [with_rollouts(g, lambda i, r: replace(r, reward=0.5) if i == 3 else r) for g in cut]
    gradients = [gradient_of(make_policy(), batch) for batch in (cut, other_tokens, other_reward)]
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2])
    assert not torch.allclose(gradients[0], gradient_of(make_policy(), cut, mask_truncated=False))


def test_an_answer_that_a_stop_string_ended_is_whole(make_policy: MakePolicy):
    groups = sampled_groups(make_policy(), max_new_tokens=MAX_NEW_TOKENS)
    cut = [with_rollouts(group, lambda i, r: replace(r, finished=False)) for group in groups]
    stopped = [with_rollouts(group, lambda i, r: replace(r, text=f"{r.text}</a>")) for group in cut]
    assert trainer_of(make_policy(), stop=("</a>", "</b>")).step(cut).skip_reason
    as_if_finished, as_stopped = make_policy(), make_policy()
    trainer_of(as_if_finished).step(groups)
    trainer_of(as_stopped, stop=("</a>", "</b>")).step(stopped)
    expected = read_adapter(as_if_finished.model)
    assert all(torch.equal(value, expected[name]) for name, value in read_adapter(as_stopped.model).items())


def test_filtered_sampling_shows_in_the_importance_weights(make_policy: MakePolicy):
    policy = make_policy()
    prompts, sampling = [policy.encode_prompt("Hi")], Sampling(top_k=3)
    (completions,) = SlotEngine(policy, 8).generate(requests(prompts, 4, 4), sampling, seed=0)
    groups = sampled_groups(policy, ("Hi",), max_new_tokens=4)

    def report(kind: str) -> float:
        drawn = with_rollouts(
            groups[0],
            lambda i, r: replace(r, token_ids=completions[i].token_ids, logprobs=getattr(completions[i], kind)),
        )
        return trainer_of(make_policy()).step([of_others(drawn)]).ess_fraction

    assert report("policy_logprobs") == pytest.approx(1.0, abs=1e-6)  # π_old itself
    assert report("logprobs") < 0.999  # w = π_old / μ, and μ is what was drawn from


def test_answers_beyond_the_token_limit_and_without_tokens_are_left_out(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    long = with_rollouts(groups[0], lambda i, r: replace(r, token_ids=(5,) * 7, logprobs=(-1.0,) * 7) if i == 1 else r)
    empty = with_rollouts(groups[0], lambda i, r: replace(r, token_ids=(), logprobs=()) if i == 1 else r)
    assert torch.equal(gradient_of(make_policy(), [long]), gradient_of(make_policy(), [empty]))


def test_sequence_mask_drops_answers_of_a_distant_policy(make_policy: MakePolicy):
    groups = sampled_groups(make_policy(), max_new_tokens=MAX_NEW_TOKENS)
    distant = [with_rollouts(g, lambda i, r: replace(r, logprobs=tuple(p - 3 for p in r.logprobs))) for g in groups]
    policy = make_policy()
    before = read_adapter(policy.model)
    trainer = trainer_of(policy, correction="sequence_mask")
    report = trainer.step(distant)
    assert "outside the correction's range" in report.skip_reason
    assert trainer.num_skipped_steps == 1 and policy.version == 0
    assert all(torch.equal(value, before[name]) for name, value in read_adapter(policy.model).items())
    # without usable log-probs there is nothing to correct: they are trained on as they are
    assert not trainer.step([replace(group, usable_logprobs=False) for group in distant]).skipped


def test_a_batch_in_parts_takes_one_step_for_each_and_is_off_policy_to_the_later_ones(make_policy: MakePolicy):
    policies = [make_policy() for _ in range(3)]
    groups = sampled_groups(policies[0], max_new_tokens=MAX_NEW_TOKENS)[:4]
    assert len(groups) == 4
    whole = trainer_of(policies[0], lr=2e-2).step(groups)
    parts = trainer_of(policies[1], lr=2e-2, groups_per_step=3).step(groups)
    by_hand = trainer_of(policies[2], lr=2e-2)
    reports = [by_hand.step(groups[0::2]), by_hand.step(groups[1::2])]
    assert [policy.version for policy in policies] == [1, 2, 2]
    left, right = (read_adapter(policy.model) for policy in policies[1:])
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert whole.ess_fraction == pytest.approx(1.0, abs=1e-4) and parts.ess_fraction < 0.9999
    assert parts.num_tokens == sum(report.num_tokens for report in reports) == whole.num_tokens
    assert parts.lr == reports[-1].lr
    tokens = [report.num_tokens for report in reports]
    mean = (reports[0].entropy * tokens[0] + reports[1].entropy * tokens[1]) / sum(tokens)
    assert parts.entropy == pytest.approx(mean)


def test_a_part_without_a_direction_costs_the_others_nothing(make_policy: MakePolicy):
    policy = make_policy()
    (useful, *_) = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    cut = with_rollouts(useful, lambda _, r: replace(r, finished=False))
    report = trainer_of(policy, groups_per_step=1).step([useful, cut])
    assert not report.skipped and policy.version == 1


def test_inner_epochs_move_away_from_the_frozen_policy(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    report = trainer_of(policy, inner_epochs=3, lr=2e-2).step(groups)
    assert policy.version == 3
    assert report.mean_ratio != pytest.approx(1.0, abs=1e-3)
    assert report.clip_fraction > 0


@pytest.mark.parametrize(("inner_epochs", "num_passes"), [(1, 1), (2, 3)])
def test_log_probs_are_computed_ahead_only_where_the_policy_moves_within_a_step(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, inner_epochs: int, num_passes: int
):
    policy, passes, compute = make_policy(), list[int](), Policy.token_logprobs
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    policy.version = inner_epochs  # the KL to the base is measured at every fourth step, the first one included

    def counted(policy: Policy, answers: Sequence[TokenSequence], *others: Any, **settings: Any) -> TokenLogprobs:
        passes.append(len(answers))
        return compute(policy, answers, *others, **settings)

    monkeypatch.setattr(Policy, "token_logprobs", counted)
    trainer_of(policy, inner_epochs=inner_epochs, micro_batch_sequences=64).step(groups)
    assert passes == [16] * num_passes


def test_kl_to_the_base_is_measured_at_every_fourth_step_and_one_answer_in_sixteen(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, group_size=5, max_new_tokens=MAX_NEW_TOKENS)
    trainer = trainer_of(policy, inner_epochs=2)
    assert [trainer.step(groups).kl is not None for _ in range(5)] == [True, False, False, False, True]
    assert trainer._kl_rows(33) == [] and policy.version == 10
    policy.version = 16
    assert trainer._kl_rows(33) == [0, 16, 32]


@pytest.mark.parametrize(("ratio", "is_clipped"), [("sequence", True), ("token", False)])
def test_the_ratio_of_an_answer_has_a_clip_range_of_its_own(make_policy: MakePolicy, ratio: str, is_clipped: bool):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    settings = {"inner_epochs": 2, "lr": 1e-4, "sequence_clip_low": 1e-7, "sequence_clip_high": 1e-7}
    report = trainer_of(policy, ratio=ratio, **settings).step(groups)
    assert (report.clip_fraction > 0) == is_clipped


def test_temperature_is_that_of_sampling(make_policy: MakePolicy):
    policy = make_policy()
    prompts = [policy.encode_prompt("Hi")]
    engine, sampling = SlotEngine(policy, 8), Sampling(temperature=0.6)
    (completions,) = engine.generate(requests(prompts, 4, 4), sampling, seed=0)
    groups = sampled_groups(policy, ("Hi",), max_new_tokens=4)
    fresh = of_others(
        with_rollouts(
            groups[0], lambda i, r: replace(r, token_ids=completions[i].token_ids, logprobs=completions[i].logprobs)
        )
    )
    assert trainer_of(make_policy(), temperature=0.6).step([fresh]).ess_fraction == pytest.approx(1.0, abs=1e-6)
    assert trainer_of(make_policy(), temperature=1.0).step([fresh]).ess_fraction < 0.999


def test_warm_up_is_linear_and_counts_from_one(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    trainer = trainer_of(policy, warmup_steps=4, lr=1e-3, lr_by_ess=False)
    assert [trainer.step(groups).lr for _ in range(5)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_step_cannot_be_larger_than_the_clip_allows(make_policy: MakePolicy):
    policy = make_policy()
    trainer = trainer_of(policy, GradientTap, max_grad_norm=0.01)
    report = trainer.step(sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS))
    assert isinstance(trainer._steps, GradientTap)
    assert trainer._steps.gradient.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert report.grad_norm > 0.01


def test_a_non_finite_step_is_skipped_and_leaves_everything_as_it_was(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    trainer = trainer_of(policy)
    trainer.step(groups)
    before, _ = trainer.state()
    poisoned = next(p for n, p in policy.model.named_parameters() if "embed_tokens" in n)
    saved = poisoned.detach().clone()
    with torch.no_grad():
        poisoned.fill_(float("inf"))
    report = trainer.step(groups)
    with torch.no_grad():
        poisoned.copy_(saved)
    assert report.skip_reason == "loss or gradient is not finite"
    assert trainer.num_skipped_steps == 1 and policy.version == 1
    after, _ = trainer.state()
    assert all(torch.equal(after[kind][name], value) for kind, named in before.items() for name, value in named.items())
    assert not trainer.step(groups).skipped


def test_nothing_to_learn_from_is_skipped(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    report = trainer_of(policy).step([with_rollouts(g, lambda _, r: replace(r, finished=False)) for g in groups])
    assert "no answer that takes part" in report.skip_reason
    assert policy.version == 0


def test_a_group_without_reward_differences_is_refused(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    flat = with_rollouts(groups[0], lambda _, r: replace(r, reward=0.25))
    with pytest.raises(TrainingError, match=r"got 0\.25 for all 4 rollouts of made-up/16/0; drop groups"):
        trainer_of(policy).step([flat])


def test_an_adapter_that_cannot_move_is_an_error(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    trainer = trainer_of(policy, lr=1e-30)
    with pytest.raises(TrainingError, match="must move the adapter"):
        trainer.step(groups)


@pytest.mark.essential
def test_a_resumed_run_is_bitwise_equal(make_policy: MakePolicy):
    settings = {"inner_epochs": 2, "warmup_steps": 3, "kl_coef": 0.01}

    def run(policy: Policy, trainer: Trainer, seeds: range) -> None:
        for seed in seeds:
            trainer.step(sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS, seed=seed))

    whole = make_policy(trained=False)
    run(whole, trainer_of(whole, **settings), range(6))

    first = make_policy(trained=False)
    interrupted = trainer_of(first, **settings)
    run(first, interrupted, range(3))
    tensors, state = interrupted.state()

    torch.manual_seed(99)  # a new process has other global random state
    second = make_policy(trained=False)
    resumed = trainer_of(second, **settings)
    resumed.restore(tensors, state)
    run(second, resumed, range(3, 6))

    assert second.version == whole.version == 12
    expected = read_adapter(whole.model)
    assert all(torch.equal(value, expected[name]) for name, value in read_adapter(second.model).items())


def test_dropout_masks_depend_on_the_step_alone(make_policy: MakePolicy):
    adapters = []
    for global_seed in (1, 2):
        base = make_policy().base_folder
        config = make_policy().config.model_copy(
            update={"lora": LoraSection(rank=4, alpha=8.0, dropout=0.3), "base": str(base)}
        )
        policy = load_policy(config, device="cpu")
        groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
        torch.manual_seed(global_seed)
        trainer = trainer_of(policy)
        reports = [trainer.step(groups) for _ in range(2)]
        assert reports[1].mean_ratio != 1.0  # π_old is computed without dropout
        adapters.append(read_adapter(policy.model))
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())


def test_state_of_another_lineage_is_refused(make_policy: MakePolicy):
    tensors, state = trainer_of(make_policy(rank=4)).state()
    with pytest.raises(CheckpointError, match="must come from policy lineage"):
        trainer_of(make_policy(rank=8)).restore(tensors, state)


@pytest.mark.parametrize("damage", ["missing", "shape", "nan"])
def test_an_adapter_that_does_not_fit_is_refused_before_anything_changes(make_policy: MakePolicy, damage: str):
    policy = make_policy()
    trainer = trainer_of(policy)
    tensors, state = trainer.state()
    before = read_adapter(policy.model)
    name = sorted(tensors["adapter"])[-1]
    if damage == "missing":
        del tensors["adapter"][name]
    else:
        tensors["adapter"][name] = torch.full((3, 3) if damage == "shape" else before[name].shape, float("nan"))
    with pytest.raises(CheckpointError):
        trainer.restore(tensors, state)
    assert all(torch.equal(value, before[key]) for key, value in read_adapter(policy.model).items())


def lead_of(policy: Policy, groups: list[TrainingGroup]) -> float:
    """How much likelier the rewarded answer is than its siblings, per group."""
    with torch.no_grad():
        sums = [
            [answer_logprobs(policy, g.prompt_ids, r.token_ids).sum().item() for r in g.group.rollouts] for g in groups
        ]
    return sum(row[0] - sum(row[1:]) / (len(row) - 1) for row in sums) / len(sums)


RATIOS = ("token", "sequence", "minpro")
PAIRED = [
    (advantage, RATIOS[(row + column) % len(RATIOS)], correction)
    for row, advantage in enumerate(ADVANTAGES.names)
    for column, correction in enumerate(CORRECTIONS.names)
]
"""Every two settings of the three meet."""


def test_every_two_settings_meet():
    for first, second in itertools.combinations(range(3), 2):
        names = (ADVANTAGES.names, RATIOS, CORRECTIONS.names)
        assert {(one[first], one[second]) for one in PAIRED} == set(itertools.product(names[first], names[second]))


@pytest.mark.parametrize(("advantage", "ratio", "correction"), PAIRED)
def test_every_pair_of_settings_makes_rewarded_answers_likelier(
    make_policy: MakePolicy, advantage: str, ratio: str, correction: str
):
    policy = make_policy(trained=False)
    groups = sampled_groups(policy, ("Hi", "What is 7 + 5?"), group_size=5, max_new_tokens=MAX_NEW_TOKENS)
    stale = [
        with_rollouts(g, lambda i, r: replace(r, logprobs=tuple(p - 0.05 * i for p in r.logprobs))) for g in groups
    ]
    trainer = trainer_of(policy, lr=5e-3, inner_epochs=2, advantage=advantage, ratio=ratio, correction=correction)
    before = lead_of(policy, groups)
    for _ in range(2):
        trainer.step(stale)
    assert policy.version >= 2
    assert lead_of(policy, groups) > before + 0.1


@pytest.mark.parametrize("settings", [{"ratio": "minpro"}, {"ratio": "sequence"}, {"adaptive_clip": True}])
def test_ratios_to_the_sampler_make_rewarded_answers_likelier(make_policy: MakePolicy, settings: dict[str, Any]):
    policy = make_policy(trained=False)
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    trainer = trainer_of(policy, lr=5e-3, ratio_reference="sampler", correction="sequence_mask+opsm", **settings)
    before = lead_of(policy, groups)
    for _ in range(3):
        trainer.step(groups)
    assert lead_of(policy, groups) > before + 0.1


def test_the_learning_rate_backs_off_when_few_answers_carry_the_step(make_policy: MakePolicy):
    groups = sampled_groups(make_policy(), max_new_tokens=MAX_NEW_TOKENS)
    one_stands_out = [  # 15 of 16 answers were far likelier when they were sampled
        of_others(
            with_rollouts(
                g,
                lambda i, r, g=g: (
                    r if g is groups[0] and i == 0 else replace(r, logprobs=tuple(p + 6 for p in r.logprobs))
                ),
            )
        )
        for g in groups
    ]
    reports = {
        on: trainer_of(make_policy(), lr=1e-3, correction="none", lr_by_ess=on).step(one_stands_out)
        for on in (True, False)
    }
    assert reports[False].lr == 1e-3
    assert reports[True].ess_fraction == reports[False].ess_fraction < 0.2
    assert reports[True].lr == pytest.approx(1e-3 * math.sqrt(max(reports[True].ess_fraction, 1 / 16)))


def test_dropped_answers_lower_the_effective_sample_size(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    groups[0] = with_rollouts(groups[0], lambda _, r: replace(r, logprobs=tuple(p - 3 for p in r.logprobs)))
    tokens = [sum(len(rollout.token_ids) for rollout in group.group.rollouts) for group in groups]
    left = 1 - tokens[0] / sum(tokens)
    assert trainer_of(policy, correction="sequence_mask").step(groups).ess_fraction == pytest.approx(left, rel=1e-4)


def test_rounding_of_the_own_engine_is_not_staleness_and_the_same_weights_of_an_older_version_are(
    make_policy: MakePolicy,
):
    groups = sampled_groups(make_policy(), max_new_tokens=MAX_NEW_TOKENS)
    noisy = [
        with_rollouts(g, lambda i, r: replace(r, logprobs=tuple(p + 0.4 * (-1) ** i for p in r.logprobs)))
        for g in groups
    ]
    older = [replace(g, group=replace(g.group, policy_version=-1)) for g in noisy]
    half = [  # the first token of each answer is older
        with_rollouts(
            g, lambda _, r: replace(r, segments=((-1, 1), (0, len(r.token_ids) - 1)) if r.token_ids[1:] else ())
        )
        for g in noisy
    ]
    fresh, stale, mixed = (trainer_of(make_policy(), lr=1e-3).step(one) for one in (noisy, older, half))
    assert fresh.ess_fraction == 1.0 and fresh.lr == 1e-3
    assert stale.ess_fraction < mixed.ess_fraction < 1 and stale.lr < mixed.lr < 1e-3
    assert fresh.loss == stale.loss, "the loss is corrected alike"


def test_gdpo_normalises_over_the_whole_batch_also_where_it_takes_several_steps(make_policy: MakePolicy):
    """The advantages of a part are those of the whole batch: float64 numpy, two signals that agree in one group alone."""
    groups = sampled_groups(make_policy(), ("Hi", "What is 7 + 5?"), max_new_tokens=MAX_NEW_TOKENS)
    signals = (((1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0)), ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (1.0, 0.2)))
    signalled = [
        with_rollouts(g, lambda i, r, of=of: replace(r, signals=(("form", of[i][0]), ("truth", of[i][1]))))
        for g, of in zip(groups, signals, strict=True)
    ]

    def normalised(values: np.ndarray) -> np.ndarray:
        return (values - values.mean(0)) / (values.std(0, ddof=1) + 1e-6)

    of_groups = [normalised(np.array(of)).sum(1) for of in signals]
    whole, last = np.concatenate(of_groups).std(ddof=1), of_groups[1].std(ddof=1)
    settings = {"advantage": "gdpo", "lr": 1e-7, "correction": "none"}
    in_parts = gradient_of(make_policy(), signalled, groups_per_step=1, **settings)  # of the last part
    alone = gradient_of(make_policy(), signalled[1:], **settings)
    assert whole / last > 1.2
    assert (in_parts * whole / last - alone).norm() < 1e-4 * alone.norm()


def test_the_report_always_tells_kl_and_adapter_norm(make_policy: MakePolicy):
    policy = make_policy()
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    sampled = trainer_of(make_policy()).step(groups)
    exact = trainer_of(make_policy(), kl_coef=1e-9).step(groups)
    assert sampled.kl is not None and exact.kl is not None
    assert sampled.kl == pytest.approx(exact.kl, rel=2.0)  # one of 16 answers
    assert sampled.sampler_kl == sampled.engine_kl == pytest.approx(0.0, abs=1e-9)
    elsewhere = [with_rollouts(g, lambda i, r: replace(r, logprobs=[x - 0.3 for x in r.logprobs])) for g in groups]
    assert trainer_of(make_policy()).step(elsewhere).engine_kl == pytest.approx(0.3**2 / 2, rel=1e-3)
    squares = [parameter.double().square().sum().item() for _, parameter in adapter_parameters(policy.model)]
    assert sampled.adapter_norm == pytest.approx(math.sqrt(sum(squares)), rel=0.05)
    row = sampled.row()
    assert row["train/kl"] == sampled.kl and row["train/adapter_norm"] == sampled.adapter_norm
    assert all(name.startswith("train/") for name in row)
    assert trainer_of(make_policy(trained=False)).step(groups).kl == 0.0


def test_adaptive_clip_bounds_survive_a_restart(make_policy: MakePolicy):
    settings = {"adaptive_clip": True, "ratio_reference": "sampler", "correction": "none", "lr": 1e-3}
    policy = make_policy()
    # bad answers at r = e^-.33 = .72 outweigh the good one until c_low is .75, the fourth bounds
    groups = [
        with_rollouts(g, lambda i, r: replace(r, logprobs=tuple(p + 0.33 * (i > 0) for p in r.logprobs)))
        for g in sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    ]
    groups = [
        with_rollouts(g, lambda i, r: replace(r, token_ids=r.token_ids[:1], logprobs=r.logprobs[:1]) if i == 0 else r)
        for g in groups
    ]
    trainer = trainer_of(policy, **settings)
    assert trainer.step(groups).clip_fraction == 0
    tensors, state = trainer.state()
    assert state["adaptive_clip_notch"] == 3
    other = make_policy()
    resumed = trainer_of(other, **settings)
    resumed.restore(tensors, state)
    assert trainer.step(groups).clip_fraction > 0.5
    resumed.step(groups)
    expected = read_adapter(policy.model)
    assert all(torch.equal(value, expected[name]) for name, value in read_adapter(other.model).items())
    del state["adaptive_clip_notch"]  # a checkpoint of an older version
    resumed.restore(tensors, state)
    assert resumed.state()[1]["adaptive_clip_notch"] == 0


def test_a_saved_state_does_not_change_with_later_steps(make_policy: MakePolicy):
    policy = make_policy()
    trainer, groups = trainer_of(policy), sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    trainer.step(groups)
    saved, _ = trainer.state()
    before = {(kind, name): value.clone() for kind, named in saved.items() for name, value in named.items()}
    trainer.step(groups)
    assert all(torch.equal(saved[kind][name], value) for (kind, name), value in before.items())


def test_without_dropout_gradients_are_computed_in_evaluation_mode(make_policy: MakePolicy):
    policy, modes = make_policy(), list[bool]()
    steps = LocalOptimizer(TrainingSection(), policy)

    def loss_of(index: int, result: TokenLogprobs) -> Tensor:
        modes.append(policy.model.training)
        return result.logprobs.sum()

    steps.accumulate([[((5, 6), (7, 8))], [((5,), (7,))]], loss_of, 1.0)
    assert modes == [False] * 2


def test_a_gradient_of_one_tensor_alone_moves_it(make_policy: MakePolicy):
    policy = make_policy()
    steps = LocalOptimizer(TrainingSection(weight_decay=0.0), policy)
    name, first = next(iter(adapter_parameters(policy.model)))
    before = steps.read()
    steps.accumulate([[((5, 6), (7, 8))]], lambda index, result: first.sum(), 1.0)
    steps.apply(1e-3)
    after = steps.read()
    assert [one for one in before if not torch.equal(before[one], after[one])] == [name] and policy.version == 1


def test_an_answer_may_be_as_long_as_the_limit(make_policy: MakePolicy):
    policy = make_policy()
    (group, *_) = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    longest = with_rollouts(group, lambda i, r: replace(r, token_ids=(5,) * 6, logprobs=(-1.0,) * 6))
    assert trainer_of(policy).step([longest]).num_tokens == 6 * len(group.group.rollouts)


def test_writing_turned_tensors_forgets_their_moments_and_no_others(make_policy: MakePolicy):
    policy = make_policy()
    trainer = trainer_of(policy)
    groups = sampled_groups(policy, max_new_tokens=MAX_NEW_TOKENS)
    trainer.step(groups)
    names = sorted(read_adapter(policy.model))
    trainer._steps.write(read_adapter(policy.model), names[:2])
    left = {key.partition(":")[2] for key in trainer.state()[0]["optimizer"]}
    assert left == set(names[2:])
    trainer.step(groups)
    moments = trainer.state()[0]["optimizer"]
    assert [moments[f"step:{name}"].item() for name in (names[0], names[2])] == [1.0, 2.0]

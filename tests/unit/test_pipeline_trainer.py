"""The trainer's own step, taken through a pipeline: the same loss on the same micro-batches moves the adapter alike."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm.adapters.adapter_state import read_adapter
from swarm.config import TrainingSection
from swarm.pipeline.commands import StageSettings
from swarm.policy.logprobs import TokenLogprobs
from swarm.policy.policy import Policy
from swarm.training.micro_batch import micro_batches, training_sequences
from swarm.training.policy_loss import ClipRange, Logprobs, policy_loss
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from tests.unit.pipeline_models import open_stage_group
from tests.unit.tiny_models import sampled_groups


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
async def test_a_training_step_is_that_of_the_trainer(
    tiny_models: dict[str, Path], make_policy: Callable[..., Policy], name: str
) -> None:
    policy = make_policy(name)
    groups = sampled_groups(policy)
    config = TrainingSection(lr=1e-3, warmup_steps=0, micro_batch_sequences=3, max_grad_norm=0.02, lr_by_ess=False)
    parts = list(micro_batches(training_sequences(groups, config, 6), policy.device, max_sequences=3, max_tokens=4096))
    assert len(parts) > 3

    def loss_of(index: int, result: TokenLogprobs) -> Tensor:
        logprobs = Logprobs(result.logprobs, result.logprobs.detach(), None, None, result.mask)
        terms = policy_loss(parts[index], logprobs, config, ClipRange(config.clip_low, config.clip_high))
        return (terms.loss * result.mask * parts[index].scales).sum()

    settings = StageSettings(weight_decay=config.weight_decay)
    async with open_stage_group(
        tiny_models[name], [1, 1], policy.config.lora, like=policy.model, stage_settings=settings
    ) as stage_group:
        gradient = await stage_group.policy.accumulate([part.sequences for part in parts], loss_of)
        await stage_group.stage_group.commit(lr=config.lr, max_grad_norm=config.max_grad_norm)
        found = {key: value for stage in stage_group.stages for key, value in stage.state()[0]["adapter"].items()}
    before = read_adapter(policy.model)
    report = Trainer(config, policy, LocalOptimizer(config, policy), temperature=1.0, max_new_tokens=6).step(groups)
    assert not report.skipped
    assert gradient.norm == pytest.approx(report.grad_norm, rel=1e-4)
    wanted = read_adapter(policy.model)
    assert set(found) == set(wanted)
    moved = torch.cat([(wanted[key] - before[key]).flatten() for key in wanted])
    error = torch.cat([(found[key] - wanted[key]).flatten() for key in wanted])
    # a first step of Adam is ±lr: where a gradient is rounding noise its sign may differ, in a few places
    assert moved.abs().mean() > 5e-4
    assert error.abs().mean() < 2e-6

"""A pipeline loses a stage and continues: the other stages are unchanged, and the new one is filled as planned."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm.config import LoraSection
from swarm.errors import PipelineError
from swarm.pipeline.commands import StageSettings
from swarm.pipeline.driver.recovery import Situation, average_weights, plan_recovery, rebuild_stage, take_copies
from swarm.pipeline.driver.stage_group import StageGroupSettings
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage_link import InProcessLink
from tests.unit.pipeline_models import (
    LORA,
    TestStageGroup,
    load_stages,
    loss_of,
    made_up_parts,
    open_stage_group,
    single_model,
)


async def train(opened: TestStageGroup, num_steps: int) -> None:
    for seed in range(num_steps):
        await opened.policy.accumulate(made_up_parts(4, seed=seed), loss_of)
        await opened.stage_group.commit(lr=1e-2, max_grad_norm=1.0)


def weights_of(stage: Stage) -> dict[str, Tensor]:
    return stage.state()[0]["adapter"]


def newcomer(folder: Path, sizes: list[int], index: int, lora: LoraSection | None, *, replicate: bool = False) -> Stage:
    return Stage(load_stages(folder, sizes, lora, replicate_edges=replicate)[index], StageSettings())


@pytest.mark.parametrize("strategy", ["neighbour_copy", "average", "base"])
async def test_a_frozen_base_loses_an_adapter_only(pipeline_models: dict[str, Path], strategy: str) -> None:
    folder, sizes = pipeline_models["llama"], [2, 1, 2]
    lost = {"neighbour_copy": 1, "average": 1, "base": 0}[strategy]
    async with open_stage_group(folder, sizes, LORA, like=single_model(folder, LORA)) as opened:
        await train(opened, 2)
        copies = await take_copies(opened.stage_group)
        await train(opened, 1)
        before = [weights_of(stage) for stage in opened.stages]
        moments = opened.stages[2].state()[0]["optimizer"]
        situation = Situation(
            3,
            frozenset({lost}),
            opened.stage_group.version,
            copies if strategy == "neighbour_copy" else (),
            is_frozen=True,
        )
        (plan,) = plan_recovery(situation)
        assert plan.strategy == strategy
        fresh = newcomer(folder, sizes, lost, LORA)
        start = weights_of(fresh)
        link = InProcessLink(fresh)
        await rebuild_stage(opened.stage_group, plan, link, situation.copies)
        found = weights_of(fresh)
        wanted = {"neighbour_copy": copies[1].weights, "base": start}.get(strategy)
        if wanted is not None:
            assert all(torch.equal(found[name], wanted[name]) for name in found)
        else:
            norms = opened.stage_group.stage_norms
            share, _ = average_weights(norms[0], norms[2])
            name = "mlp.up_proj.lora_"
            products = [
                before[i][f"model.layers.{layer}.{name}B"] @ before[i][f"model.layers.{layer}.{name}A"]
                for i, layer in ((0, 0), (2, 3))
            ]
            u, values, v = torch.linalg.svd(share * products[0] + (1 - share) * products[1], full_matrices=False)
            nearest = u[:, :3] * values[:3] @ v[:3]
            product = found[f"model.layers.2.{name}B"] @ found[f"model.layers.2.{name}A"]
            torch.testing.assert_close(product, nearest, rtol=0, atol=1e-5)
        assert fresh.version == opened.stage_group.version == 3
        assert fresh.state()[1]["lr_factor"] == 1.1
        assert not fresh.state()[0]["optimizer"]
        for index in {0, 2} - {lost}:  # no rollback of the others
            assert all(
                torch.equal(weights_of(opened.stages[index])[name], before[index][name]) for name in before[index]
            )
        assert all(torch.equal(opened.stages[2].state()[0]["optimizer"][name], moments[name]) for name in moments)
        await train(opened, 1)
        assert fresh.version == 4
        link.close()


async def test_a_lost_edge_comes_back_from_its_twin_with_its_ends(pipeline_models: dict[str, Path]) -> None:
    """CheckFree+ with all weights training: the embedding is restored exactly, the layer as its twin's."""
    folder, sizes = pipeline_models["gpt_neox"], [1, 1, 1, 1, 1]
    settings = StageGroupSettings(swap_edges=True)
    async with open_stage_group(folder, sizes, None, group_settings=settings, replicate_edges=True) as opened:
        await train(opened, 2)
        before = [weights_of(stage) for stage in opened.stages]
        (plan,) = plan_recovery(Situation(5, frozenset({0}), opened.stage_group.version, swaps_edges=True))
        fresh = newcomer(folder, sizes, 0, None, replicate=True)
        link = InProcessLink(fresh)
        await rebuild_stage(opened.stage_group, plan, link)
        found = weights_of(fresh)
        name = "gpt_neox.embed_in.weight"
        assert torch.equal(found[name], before[0][name])
        name = "gpt_neox.layers.{}.mlp.dense_h_to_4h.weight"
        assert torch.equal(found[name.format(0)], before[1][name.format(1)])
        await train(opened, 1)
        assert torch.equal(
            weights_of(fresh)["gpt_neox.embed_in.weight"], weights_of(opened.stages[1])["gpt_neox.embed_in.weight"]
        )
        link.close()


async def test_another_base_does_not_join(pipeline_models: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, sizes = pipeline_models["llama"], [2, 1, 2]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    tensors["model.layers.2.mlp.up_proj.weight"] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors")
    async with open_stage_group(folder, sizes, LORA) as opened:
        (plan,) = plan_recovery(Situation(3, frozenset({1}), 0))
        link = InProcessLink(newcomer(tmp_path, sizes, 1, LORA))
        with pytest.raises(PipelineError, match="fetch the same model"):
            await rebuild_stage(opened.stage_group, plan, link)
        await train(opened, 1)  # with the stages it had
        link.close()
        (plan,) = plan_recovery(Situation(3, frozenset({0}), 1, has_checkpoint=True))
        with pytest.raises(PipelineError, match="all stages must go back"):
            await rebuild_stage(opened.stage_group, plan, link)

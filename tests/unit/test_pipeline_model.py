"""Slices of a model have the right tensors, names and numbers, and read nothing that they do not need."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.adapters.adapter_state import read_adapter
from swarm.config import LoraSection
from swarm.errors import PipelineError, PolicyError
from swarm.pipeline.model_shape import StagePart, adapter_targets, stage_parts
from swarm.pipeline.stage.stage_model import WeightReader, load_stage
from swarm.policy.lora import adapter_shape, attach_adapter
from tests.unit.pipeline_models import (
    ARCHITECTURES,
    CPU,
    LORA,
    NUM_LAYERS,
    VOCAB_SIZE,
    load_stages,
    single_model,
)


def token_ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 3, 1], [1, 1, 1, 1, 1]])
@torch.no_grad()
def test_slices_in_a_row_compute_the_model(pipeline_models: dict[str, Path], name: str, sizes: list[int]) -> None:
    ids = token_ids(3, 10)
    states = ids
    slices = load_stages(pipeline_models[name], sizes, None)
    for one in slices:
        states = one.run(states)
    wanted = single_model(pipeline_models[name], None)(input_ids=ids).logits
    torch.testing.assert_close(slices[-1].logits(states), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_left_padding_changes_nothing(pipeline_models: dict[str, Path], name: str) -> None:
    slices = load_stages(pipeline_models[name], [2, 3], None)
    ids = token_ids(1, 8)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    plain, shifted = ids, padded
    for one in slices:
        plain, shifted = one.run(plain), one.run(shifted, torch.tensor([3]))
    torch.testing.assert_close(shifted[:, 3:], plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_stages_adapters_together_are_the_single_process_adapter(
    pipeline_models: dict[str, Path], name: str
) -> None:
    slices = load_stages(pipeline_models[name], [1, 3, 1], LORA)
    together = {key: value.detach() for one in slices for key, value in one.trainable.items()}
    base = single_model(pipeline_models[name], None)
    whole = attach_adapter(base, LORA)
    assert sum(len(one.trainable) for one in slices) == len(together)
    wanted = read_adapter(whole)
    assert set(together) == set(wanted)
    assert all(torch.equal(together[key], wanted[key]) for key in wanted)
    assert adapter_targets(pipeline_models[name], LORA) == adapter_shape(whole)  # what the lineage is made of


def test_targets_may_name_layers_of_some_stages_only(pipeline_models: dict[str, Path]) -> None:
    lora = LORA.model_copy(update={"targets": ("model.layers.3.mlp.up_proj",)})
    slices = load_stages(pipeline_models["llama"], [2, 2, 1], lora)
    assert [list(one.trainable) for one in slices] == [
        [],
        ["model.layers.3.mlp.up_proj.lora_A", "model.layers.3.mlp.up_proj.lora_B"],
        [],
    ]
    with pytest.raises(PolicyError, match=r"did you mean .*q_proj"):
        load_stages(pipeline_models["llama"], [2, 3], LORA.model_copy(update={"targets": ("q_prj",)}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_stage_holds_its_parameters_only(pipeline_models: dict[str, Path], name: str) -> None:
    whole = single_model(pipeline_models[name], None)
    slices = load_stages(pipeline_models[name], [1, 3, 1], None)
    counts = [one.num_parameters() for one in slices]
    is_tied = whole.config.tie_word_embeddings
    replica = whole.get_output_embeddings().weight.numel() if is_tied else 0
    assert sum(counts) == sum(p.numel() for p in whole.parameters()) + replica
    per_layer = counts[1] // 3
    assert counts[1] == 3 * per_layer
    assert counts[0] == per_layer + whole.get_input_embeddings().weight.numel()


def test_only_the_tensors_of_a_stage_are_read(pipeline_models: dict[str, Path], tmp_path: Path) -> None:
    """The files with other stages' tensors may be absent."""
    source, sizes = pipeline_models["qwen2"], [1, 3, 1]
    middle = stage_parts(sizes)[1]
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    kept = 0
    for path in sorted(source.glob("*.safetensors")):
        if any(f".layers.{index}." in name for name in load_file(path) for index in (1, 2, 3)):
            (tmp_path / path.name).write_bytes(path.read_bytes())
            kept += 1
    assert kept < len(list(source.glob("*.safetensors")))
    loaded = load_stage(tmp_path, middle, lora=None, device=CPU, dtype=torch.float32)
    assert loaded.num_parameters() == load_stages(source, sizes, None)[1].num_parameters()
    with pytest.raises(PipelineError, match=r"must be in the base's files, got no lm_head"):
        load_stage(tmp_path, stage_parts(sizes)[2], lora=None, device=CPU, dtype=torch.float32)


def test_bytes_read_are_those_of_the_tensors_asked_for(pipeline_models: dict[str, Path]) -> None:
    reader = WeightReader(pipeline_models["llama"])
    name = "model.layers.2.mlp.up_proj.weight"
    tensors, _ = reader.read([name])
    assert reader.num_bytes == tensors[name].nbytes == 48 * 32 * 4


def test_a_tied_head_is_the_embedding_or_a_replica_of_it(pipeline_models: dict[str, Path]) -> None:
    (whole,) = load_stages(pipeline_models["llama"], [5], None)
    first, last = load_stages(pipeline_models["llama"], [2, 3], None)
    name = "model.embed_tokens.weight"
    assert not any("lm_head" in key for one in (whole, first, last) for key in one.trainable)
    assert torch.equal(first.trainable[name], last.trainable[name])
    assert first.trainable[name] is not last.trainable[name]
    assert whole.num_parameters() == sum(p.numel() for p in whole.trainable.values())


def test_the_content_hash_holds_for_the_tensors_and_not_the_files(
    pipeline_models: dict[str, Path], tmp_path: Path
) -> None:
    source, part = pipeline_models["gpt_neox"], StagePart(1, 3, False, False)
    known = load_stage(source, part, lora=LORA, device=CPU, dtype=torch.float32).content_hash
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    everything = {key: value for path in source.glob("*.safetensors") for key, value in load_file(path).items()}
    save_file(everything, tmp_path / "model.safetensors")
    again = load_stage(tmp_path, part, lora=LORA, device=CPU, dtype=torch.float32, content_hash=known)
    assert again.content_hash == known
    everything["gpt_neox.layers.4.mlp.dense_h_to_4h.bias"] += 1  # not its own
    save_file(everything, tmp_path / "model.safetensors")
    load_stage(tmp_path, part, lora=LORA, device=CPU, dtype=torch.float32, content_hash=known)
    everything["gpt_neox.layers.2.mlp.dense_h_to_4h.bias"] += 1
    save_file(everything, tmp_path / "model.safetensors")
    with pytest.raises(PipelineError, match="must have the hash"):
        load_stage(tmp_path, part, lora=LORA, device=CPU, dtype=torch.float32, content_hash=known)


def test_what_cannot_be_cut_is_refused_in_one_line(pipeline_models: dict[str, Path], tmp_path: Path) -> None:
    def load(folder: Path, part: StagePart, lora: LoraSection | None = None) -> None:
        load_stage(folder, part, lora=lora, device=CPU, dtype=torch.float32)

    config = json.loads((pipeline_models["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    with pytest.raises(PipelineError, match="one of llama, qwen2, gpt_neox, got mistral"):
        load(tmp_path, StagePart(0, 1, True, False))
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    for path in pipeline_models["llama"].glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(PipelineError, match=r"shapes of config\.json"):
        load(tmp_path, StagePart(0, 1, True, False))
    with pytest.raises(PipelineError, match=f"some of {NUM_LAYERS} layers"):
        load(pipeline_models["llama"], StagePart(3, NUM_LAYERS + 1, False, True))
    with pytest.raises(PipelineError, match="no dropout"):
        load(pipeline_models["llama"], StagePart(0, 1, True, False), LORA.model_copy(update={"dropout": 0.1}))
    with pytest.raises(PipelineError, match="at least one layer"):
        stage_parts([3, 0, 2])
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(PipelineError, match="must hold safetensors"):
        load(tmp_path, StagePart(0, 1, True, False))
    middle = load_stages(pipeline_models["llama"], [1, 3, 1], None)[1]
    with pytest.raises(PipelineError, match="token ids"):
        middle.run(token_ids(1, 3))
    with pytest.raises(PipelineError, match="logits"):
        middle.logits(torch.zeros(1, 32))


def test_loading_leaves_random_state_as_it_was(pipeline_models: dict[str, Path]) -> None:
    before = torch.get_rng_state()
    load_stages(pipeline_models["qwen2"], [2, 3], LORA)
    assert torch.equal(torch.get_rng_state(), before)

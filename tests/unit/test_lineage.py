"""What makes two policies one lineage, and what does not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swarm.config import LoraSection, PolicySection
from swarm.errors import PolicyError
from swarm.policy.lineage import hash_weights
from swarm.policy.policy import Policy, load_policy
from swarm.types import Lineage

MakePolicy = Callable[..., Policy]


def lineage(folder: Path, **lora: object) -> Lineage:
    section = LoraSection.model_validate({"rank": 4, "alpha": 8.0, **lora})
    return load_policy(PolicySection(base=str(folder), lora=section), device="cpu").lineage


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.fixture
def copied(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models["llama"], tmp_path / "copied"))


def test_a_copy_is_the_same_lineage(tiny_models: dict[str, Path], copied: Path):
    got = lineage(copied)
    assert got == lineage(tiny_models["llama"])
    assert len(got.policy) == len(got.tokenizer) == 32
    assert int(got.policy, 16) and int(got.tokenizer, 16)


@pytest.mark.parametrize("change", [{"rank": 8}, {"alpha": 16.0}, {"init_seed": 1}, {"targets": ("q_proj",)}])
def test_another_adapter_shape_is_another_policy_with_the_same_tokenizer(
    tiny_models: dict[str, Path], change: dict[str, object]
):
    plain, other = lineage(tiny_models["llama"]), lineage(tiny_models["llama"], **change)
    assert other.policy != plain.policy
    assert other.tokenizer == plain.tokenizer


def test_dropout_is_no_part_of_the_shape(tiny_models: dict[str, Path]):
    assert lineage(tiny_models["llama"], dropout=0.1) == lineage(tiny_models["llama"])


def test_precision_is_no_part_of_the_lineage(make_policy: MakePolicy):
    plain = make_policy().lineage
    assert make_policy(quantization="4bit").lineage == plain
    assert make_policy(dtype="bfloat16").lineage == plain


def test_one_changed_weight_is_another_policy(tiny_models: dict[str, Path], copied: Path):
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    got, plain = lineage(copied), lineage(tiny_models["llama"])
    assert got.policy != plain.policy
    assert got.tokenizer == plain.tokenizer


def test_splitting_the_weights_over_files_changes_nothing(tiny_models: dict[str, Path], copied: Path):
    tensors = load_file(copied / "model.safetensors")
    names = sorted(tensors)
    (copied / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in names[::2]}, copied / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, copied / "b.safetensors")
    assert hash_weights(copied) == hash_weights(tiny_models["llama"])


def test_another_chat_template_is_another_tokenizer(tiny_models: dict[str, Path], copied: Path):
    (copied / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    got, plain = lineage(copied), lineage(tiny_models["llama"])
    assert got.tokenizer != plain.tokenizer
    assert got.policy != plain.policy


def test_another_vocabulary_is_another_tokenizer(tiny_models: dict[str, Path], copied: Path):
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert lineage(copied).tokenizer != lineage(tiny_models["llama"]).tokenizer


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 0.5},
        {"hidden_act": "relu"},
        {"rope_theta": 7.0},
        {"rope_parameters": {"rope_theta": 7.0}},
        {"new": 1},
    ],
)
def test_other_settings_of_the_same_weights_are_another_policy(
    tiny_models: dict[str, Path], copied: Path, change: dict[str, Any]
):
    edit(copied / "config.json", **change)
    got, plain = lineage(copied), lineage(tiny_models["llama"])
    assert got.policy != plain.policy
    assert (got.tokenizer, got.earlier) == (plain.tokenizer, plain.earlier)
    assert plain.has_name(got.earlier) and not plain.has_name(got.policy) and not plain.has_name("")


def test_other_ends_of_answers_are_another_policy(tiny_models: dict[str, Path], copied: Path):
    edit(copied / "generation_config.json", eos_token_id=[1, 5])
    assert lineage(copied) != lineage(tiny_models["llama"])


def test_other_rules_for_splitting_text_are_another_policy(tiny_models: dict[str, Path], copied: Path):
    edit(copied / "tokenizer.json", normalizer={"type": "Lowercase"})
    got, plain = lineage(copied), lineage(tiny_models["llama"])
    assert got.policy != plain.policy and got.tokenizer == plain.tokenizer


def test_where_a_base_came_from_is_no_part_of_the_lineage(tiny_models: dict[str, Path], copied: Path):
    edit(copied / "config.json", _name_or_path="elsewhere", transformers_version="5.0.0", dtype="bfloat16")
    assert lineage(copied) == lineage(tiny_models["llama"])


def test_unchanged_files_are_not_read_again(copied: Path, tmp_path: Path):
    cache = tmp_path / "cache" / "hashes.json"
    first = hash_weights(copied, cache)
    known = json.loads(cache.read_text())
    (entry,) = known.values()
    entry["tensors"][0][0] = "renamed in the cache"
    cache.write_text(json.dumps(known))
    assert hash_weights(copied, cache) != first  # believed without reading
    (copied / "model.safetensors").touch()
    assert hash_weights(copied, cache) == first  # a new modification time: read again


@pytest.mark.parametrize("entry", ["x", 7, [], {"tensors": []}, "of somebody else"])
def test_a_cache_of_somebody_else_says_nothing_about_files_here(copied: Path, tmp_path: Path, entry: Any):
    cache = tmp_path / "hashes.json"
    true = hash_weights(copied, cache)
    known = json.loads(cache.read_text())
    for path, stored in known.items():  # whoever packs a folder chooses sizes and modification times in it
        status = Path(path).stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_mtime_ns][: len(stored["stamp"])]
        forged = {"stamp": stamp, "tensors": [["a", "b", [], "c"]]}
        known[path] = forged if entry == "of somebody else" else entry
    cache.write_text(json.dumps(known))
    assert hash_weights(copied, cache) == true


def test_a_damaged_cache_is_ignored(copied: Path, tmp_path: Path):
    cache = tmp_path / "hashes.json"
    cache.write_text("{")
    assert hash_weights(copied, cache) == hash_weights(copied)


@pytest.mark.parametrize("keep", [4, 200, -1])
def test_cut_off_weights_are_named(copied: Path, keep: int):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PolicyError, match="must hold readable weights"):
        hash_weights(copied)

"""Bases and adapters of strangers: no code of theirs runs, and nothing of the machine comes into a folder that is published."""

import ast
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm.adapters.adapter_folder import read_adapter_folder, write_adapter_folder
from swarm.adapters.checkpoint import CheckpointStore
from swarm.adapters.export import BASE_FACTS, export_adapter, export_merged
from swarm.errors import CheckpointError, MergeError, PipelineError, PolicyError
from swarm.pipeline.model_shape import read_config
from swarm.policy.base_folder import BUNDLED_FOLDER, locate_base
from swarm.policy.base_model import check_is_causal, folder_eos_ids, load_tokenizer
from swarm.policy.policy import Policy

MakePolicy = Callable[..., Policy]
SOURCE = Path(__file__).parents[2] / "swarm"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled base with code beside it, and somebody who says yes to every question."""
    folder = shutil.copytree(BUNDLED_FOLDER, tmp_path / "base")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'code-ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n1\nyes\n" * 9))
    return folder


CODE = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}


def test_a_tokenizer_of_its_own_code_is_refused(base: Path, tmp_path: Path) -> None:
    edit(base / "tokenizer_config.json", tokenizer_class="Evil", auto_map=CODE)
    with pytest.raises(PolicyError, match="must come with a tokenizer"):
        load_tokenizer(base)
    assert not (tmp_path / "code-ran").exists()


def test_a_configuration_of_its_own_code_is_refused(base: Path, tmp_path: Path) -> None:
    edit(base / "config.json", model_type="evil", auto_map=CODE)
    with pytest.raises(PipelineError, match="must hold a valid config"):
        read_config(base)
    with pytest.raises(PolicyError, match="contains custom code"):
        folder_eos_ids(base, transformers.PreTrainedTokenizerFast.from_pretrained(BUNDLED_FOLDER))
    with pytest.raises(PolicyError, match="causal language model"):
        check_is_causal(base)
    assert not (tmp_path / "code-ran").exists()


def test_code_beside_a_known_architecture_is_left_alone(
    base: Path, tmp_path: Path, make_policy: MakePolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is not handed on: neither in an exported model, nor in an adapter."""
    edit(base / "config.json", auto_map=CODE)
    edit(base / "tokenizer_config.json", auto_map=CODE, secret="of the machine")
    policy = make_policy(base=str(base))
    export_merged(policy.model, policy.tokenizer, base, tmp_path / "model")
    export_adapter(policy.model, policy.tokenizer, tmp_path / "adapter")
    for name in ("model/config.json", "model/tokenizer_config.json", "adapter/tokenizer_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        assert "auto_map" not in settings and "secret" not in settings, name
    assert not (tmp_path / "code-ran").exists() and "Do you wish to run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        {"_attn_implementation": "somebody/kernel"},
        {"attn_implementation": {"": "somebody/kernel"}},
        {"text_config": {"experts_implementation": "somebody/kernel"}},
        {"_attn_implementation_internal": "somebody/kernel"},
        {"text_config": [{"_experts_implementation_internal": {"": "somebody/kernel"}}]},
    ],
)
def test_a_kernel_from_elsewhere_is_refused(base: Path, settings: dict[str, Any]) -> None:
    edit(base / "config.json", **settings)
    with pytest.raises(PolicyError, match="must not name code to download"):
        locate_base(str(base), None)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("config.json", {"text_config": {"a": 1}}),
        ("config.json", {"num_attention_heads": "x"}),
        ("config.json", {"pad_token_id": 10**9}),
        ("config.json", {"model_type": []}),
        ("config.json", {"architectures": 7}),
        ("generation_config.json", {"eos_token_id": [["a"]]}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": 10**12}),
        ("tokenizer_config.json", {"tokenizer_class": "PhobertTokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": "RagTokenizer"}),
    ],
)
def test_settings_of_any_kind_give_one_clear_error(
    base: Path, make_policy: MakePolicy, name: str, settings: dict[str, Any]
) -> None:
    edit(base / name, **settings)
    with pytest.raises(PolicyError, match=r"policy\.base must"):
        make_policy(base=str(base))


def other_weights(base: Path, name: str) -> dict[str, Tensor]:
    """All zeros, in a file of the base's folder; returns them."""
    weights = {key: torch.zeros_like(value) for key, value in load_file(base / "model.safetensors").items()}
    torch.save(weights, base / name) if name.endswith(".bin") else save_file(weights, base / name, {"format": "pt"})
    return weights


@pytest.mark.parametrize("part", ["", "text_config"])
@pytest.mark.parametrize("name", ["part/other.safetensors", "part/other.safetensors.index.json"])
def test_weights_that_no_hash_is_about_are_not_loaded_by_name(base: Path, part: str, name: str) -> None:
    named = {"transformers_weights": name}
    edit(base / "config.json", **({part: named} if part else named))
    with pytest.raises(PolicyError, match="must have its weights in the usual files"):
        locate_base(str(base), None)


@pytest.mark.parametrize("name", ["adapter_w.safetensors", "consolidated.safetensors", "other.bin"])
def test_an_index_names_only_weights_that_are_hashed(base: Path, name: str) -> None:
    weights = other_weights(base, name)
    (base / "model.safetensors").rename(base / "shown.safetensors")
    edit(base / "model.safetensors.index.json", metadata={}, weight_map=dict.fromkeys(weights, name))
    with pytest.raises(PolicyError, match="must name weights of the base"):
        locate_base(str(base), None)


def test_of_two_kinds_of_weights_those_are_loaded_that_are_hashed(base: Path, make_policy: MakePolicy) -> None:
    other_weights(base, "pytorch_model.bin")
    (base / "model.safetensors").rename(base / "shown.safetensors")
    with pytest.raises(PolicyError, match=r"no file named model\.safetensors"):
        make_policy(base=str(base))


def test_an_adapter_in_the_base_is_refused(base: Path) -> None:
    edit(base / "adapter_config.json", peft_type="LORA", base_model_name_or_path="/home/somebody/private")
    with pytest.raises(PolicyError, match="must be a base alone"):
        locate_base(str(base), None)


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".hidden", "", 7])
def test_an_index_of_weights_names_files_beside_it(base: Path, name: Any) -> None:
    edit(base / "model.safetensors.index.json", weight_map={"a": "model.safetensors", "b": name})
    with pytest.raises(PolicyError, match="must name files beside it"):
        locate_base(str(base), None)


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "[]"])
def test_a_damaged_index_is_one_error(base: Path, text: str) -> None:
    (base / "model.safetensors.index.json").write_text(text)
    with pytest.raises(PolicyError, match="must hold a readable"):
        locate_base(str(base), None)


@pytest.mark.essential
def test_there_is_one_way_to_load() -> None:
    for path in SOURCE.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        loads = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "from_pretrained"]
        assert not loads or path == SOURCE / "adapters/load_pretrained.py", f"{path} must use load_pretrained"


@pytest.fixture
def adapter(make_policy: MakePolicy, tmp_path: Path) -> Path:
    policy = make_policy()
    return export_adapter(policy.model, policy.tokenizer, tmp_path / "theirs", "0" * 64)


def merged(adapter: Path, out: Path) -> Path:
    one = read_adapter_folder(adapter)
    return write_adapter_folder(out, one.tensors, one.rank, one.low_rank.scaling, like=one)


@pytest.mark.parametrize(
    "name", ["notes.txt", "tokenizer.model", "tokenizer.json", "adapter_model.safetensors", BASE_FACTS]
)
def test_nothing_that_a_link_leads_to_is_published(adapter: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "id_key"
    secret.write_text("PRIVATE KEY")
    (adapter / name).unlink(missing_ok=True)
    (adapter / name).symlink_to(secret)
    with pytest.raises(MergeError, match="got a link"):
        merged(adapter, tmp_path / "out")
    assert not any(
        "PRIVATE KEY" in path.read_text(errors="ignore") for path in (tmp_path / "out").rglob("*") if path.is_file()
    )


def test_only_what_is_known_comes_into_a_merged_folder(adapter: Path, tmp_path: Path) -> None:
    (adapter / "notes.txt").write_text("mine")
    (adapter / "credentials.json").write_text("{}")
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    edit(
        adapter / "adapter_config.json",
        auto_mapping={"base_model_class": "evil.Evil"},
        mine="text",
        megatron_core="evil",
    )
    edit(adapter / "tokenizer_config.json", auto_map=CODE, mine="text")
    edit(adapter / BASE_FACTS, mine="text")
    out = merged(adapter, tmp_path / "out")
    names = {path.name for path in out.iterdir()}
    assert "notes.txt" not in names and "credentials.json" not in names
    assert {"tokenizer.json", "chat_template.jinja", "adapter_config.json", BASE_FACTS} <= names
    told = {name: json.loads((out / name).read_text()) for name in names if name.endswith("config.json")}
    assert not any(key in one for one in told.values() for key in ("auto_map", "auto_mapping", "mine", "megatron_core"))
    assert json.loads((out / BASE_FACTS).read_text()) == {"weights": "0" * 64}
    assert set(read_adapter_folder(out).tensors) == set(read_adapter_folder(adapter).tensors)


def test_a_checkpoint_reads_no_file_outside_of_it(tmp_path: Path) -> None:
    import hashlib

    store = CheckpointStore(tmp_path / "checkpoints", 3)
    path = store.save(1, {"adapter": {}}, {"policy_version": 1})
    (tmp_path / "secret.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    digest = hashlib.sha256((tmp_path / "secret.safetensors").read_bytes()).hexdigest()
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("../../secret.safetensors", str(tmp_path / "secret.safetensors"), ".x.safetensors", "notes.txt"):
        (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": manifest["sha256"] | {name: digest}}))
        with pytest.raises(CheckpointError, match="got 1 damaged"):
            store.load_newest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert store.load_newest()
    (path / "adapter.safetensors").rename(tmp_path / "moved.safetensors")
    (path / "adapter.safetensors").symlink_to(tmp_path / "moved.safetensors")
    with pytest.raises(CheckpointError, match="got 1 damaged"):
        store.load_newest()

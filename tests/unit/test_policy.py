"""Loading: what works, and what is said about what does not."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, MambaConfig, MambaForCausalLM

from swarm.config import LoraSection, PolicySection
from swarm.errors import PolicyError
from swarm.policy import base_folder
from swarm.policy.device import resolve_device, resolve_dtype
from swarm.policy.lora import adapted_layers
from swarm.policy.policy import Policy, load_policy
from tests.unit.tiny_models import ARCHITECTURES, character_tokenizer

MakePolicy = Callable[..., Policy]


def load(base: Path | str, **settings: object) -> Policy:
    return load_policy(PolicySection.model_validate({"base": str(base), **settings}), device="cpu")


@pytest.fixture
def copied(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the Llama folder to damage."""
    return Path(shutil.copytree(tiny_models["llama"], tmp_path / "copied"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_fresh_adapter_leaves_the_base_as_it_is(make_policy: MakePolicy, name: str):
    policy = make_policy(name, trained=False)
    ids = torch.tensor([policy.encode_prompt("What is 7 + 5?")])
    with torch.no_grad(), policy.model.disable_adapter():
        base = policy.model(input_ids=ids).logits
    assert torch.equal(policy.model(input_ids=ids).logits, base)
    assert policy.version == 0


def test_only_the_adapter_is_trainable_and_it_is_float32(make_policy: MakePolicy):
    policy = make_policy("qwen2", dtype="bfloat16")
    trainable = [(name, p.dtype) for name, p in policy.model.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in name and dtype == torch.float32 for name, dtype in trainable)
    assert policy.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_linear_is_every_layer_but_the_head(make_policy: MakePolicy, name: str):
    policy = make_policy(name)
    adapted = {layer for layer, _ in adapted_layers(policy.model)}
    linear = {
        n
        for n, m in policy.model.base_model.model.named_modules()
        if isinstance(m, torch.nn.Linear) and "lora" not in n
    }
    assert adapted == {n.removesuffix(".base_layer") for n in linear} - {"lm_head", "embed_out"}
    assert len(adapted) == {"llama": 14, "qwen2": 14, "gpt_neox": 8}[name]


def test_named_layers_are_adapted_and_no_others(tiny_models: dict[str, Path]):
    policy = load(tiny_models["llama"], lora=LoraSection(rank=2, targets=("q_proj", "v_proj")))
    assert {name.rpartition(".")[2] for name, _ in adapted_layers(policy.model)} == {"q_proj", "v_proj"}


def test_the_first_factor_depends_on_the_seed_alone(make_policy: MakePolicy):
    torch.manual_seed(1)
    first = make_policy(trained=False, init_seed=5).model.state_dict()
    torch.manual_seed(2)
    second = make_policy(trained=False, init_seed=5).model.state_dict()
    other = make_policy(trained=False, init_seed=6).model.state_dict()
    name = next(key for key in first if "lora_A" in key)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first[name], other[name])


def test_the_first_factor_is_the_same_on_every_machine(make_policy: MakePolicy):
    """Golden values from a plain Python Philox4x64-10: key by SHA-256, top 23 bits, scaled to ±1/sqrt(32)."""
    layers = dict(adapted_layers(make_policy(trained=False, init_seed=5).model))
    weight = layers["model.layers.0.self_attn.q_proj"].lora_A["default"].weight
    golden = [0.1084971148350481, 0.13925070081593172, -0.15473026889646735, -0.11131345154624307]
    assert weight.flatten()[:4].tolist() == pytest.approx(golden, rel=1e-6)
    assert weight.abs().max().item() <= 32**-0.5


def test_loading_leaves_torchs_random_state_alone(make_policy: MakePolicy):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    make_policy()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_prompts_go_through_the_chat_template_where_there_is_one(make_policy: MakePolicy):
    plain, chat = make_policy("llama"), make_policy("qwen2")
    assert plain.decode(plain.encode_prompt("1 + 1")) == "1 + 1"
    assert chat.decode(chat.encode_prompt("1 + 1")) == "<u>1 + 1\n<a>"


def test_text_survives_encoding_and_special_tokens_are_dropped(make_policy: MakePolicy):
    policy = make_policy()
    ids = policy.encode_answer(" two  spaces , and\nlines.")
    assert policy.decode([*ids, policy.eos_token_ids[0]]) == " two  spaces , and\nlines."
    assert policy.eos_token_ids[0] not in ids


def test_a_tokenizer_that_closes_texts_does_not_close_prompts(copied: Path):
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": t, "type_id": 0}} if t != "A" else {"Sequence": {"id": "A", "type_id": 0}}
            for t in ("<bos>", "A", "<eos>")
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for i, t in ((1, "<bos>"), (2, "<eos>"))},
    }
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    policy = load(copied)
    assert policy.encode_prompt("ab")[0] == 1 and policy.encode_prompt("ab")[-1] == policy.encode_answer("b")[0]


def test_every_end_token_of_the_generation_config_counts(copied: Path):
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load(copied).eos_token_ids == (2, 7, 9)


def test_an_encoded_answer_ends_with_the_end_token_of_the_chat_template(copied: Path):
    """As in models whose tokenizer ends texts with `<eos>`, and whose template ends turns with `<end_of_turn>`."""
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    plain = load(copied)
    assert plain.end_token_id == 2
    end = plain.tokenizer.convert_ids_to_tokens(7)
    turn = "{% for m in messages %}{{ '(' + m['role'] + ')' + m['content'] + '" + end + "\n' }}{% endfor %}"
    (copied / "chat_template.jinja").write_text(turn + "{% if add_generation_prompt %}(assistant){% endif %}")
    assert load(copied).eos_token_ids == (2, 7)
    assert load(copied).end_token_id == 7


def test_dropout_of_the_base_is_off_in_train_mode_too(make_policy: MakePolicy):
    policy = make_policy("gpt_neox")
    ids = torch.tensor([policy.encode_prompt("What is 7 + 5?")])
    with torch.no_grad():
        quiet = policy.model.eval()(input_ids=ids).logits
        assert torch.equal(policy.model.train()(input_ids=ids).logits, quiet)


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quantised_bases_load_stay_frozen_and_give_the_adapter_gradients(
    make_policy: MakePolicy, name: str, quantization: str, caplog: pytest.LogCaptureFixture
):
    policy = make_policy(name, quantization=quantization)
    kinds = {type(layer.get_base_layer()).__name__ for _, layer in adapted_layers(policy.model)}
    assert kinds == {"Linear8bitLt" if quantization == "8bit" else "Linear4bit"}
    ids = torch.tensor([policy.encode_prompt("What is 7 + 5?")])
    policy.model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    with_gradient = [n for n, p in policy.model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert with_gradient and all("lora_" in n for n in with_gradient)
    assert caplog.records == []


def test_a_4bit_base_computes_the_same_before_and_after_sampling(make_policy: MakePolicy):
    """bitsandbytes repacks 4-bit weights on some CPUs at the first forward pass without gradients, and rounds them."""
    policy = make_policy(quantization="4bit")
    ids = torch.tensor([policy.encode_prompt("What is 7 + 5?")])
    before = policy.model(input_ids=ids).logits.detach()
    with torch.no_grad():
        policy.model(input_ids=ids)
    assert torch.equal(policy.model(input_ids=ids).logits.detach(), before)


def test_missing_bitsandbytes_is_named_with_the_fix(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(PolicyError, match="pip install bitsandbytes"):
        load(tiny_models["llama"], quantization="8bit")


def test_an_unknown_layer_is_answered_with_the_nearest(tiny_models: dict[str, Path]):
    with pytest.raises(PolicyError, match=r"got 'q_porj'; did you mean q_proj"):
        load(tiny_models["llama"], lora=LoraSection(targets=("q_porj",)))


def test_the_head_is_no_target(tiny_models: dict[str, Path]):
    with pytest.raises(PolicyError, match="got 'lm_head'"):
        load(tiny_models["llama"], lora=LoraSection(targets=("lm_head",)))


def test_no_such_folder(tmp_path: Path):
    with pytest.raises(PolicyError, match="must be an existing folder"):
        load(tmp_path / "nowhere")


def test_a_folder_without_a_model(tmp_path: Path):
    with pytest.raises(PolicyError, match=r"must hold a config\.json"):
        load(tmp_path)


def test_a_folder_without_weights(copied: Path):
    (copied / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"must hold \*\.safetensors weights"):
        load(copied)


def test_a_folder_without_a_tokenizer(copied: Path):
    for path in copied.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(PolicyError, match="must come with a tokenizer"):
        load(copied)


def test_damaged_weights(copied: Path):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(PolicyError, match="must load as a causal language model"):
        load(copied)


def test_weights_of_another_shape_are_not_filled_up_with_noise(copied: Path):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(PolicyError, match="must hold all weights"):
        load(copied)


def test_a_damaged_config(copied: Path):
    (copied / "config.json").write_text("{")
    with pytest.raises(PolicyError, match=r"valid config\.json"):
        load(copied)


def test_a_masked_language_model_is_refused(tmp_path: Path):
    BertForMaskedLM(
        BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="must be a causal language model, got"):
        load(tmp_path)


def test_a_model_without_a_key_value_cache_is_refused(tmp_path: Path):
    MambaForCausalLM(MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, state_size=4)).save_pretrained(
        tmp_path
    )
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="standard key/value cache"):
        load(tmp_path)


def test_a_tokenizer_without_an_end_token_is_refused(copied: Path):
    for name, key in (
        ("tokenizer_config.json", "eos_token"),
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
    ):
        data = json.loads((copied / name).read_text())
        (copied / name).write_text(json.dumps({**data, key: None}))
    with pytest.raises(PolicyError, match="end-of-text token"):
        load(copied)


def test_a_folder_here_takes_no_place_of_a_pinned_revision(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tiny_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    """Whoever can write in the folder in which a node is started could give it another base."""
    import huggingface_hub

    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "model").symlink_to(tiny_models["llama"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_folder, "download", lambda *_: tiny_models["llama"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tiny_models["llama"]))
    for locate in (base_folder.locate_base, base_folder.base_at_hand):
        assert locate("owner/model", "a" * 40) == tiny_models["llama"]
        assert locate("./owner/model", "a" * 40) == Path("owner/model")
    assert not caplog.messages
    assert base_folder.locate_base("owner/model", None) == Path("owner/model")
    assert "no model of the hub" in caplog.text


@pytest.mark.parametrize("base", ["a b", "owner/"])
def test_a_name_that_is_no_hub_id(base: str):
    with pytest.raises(PolicyError, match="must be bundled, bundled-reasoning, a folder or a hub id"):
        load(base)


def test_auto_takes_what_is_there_and_float32_on_cpu():
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert resolve_device("auto").type == expected
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(PolicyError, match=f"got {device}; set node.device = auto"):
        resolve_device(device)


@pytest.mark.parametrize(
    "reason",
    [
        torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with …", 46),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    ],
)
def test_a_gpu_that_is_busy_is_told_with_what_to_do(reason: RuntimeError, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, device: torch.device) -> None:
        raise reason

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        PolicyError, match=r"cuda must be free for this process, got: CUDA [^\n]*nvidia-smi[^\n]*= cpu$"
    ):
        resolve_device("cuda")


def test_the_bundled_policy_loads_and_is_small():
    policy = load("bundled")
    assert sum(p.numel() for n, p in policy.model.named_parameters() if "lora_" not in n) <= 2_000_000
    assert policy.decode(policy.encode_answer("12 apples")) == "12 apples"

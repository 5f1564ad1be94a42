"""GGUF files are read back by another program's reader, and compute and split text as the policy does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from swarm.adapters.export import BaseName, merged_model
from swarm.adapters.gguf_export import (
    _RULES,
    GGUF_FILE,
    MODELFILE,
    GgufFacts,
    check_gguf,
    export_gguf,
    gguf_tokenizer,
    modelfile,
)
from swarm.cli.policy.export import gguf_facts
from swarm.config import load
from swarm.errors import PolicyError
from swarm.policy.policy import Policy
from swarm.types import Turns
from tests.unit.test_full_disk import no_file_grows_beyond
from tests.unit.tiny_models import SHAPE, _fill, build_policy

pytestmark = pytest.mark.extra("gguf")

TEXTS = ("What is 7 + 5?", "It's naïve — 2,024 tests\n\n  in  a row!", "<|im_start|>user\nHi<|im_end|>\n", "日本語 ☃")
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 400


def byte_tokenizer(rule: tuple[Any, ...]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that was trained on this file, with a splitting rule of `gguf_tokenizer`."""
    parts: list[Any] = []
    for kind, *values in rule:
        if kind == "Split":
            parts.append(pre_tokenizers.Split(Regex(values[0]), "isolated"))
        elif kind == "Digits":
            parts.append(pre_tokenizers.Digits(individual_digits=values[0]))
        else:
            parts.append(pre_tokenizers.ByteLevel(add_prefix_space=values[0], use_regex=values[1]))
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT,
    )


QWEN2 = next(rule for rule, name in _RULES.items() if name == "qwen2")
TINY = {
    **SHAPE,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-untied": {"tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    "mistral": {"sliding_window": None},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"head_dim": 128},
}


@pytest.fixture
def policy_of(tmp_path: Path) -> Callable[[str], Policy]:
    def build(name: str, rule: tuple[Any, ...] = QWEN2, dtype: torch.dtype = torch.float32, **settings: Any) -> Policy:
        folder = tmp_path / f"base-{name}"
        config = AutoConfig.for_model(name.partition("-")[0], **TINY, **MODELS[name], **settings)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        _fill(model, 3)
        model.save_pretrained(folder)
        byte_tokenizer(rule).save_pretrained(folder)
        return build_policy(folder)

    return build


def exported(policy: Policy, folder: Path) -> Path:
    facts = gguf_facts(policy, load([], {"policy.base": json.dumps(str(policy.base_folder))}), BaseName("tiny"), "card")
    return export_gguf(merged_model(policy.model, policy.base_folder), policy.tokenizer, folder, facts)


@pytest.mark.parametrize("name", MODELS)
def test_another_reader_computes_what_the_policy_computes(
    policy_of: Callable[..., Policy], tmp_path: Path, name: str
) -> None:
    policy = policy_of(name)
    out = exported(policy, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, gguf_file=GGUF_FILE, dtype=torch.float32).eval()
    for text in TEXTS:
        ids = torch.tensor([policy.encode_prompt(text)])
        with torch.no_grad():
            expected, got = policy.model(input_ids=ids).logits, loaded(input_ids=ids).logits
        assert torch.allclose(got, expected, atol=1e-4), (got - expected).abs().max()
        assert expected.abs().max() > 0.5, "it has something to say"


@pytest.mark.parametrize("rule", _RULES, ids=_RULES.get)
def test_tokens_merges_and_rule_are_those_of_the_tokenizer(
    policy_of: Callable[..., Policy], tmp_path: Path, rule: tuple[Any, ...]
) -> None:
    import gguf

    policy = policy_of("llama", rule)
    out = exported(policy, tmp_path / "out")
    fields = gguf.GGUFReader(out / GGUF_FILE).fields
    assert fields["tokenizer.ggml.pre"].contents() == _RULES[rule]
    tokens, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    assert len(tokens) == len(kinds) == VOCABULARY
    assert {text: number for number, text in enumerate(tokens) if kinds[number] != 5} == policy.tokenizer.get_vocab()
    assert [text for text, kind in zip(tokens, kinds, strict=True) if kind == 3] == [
        "<|bos|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    # built anew from the file alone, with the rule that its name stands for
    merges = [tuple(one.split(" ")) for one in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {text: number for number, text in enumerate(tokens) if kinds[number] != 5}
    rebuilt = Tokenizer(models.BPE(vocabulary, merges))
    rebuilt.pre_tokenizer = Tokenizer.from_str(byte_tokenizer(rule).backend_tokenizer.to_str()).pre_tokenizer
    for text in (TEXTS[0], TEXTS[1], TEXTS[3]):
        assert rebuilt.encode(text).ids == policy.tokenizer(text, add_special_tokens=False).input_ids


def test_the_reader_of_transformers_splits_text_as_the_policy_does(
    policy_of: Callable[..., Policy], tmp_path: Path
) -> None:
    policy = policy_of("qwen2")
    tokenizer = AutoTokenizer.from_pretrained(exported(policy, tmp_path / "out"), gguf_file=GGUF_FILE)
    assert tokenizer.chat_template == CHAT
    for text in TEXTS:
        assert (
            tokenizer(text, add_special_tokens=False).input_ids
            == policy.tokenizer(text, add_special_tokens=False).input_ids
        )


def test_frequencies_of_llama_3_are_those_of_the_model(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    import gguf

    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 128}  # fmt: skip
    policy = policy_of("llama", rope_parameters=scaled)
    reader = gguf.GGUFReader(exported(policy, tmp_path / "out") / GGUF_FILE)
    (factors,) = [torch.tensor(one.data) for one in reader.tensors if one.name == "rope_freqs.weight"]
    plain = 10000.0 ** -(torch.arange(4) / 4)
    assert torch.allclose(plain / factors, policy.model.get_base_model().model.rotary_emb.inv_freq, rtol=1e-5)
    assert factors.max() == pytest.approx(8.0, rel=1e-4) and factors.min() == pytest.approx(1.0, rel=1e-4)


def test_precision_of_the_base_is_kept(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    import gguf

    policy = policy_of("llama", dtype=torch.bfloat16)
    tensors = gguf.GGUFReader(exported(policy, tmp_path / "out") / GGUF_FILE).tensors
    assert {one.tensor_type.name for one in tensors if len(one.shape) > 1} == {"BF16"}
    assert {one.tensor_type.name for one in tensors if len(one.shape) == 1} == {"F32"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gemma2"}, "families llama, mistral, qwen2, qwen3, got gemma2"),
        ({"hidden_act": "gelu"}, "SiLU as the activation, got gelu"),
        ({"mlp_bias": True}, "without biases, got mlp_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "got a sliding window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "got yarn"),
    ],
)
def test_what_cannot_be_mapped_is_an_error_before_anything_is_written(change: dict[str, Any], told: str) -> None:
    class Settings:
        model_type, hidden_act, rope_parameters, sliding_window = "llama", "silu", None, None

    for name, value in change.items():
        setattr(Settings, name, value)
    with pytest.raises(PolicyError, match=f"{told}; export with --format merged"):
        check_gguf(Settings, byte_tokenizer(QWEN2), VOCABULARY)


def test_a_tokenizer_that_llama_cpp_splits_otherwise_is_refused(
    make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    policy = make_policy("llama")
    with pytest.raises(
        PolicyError, match=r"byte-level BPE tokenizer with a splitting rule of llama\.cpp .*, got WordLevel"
    ):
        export_gguf(merged_model(policy.model, policy.base_folder), policy.tokenizer, tmp_path / "out", FACTS)
    assert not (tmp_path / "out").exists()
    other = byte_tokenizer((("Digits", False), ("ByteLevel", False, True)))
    with pytest.raises(PolicyError, match="got one that splits text by"):
        gguf_tokenizer(other, VOCABULARY)
    with pytest.raises(PolicyError, match="beyond the 100 rows"):
        gguf_tokenizer(byte_tokenizer(QWEN2), 100)


def test_a_missing_package_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PolicyError, match=r"needs the package gguf, got none; .*pip install '?gguf"):
        check_gguf(None, None, 1)


def test_a_full_disk_leaves_nothing(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    policy = policy_of("llama")
    with no_file_grows_beyond(20_000), pytest.raises(PolicyError, match="with room for it, got"):
        exported(policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


FACTS = GgufFacts("name", "FROM x", (2,), adds_bos=False)


def test_modelfile_asks_as_the_node_does(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    policy = policy_of("qwen2")
    turns = policy.prompts.turns()
    assert turns == Turns(
        first="<|bos|><|im_start|>user\n",
        system=("<|bos|><|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n"),
        next="<|im_end|>\n<|im_start|>user\n",
        after="<|im_end|>\n<|im_start|>assistant\n",
    )
    text = (exported(policy, tmp_path / "out") / MODELFILE).read_text()
    assert text.startswith('FROM ./model.gguf\nTEMPLATE """')
    assert "<|bos|>" not in text, "the runtime itself puts it first"
    for line in ('PARAMETER stop """<|im_end|>"""', "PARAMETER temperature 1", "PARAMETER repeat_penalty 1"):
        assert line in text.splitlines()
    told = rendered(text, [("user", "Hi"), ("assistant", "Yes?"), ("user", "Bye")], system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye"}]  # fmt: skip
    expected = policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "<|bos|>" + told == expected
    assert "<|bos|>" + rendered(text, [("user", "Hi")]) == policy.prompts.render("Hi")


def test_texts_of_a_base_are_no_commands_of_the_modelfile() -> None:
    hostile = 'x"""\nFROM /etc/passwd\n{{ .System }}\\'
    turns = Turns(first=hostile, system=(hostile, hostile), next=hostile, after=hostile)
    text = modelfile("m", turns, system=hostile, parameters={}, stop=["ok", hostile])
    assert not [line for line in text.splitlines()[1:] if line.startswith(("FROM", "SYSTEM"))]
    assert text.count('"""') == 4, "the template and one stop text, and nothing of what was given"
    assert rendered(text, [("user", "Hi")]) == f"{hostile}Hi{hostile}"


def rendered(text: str, messages: list[tuple[str, str]], system: str = "") -> str:
    """What Ollama makes of a Modelfile's template: the few actions of Go's templates that are in ours."""
    import re

    template = text.split('TEMPLATE """', 1)[1].split('"""\n', 1)[0]
    actions = re.findall(r'\{\{ ("(?:[^"\\]|\\.)*"|.*?) \}\}', template)
    assert "".join(f"{{{{ {one} }}}}" for one in actions) == template, "no text beside the actions"
    written: list[str] = []
    asked = False
    for role, content in messages:
        skip: list[bool] = []  # of each open condition: whether its branch is left out
        for one in actions[2:]:
            if one == 'if eq .Role "user"':
                skip.append(role != "user")
            elif one == 'else if eq .Role "assistant"':
                skip[-1] = role != "assistant"
            elif one.startswith("if "):
                skip.append(not {"if $asked": asked, "if $.System": bool(system)}[one])
            elif one == "else":
                skip[-1] = not skip[-1]
            elif one == "end":
                if skip:
                    skip.pop()
            elif not any(skip):
                asked = asked or one == "$asked = true"
                known = {".Content": content, "$.System": system, "$asked = true": ""}
                written.append(json.loads(one) if one.startswith('"') else known[one])
    return "".join(written)

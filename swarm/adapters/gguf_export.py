"""Writes base and adapter as one GGUF file for llama.cpp and Ollama, for families whose tensors have one meaning there.

    merged model ─ family known? every setting and tensor accounted for? ─▶ metadata, tokenizer, tensors ─▶ model.gguf, Modelfile

Whatever the file cannot say, such as a scaling of positions that llama.cpp computes otherwise, is an error before anything is
written: a file that loads and answers differently is worse than none. GGUF stores tokens, merges and the *name* of a splitting
rule, which llama.cpp has in its code; so a tokenizer is mapped only if its rule is one of those, character by character.

The Modelfile has Ollama ask the model as the node does: its turns, its sampling, what ends an answer. Every text of the base's
chat template stands there as a quoted string of Go, so nothing in it is read as a command, of the template language or of
the Modelfile.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.adapters.export import CARD, new_folder
from swarm.errors import PolicyError
from swarm.machine.child_python import install_extra
from swarm.machine.safe_files import SHARED, replace_file
from swarm.types import Turns

GGUF_FILE, MODELFILE = "model.gguf", "Modelfile"
_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Type of a transformers model → name of the architecture in GGUF."""
_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
"""Tensors whose rows llama.cpp has in another order for its `llama` architecture: pairs beside each other."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES, _BYTES_SPLIT = ("ByteLevel", False, False), ("ByteLevel", False, True)
_RULES: dict[tuple[Any, ...], str] = {
    (("Split", _CONTRACTIONS + r"\p{N}" + _REST, "Isolated", False), _BYTES): "qwen2",
    (("Split", _CONTRACTIONS + r"\p{N}{1,3}" + _REST, "Isolated", False), _BYTES): "llama-bpe",
    (_BYTES_SPLIT,): "gpt-2",
    (("Digits", True), _BYTES_SPLIT): "smollm",
}
"""Splitting rules of tokenizer.json, by their name in llama.cpp."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens in GGUF."""


_FENCE = '"""'


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What GGUF stores of a tokenizer."""

    rule: str
    """The name of its splitting rule in llama.cpp."""
    tokens: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[str]


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What goes into the file besides the model."""

    name: str
    """For people."""
    modelfile: str
    """The Modelfile for Ollama."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end an answer."""
    adds_bos: bool
    """Whether a prompt begins with the BOS token."""
    card: str = ""
    """Content of README.md."""


def check_gguf(model_config: Any, tokenizer: Any, vocab_size: int) -> GgufTokenizer:
    """Return the tokenizer as GGUF has it. Raises PolicyError where a model cannot be mapped with certainty, or the package
    is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise PolicyError(f"--format gguf needs the package gguf, got none; {install_extra('gguf')}")
    kind = str(model_config.model_type)
    if kind not in _FAMILIES:
        raise _refusal(f"a model of one of the families {', '.join(_FAMILIES)}", kind)
    if model_config.hidden_act != "silu":
        raise _refusal("SiLU as the activation", str(model_config.hidden_act))
    if getattr(model_config, "mlp_bias", False):
        raise _refusal("a feed-forward part without biases", "mlp_bias")
    if _uses_windows(model_config):
        raise _refusal("attention over the whole text", "a sliding window")
    rope = _rope(model_config)
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise _refusal("positions scaled as default, linear or llama3", str(rope["rope_type"]))
    return gguf_tokenizer(tokenizer, vocab_size)


def gguf_tokenizer(tokenizer: Any, vocab_size: int) -> GgufTokenizer:
    """Map a tokenizer of transformers. `vocab_size`: rows of the embedding. Raises PolicyError where that is not certain."""
    try:
        data = json.loads(tokenizer.backend_tokenizer.to_str())
    except AttributeError:
        raise _tokenizer_refusal("one without a tokenizer.json") from None
    model, normalizer = data["model"], data.get("normalizer")
    if model["type"] != "BPE" or model.get("byte_fallback") or (data.get("decoder") or {}).get("type") != "ByteLevel":
        raise _tokenizer_refusal(f"{model['type']} that does not work on bytes")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _tokenizer_refusal(f"one that normalizes text by {normalizer['type']}")
    parts = tuple(_parts(data.get("pre_tokenizer")))
    if parts not in _RULES:
        raise _tokenizer_refusal(f"one that splits text by {str(parts)[:200]}")
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    vocabulary = {**model["vocab"], **{one["content"]: one["id"] for one in data["added_tokens"]}}
    special = {one["id"]: one["special"] for one in data["added_tokens"]}
    for text, number in vocabulary.items():
        if number >= vocab_size:
            raise _tokenizer_refusal(f"token {number} beyond the {vocab_size} rows of the embedding")
        tokens[number] = text
        kinds[number] = NORMAL if number not in special else CONTROL if special[number] else USER_DEFINED
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    if not merges:
        raise _tokenizer_refusal("one without merges")
    return GgufTokenizer(_RULES[parts], tokens, kinds, merges)


def export_gguf(merged: Any, tokenizer: Any, folder: Path, facts: GgufFacts) -> Path:
    """Write a merged model as `model.gguf`, in the precision of its weights, and a Modelfile.

    Raises PolicyError if the model cannot be mapped, or `folder` is not empty or cannot be written.
    """
    rows = merged.get_input_embeddings().num_embeddings
    words = check_gguf(merged.config, tokenizer, rows)
    import gguf

    architecture = _FAMILIES[merged.config.model_type]
    tensors = list(_named(merged, architecture))
    with new_folder(folder) as scratch:
        writer = gguf.GGUFWriter(scratch / GGUF_FILE, architecture)
        writer.add_name(facts.name)
        _add_shape(writer, merged.config, rows, merged.dtype)
        _add_tokenizer(writer, words, tokenizer, facts)
        for name, tensor in tensors:
            values, kind = _stored(tensor)
            writer.add_tensor(name, values, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        replace_file(scratch / MODELFILE, facts.modelfile, SHARED)
        if facts.card:
            replace_file(scratch / CARD, facts.card, SHARED)
    return folder


def _named(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model under its name in GGUF. Raises PolicyError for one that has no name there."""
    import gguf

    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # a file without it uses the embedding
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise _refusal("tensors that GGUF has a name for", name)
        if architecture == "llama" and name.endswith(_ROTATED):
            heads = config.num_key_value_heads if "k_proj" in name else config.num_attention_heads
            tensor = _paired(tensor, heads)
        yield known, tensor
    factors = _rope_factors(model)
    if factors is not None:
        yield "rope_freqs.weight", factors


def _paired(tensor: Tensor, num_heads: int) -> Tensor:
    """Put the rows of each head that are rotated together beside each other. [heads · head_dim, …] → the same shape."""
    return tensor.view(num_heads, 2, tensor.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def _rope_factors(model: Any) -> Tensor | None:
    """By what the frequencies of positions are divided, [head_dim / 2], as the model itself has them; None where by 1."""
    rope = _rope(model.config)
    if rope["rope_type"] != "llama3":
        return None
    frequencies = model.model.rotary_emb.inv_freq.float().cpu()
    exponents = torch.arange(len(frequencies), dtype=torch.float32) / len(frequencies)
    return float(rope["rope_theta"]) ** -exponents / frequencies


def _stored(tensor: Tensor) -> tuple[Any, Any]:
    """(values, type in GGUF): matrices in their own precision, vectors in float32."""
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import quantize

    values: np.ndarray = tensor.detach().float().cpu().contiguous().numpy()
    kinds = {torch.bfloat16: Kind.BF16, torch.float16: Kind.F16}
    kind = kinds.get(tensor.dtype, Kind.F32) if tensor.dim() > 1 else Kind.F32
    return (quantize(values, kind) if kind is not Kind.F32 else values), kind


def _add_shape(writer: Any, config: Any, num_rows: int, dtype: torch.dtype) -> None:
    import gguf

    kinds = {torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16, torch.float16: gguf.LlamaFileType.MOSTLY_F16}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = _rope(config)
    writer.add_file_type(kinds.get(dtype, gguf.LlamaFileType.ALL_F32))
    writer.add_vocab_size(num_rows)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _add_tokenizer(writer: Any, words: GgufTokenizer, tokenizer: Any, facts: GgufFacts) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.rule)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    writer.add_token_merges(words.merges)
    writer.add_eos_token_id(facts.eos_token_ids[0])
    if facts.eos_token_ids[1:]:
        writer.add_eot_token_id(facts.eos_token_ids[1])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(facts.adds_bos)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _rope(config: Any) -> dict[str, Any]:
    """How positions turn into angles, with the names of transformers."""
    return {"rope_type": "default", "rope_theta": 10000.0, **(config.rope_parameters or {})}


def _uses_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _refusal(rule: str, value: str) -> PolicyError:
    return PolicyError(
        f"a GGUF file needs {rule}, got {value}; export with --format merged, and convert that with llama.cpp's "
        "convert_hf_to_gguf.py, which knows more families"
    )


def _parts(rule: Any) -> list[tuple[Any, ...]]:
    """The steps of a splitting rule, with what decides where they split."""
    kind = rule["type"] if rule else None
    if kind == "Sequence":
        return [part for one in rule["pretokenizers"] for part in _parts(one)]
    if kind == "Split":
        return [(kind, rule["pattern"].get("Regex"), rule["behavior"], rule["invert"])]
    if kind == "ByteLevel":
        return [(kind, rule["add_prefix_space"], rule.get("use_regex", True))]
    if kind == "Digits":
        return [(kind, rule["individual_digits"])]
    return [(kind,)]


def _tokenizer_refusal(what: str) -> PolicyError:
    return PolicyError(
        "a GGUF file needs a byte-level BPE tokenizer with a splitting rule of llama.cpp (gpt-2, llama-bpe, qwen2, smollm), got "
        f"{what}; export with --format merged, as llama.cpp's convert_hf_to_gguf.py may know this one"
    )


def modelfile(
    model_file: str,
    turns: Turns | None,
    *,
    bos: str = "",
    system: str = "",
    parameters: Mapping[str, float],
    stop: Sequence[str],
) -> str:
    """Return a Modelfile. `turns` None: the model gets prompts as they are. `bos`: text that the runtime itself puts first."""
    lines = [f"FROM ./{model_file}", f"TEMPLATE {_FENCE}{_template(turns, bos)}{_FENCE}"]
    if system and _FENCE not in system:
        lines.append(f"SYSTEM {_FENCE}{system}{_FENCE}")
    lines += [f"PARAMETER {name} {value:g}" for name, value in parameters.items()]
    lines += [f"PARAMETER stop {_FENCE}{text}{_FENCE}" for text in dict.fromkeys(stop) if text and _FENCE not in text]
    return "\n".join(lines) + "\n"


def _template(turns: Turns | None, bos: str) -> str:
    if turns is None:
        return "{{ .Prompt }}"
    begin = _quoted(turns.first.removeprefix(bos))
    if turns.system is not None:
        before, after = turns.system
        told = f"{_quoted(before.removeprefix(bos))}{{{{ $.System }}}}{_quoted(after)}"
        begin = f"{{{{ if $.System }}}}{told}{{{{ else }}}}{begin}{{{{ end }}}}"
    return (
        "{{ $asked := false }}{{ range .Messages }}"
        f'{{{{ if eq .Role "user" }}}}{{{{ if $asked }}}}{_quoted(turns.next)}{{{{ else }}}}{begin}{{{{ end }}}}'
        f"{{{{ .Content }}}}{_quoted(turns.after)}{{{{ $asked = true }}}}"
        '{{ else if eq .Role "assistant" }}{{ .Content }}{{ end }}{{ end }}'
    )


def _quoted(text: str) -> str:
    """An action that writes this text. A quoted string of Go has the escapes of JSON, besides pairs of surrogates."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""

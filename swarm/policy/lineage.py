"""The lineage of a policy: hashes that tell which nodes can use each other's rollouts and adapters.

    policy    = H(contents of the base's weight files, settings in its other files that affect them, tokenizer,
                  adapter: rank, alpha, layers and their shapes, A seed, warm start)
    tokenizer = H(vocabulary, special tokens, chat template)

The same weights make another policy with another activation, rotary base or rule for splitting text. All of `config.json`
therefore counts except what is known to have no effect (`_WITHOUT_EFFECT`), and so does `tokenizer.json`. The files are
hashed as published, not as a library reads them: its next release would fill in other defaults.

Precision is left out on purpose: 4-bit, bfloat16 and float32 nodes with the same files share a lineage. They start from the
same A and can average adapters (QLoRA, too, trains on a 4-bit base and deploys on the full one), and token ids mean the same.
The importance weight π_old/μ measures the small difference of their log-probs, since the author sampled from μ.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from swarm.config import LoraSection
from swarm.errors import PolicyError
from swarm.machine.safe_files import read_json, replace_file
from swarm.observability.progress import progress
from swarm.policy.base_folder import read_base_json, weight_files
from swarm.types import Lineage

_READ_BYTES = 1 << 22
_MAX_CACHE_BYTES = 64 << 20
_WITHOUT_EFFECT = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "pad_token_id", "auto_map"}
)
"""Keys of config.json that say where a base came from, or that this node sets itself."""
_OF_EACH_CALL = frozenset({"version", "truncation", "padding"})
"""Keys of tokenizer.json that do not affect which ids a text has."""


def compute_lineage(
    folder: Path,
    tokenizer: Any,
    lora: LoraSection,
    adapted: Iterable[tuple[str, int, int]],
    *,
    cache: Path | None,
    start: str = "",
) -> Lineage:
    """Compute the lineage of the base in `folder` with an adapter on the layers `adapted`: (name, inputs, outputs).

    `start` says what the adapter began with before RL; empty for a fresh one.

    `cache` is a JSON file of hashes of large weight files by path, size and times. One of these is the system's time of the
    last change, which nobody can set, so the cache of a foreign folder says nothing about files here. Raises PolicyError
    for unreadable weights and settings.
    """
    tokenizer_hash, weights = _digest(_tokenizer_facts(tokenizer)), hash_weights(folder, cache)
    adapter = [lora.rank, float(lora.alpha), lora.init_seed, sorted(adapted), *([start] if start else [])]
    policy_hash = _digest(["policy-v2", weights, _file_facts(folder), tokenizer_hash, adapter])
    earlier_hash = _digest(["policy-v1", weights, tokenizer_hash, adapter])
    return Lineage(policy=policy_hash[:32], tokenizer=tokenizer_hash[:32], earlier=earlier_hash[:32])


def hash_weights(folder: Path, cache: Path | None = None) -> str:
    """Return 64 hex digits over (tensor name, dtype, shape, content) of all weights, in any division into files.

    The first call reads about 2 GB/s of each file; later calls with `cache` read nothing.
    """
    known = _read_cache(cache)
    tensors: list[list[Any]] = []
    paths = [path.resolve() for path in weight_files(folder)]  # hub files are links into a content store
    with progress("hashing the base", sum(path.stat().st_size for path in paths), in_bytes=True) as add:
        for path in paths:
            status = path.stat()
            stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            entry = known.get(str(path))
            if not isinstance(entry, dict) or entry.get("stamp") != stamp:
                entry = {"stamp": stamp, "tensors": _tensor_digests(path, add)}
                known[str(path)] = entry
            else:
                add(status.st_size)
            tensors += entry["tensors"]
    _write_cache(cache, known)
    return _digest(sorted(tensors))


def _tensor_digests(path: Path, add: Callable[[float], None]) -> list[list[Any]]:
    """Return [name, dtype, shape, SHA-256] of every tensor of a file. A PyTorch file counts as one; it is not unpickled."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".bin":
                return [[path.name, "file", [], _sha256(file, path.stat().st_size, add)]]
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > path.stat().st_size:
                raise ValueError("the header is cut off")
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            digests: list[list[Any]] = []
            for name, facts in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                start, end = facts["data_offsets"]
                file.seek(8 + header_bytes + start)
                digests.append([name, facts["dtype"], facts["shape"], _sha256(file, end - start, add)])
            return digests
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"policy.base must hold readable weights, got {path}: {error}; fetch the model again"
        ) from None


def _sha256(file: Any, num_bytes: int, add: Callable[[float], None]) -> str:
    digest = hashlib.sha256()
    while num_bytes > 0:
        block = file.read(min(_READ_BYTES, num_bytes))
        if not block:
            raise ValueError("the file is cut off")
        digest.update(block)
        num_bytes -= len(block)
        add(len(block))
    return digest.hexdigest()


def _file_facts(folder: Path) -> list[Any]:
    """Return what the small files of a base determine: its function, its EOS tokens, and which ids a text has."""
    config = _table(folder, "config.json", is_required=True)
    function = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    ends = _table(folder, "generation_config.json").get("eos_token_id")
    rules = {key: value for key, value in _table(folder, "tokenizer.json").items() if key not in _OF_EACH_CALL}
    return [function, ends, rules]


def _table(folder: Path, name: str, *, is_required: bool = False) -> dict[str, Any]:
    """Read a JSON table of a base; empty where it is not required and absent. Raises PolicyError."""
    try:
        table = read_base_json(folder / name)
    except FileNotFoundError:
        if not is_required:
            return {}
        table = None
    except (OSError, ValueError):
        table = None
    if not isinstance(table, dict):
        raise PolicyError(f"policy.base must hold a valid {name}, got a damaged one in {folder}; fetch the model again")
    return table


def _tokenizer_facts(tokenizer: Any) -> list[Any]:
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return ["tokenizer-v1", sorted(tokenizer.get_vocab().items()), sorted(special.items()), tokenizer.chat_template]


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read_cache(cache: Path | None) -> dict[str, Any]:
    try:
        known = read_json(cache, _MAX_CACHE_BYTES) if cache else {}
    except (OSError, ValueError):
        return {}  # absent or damaged: hash again
    return known if isinstance(known, dict) else {}


def _write_cache(cache: Path | None, known: dict[str, Any]) -> None:
    if cache is None:
        return
    cache.parent.mkdir(parents=True, exist_ok=True)
    replace_file(cache, json.dumps(known))

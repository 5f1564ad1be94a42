"""How much memory a training step on long answers takes: this project beside TRL's GRPOTrainer.

    python benchmarks/memory.py            Qwen2.5-0.5B's shape, answers of 512 and 2,048 tokens; about half an hour
    python benchmarks/memory.py --quick    the same with two layers, prompt and answers of 96 tokens; under a minute
    python benchmarks/memory.py --probe    predictions of the probe beside measured peaks, 12 cases; a quarter of an hour
    python benchmarks/memory.py --models   what Qwen2.5's sizes take by length, as computed from measured layers; some minutes
    python benchmarks/memory.py --prepare  make TRL's environment, once (2 GB in ~/.cache, some minutes)

A step is log-probs, entropy, loss, backward pass and optimizer on the same made-up answers, with LoRA of rank 16 on all linear
layers, in float32. Each system runs in a process of its own, as it is set up for its users: TRL with the whole group at once,
with and without gradient checkpointing; this project with the micro-batches that its memory probe chooses, and with the whole
group at once. The peak is the resident memory of the process, weights and libraries included. A system that does not fit into
the memory of the machine is ended before the machine is, and counts as `more than` its limit.

`memory_ratio_trl` is the peak of this project over that of TRL, both with gradient checkpointing, which is TRL's own default.
It is an upper bound where TRL did not fit into the machine.
`probe_error` is the largest difference between the peak that the probe predicts and the one that was measured. The last line of
the output is one JSON object.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from peers.environment import PeerUnavailable
from peers.trainers_venv import TRAINERS
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from swarm.config import PolicySection
from swarm.policy.base_folder import BUNDLED_FOLDER
from swarm.policy.base_model import load_tokenizer
from swarm.policy.memory_probe import Polynomial, StepNeed, measure_step
from swarm.policy.policy import load_policy

_HERE = Path(__file__).resolve().parent
_TIME_LIMIT_S = 1800.0
_RESERVE = 0.9
"""Part of the free memory that one process may take."""
SWARM, TRL = "swarm", "TRL"
_SCRIPTS = {SWARM: "measuring/swarm_memory.py", TRL: "peers/trl_memory.py"}


_ANSWERS = (512, 2048, 8192)
_QUICK_TOKENS = 96
"""Of a prompt and of an answer."""


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model, as in the settings of Qwen2.5."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    is_tied: bool


SIZES = {
    "0.5 B": Size(24, 896, 4864, 14, 2, True),
    "1.5 B": Size(28, 1536, 8960, 12, 2, True),
    "3 B": Size(36, 2048, 11008, 16, 2, True),
    "7 B": Size(28, 3584, 18944, 28, 4, False),
}


PROBED = {
    "42 M": Size(8, 256, 1024, 4, 2, True),
    "0.5 B, 2 layers": replace(SIZES["0.5 B"], layers=2),
    "0.5 B, 8 layers": replace(SIZES["0.5 B"], layers=8),
    "1.5 B, 2 layers": replace(SIZES["1.5 B"], layers=2),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One step."""

    system: str
    answer_tokens: int
    checkpointing: bool
    at_once: str
    """How many answers go through the model together, in words."""
    micro_batch_tokens: int | None = None
    answers: int = 8
    prompt_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    found: dict[str, float]
    """Empty where the step did not end."""
    failure: str = ""
    limit_mib: float = 0.0
    """What the process was allowed, where that was not enough."""


def main() -> None:
    """Measure, print the table, print the figures."""
    options = _options()
    if options.prepare:
        TRAINERS.make(TRAINERS.folder)
        return
    if options.models:
        _print_models()
        return
    if options.probe:
        print(json.dumps({"probe_error": _print_probed(options.threads)}))
        return
    try:
        peer_python: Path | None = TRAINERS.python_of(TRAINERS.folder)
    except PeerUnavailable as error:
        print(f"without TRL: {error}")
        peer_python = None
    with tempfile.TemporaryDirectory() as folder:
        base = _base(Path(folder), replace(SIZES["0.5 B"], layers=2) if options.quick else SIZES["0.5 B"])
        print("| system | answers of | gradient checkpointing | at once | peak, MiB | predicted | weights | seconds |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        results = [
            _show(_run(case, base, peer_python, options.threads))
            for case in _cases(options.answers, quick=options.quick)
            if case.system == SWARM or peer_python
        ]
    print(json.dumps(_figures(results)))


def _cases(lengths: list[int], *, quick: bool) -> Iterator[Case]:
    prompt_tokens = _QUICK_TOKENS if quick else 256
    for length in (_QUICK_TOKENS,) if quick else lengths:
        yield Case(SWARM, length, checkpointing=True, at_once="as the probe chooses", prompt_tokens=prompt_tokens)
        yield Case(TRL, length, checkpointing=True, at_once="the group", prompt_tokens=prompt_tokens)
    if not quick:
        length = lengths[0]
        yield Case(SWARM, length, checkpointing=True, at_once="the group", micro_batch_tokens=10**6)
        yield Case(SWARM, length, checkpointing=False, at_once="as the probe chooses")
        yield Case(SWARM, length, checkpointing=False, at_once="one answer", micro_batch_tokens=1)
        yield Case(TRL, length, checkpointing=False, at_once="the group")


def _base(folder: Path, size: Size, dtype: torch.dtype = torch.float32) -> Path:
    """A folder with random weights."""
    torch.manual_seed(0)
    disable_progress_bar()
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, max_position_embeddings=32_768,
        tie_word_embeddings=size.is_tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    load_tokenizer(BUNDLED_FOLDER).save_pretrained(folder)
    return folder


def _print_probed(threads: int) -> float | None:
    """Predicted and measured growth of the process during one step on two answers. Returns the largest error of a peak."""
    print("| model | answers of | at once | weights and libraries, MiB | step, MiB | predicted |")
    print("|---|---|---|---|---|---|", flush=True)
    results = []
    for name, size in PROBED.items():
        with tempfile.TemporaryDirectory() as folder:
            base = _base(Path(folder), size)
            for length in (256, 1024, 2048):
                case = Case(SWARM, length, checkpointing=True, at_once="as the probe chooses", answers=2)
                results.append(one := _run(case, base, None, threads))
                loaded, peak, predicted = (
                    one.found.get(key, math.nan) for key in ("loaded_mib", "peak_mib", "predicted_mib")
                )
                cells = [
                    name,
                    length,
                    case.at_once,
                    *(f"{mib:.0f}" for mib in (loaded, peak - loaded, predicted - loaded)),
                ]
                print("|", " | ".join(map(str, cells)), "|", one.failure, flush=True)
    return _probe_error(results)


def _probe_error(results: Sequence[Result]) -> float | None:
    found = [one.found for one in results if "predicted_mib" in one.found]
    return max((abs(one["predicted_mib"] / one["peak_mib"] - 1) for one in found), default=None)


def _print_models() -> None:
    """Bytes of a whole model from those of one with two layers and one with four: each layer takes the same.

    Without the part that grows with the square of the length: kernels of GPUs do not store attention weights.
    """
    print(
        "| size | gradient checkpointing | weights in bfloat16, GiB | adapter, gradients, moments | a token, MiB |",
        end="",
    )
    print("".join(f" one answer of {length:,} |" for length in _ANSWERS))
    print("|---|---|---|---|---|" + "---|" * len(_ANSWERS), flush=True)
    for name, size in SIZES.items():
        for checkpointing in (False, True):
            weights, step = _whole(size, checkpointing)
            cells = [name, "yes" if checkpointing else "no", f"{weights / 2**30:.1f}"]
            cells += [f"{step.adapter_bytes * 4 / 3 / 2**30:.2f}"]
            cells += [f"{max(step.stored.linear, step.backward.linear) / 2**20:.2f}"]
            cells += [f"{step.of(1, 512, length) / 2**30:.1f}" for length in _ANSWERS]
            print("|", " | ".join(cells), "|", flush=True)


def _whole(size: Size, checkpointing: bool) -> tuple[float, StepNeed]:
    few, more = (_measured(replace(size, layers=layers), checkpointing) for layers in (2, 4))

    def at_all_layers(get: Callable[[tuple[int, StepNeed]], float]) -> float:
        return get(few) + (get(more) - get(few)) * (size.layers - 2) / 2

    def polynomial(get: Callable[[StepNeed], Polynomial]) -> Polynomial:
        return Polynomial(
            at_all_layers(lambda one: get(one[1]).once),
            at_all_layers(lambda one: get(one[1]).linear),
            quadratic=0.0,
        )

    adapter = int(at_all_layers(lambda one: one[1].adapter_bytes))
    stored, backward = polynomial(lambda one: one.stored), polynomial(lambda one: one.backward)
    return at_all_layers(lambda one: one[0]), StepNeed(adapter, few[1].logits_bytes, stored, backward)


def _measured(size: Size, checkpointing: bool) -> tuple[int, StepNeed]:
    with tempfile.TemporaryDirectory() as folder:
        base = _base(Path(folder), size, torch.bfloat16)
        section = PolicySection(base=str(base), dtype="bfloat16", gradient_checkpointing=checkpointing)
        policy = load_policy(section, device="cpu")
        frozen = sum(one.nbytes for one in policy.model.parameters() if not one.requires_grad)
        return frozen, measure_step(policy)


def _run(case: Case, base: Path, peer_python: Path | None, threads: int) -> Result:
    spec = {
        "base": str(base), "threads": threads, "answers": case.answers, "prompt_tokens": case.prompt_tokens,
        "answer_tokens": case.answer_tokens, "checkpointing": case.checkpointing,
        "micro_batch_tokens": case.micro_batch_tokens,
    }  # fmt: skip
    python = sys.executable if case.system == SWARM else str(peer_python)
    limit = int(_RESERVE * psutil.virtual_memory().available)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
    }

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # an error here rather than the system's killer

    try:
        ended = subprocess.run(
            [python, str(_HERE / _SCRIPTS[case.system]), json.dumps(spec)],
            capture_output=True, text=True, timeout=_TIME_LIMIT_S, env=environment, preexec_fn=bound, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Result(case, {}, f"not done in {_TIME_LIMIT_S:.0f} s")
    if ended.returncode:
        last = " ".join(ended.stderr.split())[-300:]
        is_memory = "allocate memory" in last or "MemoryError" in last
        if is_memory:
            return Result(case, {}, f"more than {limit / 2**20:.0f}", limit / 2**20)
        return Result(case, {}, last)
    return Result(case, json.loads(ended.stdout.splitlines()[-1]))


def _show(result: Result) -> Result:
    case, found = result.case, result.found
    cells: list[Any] = [case.system, case.answer_tokens, "yes" if case.checkpointing else "no", case.at_once]
    if found:
        predicted = f"{found['predicted_mib']:.0f}" if "predicted_mib" in found else ""
        cells += [f"{found['peak_mib']:.0f}", predicted, f"{found['loaded_mib']:.0f}", f"{found['seconds']:.0f}"]
    else:
        cells += [result.failure, "", "", ""]
    print("|", " | ".join(map(str, cells)), "|", flush=True)
    return result


def _figures(results: list[Result]) -> dict[str, float | None]:
    def peak(system: str, length: int) -> float | None:
        """Of the first case of a system, which has gradient checkpointing; its limit where it did not fit."""
        first = next((one for one in results if one.case.system == system and one.case.answer_tokens == length), None)
        return first.found.get("peak_mib", first.limit_mib or None) if first else None

    lengths = sorted({one.case.answer_tokens for one in results})
    own, other = peak(SWARM, lengths[0]), peak(TRL, lengths[0])
    longest = peak(SWARM, lengths[-1])
    return {
        "memory_ratio_trl": own / other if own and other else None,
        "growth_with_length": longest / own if own and longest and len(lengths) > 1 else None,
        "probe_error": _probe_error(results),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller policy and shorter answers")
    parser.add_argument("--answers", type=int, nargs="+", default=[512, 2048], help="lengths of answers in tokens")
    parser.add_argument("--probe", action="store_true", help="predictions of the memory probe beside measured peaks")
    parser.add_argument("--models", action="store_true", help="a table of model sizes, without steps")
    parser.add_argument("--prepare", action="store_true", help="make TRL's environment, once")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    main()

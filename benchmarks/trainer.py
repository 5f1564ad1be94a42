"""How fast a node samples and trains: this project beside TRL's GRPOTrainer and genrl's trainer.

    python benchmarks/trainer.py            two policies, LoRA and all weights; about ten minutes
    python benchmarks/trainer.py --quick    the bundled policy with LoRA; under a minute
    python benchmarks/trainer.py --long     answers of 500 tokens of the larger policy with LoRA, beside TRL; five minutes
    python benchmarks/trainer.py --base DIR    answers of 500 tokens of the model in that folder with LoRA, beside TRL
    python benchmarks/trainer.py --prepare  make the environment of the others, once (2 GB in ~/.cache, some minutes)

Same weights, prompts, group size, LoRA shape, optimizer steps (one per batch) and forced answer length; made-up rewards that
cost nothing. A step is everything from prompts to the moved weights: sampling, rewards, log-probs, backward, optimizer. All
systems are alive at the same time and take turns, step by step: what else the machine does, it does to all. This project trains
adapters only, so where the others train all weights it is shown beside them as it is. The correctness column is the largest
difference of log-probs from those of every sequence alone, without padding. The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring.engine_models import small_llama
from measuring.node_processes import NodeFailed, NodeProcess, Reply
from peers.environment import PeerUnavailable
from peers.trainers_venv import TRAINERS

from swarm.policy.base_folder import BUNDLED_FOLDER
from swarm.policy.base_model import load_tokenizer

_HERE = Path(__file__).resolve().parent
_TIME_LIMIT_S = 300.0
SWARM, TRL, GENRL = "swarm", "TRL", "genrl"
_SCRIPTS = {SWARM: "measuring/swarm_trainer.py", TRL: "peers/trl_trainer.py", GENRL: "peers/genrl_trainer.py"}


@dataclass(frozen=True, slots=True)
class Case:
    """One policy and batch."""

    model: str
    base: Path
    num_prompts: int
    group_size: int
    answer_tokens: int
    num_steps: int
    """Of each system, after one that does not count."""

    @property
    def num_answers(self) -> int:
        return self.num_prompts * self.group_size


@dataclass(slots=True)
class Measurement:
    """One system in one case."""

    case: Case
    system: str
    lora: bool
    seconds: list[float] = field(default_factory=list)
    """By step."""
    peak_mib: float = 0.0
    logprob_error: float | None = None
    """Largest difference from the unpadded forward, in nats; None where the answers could not be compared."""
    failure: str = ""

    @property
    def samples_per_s(self) -> float:
        return self.case.num_answers / statistics.median(self.seconds) if self.seconds else 0.0


def main() -> None:
    """Measure, print the table, print the figures."""
    options = _options()
    if options.prepare:
        TRAINERS.make(TRAINERS.folder)
        return
    try:
        peer_python: Path | None = TRAINERS.python_of(TRAINERS.folder)
    except PeerUnavailable as error:
        print(f"without the others: {error}")
        peer_python = None
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in _cases(options, Path(folder)):
            measured = asyncio.run(_measure(case, peer_python, options, Path(folder)))
            _print(measured, options.threads)
            measurements += measured
    print(json.dumps(_figures(measurements)))


async def _measure(
    case: Case, peer_python: Path | None, options: argparse.Namespace, folder: Path
) -> list[Measurement]:
    """All systems side by side, in turns."""
    wanted = [Measurement(case, SWARM, lora=True)]
    if peer_python is not None:
        only_lora = options.quick or options.long or options.base
        forms = (True,) if only_lora else (True, False)
        with_genrl = options.device == "cpu" and not (options.long or options.base)
        others = (TRL, GENRL) if with_genrl else (TRL,)
        wanted += [Measurement(case, system, lora) for lora in forms for system in others]
    async with AsyncExitStack() as alive:
        processes = [await _spawn(alive, one, peer_python, folder) for one in wanted]
        await asyncio.gather(*(_start(p, one, options, folder) for p, one in zip(processes, wanted, strict=True)))
        await _compare_logprobs(processes, wanted)
        for turn in range(case.num_steps + 1):
            for process, one in zip(processes, wanted, strict=True):
                if not one.failure:
                    await _step(process, one, counts=turn > 0)
    return wanted


async def _spawn(alive: AsyncExitStack, one: Measurement, peer_python: Path | None, folder: Path) -> NodeProcess:
    python = sys.executable if one.system == SWARM or peer_python is None else str(peer_python)
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(_HERE.parent)}
    log = folder / f"{one.system}-{one.lora}-{one.case.base.name}.log"
    process = await NodeProcess.spawn([python, str(_HERE / _SCRIPTS[one.system])], environment, log)
    alive.push_async_callback(process.end)
    return process


async def _start(process: NodeProcess, one: Measurement, options: argparse.Namespace, folder: Path) -> None:
    case = one.case
    tokenizer = load_tokenizer(case.base)
    spec = {
        "base": str(case.base),
        "prompts": _prompts(case.num_prompts),
        "rendered": [_rendered(tokenizer, text) for text in _prompts(case.num_prompts)],
        "group_size": case.group_size,
        "answer_tokens": case.answer_tokens,
        "max_steps": case.num_steps + 1,
        "threads": options.threads,
        "device": options.device,
        "lora": one.lora,
        "folder": str(folder / f"{one.system}-{one.lora}"),
    }
    await _ask(process, one, **spec)


async def _compare_logprobs(processes: Sequence[NodeProcess], wanted: Sequence[Measurement]) -> None:
    """Prompts and answers of unlike lengths, as each system batches them for training."""
    tokenizer = load_tokenizer(wanted[0].case.base)
    texts = [(prompt, "7" * (1 + 3 * number)) for number, prompt in enumerate(_prompts(4))]
    pairs = [(_ids(tokenizer, _rendered(tokenizer, prompt)), _ids(tokenizer, answer)) for prompt, answer in texts]
    replies = [await _ask(p, one, pairs=pairs, texts=texts) for p, one in zip(processes, wanted, strict=True)]
    reference = (replies[0] or {}).get("unpadded", [])
    for one, reply in zip(wanted, replies, strict=True):
        got = (reply or {}).get("logprobs", [])
        if [len(row) for row in got] == [len(row) for row in reference] and got:
            one.logprob_error = max(
                abs(a - b) for row, right in zip(got, reference, strict=True) for a, b in zip(row, right, strict=True)
            )


async def _step(process: NodeProcess, one: Measurement, *, counts: bool) -> None:
    reply = await _ask(process, one)
    if reply is not None:
        one.seconds += [reply["seconds"]] if counts else []
        one.peak_mib = reply["peak_mib"]


async def _ask(process: NodeProcess, one: Measurement, **arguments: Any) -> Reply | None:
    """None once it has failed; the reason stays with the measurement."""
    if one.failure:
        return None
    try:
        return await process.ask("go", timeout_s=_TIME_LIMIT_S, **arguments)
    except NodeFailed as error:
        one.failure = " ".join(str(error).split())[-300:]
        return None


def _cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    bundled = Case("bundled, 0.9 M", BUNDLED_FOLDER, 8, 8, 24, 5 if options.quick else 12)
    if options.quick:
        return [bundled]
    if options.base:
        return [Case(options.base.name, options.base, 4, 8, 500, 2)]
    small_llama(folder / "llama")
    if options.long:
        return [Case("random Llama, 32 M", folder / "llama", 2, 8, 500, 2)]
    return [bundled, Case("random Llama, 32 M", folder / "llama", 4, 8, 24, 4)]


def _prompts(count: int) -> list[str]:
    """Of unlike lengths."""
    return [f"State the final answer: {' + '.join(str(7 * n + 3) for n in range(i % 4 + 2))} =" for i in range(count)]


def _rendered(tokenizer: Any, text: str) -> str:
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _print(measurements: Sequence[Measurement], threads: int) -> None:
    print(f"\n{threads} thread(s); median over steps")
    headers = (
        "policy",
        "answers × tokens",
        "trained",
        "system",
        "s per step",
        "samples/s",
        "swarm over it",
        "peak MiB",
    )
    print(f"| {' | '.join(headers)} | log-probs off by |\n|{'---|' * (len(headers) + 1)}")
    own = {one.case: one for one in measurements if one.system == SWARM}
    for one in measurements:
        case = one.case
        trained = "LoRA" if one.lora else "all weights"
        what = f"| {case.model} | {case.num_answers} × {case.answer_tokens} | {trained} | {one.system}"
        if one.failure or not one.seconds:
            print(f"{what} | failed: {one.failure} | | | | |")
            continue
        ratio = "" if one.system == SWARM else f"{own[case].samples_per_s / one.samples_per_s:.2f}"
        error = "not comparable" if one.logprob_error is None else f"{one.logprob_error:.1e}"
        seconds = statistics.median(one.seconds)
        print(
            f"{what} | {seconds:.3f} | {one.samples_per_s:.1f} | {ratio} | {one.peak_mib:.0f} | {error} |", flush=True
        )


def _figures(measurements: Sequence[Measurement]) -> Mapping[str, float | None]:
    """The worst ratios over the policies, with LoRA on both sides; null where the other did not run."""
    figures: dict[str, float | None] = {}
    for system, name in ((TRL, "trl"), (GENRL, "genrl")):
        for lora, suffix in ((True, ""), (False, "_all_weights")):
            pairs = _pairs(measurements, system, lora)
            figures[f"ratio_{name}{suffix}"] = _least([own.samples_per_s / other.samples_per_s for own, other in pairs])
            worst = _least([-own.peak_mib / other.peak_mib for own, other in pairs])
            figures[f"memory_ratio_{name}{suffix}"] = None if worst is None else -worst
    own_errors = [m.logprob_error for m in measurements if m.system == SWARM and m.logprob_error is not None]
    figures["logprob_error"] = max(own_errors, default=None)
    return figures


def _pairs(measurements: Sequence[Measurement], system: str, lora: bool) -> list[tuple[Measurement, Measurement]]:
    own = {one.case: one for one in measurements if one.system == SWARM}
    return [
        (own[one.case], one)
        for one in measurements
        if (one.system, one.lora) == (system, lora) and one.seconds and own[one.case].seconds
    ]


def _least(values: Sequence[float]) -> float | None:
    return round(min(values), 3) if values else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one policy, LoRA, five steps")
    parser.add_argument("--long", action="store_true", help="the larger policy, LoRA, answers of 500 tokens, TRL alone")
    parser.add_argument("--base", type=Path, help="a folder with a model, in the number format that it was saved in")
    parser.add_argument("--prepare", action="store_true", help="make the environment of the others and end")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for tensor work of each system (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="genrl is measured on the CPU only")
    return parser.parse_args()


if __name__ == "__main__":
    main()

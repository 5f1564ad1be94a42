"""Everything that was never run on a GPU, on one: number formats, speed, memory, long answers, a soak. Writes one report.

    python benchmarks/gpu.py             on a CUDA machine, Qwen2.5-1.5B's shape with random weights; about an hour
    python benchmarks/gpu.py --quick     a model of 9 M parameters, short answers, a soak of 5 s; under a minute on a CPU, too
    python benchmarks/gpu.py --parts bfloat16,soak --base Qwen/Qwen2.5-1.5B-Instruct
    python benchmarks/gpu.py --turns 1 --part-limit-s 120 --soak-s 60   where the GPU is rented by the minute

Each part runs in a process of its own, so that one that fails, or breaks the state of the GPU, costs its own figures only. On a
machine without CUDA the same parts run on the CPU. What is not installed is left out with a line that says so: bitsandbytes
(4 and 8 bit), vLLM (`make vllm`) and TRL (`python benchmarks/trainer.py --prepare`). The soak is a whole node that trains the
bundled policy, or the base that `--base` names at a hub, for ten minutes.

The report is Markdown (`--report`, by default gpu-report.md). The last line of the output is one JSON object: the figures by
part, and `failed`, the number of parts that failed. The exit code is 1 where one did.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # asks for GPUs without starting CUDA, which no fork survives
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from measuring import gpu_parts
from measuring.gpu_parts import Figures, SkippedPart, Spec

_PARTS: dict[str, Callable[[Spec], Figures]] = {
    "machine": gpu_parts.machine,
    "float32": gpu_parts.float32,
    "bfloat16": gpu_parts.bfloat16,
    "4 bit": gpu_parts.four_bit,
    "8 bit": gpu_parts.eight_bit,
    "engine and generate": gpu_parts.engine_and_generate,
    "long answers": gpu_parts.long_answers,
    "memory": gpu_parts.memory,
    "cost of a token": gpu_parts.cost_of_a_token,
    "one-token pass": gpu_parts.one_token_pass,
    "checkpoint": gpu_parts.checkpoint,
    "TRL": gpu_parts.beside_trl,
    "soak": gpu_parts.soak,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one part."""

    part: str
    figures: Figures
    state: str
    """done, skipped or failed."""
    why: str
    seconds: float

    def rounded(self) -> Figures:
        return {name: v if isinstance(v, str) else float(f"{v:.4g}") for name, v in self.figures.items()}

    def markdown(self) -> str:
        title = f"## {self.part[0].upper()}{self.part[1:]}\n\n"
        if self.state != "done":
            return f"{title}{self.state}: {self.why}\n"
        rows = "".join(f"| {name} | {_shown(value)} |\n" for name, value in self.figures.items())
        return f"{title}| | |\n|---|---|\n{rows}\nThis took {self.seconds:.0f} s.\n"


def main() -> None:
    """Measure part by part, write the report, print the figures."""
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(device, options.quick, options.base or folder, options.soak_s, options.turns)
        if not options.base:
            made = _run("base", _make_base, spec, options.part_limit_s)
            if made.state != "done":
                sys.exit(f"no base could be made: {made.why}")
        for name in options.parts:
            outcomes.append(_run(name, _PARTS[name], spec, options.part_limit_s))
            print(outcomes[-1].markdown(), flush=True)
    report = f"# What was measured on {device.upper()}\n\n" + "\n".join(one.markdown() for one in outcomes)
    options.report.write_text(report)
    print(f"the report: {options.report}")
    num_failed = sum(one.state == "failed" for one in outcomes)
    figures = {one.part: one.rounded() if one.state == "done" else f"{one.state}: {one.why}" for one in outcomes}
    print(json.dumps({"device": device, "failed": num_failed, **figures}))
    sys.exit(1 if num_failed else 0)


def _make_base(spec: Spec) -> Figures:
    gpu_parts.make_base(Path(spec.base), device=spec.device, quick=spec.quick)
    return {}


def _run(name: str, part: Callable[[Spec], Figures], spec: Spec, limit_s: float) -> Outcome:
    """In a fork of this process, which has imported everything and has not touched the GPU."""
    started = time.monotonic()
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(part, spec, there))
    process.start()
    there.close()
    state, found = "failed", f"it took more than {limit_s:.0f} s"
    try:
        if here.poll(limit_s):
            state, found = here.recv()
    except EOFError:
        process.join()
        found = f"its process ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    outcome = Outcome(name, {}, state, "", time.monotonic() - started)
    return replace(outcome, figures=found) if state == "done" else replace(outcome, why=str(found))


def _child(part: Callable[[Spec], Figures], spec: Spec, there: Connection) -> None:
    if spec.quick and not spec.is_cuda:
        torch.set_num_threads(1)  # threads that wait for each other take minutes where something else computes
    answer: tuple[str, Any]
    try:
        answer = "done", part(spec)
    except SkippedPart as skipped:
        answer = "skipped", str(skipped)
    except Exception as error:  # whatever it is belongs into the report
        traceback.print_exc()
        answer = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    there.send(answer)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and short answers")
    parser.add_argument("--base", default="", help="a folder or a name of a hub; by default random weights")
    parser.add_argument("--parts", default=",".join(_PARTS), help="names, separated by commas; default all")
    parser.add_argument("--soak-s", type=float, help="seconds of the soak, default 600")
    parser.add_argument("--turns", type=int, help="of each system, where several are compared; default 3")
    parser.add_argument(
        "--part-limit-s", type=float, default=3600.0, help="a part that takes longer fails; default 3600"
    )
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"), help="default gpu-report.md")
    options = parser.parse_args()
    options.parts = [name.strip() for name in options.parts.split(",")]
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"--parts must be of {', '.join(_PARTS)}, got {', '.join(sorted(unknown))}")
    options.turns = options.turns or (1 if options.quick else 3)
    options.soak_s = options.soak_s or (5.0 if options.quick else 600.0)
    return options


if __name__ == "__main__":
    main()

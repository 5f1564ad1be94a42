"""How fast answers are sampled: this project's engine beside transformers' `model.generate`.

    python benchmarks/engine.py            three policies; about five minutes
    python benchmarks/engine.py --long     prompts of 1,000 tokens, answers of up to 2,000; about an hour
    python benchmarks/engine.py --quick    both, without the largest policy and shorter; under a minute

Same policy (base and adapter), same prompts, same sampling, same lengths, in turns. `generate` runs twice: on the policy
as it is, as a node without an engine would, and with the adapter folded in, as the engine does it; the ratios are
against the faster of the two. `generate` returns no log-probs: the pass that computes them afterwards is not counted.
Two forms of lengths: uniform, and long-tailed, where one answer in ten is 8 times as long as the others. The whole round is
one batch for either system, so the engine has nothing to refill from: with a queue it gains more.

At length: all answers start at once, in groups to prompts of 1,000 tokens, and their lengths are log-normal. Beside `generate`
come continuous batching of transformers and, where it is installed, vLLM. `--quick` takes prompts of 512 tokens, answers of up
to 128, and the policy of 32 M alone, without vLLM.

Limit: the arithmetic of the tokens owed, over what a large matrix product reaches here; and the bytes that must be read,
over what reading memory reaches. The last line of the output is one JSON object.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measuring.engine_contest import (
    ENGINE,
    FOLDED,
    GENERATE,
    Case,
    Contest,
    Times,
    peak_bytes_per_s,
    peak_flops_per_s,
)
from measuring.engine_long import ENGINE as ENGINE_AT_LENGTH
from measuring.engine_long import GENERATE as GENERATE_AT_LENGTH
from measuring.engine_long import LongCase, LongContest, LongTimes
from measuring.engine_models import bundled, qwen_half_billion, small_llama

from swarm.adapters.load_pretrained import quiet_libraries
from swarm.policy.policy import Policy

_TAIL = 8
"""Long answers over the median."""


def main() -> None:
    """Measure, print the tables, print the figures."""
    options = _options()
    torch.set_num_threads(options.threads)
    figures: dict[str, float | str] = {}
    with quiet_libraries():
        if not options.long:
            figures |= _short(options)
        if options.quick or options.long:
            figures |= _at_length(options.quick, options.small)
    print(json.dumps(figures))


def _short(options: argparse.Namespace) -> dict[str, float]:
    """Short prompts and answers: ratios over `generate`."""
    peaks = peak_flops_per_s(), peak_bytes_per_s()
    print(f"{options.threads} threads: {peaks[0] / 1e9:.0f} GFLOP/s, {peaks[1] / 1e9:.1f} GB/s", flush=True)
    results: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make, group_size, median, num_turns in _plan(options.quick, Path(folder)):
            contest = Contest(make(), max_answers=10 * group_size)
            uniform = Case("uniform", group_size, (2 * median,) * 8)
            long_tail = Case("long tail", group_size, (_TAIL * median, *(median,) * 9))
            results[name] = []
            for case in (uniform, long_tail):
                results[name].append(contest.run(case, num_turns))
                _print(name, results[name][-1], peaks)
    if options.quick:
        print("left out by --quick: the shape of Qwen2.5-0.5B")
    return _figures(results)


def _at_length(quick: bool, small: bool) -> dict[str, float | str]:
    """Long prompts, and answers of log-normal length: ratios over `generate`, and which system is the fastest."""
    results: dict[str, LongTimes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make, case in _long_plan(quick, Path(folder))[: 1 if small else None]:
            results[name] = LongContest(make, case).run(num_turns=1, with_vllm=not quick)
            _print_long(name, results[name])
    worst = min(results.values(), key=lambda times: times.ratio(GENERATE_AT_LENGTH))
    figures: dict[str, float | str] = {"ratio_long": round(worst.ratio(GENERATE_AT_LENGTH), 3)}
    for name, times in results.items():
        figures[f"best_long {name}"] = max(times.seconds, key=times.tokens_per_s)
        figures |= {f"tokens_per_s_long {name}, {one}": round(times.tokens_per_s(one), 1) for one in times.seconds}
    return figures


def _long_plan(quick: bool, folder: Path) -> Sequence[tuple[str, Callable[[], Policy], LongCase]]:
    """(name, how to make it, prompts and answers)."""
    small = ("random Llama, 32 M", lambda: small_llama(folder / "long-llama"))
    if quick:
        return [(*small, LongCase(2, 4, 512, median=24, longest=128))]
    large = ("random Qwen2.5-0.5B", lambda: qwen_half_billion(folder / "long-qwen"))
    return [
        (*small, LongCase(4, 8, 1000, median=300, longest=2000)),
        (*large, LongCase(2, 8, 1000, median=200, longest=2000)),
    ]


def _print_long(name: str, times: LongTimes) -> None:
    case = times.case
    print(
        f"\n{name}, {case.num_prompts} prompts of {case.prompt_tokens} tokens, {case.group_size} answers each: "
        f"{case.num_tokens} tokens, median {case.median}, longest {case.longest}"
    )
    for system in times.seconds:
        ratio = "" if system == ENGINE_AT_LENGTH else f"   engine {times.ratio(system):.2f} times as fast"
        print(f"  {system:26} {times.tokens_per_s(system):8.1f} tokens/s{ratio}", flush=True)
    for system, reason in times.missing.items():
        print(f"  {system:26} left out: {reason}")


def _plan(quick: bool, folder: Path) -> Sequence[tuple[str, Callable[[], Policy], int, int, int]]:
    """(name, how to make it, answers per prompt, median length, turns)."""
    small = ("random Llama, 32 M", lambda: small_llama(folder / "llama"))
    if quick:
        return [("bundled, 0.9 M", bundled, 8, 16, 2), (*small, 4, 10, 1)]
    large = ("random Qwen2.5-0.5B", lambda: qwen_half_billion(folder / "qwen"), 4, 4, 1)
    return [("bundled, 0.9 M", bundled, 8, 24, 7), (*small, 8, 16, 2), large]


def _print(name: str, times: Times, peaks: tuple[float, float]) -> None:
    print(f"\n{name}, {times.case.name}: {times.case.num_tokens} tokens, longest answer {max(times.case.lengths)}")
    for system in (GENERATE, FOLDED, ENGINE):
        speed = times.tokens_per_s(system)
        seconds = times.case.num_tokens / speed
        shares = times.flops / seconds / peaks[0], times.num_bytes / seconds / peaks[1]
        ratio = "" if system == ENGINE else f"   engine {times.ratio(system):.2f} times as fast"
        print(
            f"  {system:26} {speed:8.0f} tokens/s   {shares[0]:6.1%} of FLOP/s {shares[1]:6.1%} of bytes/s{ratio}",
            flush=True,
        )


def _figures(results: dict[str, list[Times]]) -> dict[str, float]:
    """The worst ratios over the policies measured, against the faster `generate`."""
    uniform = [times.strict_ratio for times, _ in results.values()]
    long_tail = [times.strict_ratio for _, times in results.values()]
    as_it_is = [times.ratio(GENERATE) for both in results.values() for times in both]
    figures = {
        "ratio_long_tail": min(long_tail),
        "ratio_uniform": min(uniform),
        "ratio_worst": min(*uniform, *long_tail),
        "ratio_worst_adapter_unfolded": min(as_it_is),
    }
    return {name: round(value, 3) for name, value in figures.items()} | {
        f"tokens_per_s {name}, {times.case.name}": round(times.tokens_per_s(ENGINE))
        for name, both in results.items()
        for times in both
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="smaller policies, shorter answers, all cases")
    parser.add_argument("--long", action="store_true", help="only long prompts and answers")
    parser.add_argument(
        "--small", action="store_true", help="with --long: without the policy of 0.5 B, in a fifth of the time"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for tensor work (default 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

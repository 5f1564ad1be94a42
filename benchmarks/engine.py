"""How fast answers are sampled: this project's engine beside transformers' `model.generate`.

    python benchmarks/engine.py            three policies; about five minutes
    python benchmarks/engine.py --quick    without the largest; under a minute

Same policy (base and adapter), same prompts, same sampling, same lengths, in turns. `generate` runs twice: on the policy
as it is, as a node without an engine would, and with the adapter folded in, as the engine does it; the ratios are
against the faster of the two. `generate` returns no log-probs: the pass that computes them afterwards is not counted.
Two forms of lengths: uniform, and long-tailed, where one answer in ten is 8 times as long as the others. The whole round is
one batch for either system, so the engine has nothing to refill from: with a queue it gains more.

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
from measuring.engine_models import bundled, qwen_half_billion, small_llama

from swarm.policy.policy import Policy
from swarm.policy.quiet import quiet_libraries

_TAIL = 8
"""Long answers over the median."""


def main() -> None:
    """Measure, print the table, print the figures."""
    options = _options()
    torch.set_num_threads(options.threads)
    peaks = peak_flops_per_s(), peak_bytes_per_s()
    print(f"{options.threads} threads: {peaks[0] / 1e9:.0f} GFLOP/s, {peaks[1] / 1e9:.1f} GB/s", flush=True)
    results: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
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
    print(json.dumps(_figures(results)))


def _plan(quick: bool, folder: Path) -> Sequence[tuple[str, Callable[[], Policy], int, int, int]]:
    """(name, how to make it, answers per prompt, median length, turns)."""
    small = ("random Llama, 32 M", lambda: small_llama(folder / "llama"))
    if quick:
        return [("bundled, 0.9 M", bundled, 8, 16, 3), (*small, 4, 10, 2)]
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
    parser.add_argument("--quick", action="store_true", help="two policies, short answers")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for tensor work (default 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Short Python functions over a list of integers, made up from a seed: a chain of steps, and what to return in the end.

Every step is known twice, as a function for the expected results and as source text for a right answer.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ENTRY = "solve"
_MAX_ITEMS = 8
_ITEMS = range(-20, 21)
_FACTORS = range(2, 6)
_MIN_DIFFERENT = 3
"""Expected results that differ, so that no constant passes many tests."""


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A function to write. `tests` stay with the node: the sandbox sees the arguments alone."""

    prompt: str
    entry: str
    tests: tuple[tuple[list[Any], Any], ...]
    """(arguments, expected result)"""
    answer: str
    """Source text of a right answer; empty where none is known."""


@dataclass(frozen=True, slots=True)
class _Step:
    """`k` stands for a small number, drawn anew for every problem."""

    words: str
    source: str
    apply: Callable[[list[int], int], Any]


_STEPS = (
    _Step("keep the even numbers only", "xs = [x for x in xs if x % 2 == 0]", lambda xs, k: [x for x in xs if x % 2 == 0]),
    _Step("keep the odd numbers only", "xs = [x for x in xs if x % 2 == 1]", lambda xs, k: [x for x in xs if x % 2 == 1]),
    _Step("keep the numbers greater than {k}", "xs = [x for x in xs if x > {k}]", lambda xs, k: [x for x in xs if x > k]),
    _Step("multiply each number by {k}", "xs = [x * {k} for x in xs]", lambda xs, k: [x * k for x in xs]),
    _Step("add {k} to each number", "xs = [x + {k} for x in xs]", lambda xs, k: [x + k for x in xs]),
    _Step("take the absolute value of each number", "xs = [abs(x) for x in xs]", lambda xs, k: [abs(x) for x in xs]),
    _Step("reverse the order", "xs = xs[::-1]", lambda xs, k: xs[::-1]),
    _Step("sort in ascending order", "xs = sorted(xs)", lambda xs, k: sorted(xs)),
    _Step("drop the first {k} numbers", "xs = xs[{k}:]", lambda xs, k: xs[k:]),
    _Step("drop repeated numbers but the first of each", "xs = list(dict.fromkeys(xs))", lambda xs, k: list(dict.fromkeys(xs))),
)  # fmt: skip
_ENDS = (
    _Step("return the list", "return xs", lambda xs, k: xs),
    _Step("return the sum", "return sum(xs)", lambda xs, k: sum(xs)),
    _Step("return how many numbers are left", "return len(xs)", lambda xs, k: len(xs)),
    _Step("return the largest number, or 0 if none is left", "return max(xs, default=0)", lambda xs, k: max(xs, default=0)),
)  # fmt: skip


def list_function(seed: int, *, num_steps: int, num_tests: int) -> CodeProblem:
    """The problem of that number; the same on every node."""
    rng = random.Random(seed)
    while True:
        chain = [(step, rng.choice(_FACTORS)) for step in [*rng.sample(_STEPS, num_steps), rng.choice(_ENDS)]]
        inputs: list[list[int]] = [[]] + [_numbers(rng) for _ in range(num_tests - 1)]
        tests = tuple(([xs], _apply(chain, xs)) for xs in inputs)
        if len({repr(expected) for _, expected in tests}) >= min(
            num_tests, _MIN_DIFFERENT
        ):  # odd, then even: always []
            break
    words = "; ".join(step.words.format(k=k) for step, k in chain)
    body = "".join(f"    {step.source.format(k=k)}\n" for step, k in chain)
    example = tests[-1]
    prompt = (
        f"Write a Python function {ENTRY}(xs) that takes a list of integers. In this order: {words}. "
        f"For example, {ENTRY}({example[0][0]}) is {example[1]}. Answer with the code alone."
    )
    return CodeProblem(prompt, ENTRY, tests, f"def {ENTRY}(xs):\n{body}")


def _numbers(rng: random.Random) -> list[int]:
    return [rng.choice(_ITEMS) for _ in range(rng.randint(1, _MAX_ITEMS))]


def _apply(chain: list[tuple[_Step, int]], xs: list[int]) -> Any:
    value: Any = xs
    for step, k in chain:
        value = step.apply(value, k)
    return value

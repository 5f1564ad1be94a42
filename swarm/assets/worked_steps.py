"""Answers with their steps, as the reasoning policy learns to write them.

    7468 + 1791 = ?      8+1=9→9            one digit of each number, then the result so far
                         6+9=15→59
                         4+7+1=12→259       with what the step before carried
                         7+1+1=9→9259

A writer with bad habits sometimes leaves out the steps, forgets what it carried, or gets one step wrong and goes on from there.
The answer follows from the steps, so a text is right exactly if nothing of that changed its last line.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_TEXT = "<think>{steps}</think><answer>{answer}</answer>"
_SLIPS = (-10, -2, -1, 1, 2, 10)
_LEGS: Mapping[int, str] = {
    0: "snake,sea slug,jellyfish,flatworm,leech",
    2: "chicken,bird,human,duck",
    4: "dog,cat,cow,horse,lion,elephant,giraffe,tiger,deer,sheep",
    5: "starfish",
    6: "insect,ant,butterfly,beetle,bee,wasp,grasshopper,cricket,cockroach,praying mantis,firefly",
    8: "spider,scorpion",
    10: "crab,lobster,shrimp",
    14: "woodlouse",
}
"""The animals of reasoning-gym's `leg_counting` by their legs."""
_LEGS_OF = {animal: legs for legs, animals in _LEGS.items() for animal in animals.split(",")}


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of what makes answers wrong."""

    slip: float = 0.0
    """Of each step: a wrong result."""
    careless: float = 0.0
    """Of each answer: a wrong method. Nothing is carried or borrowed, products do not come first, numbers are always sorted
    upwards, and all animals have four legs."""
    skip: float = 0.0
    """Of each answer: no steps."""


class StepWriter:
    """Writes tasks out in steps, with its habits. It draws from `rng` alone."""

    def __init__(self, rng: random.Random, habits: Habits = Habits()) -> None:
        self._rng = rng
        self._habits = habits
        self._is_careless = False
        self._lines: list[str] = []

    def write(self, kind: str, prompt: str) -> str:
        """The text of an answer to `prompt`, a task of the data set `kind` of reasoning-gym. Raises KeyError for another kind."""
        self._lines = []
        self._is_careless = self._rng.random() < self._habits.careless
        skips = self._rng.random() < self._habits.skip
        answer = _WRITERS[kind](self, prompt)
        return _TEXT.format(steps="" if skips else "\n".join(self._lines), answer=answer)

    def sum(self, prompt: str) -> str:
        """`chain_sum` with two terms."""
        left, sign, right = _found(r"(\d+) ([+-]) (\d+) =", prompt)
        return str(self._add(int(left), int(right)) if sign == "+" else self._subtract(int(left), int(right)))

    def product(self, prompt: str) -> str:
        """`products` with two terms: the product with each digit of the second, then their sum."""
        left, right = (int(number) for number in _found(r"(\d+) \* (\d+)", prompt))
        total: int | None = None
        for place, digit in enumerate(_digits(right)):
            zeros = "0" * place
            self._lines.append(f"{left}*{digit}{zeros}")
            part = int(str(self._multiply(left, digit)) + zeros)
            if total is not None:
                self._lines.append(f"{total}+{part}")
            total = part if total is None else self._add(total, part)
        return str(total)

    def chain(self, prompt: str) -> str:
        """`basic_arithmetic` with spaces between all parts: one operation per line, then what is left of the expression.

        Innermost parentheses come first, then products, then what stands first.
        """
        (expression,) = _found(r"Calculate (.+)\.", prompt)
        terms = expression.split()
        while len(terms) > 1:
            end = terms.index(")") if ")" in terms else len(terms)
            start = max((i + 1 for i in range(end) if terms[i] == "("), default=0)
            inner = terms[start:end]
            if len(inner) == 1:  # parentheses around a number
                terms[start - 1 : end + 1] = inner
                continue
            position = start + (inner.index("*") if "*" in inner and not self._is_careless else 1)
            left, sign, right = terms[position - 1 : position + 2]
            result = str(self._result(_OPERATIONS[sign](int(left), int(right))))
            terms[position - 1 : position + 2] = [result]
            if len(inner) == 3 and end < len(terms) + 2:
                terms[start - 1 : start + 2] = [result]
            self._lines.append(f"{left}{sign}{right}={result}" + (f"→{''.join(terms)}" if len(terms) > 1 else ""))
        return terms[0]

    def sorting(self, prompt: str) -> str:
        """`number_sorting` of whole numbers: the next number, then those that are left."""
        direction, listed = _found(r"in (ascending|descending) order: ([\d., ]+)", prompt)
        left = [int(float(number)) for number in listed.split(",")]
        order = max if direction == "descending" and not self._is_careless else min
        done: list[int] = []
        while left:
            chosen = order(left)
            if len(left) > 1 and self._slips():
                chosen = self._rng.choice([number for number in left if number != chosen] or left)
            left.remove(chosen)
            done.append(chosen)
            self._lines.append(str(chosen) + (f"→{', '.join(map(str, left))}" if left else ""))
        return f"[{', '.join(map(str, done))}]"

    def legs(self, prompt: str) -> str:
        """`leg_counting`: the legs of one kind of animal, then the sum so far."""
        (listed,) = _found(r"if you have (.+)\?", prompt)
        total = 0
        for number, name in re.findall(r"(\d+) ([a-z ]+)", listed):
            legs = 4 if self._is_careless else _LEGS_OF[name if name in _LEGS_OF else name.removesuffix("s")]
            part = self._result(int(number) * legs)
            before, total = total, self._result(total + part)
            self._lines.append(f"{name} {legs}*{number}={part}, {before}+{part}={total}")
        return str(total)

    def _add(self, left: int, right: int) -> int:
        carry, done = 0, ""
        for a, b in _pairs(left, right):
            total = self._result(a + b + carry, at_least=0)
            written = f"{a}+{b}" + (f"+{carry}" if carry else "")
            carry, done = self._carried(total // 10), f"{total % 10}{done}"
            self._lines.append(f"{written}={total}→{done}")
        return int(f"{carry}{done}") if carry else int(done)

    def _subtract(self, left: int, right: int) -> int:
        if left < right:
            self._lines.append(f"{left}<{right}, so -({right}-{left})")
            return -self._subtract(right, left)
        borrowed, done = 0, ""
        for a, b in _pairs(left, right):
            total = self._result(a - b - borrowed)
            written = f"{a}-{b}" + (f"-{borrowed}" if borrowed else "")
            borrowed, done = self._carried(int(total < 0)), f"{total % 10}{done}"
            self._lines.append(f"{written}={total}→{done}")
        return int(done)

    def _multiply(self, left: int, digit: int) -> int:
        carry, done = 0, ""
        for a in _digits(left):
            total = self._result(a * digit + carry, at_least=0)
            written = f"{a}*{digit}" + (f"+{carry}" if carry else "")
            carry, done = self._carried(total // 10), f"{total % 10}{done}"
            self._lines.append(f"{written}={total}→{done}")
        return int(f"{carry}{done}") if carry else int(done)

    def _carried(self, number: int) -> int:
        return 0 if self._is_careless else number

    def _slips(self) -> bool:
        return self._rng.random() < self._habits.slip

    def _result(self, right: int, at_least: int | None = None) -> int:
        """What the writer takes for the result of one step."""
        result = right + self._rng.choice(_SLIPS) if self._slips() else right
        return result if at_least is None else max(at_least, result)


_WRITERS: Mapping[str, Callable[[StepWriter, str], str]] = {
    "chain_sum": StepWriter.sum,
    "products": StepWriter.product,
    "basic_arithmetic": StepWriter.chain,
    "number_sorting": StepWriter.sorting,
    "leg_counting": StepWriter.legs,
}
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


def _found(pattern: str, prompt: str) -> tuple[str, ...]:
    """The groups of a pattern that every prompt of the data set matches. Raises ValueError."""
    match = re.search(pattern, prompt)
    if match is None:
        raise ValueError(f"a prompt must match {pattern}, got {prompt[:200]!r}; the data set has changed")
    return match.groups()


def _digits(number: int) -> list[int]:
    """From the last one."""
    return [int(digit) for digit in reversed(str(number))]


def _pairs(left: int, right: int) -> Iterator[tuple[int, int]]:
    """Digits of equal places, from the last one; 0 where the shorter number has none."""
    length = max(len(str(left)), len(str(right)))
    return zip(_digits_of(left, length), _digits_of(right, length), strict=True)


def _digits_of(number: int, length: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number).zfill(length))]

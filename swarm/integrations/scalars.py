"""The numbers of a metrics row, under flat names, for tools that draw curves."""

import math
from collections.abc import Iterator, Mapping
from typing import Any


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, value) of every finite number: `area/name` as it is, counts by reason as `area/name/reason`.

    Evaluations become `evaluation/…`, so that they stand beside the curves of rounds.
    """
    is_evaluation = row.get("kind") == "evaluation"
    for name, value in row.items():
        for full_name, number in _numbers(name, value):
            if is_evaluation and name not in ("round", "policy_version"):
                full_name = f"evaluation/{full_name}"
            if "/" in full_name and math.isfinite(number):
                yield full_name, number


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if isinstance(part, int | float):
                yield f"{name}/{key}", float(part)

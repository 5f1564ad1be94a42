"""A function of a program becomes a file that stands alone, or is refused with the reason."""

import functools
import math
import os.path
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.api.reward_file import reward_file
from swarm.errors import TaskError
from tests.unit import tiny_models as of_this_project

NUMBER = re.compile(r"-?\d+", re.ASCII)
POINTS = {"right": 0.75, "near": [0.25, 0.125]}
SHIFT, LATE, ROOT = 1, math.inf, Path("/")
COUNT = 0


def numbers(text: str) -> "Unknown":  # type: ignore[name-defined]  # noqa: F821
    return [int(one) for one in NUMBER.findall(text)]


def score(task: Any, answer: str, *, shift: int = SHIFT) -> float:
    """Read as it stands.

    Also of several lines.
    """
    counted = Counter(numbers(answer))  # a comment that stays
    mean = np.linalg.norm([POINTS["right"]])
    return float(counted[int(task.answer)] > 0) * mean + 0 * shift * len(os.path.normpath("a"))


def even(n: int) -> bool:
    return n == 0 or odd(n - 1)


def odd(n: int) -> bool:
    return n > 0 and even(n - 1)


def loads(text: str) -> dict[str, Any]:
    """What another interpreter, in which nothing of this project is, makes of the file."""
    script = (
        "import types\nspace = {}\nexec(TEXT, space)\nprint(space['score'](types.SimpleNamespace(answer='7'), 'is 7'))"
    )
    script = script.replace("TEXT", repr(text))
    ended = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return {"printed": ended.stdout.strip()}


def test_a_file_has_all_that_the_function_reads_and_stands_alone() -> None:
    text = reward_file(score)
    assert loads(text) == {"printed": "0.75"}
    assert "# a comment that stays" in text and "import numpy as np" in text and "import numpy.linalg" in text
    assert "NUMBER = re.compile('-?\\\\d+', 256)" in text and "LATE" not in text
    assert reward_file(score) == text, "others compute the same SHA-256"
    space: dict[str, Any] = {}
    exec(reward_file(even), space)
    assert space["even"](4) and not space["even"](5)


def test_a_function_that_was_defined_within_another_one_may_be_indented() -> None:
    def inner(task: Any, answer: str) -> float:
        """Of two

        lines."""
        return float(answer == task.answer)

    assert reward_file(inner).endswith("    return float(answer == task.answer)\n")


def make_refused() -> dict[str, Any]:
    limit = 3

    def closure(task: Any, answer: str) -> float:
        return float(len(answer) < limit)

    def counting(task: Any, answer: str) -> float:
        global COUNT
        COUNT += 1
        return COUNT

    def infinite(task: Any, answer: str) -> float:
        return 1 / LATE

    def path(task: Any, answer: str) -> float:
        return float((ROOT / answer).exists())

    def undefined(task: Any, answer: str) -> float:
        return nowhere(answer)  # type: ignore[name-defined]  # noqa: F821

    def module(task: Any, answer: str) -> float:
        return float(bool(of_this_project))

    def asserting(task: Any, answer: str) -> float:
        assert answer
        return 1.0

    def yielding(task: Any, answer: str) -> Any:
        yield 1.0

    async def asynchronous(task: Any, answer: str) -> float:
        return 1.0

    @functools.cache
    def cached(task: Any, answer: str) -> float:
        return 1.0

    @functools.wraps(score)
    def wrapped(task: Any, answer: str) -> float:
        return 1.0

    class Reward:
        def method(self, task: Any, answer: str) -> float:
            return 1.0

    space: dict[str, Any] = {}
    exec("def typed(task, answer):\n    return 1.0", space)
    return {
        "reads limit of the function around it": closure,
        "changes the global name COUNT": counting,
        "LATE, a float that cannot": infinite,
        "ROOT, a PosixPath that cannot": path,
        "nowhere, which is not defined": undefined,
        "module tests.unit.tiny_models, which is not an installed": module,
        "a tool rewrites it, as pytest": asserting,
        "asynchronous or a generator": yielding,
        "asynchronous or a generator ": asynchronous,
        "is a _lru_cache_wrapper, not a function": cached,
        "it has a decorator": wrapped,
        "it is a method": Reward().method,
        "is a Reward, not a function": Reward(),
        "is a type, not a function": Reward,
        "a lambda: it has no name": lambda task, answer: 1.0,
        "its source is not known": space["typed"],
        "is a builtin_function_or_method": len,
        "is a partial": functools.partial(score, shift=1),
    }


@pytest.mark.parametrize("reason", make_refused())
def test_what_is_not_certain_is_refused_with_the_reason_and_a_way_out(reason: str) -> None:
    with pytest.raises(TaskError, match=re.escape(reason.strip())) as refused:
        reward_file(make_refused()[reason])
    assert 'put it into a file with all that it needs, and give reward="FILE.py:NAME"' in str(refused.value)


def test_a_source_that_was_edited_since_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edited_reward.py").write_text("def score(task, answer):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    import edited_reward  # type: ignore[import-not-found]

    assert reward_file(edited_reward.score).endswith("return 0.5\n")
    (tmp_path / "edited_reward.py").write_text("def score(task, answer):\n    return 1.0  # now\n")
    with pytest.raises(TaskError, match="the source of score is not what runs"):
        reward_file(edited_reward.score)
    monkeypatch.setattr(sys.modules[__name__], "SHIFT", 2)
    with pytest.raises(TaskError, match="defaults of score were computed from values that have changed"):
        reward_file(score)


def test_a_constant_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "POINTS", {"right": 0.5, "x": "a" * (256 << 10)})
    with pytest.raises(TaskError, match=r"bytes with its constants, more than 262144"):
        reward_file(score)

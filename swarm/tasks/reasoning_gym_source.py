"""Procedural tasks of reasoning-gym, each scored by the library's own verifier.

Task `index` of stream `seed` is item 0 of the data set built with seed `seed * INDEX_SPAN + index` and size 1. Nearly all
data sets generate item i from `Random(seed + i)`, so one object serves every stream at no cost per stream. Whether that
holds is checked when the source is built; where it does not, the data set is built again for every task.

Not every data set may be a source, and not every answer may reach every verifier. Rewards of other nodes are computed again
here, so a verifier reads text that a stranger wrote. Some of the library's verifiers run an answer as Python code (`eval`,
`sympy.parse_expr`), and one hangs on `1e999999999`. An answer reaches those only if every character belongs to an alphabet in
which nothing but the expected literals can be written.

Other verifiers are too generous: they find the answer anywhere in a text, or read numbers as Python's `int` and `float` do
(`5_7`, digits of other scripts, `007`). A policy would learn to write all possible answers at once; `score_once` corrects that.
Reviewed against reasoning-gym 0.1.25.
"""

import difflib
import hashlib
import importlib
import itertools
import json
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache, partial
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.registry import Isolation
from swarm.machine.child_python import install_extra
from swarm.tasks.parameter_rules import check_declared, declared_by_class
from swarm.tasks.prompted_source import PROMPT, PromptTemplate
from swarm.tasks.task_source import INDEX_SPAN, TaskFailure
from swarm.types import Task, TaskRef

MAX_ANSWER_CHARS = 16_384
"""Longer answers are wrong, whatever the data set. Most verifiers take time in proportion to the text."""

_NUMBER_LISTS = re.compile(r"[\d\s,\[\]-]{0,16384}", re.ASCII)
_ARITHMETIC = re.compile(r"(?!.*\*\s*\*)(?!.*//)[\d\s+\-*/().]{0,256}", re.ASCII | re.DOTALL)

ALPHABETS: dict[str, re.Pattern[str]] = {
    "binary_matrix": _NUMBER_LISTS,
    "spiral_matrix": _NUMBER_LISTS,
    "n_queens": re.compile(r"[\sQ_,'\"\[\]]{0,16384}", re.ASCII),
    "string_insertion": re.compile(r"[\sA-E,'\"\[\]]{0,4096}", re.ASCII),
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
    "coin_flip": re.compile(r"[\d\s,./+-]{0,256}", re.ASCII),
}
"""Patterns that a whole answer must match to reach these verifiers; none of them admits powers, known names or calls."""

_RUNS_ANSWERS = "its verifier runs answers as Python code, also those of strangers"
_VARIES = "its tasks differ from process to process, so no other node could rebuild them"

REFUSED: dict[str, str] = {
    "simple_integration": _RUNS_ANSWERS,
    "intermediate_integration": _RUNS_ANSWERS,
    "polynomial_multiplication": _RUNS_ANSWERS,
    "codeio": _VARIES,
    "isomorphic_strings": _VARIES,
    "knight_swap": _VARIES,
    "ransom_note": _VARIES,
    "composite": "a mixture is made of several sources",
}
"""Data sets that cannot be a source, with the reason."""


Form = Callable[[str, str], bool]
"""Whether a text (first) is nothing but an answer, of the form that the expected answer (second) has."""


def _matches(pattern: str) -> Form:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text, answer: compiled.fullmatch(text) is not None


def _has_same_words(text: str, answer: str) -> bool:
    is_plain = re.fullmatch(r"[A-Za-z\s.,'-]*", text) is not None
    return is_plain and sorted(re.findall(r"\w+", text.lower())) == sorted(re.findall(r"\w+", answer.lower()))


def _has_same_parts(text: str, answer: str) -> bool:
    return len(re.split(r"[\s,;]+", text)) == len(re.split(r"[\s,;]+", answer))


def _has_same_marks(text: str, answer: str) -> bool:
    """Whether both have as many parts and differ only in letters, white space and the length of numbers."""
    return _has_same_parts(text, answer) and _marks(text) == _marks(answer)


def _marks(text: str) -> str:
    return re.sub(r"\d+", "0", re.sub(r"[A-Za-z\s]+", "", text))


def _is_no_longer(text: str, answer: str) -> bool:
    return len(text) <= len(answer)


_ANYWHERE = "its verifier finds the answer anywhere in a text"
_FIRST_PARTS = "its verifier ignores what comes after the answer"
FORMS: dict[str, tuple[Form, str]] = {
    "advanced_geometry": (_has_same_parts, _FIRST_PARTS),
    "complex_arithmetic": (_has_same_parts, "its verifier ignores a number before the answer"),
    "cryptarithm": (_has_same_parts, "of two digits for one letter its verifier takes the last"),
    "fraction_simplification": (_matches(r"\$?-?(?:\\d?frac\{-?\d+\}\{-?\d+\}|\d+ ?/ ?\d+)\$?"), _FIRST_PARTS),
    "game_of_life_halting": (
        _matches(r"(?i)true|false"),
        "its verifier looks for one of the two words and not for the other",
    ),
    "gsm_symbolic": (_matches(r"\$?-?\d+(?:\.\d+)?"), "its verifier takes the first number of a text"),
    "kakurasu": (_matches(r"[01\s]*"), _ANYWHERE),
    "knights_knaves": (_has_same_words, _ANYWHERE),
    "letter_jumble": (_has_same_parts, _FIRST_PARTS),
    "polynomial_equations": (_has_same_parts, "its verifier ignores solutions that are given twice"),
    "quantum_lock": (_matches(r"[A-C\s\u2192>,-]*"), "its verifier takes the letters A, B and C out of a text"),
    "sokoban": (_matches(r"[UDLR]*"), "its verifier ignores what is no move"),
    "spell_backward": (_is_no_longer, _FIRST_PARTS),
    "survo": (_matches(r"[\d\s]*"), _ANYWHERE),
    "time_intervals": (_has_same_marks, _FIRST_PARTS),
    "word_sorting": (_has_same_parts, _FIRST_PARTS),
}
"""Data sets whose verifiers give the full reward to a text that merely contains the answer: (form of an answer, reason)."""
_FULL = 0.999
"""Rewards from here on count as 1: sums of floating-point shares of 1 end a little below it."""
_UNUSUAL_NUMBERS = {
    "underscore": re.compile(r"\d_|_\d", re.ASCII),
    "zero": re.compile(r"(?<![\w.,])0\d", re.ASCII),
}


def score_once(data_set: str, score: Callable[[str, Any], float], entry: dict[str, Any], text: str) -> float:
    """The reward that the library's verifier `score` gives to a text, without the full reward for what only contains an answer.

    Such a text gets half of the share of it that the answer is. Numbers in unusual forms, which Python reads and nobody writes,
    are no answer; what the verifier gives to an empty text is then the reward.
    """
    answer = str(entry["answer"])
    text = admissible(data_set, text)
    if not _unusual_numbers(text) <= _unusual_numbers(answer):
        text = ""
    reward = score(text, entry)
    form = FORMS.get(data_set)
    stripped = text.strip()
    if form is None or not reward > _FULL or form[0](stripped, answer.strip()):
        return reward
    return 0.5 * len(answer) / max(len(answer), len(stripped))


def _unusual_numbers(text: str) -> set[str]:
    """Which of these a text has: digits beside an underscore, numbers with a superfluous 0, digits of other scripts."""
    kinds = {name for name, pattern in _UNUSUAL_NUMBERS.items() if pattern.search(text)}
    if any(unicodedata.category(character)[0] == "N" for character in text if not character.isascii()):
        kinds.add("script")
    return kinds


def admissible(data_set: str, text: str) -> str:
    """The text if the data set's verifier may read it, else the empty text, whatever the verifier gives for that."""
    alphabet = ALPHABETS.get(data_set)
    if len(text) > MAX_ANSWER_CHARS or (alphabet is not None and alphabet.fullmatch(text) is None):
        return ""
    return text


_RULES = "reasoning_gym-2"
"""Changes whenever answers are judged differently, so that nodes with other rules do not share these tasks."""
_PROBE_NUMBER = 7 * INDEX_SPAN + 3
"""Number of a task in a stream that nobody draws from."""


class ReasoningGymSource:
    """A task source of one reasoning-gym data set."""

    isolation: ClassVar[Isolation] = Isolation.PROCESS

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for a data set that is unknown or refused, or parameters that it does not accept.

        With `tasks.sandboxed` the parameters are a manifest's and have to pass `check_declared`; else they are the
        operator's own, who may name files.
        """
        self.name = config.source_name
        self.config_digest = base_digest(config)
        self._recipe = _Recipe(self.config_digest, config.name, config.parameters)
        self._template = PromptTemplate(config, {PROMPT, "question"})
        _check_name(config.name)
        try:
            if tasks.sandboxed:
                _check_declared(config)
            self._shared, self._is_shareable = _shared_data_set(self._recipe)
        except Exception as error:  # each data set refuses parameters in a way of its own
            raise TaskError(
                f"parameters must be such that {config.name} accepts them, got {config.parameters}: "
                f"{str(error) or type(error).__name__}; set tasks.sources.parameters of {config.source_name!r}"
                f"{_known_parameters(config)}"
            ) from None

    @property
    def num_held_out(self) -> int:
        return INDEX_SPAN

    def task(self, seed: int, index: int) -> Task:
        data_set, entry = self._item(seed, index)
        ref = TaskRef(self.name, self.config_digest, seed, index)
        prompt = self._template.render({PROMPT: entry["question"], "question": entry["question"]})
        verify = partial(score_once, self._recipe.name, data_set.score_answer, entry)
        return Task(ref, prompt, verify, facts=entry.get("metadata") or {})

    def answer(self, seed: int, index: int) -> str:
        return str(self._item(seed, index)[1]["answer"])

    def _item(self, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
        number = seed * INDEX_SPAN + index
        try:
            data_set, position = (self._shared, number) if self._is_shareable else (self._recipe.build(number), 0)
            entry = data_set[position]
        except Exception as error:  # third-party generators fail in any way they like
            raise TaskFailure(self.name, f"building task {seed}/{index}: {type(error).__name__}: {error}") from error
        if not isinstance(entry.get("question"), str):
            raise TaskFailure(self.name, f"building task {seed}/{index}: no question")
        return data_set, entry


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a data set is built from. Recipes are equal where their digests are."""

    digest: str
    name: str = field(compare=False)
    parameters: Mapping[str, Any] = field(compare=False)

    def build(self, number: int) -> Any:
        return import_library().factory.create_dataset(self.name, seed=number, size=1, **self.parameters)


@lru_cache(maxsize=32)  # some data sets read a word list of megabytes each time that they are built
def _shared_data_set(recipe: _Recipe) -> tuple[Any, bool]:
    """(the data set of seed 0, whether it gives each item that a data set built for that item's number gives)."""
    shared = recipe.build(0)
    try:
        item, own = shared[_PROBE_NUMBER], recipe.build(_PROBE_NUMBER)[0]
    except (
        Exception
    ):  # items fixed at construction: IndexError, ValueError; the slow way reports what is wrong per task
        return shared, False
    return shared, (item["question"], item["answer"]) == (own["question"], own["answer"])


def base_digest(config: TaskSourceSection) -> str:
    """16 hex digits over what decides the tasks, signals left out. Raises TaskError for values that JSON does not have."""
    try:
        canonical = json.dumps([_RULES, config.name, config.parameters], sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise TaskError(
            f"parameters must be numbers, texts, lists or tables, got {config.parameters}: {error}; "
            f"set tasks.sources.parameters of {config.source_name!r}"
        ) from None
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


NEEDS_PYCOSAT = frozenset({"zebra_puzzles"})
"""Data sets that call pycosat, a package without wheels: it needs a C compiler."""


@cache
def import_library() -> Any:
    """Import and return reasoning_gym, which is slow, and which nodes without such tasks do not need."""
    with _stand_in_for_pycosat():
        return importlib.import_module("reasoning_gym")  # waits for another thread that imports it


@contextmanager
def _stand_in_for_pycosat() -> Iterator[None]:
    """Let the library import an empty pycosat where that is missing. `_check_name` refuses the data sets that would call it."""
    with _IMPORT_LOCK:
        is_missing = find_spec("pycosat") is None
        if is_missing:
            sys.modules["pycosat"] = ModuleType("pycosat")
        try:
            yield
        finally:
            if is_missing:  # sympy would take it for the real one
                del sys.modules["pycosat"]


_IMPORT_LOCK = threading.Lock()
_DATA_SET_NAME = re.compile(r'^DATASET_NAME = "(\w+)"', re.MULTILINE)


def import_data_sets(names: Iterable[str]) -> None:
    """Import these data sets alone, for a process that needs no others: a tenth of a second instead of one, and less memory.

    `import reasoning_gym` imports all of them, and sympy and matplotlib for some. So the packages on the way to a data set
    are created here without running their `__init__`. For an unknown name the whole library is imported.
    """
    modules = _modules_of_data_sets()
    wanted = [modules.get(name) for name in names]
    if None in wanted:
        wanted = ["reasoning_gym"]
    elif wanted:  # `coaching` and `factory` import each other, which works where `coaching` is the first
        wanted = ["reasoning_gym.coaching", *wanted]
    with _stand_in_for_pycosat():
        for module in filter(None, wanted):
            for package in itertools.accumulate(module.split(".")[:-1], "{}.{}".format):
                if package not in sys.modules and (spec := find_spec(package)) is not None:
                    sys.modules[package] = module_from_spec(spec)
            importlib.import_module(module)


def _modules_of_data_sets() -> dict[str, str]:
    """{data set: its module}, as the files of the library say."""
    spec = find_spec("reasoning_gym")
    root = Path(*(spec and spec.submodule_search_locations) or ())
    found = [(path, _DATA_SET_NAME.search(path.read_text(encoding="utf-8"))) for path in root.rglob("*.py")]
    return {name[1]: ".".join(path.relative_to(root.parent).with_suffix("").parts) for path, name in found if name}


def _check_declared(config: TaskSourceSection) -> None:
    check_declared(declared_by_class(import_library().factory.DATASETS[config.name][1]), config.parameters)


def _known_parameters(config: TaskSourceSection) -> str:
    """For a person who has given one that does not exist: those that do. `size` and `seed` are not theirs to set."""
    known = {one.name for one in fields(import_library().factory.DATASETS[config.name][1])} - {"size", "seed"}
    return "" if known >= config.parameters.keys() else f"; it knows {', '.join(sorted(known))}"


def _check_name(name: str) -> None:
    data_sets = import_library().factory.DATASETS
    if name in REFUSED:
        raise TaskError(
            f"a source must be safe and the same on every node, got {name!r}: {REFUSED[name]}; choose another"
        )
    if name not in data_sets:
        close = difflib.get_close_matches(name, data_sets, n=1)
        hint = f"did you mean {close[0]}?" if close else "see reasoning_gym.factory.DATASETS"
        raise TaskError(f"a reasoning_gym source must be one of its data sets, got {name!r}; {hint}")
    if name in NEEDS_PYCOSAT and find_spec("pycosat") is None:
        raise TaskError(
            f"the data set {name} needs the package pycosat, got none; {install_extra('puzzles')} (this needs a C compiler), "
            "or choose another data set"
        )

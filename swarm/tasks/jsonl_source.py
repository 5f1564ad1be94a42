"""Tasks of a JSONL file: one {"prompt", "answer", "verifier"?} object per line, with the fields that `prompt_template` names.

The config digest is a hash of the file's content, so two nodes share tasks only if they have the same file. Every tenth line
is held out for evaluation. Each training stream goes through the others in an order of its own, over and over.
"""

import hashlib
import logging
import math
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import VERIFIERS
from swarm.extensions.registry import Isolation
from swarm.machine.safe_files import parse_json_text
from swarm.tasks.data_sets.rows import suggested_columns
from swarm.tasks.prompted_source import PROMPT, PromptTemplate
from swarm.tasks.task_source import EVALUATION_SEED, TaskFailure
from swarm.tasks.verifiers import checked_verifier, rules_of
from swarm.types import Task, TaskRef

logger = logging.getLogger(__name__)
T = TypeVar("T")

_RULES = "jsonl-2"
"""Changes whenever the verifiers judge an answer differently, so that nodes with other rules do not share these tasks."""
HELD_OUT_EVERY = 10
_MIN_LINES = 2


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the file."""

    prompt: str
    answer: str
    verifier: str
    facts: dict[str, Any]
    """Its other fields, for reward functions."""


class JsonlSource:
    """Tasks of one file, held in memory."""

    isolation: ClassVar[Isolation] = Isolation.NONE_NEEDED

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for a file that is missing, malformed or too short."""
        if config.path is None:
            raise TaskError(f"a jsonl source needs a path, got none; set path for source {config.name!r}")
        self.name = config.source_name
        content, numbered = numbered_lines(config.path)
        template = PromptTemplate(config, None)
        lines = [_parse(text, where, config, template) for text, where in numbered]
        self._held_out, self._training = held_out_and_training(lines, config.path)
        facts = f"{_RULES}:{config.verifier}:{rules_of(line.verifier for line in lines)}"
        self.config_digest = hashlib.sha256(facts.encode() + content).hexdigest()[:16]
        logger.info(
            "tasks of %s: %d lines for training, every tenth line held out (%d)",
            self.name, len(self._training), len(self._held_out),
        )  # fmt: skip

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def task(self, seed: int, index: int) -> Task:
        line = self._line(seed, index)
        verify = partial(VERIFIERS.load(line.verifier).score, line.answer)
        return Task(TaskRef(self.name, self.config_digest, seed, index), line.prompt, verify, facts=line.facts)

    def answer(self, seed: int, index: int) -> str:
        return self._line(seed, index).answer

    def _line(self, seed: int, index: int) -> Line:
        if seed == EVALUATION_SEED:
            return self._held_out[index % len(self._held_out)]
        return self._training[shuffled_position(seed, index, len(self._training))]


def shuffled_position(seed: int, index: int, count: int) -> int:
    """Where step `index` of stream `seed` stands in a list of `count`; every `count` steps visit each position once.

    An affine map with a multiplier coprime to `count` is a permutation that costs nothing to set up, so that references to
    any number of foreign streams stay cheap.
    """
    rng = random.Random(seed)
    offset, multiplier = rng.randrange(count), rng.randrange(1, count + 1)
    while math.gcd(multiplier, count) != 1:
        multiplier = multiplier % count + 1
    return (multiplier * index + offset) % count


def numbered_lines(path: Path) -> tuple[bytes, list[tuple[bytes, str]]]:
    """A file's content, and its lines that are not empty with where they are. Raises TaskError."""
    content = _read(path)
    numbered = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)  # JSON text may hold other line ends
    return content, [(text, f"{path}:{number}") for number, text in numbered if text.strip()]


def held_out_and_training(lines: list[T], path: Path) -> tuple[list[T], list[T]]:
    """Every tenth line is held out. Raises TaskError for a file that is too short."""
    if len(lines) < _MIN_LINES:
        raise TaskError(f"a JSONL source needs at least {_MIN_LINES} lines, got {len(lines)} in {path}; add tasks")
    training = [line for position, line in enumerate(lines) if position % HELD_OUT_EVERY]
    return lines[::HELD_OUT_EVERY], training


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TaskError(
            f"a JSONL source must be a readable file, got {path}: {error.strerror}; set tasks.sources.path"
        ) from None


def _parse(text: bytes, where: str, config: TaskSourceSection, template: PromptTemplate) -> Line:
    try:
        data = parse_json_text(text)
    except ValueError as error:  # not UTF-8, not JSON, numbers or nesting beyond the parser's bounds
        raise TaskError(f"a line must be one JSON object in UTF-8, got {error} in {where}; fix that line") from None
    if not isinstance(data, dict):
        raise TaskError(f'a line must have a text "prompt", got none in {where}; fix that line')
    _check_names(data, where, config, template)
    prompt = _prompt(data, where, template)
    facts = {name: value for name, value in data.items() if name not in (PROMPT, "answer", "verifier")}
    unknown = sorted(facts.keys() - template.names)
    if unknown and not any(signal.function for signal in config.signals):  # a function may read them
        raise TaskError(
            f"a line must have prompt, answer, verifier and the fields that prompt_template names only, got {unknown} in "
            f"{where}; fix that line"
        )
    answer, verifier = data.get("answer"), data.get("verifier", config.verifier)
    if answer is None and not needs_answer(config):
        return Line(prompt, "", config.verifier, facts)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise TaskError(f'a line must have an "answer" (text or number), got {answer!r} in {where}; fix that line')
    try:
        checked_verifier(verifier, str(answer))
    except ValueError as error:
        raise TaskError(f"{error} in {where}; fix that line") from None
    return Line(prompt, str(answer), verifier, facts)


def needs_answer(config: TaskSourceSection) -> bool:
    """Whether every task must have an expected answer: not where functions alone decide the reward."""
    return not config.signals or any(not signal.function for signal in config.signals)


def _check_names(data: dict[str, Any], where: str, config: TaskSourceSection, template: PromptTemplate) -> None:
    """Raise TaskError where other names than `prompt` and `answer` stand for them, with the mapping that fixes it."""
    needed = [PROMPT, *(["answer"] if needs_answer(config) else [])]
    missing = [name for name in needed if name not in data and name in {*template.names, "answer"}]
    others = [name for name in data if name not in {PROMPT, "answer", "verifier", *template.names}]
    if missing and others:
        wanted = " and ".join('a text "prompt"' if name == PROMPT else 'an "answer"' for name in missing)
        is_added = "answer" not in data and "answer" not in missing  # a data set always needs one
        fields = [*missing, "answer"] if is_added else missing
        raise TaskError(
            f'a line must have {wanted}, got {str(others)[:200]} in {where}; set kind = "dataset" and '
            f"{suggested_columns(others, fields)} for source {config.source_name!r}, or rename them in the file"
        )


def _prompt(data: dict[str, Any], where: str, template: PromptTemplate) -> str:
    """The prompt of a line. Raises TaskError for a field that it lacks, and for a prompt that is too long."""
    for name in sorted(template.names):
        value = data.get(name)
        is_text = isinstance(value, str) and bool(value.strip())
        if name == PROMPT and not is_text:
            raise TaskError(f'a line must have a text "prompt", got none in {where}; fix that line')
        if not is_text and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TaskError(
                f"a line must have the fields that prompt_template names, as text or number, got no {name!r} in {where}; fix "
                f"that line, or write {{{{{name}}}}} in the template for that text itself"
            )
    try:
        return template.render({name: str(data[name]) for name in template.names})
    except TaskFailure as failure:
        raise TaskError(f"{failure} in {where}; shorten it") from None

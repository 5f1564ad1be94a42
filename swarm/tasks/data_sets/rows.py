"""Turns the rows of a data set into tasks: which column is the prompt, which the answer, and what a conversation asks.

    row ─▶ columns (names, inner names, templates) ─▶ fields ─▶ prompt_template ─▶ prompt
                                                         └──▶ expected (boxed, …) ─▶ answer ─▶ check of the verifier

A field is the column of its own name unless `columns` says otherwise. The prompt may be a conversation, a list of messages: its
last question is the prompt, and the answer to it the expected answer unless another column has that. All of it is text of
strangers, bounded before it arrives here, and takes time in proportion to it.
"""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.config import TaskSourceSection
from swarm.errors import TaskError
from swarm.tasks.final_answers import answer_rule, final_answer
from swarm.tasks.prompted_source import PROMPT, PromptTemplate
from swarm.tasks.task_source import MAX_TEXT_CHARS, TaskFailure
from swarm.tasks.verifiers import checked_verifier

ANSWER, VERIFIER = "answer", "verifier"
_COLUMN = re.compile(r"\{([^{}]{1,256})\}")
_GUESSES = {
    PROMPT: ("question", "problem", "query", "instruction", "input", "task", "text", "messages", "conversations"),
    ANSWER: (
        "solution", "target", "output", "response", "completion", "label", "ground_truth", "expected_answer", "final_answer",
        "reference",
    ),
}  # fmt: skip
_UNKNOWN = "COLUMN"
"""Stands in a suggestion for a column that the person has to choose."""
_CONVERSATIONS = ("messages", "conversations", "conversation")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "developer": "system"}
_MAX_SHOWN = 80
Values = Mapping[str, Any]
"""The values of one row, by column."""
_Path = tuple[str | int, ...]


class InvalidRow(Exception):
    """A row is no task. The message says rule and value, `fix` what to do."""

    def __init__(self, problem: str, fix: str = "correct it") -> None:
        super().__init__(problem)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Row:
    """One task of a data set."""

    prompt: str
    answer: str
    verifier: str
    system: str = ""
    """The system message of a conversation."""
    turns: tuple[tuple[str, str], ...] = ()
    """(question, answer) of a conversation before its last question."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The other fields that `columns` names, as values of JSON, for reward functions."""

    def text(self, *, with_system: bool, with_turns: bool) -> str:
        """The prompt, with what stands before it as text."""
        turns = self.turns if with_turns else ()
        said = [text for question, answer in turns for text in (f"User: {question}", f"Assistant: {answer}")]
        system = [self.system] if with_system and self.system else []
        return "\n\n".join([*system, *said, f"User: {self.prompt}" if turns else self.prompt])


def suggested_columns(columns: Collection[str], missing: Sequence[str], kept: Mapping[str, str] | None = None) -> str:
    """The setting that maps the missing fields to columns that look like them, such as `columns = {prompt = "question"}`.

    `kept`: what the setting maps already, which the whole setting repeats.
    """
    free = [column for column in columns if column not in (PROMPT, ANSWER, VERIFIER)]
    mapped = dict(kept or {})
    for name in missing:
        known = (name, *_GUESSES.get(name, ()))
        by_name = {column.lower(): column for column in free if column not in mapped.values()}
        close = [found for name in known for found in difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)]
        inner = [column for name in known for lower, column in by_name.items() if name in lower]
        guess = next((by_name[name] for name in known if name in by_name), None) or next(
            (by_name[name] for name in close), next(iter(inner), _UNKNOWN)
        )
        mapped[name] = guess[:_MAX_SHOWN]
    if PROMPT in missing and mapped[PROMPT] in _CONVERSATIONS and mapped.get(ANSWER) == _UNKNOWN:
        del mapped[ANSWER]  # the conversation has it
    pairs = ", ".join(f"{name} = {json.dumps(column)}" for name, column in mapped.items())
    return f"columns = {{{pairs}}}"


class RowMapping:
    """How the rows of one source become tasks. It is immutable."""

    def __init__(self, config: TaskSourceSection, columns: Sequence[str], split: str) -> None:
        """`columns`: those that the split has. Raises TaskError for a field that none of them gives."""
        self._config = config
        self._columns = columns
        self._template = PromptTemplate(config, None)
        self._rule = answer_rule(
            config.model_copy(update={"answer": config.expected, "answer_parameters": config.expected_parameters})
        )
        wanted = dict(config.columns)
        if PROMPT in self._template.names and PROMPT not in wanted and PROMPT not in columns:
            wanted |= dict(zip([PROMPT], (name for name in _CONVERSATIONS if name in columns), strict=False))
        fields = [*self._template.names, *([VERIFIER] if VERIFIER in wanted else [])]
        self._mapped = wanted
        self._conversation_only = PROMPT in wanted and ANSWER not in wanted and ANSWER not in columns
        fields += [] if self._conversation_only else [ANSWER]
        if missing := sorted({name for name in fields if name not in wanted and name not in columns}, reverse=True):
            raise self._missing(missing, split)
        self._fields = {name: self._selection(wanted.get(name, name), split) for name in fields}
        self._facts = {
            name: self._fields.get(name) or self._selection(column, split)
            for name, column in config.columns.items()
            if name not in (PROMPT, ANSWER, VERIFIER)
        }
        self._check_secret()

    @property
    def needed(self) -> list[str]:
        """The columns that are read, in order."""
        selections = [*self._fields.values(), *self._facts.values()]
        return sorted({column for selection in selections for column in selection.columns})

    def row(self, values: Values) -> Row:
        """The task of a row. Raises InvalidRow."""
        found = {name: selection.value(values) for name, selection in self._fields.items()}
        talk = conversation_of(found.get(PROMPT))
        if talk is not None:
            found[PROMPT] = talk.prompt
        if self._conversation_only and (talk is None or talk.answer is None):
            raise InvalidRow(
                'a row must have an answer, got none: "answer" is no column, and no conversation ends with one',
                f"set {suggested_columns(self._columns, [ANSWER], self._mapped)}",
            )
        answer = talk.answer if self._conversation_only and talk is not None else found[ANSWER]
        expected, verifier = self._answer(_text(answer, ANSWER), found)
        system, turns = ("", ()) if talk is None else (talk.system, talk.turns)
        facts = {name: _fact(selection.value(values), name) for name, selection in self._facts.items()}
        row = Row(self._prompt(found), expected, verifier, system, turns, facts)
        if (num_chars := len(json.dumps(facts))) > MAX_TEXT_CHARS:
            raise InvalidRow(f"further columns must have at most {MAX_TEXT_CHARS} characters in all, got {num_chars}")
        num_chars = len(row.text(with_system=True, with_turns=True))
        if num_chars > MAX_TEXT_CHARS:
            raise InvalidRow(f"a prompt must have at most {MAX_TEXT_CHARS} characters, got {num_chars}")
        return row

    def _prompt(self, found: Values) -> str:
        try:
            return self._template.render({name: _text(found[name], name) for name in self._template.names})
        except TaskFailure as failure:
            raise InvalidRow(str(failure).removeprefix(f"{self._config.source_name}: ")) from None

    def _answer(self, text: str, found: Values) -> tuple[str, str]:
        """(expected answer, name of the verifier)."""
        expected = final_answer(self._rule, text)
        if expected is None:
            raise InvalidRow(
                f"an answer must have a part that expected = {self._config.expected} finds, got {_shown(text)}"
            )
        verifier = _text(found[VERIFIER], VERIFIER) if VERIFIER in found else self._config.verifier
        try:
            checked_verifier(verifier, expected)
        except ValueError as error:
            raise InvalidRow(str(error)) from None
        return expected, verifier

    def _check_secret(self) -> None:
        """Raise TaskError where the prompt would show the answer's column."""
        answer = self._fields.get(ANSWER)
        for name in self._template.names:
            if answer is not None and answer.paths and set(self._fields[name].paths) & set(answer.paths):
                raise self._error(
                    f"a prompt must not show the answer, got the answer's column {self._fields[name].text!r} as {{{name}}}",
                    "take another column",
                )

    def _selection(self, text: str, split: str) -> "_Selection":
        try:
            return _Selection(text, self._columns)
        except _UnknownColumn as error:
            close = difflib.get_close_matches(str(error), self._columns, n=1)
            hint = f"did you mean {close[0]}? Correct columns" if close else "correct columns"
            known = ", ".join(self._columns)[:200]
            raise self._error(
                f"columns must name columns of the data set, got {_shown(str(error))}: {split} has {known}", hint
            ) from None

    def _missing(self, missing: Sequence[str], split: str) -> TaskError:
        known = ", ".join(self._columns)[:200]
        names = " and ".join(json.dumps(name) for name in missing)
        return self._error(
            f"a data set needs a column for each field of its tasks, got none for {names}: {split} has {known}",
            f"set {suggested_columns(self._columns, missing, self._mapped)}",
        )

    def _error(self, rule: str, fix: str) -> TaskError:
        return TaskError(f"{rule}; {fix} for source {self._config.source_name!r}")


class _UnknownColumn(Exception):
    """The data set has no column of this name."""


class _Selection:
    """What one field takes from a row: a column, a value inside of one, or a text with several of them."""

    def __init__(self, text: str, columns: Collection[str]) -> None:
        """Raises _UnknownColumn."""
        self.text = text
        self._columns = columns
        whole = self._path(text)
        self._parts = [whole] if whole is not None else list(self._parsed(text))
        self.paths = [part for part in self._parts if isinstance(part, tuple)]

    @property
    def columns(self) -> set[str]:
        return {str(path[0]) for path in self.paths}

    def value(self, values: Values) -> Any:
        """The value, or a text where this is a template. Raises InvalidRow."""
        if len(self._parts) == 1 and isinstance(self._parts[0], tuple):
            return _inside(values, self._parts[0])
        texts = [
            part if isinstance(part, str) else _text(_inside(values, part), ".".join(map(str, part)))
            for part in self._parts
        ]
        return "".join(texts)

    def _parsed(self, text: str) -> Iterator[str | _Path]:
        position = 0
        for found in _COLUMN.finditer(text):
            if position < found.start():
                yield text[position : found.start()]
            yield self._known(found[1])
            position = found.end()
        if position == 0:
            yield self._known(text)
        elif position < len(text):
            yield text[position:]

    def _known(self, name: str) -> _Path:
        path = self._path(name)
        if path is None:
            raise _UnknownColumn(name)
        return path

    def _path(self, name: str) -> _Path | None:
        """Where a value is in a row. A column whose name has a dot comes before a value inside of another."""
        if name in self._columns:
            return (name,)
        head, *rest = name.split(".")
        if not rest or head not in self._columns:
            return None
        return (head, *(int(part) if re.fullmatch(r"-?[0-9]{1,6}", part) else part for part in rest))


def _inside(values: Values, path: _Path) -> Any:
    value: Any = values
    for part in path:
        if isinstance(value, Mapping) and str(part) in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and -len(value) <= part < len(value):
            value = value[part]
        else:
            raise InvalidRow(f"a row must have {'.'.join(map(str, path))}, got none")
    return value


def _text(value: Any, name: str) -> str:
    """A value as text: numbers as they are printed, booleans as true and false. Raises InvalidRow."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str) and value.strip():
        if len(value) > MAX_TEXT_CHARS:
            raise InvalidRow(f"{name} must have at most {MAX_TEXT_CHARS} characters, got more")
        return value
    raise InvalidRow(f"{name} must be a text or a number, got {_kind(value)}")


def _fact(value: Any, name: str) -> Any:
    """A value of JSON as it is. Raises InvalidRow for one that JSON cannot hold."""
    if isinstance(value, dict) and list(value) == [""]:
        raise InvalidRow(f"{name} must be a value that JSON can hold, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "an empty text"
    if isinstance(value, list):
        return f"a list of {len(value)}; name one of its items, as in COLUMN.0"
    if list(value) == [""]:
        return f"a value of type {value['']}; store it as text"
    return f"a table with {', '.join(value)[:_MAX_SHOWN]}; name one of them, as in COLUMN.{next(iter(value), 'NAME')}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A list of messages, taken apart."""

    prompt: str
    """The last question."""
    answer: str | None
    """The answer to it; None where the conversation ends with the question."""
    system: str
    turns: tuple[tuple[str, str], ...]
    """(question, answer) before it."""


def conversation_of(value: Any) -> Conversation | None:
    """Take a list of messages apart; None for any other value. Raises InvalidRow unless it is questions and answers in turn."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) and _role(item) for item in value):
        return None
    spoken = [_message(message) for message in value]
    system = ""
    if spoken[0][0] == "system":
        system = spoken.pop(0)[1]
    roles = [role for role, _ in spoken]
    expected = ["user" if number % 2 == 0 else "assistant" for number in range(len(roles))]
    if not roles or roles != expected:
        raise InvalidRow(
            "a conversation must be questions of user and answers of assistant in turn, after at most one message of system, got "
            f"{', '.join(map(_role, value))[:_MAX_SHOWN]}"
        )
    texts = [text for _, text in spoken]
    answer = texts.pop() if roles[-1] == "assistant" else None
    *earlier, prompt = texts
    return Conversation(prompt, answer, system, tuple(zip(earlier[::2], earlier[1::2], strict=True)))


def _role(message: dict[str, Any]) -> str:
    role = message.get("role", message.get("from"))
    return role if isinstance(role, str) else ""


def _message(message: dict[str, Any]) -> tuple[str, str]:
    """(role, text) of a message in the form {role, content} or {from, value}. Raises InvalidRow."""
    role = _role(message).lower()
    content = message.get("content", message.get("value"))
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(_text(part.get("text"), "content") for part in content)
    if message.get("tool_calls"):
        raise InvalidRow("a conversation must have no calls of tools, got tool_calls in a message")
    return _ROLES.get(role, role), _text(content, "content of a message")


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]!a}…"

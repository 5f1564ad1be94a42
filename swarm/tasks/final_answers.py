r"""Rules that take the final answer, which the verifier compares, out of a text that may reason before it.

    text ─▶ rule of the source ─▶ final answer ─▶ limit of its length ─▶ verifier
                                └ none, or empty: 0

    The product is 15, so <answer>15</answer>      tag            15
    … = 7 + 8 = \boxed{15}                         boxed          15

If a text has several answers, the last one counts. Limits bind the final answer alone; the text may have any length. Texts come
from policies, including those of strangers, and every rule reads a text once, in time proportional to its length.

A rule is one class here, or in a file of its own, and one line in `swarm/extensions/points.py`.
"""

import re
from typing import Annotated, Any, Protocol

import re2
from pydantic import Field, field_validator

from swarm.config import Section, TaskSourceFacts
from swarm.extensions.points import FINAL_ANSWERS
from swarm.tasks.verifiers import check_pattern, compiled, is_unicode, number_at_end


class FinalAnswerRule(Protocol):
    """A rule with its parameters. It is called from several threads."""

    rules: str
    """Part of the config digest: changes whenever the rule takes another answer with the same parameters."""
    marker: str
    """Text without which there is no answer; empty where there is none."""

    def find(self, text: str) -> str | None:
        """The final answer, or None where the text has none. The text may be anybody's, of any length."""
        ...


def answer_rule(config: TaskSourceFacts) -> FinalAnswerRule:
    """The rule of a source. Raises TaskError for parameters that it does not accept."""
    setting = f"tasks.sources.answer_parameters of {config.source_name!r}"
    rule: FinalAnswerRule = FINAL_ANSWERS.make(config.answer, config.answer_parameters, setting)
    return rule


def final_answer(rule: FinalAnswerRule, text: str) -> str | None:
    """The final answer, or None where the text has none or an empty one. Only the whole text may be empty."""
    found = rule.find(text)
    return found if isinstance(rule, Whole) or (found and not found.isspace()) else None


_FORMS = (("", ""), ("<answer>", "</answer>"), ("\\boxed{", "}"), ("</think>", ""))


def written_by(rule: FinalAnswerRule, answer: str) -> str:
    """A text in which the rule finds this answer; the answer alone where no usual form is found by it."""
    own = (rule.marker, f"</{rule.marker[1:]}" if rule.marker.startswith("<") else "")
    texts = [f"{before}{answer}{after}" for before, after in (*_FORMS, own)]
    return next((text for text in texts if final_answer(rule, text) == answer.strip()), answer)


class Whole:
    """The whole text."""

    rules = "1"
    marker = ""

    def find(self, text: str) -> str | None:
        return text


class LastLine:
    """The last line that is not empty."""

    rules = "1"
    marker = ""

    def find(self, text: str) -> str | None:
        return text.rstrip().rpartition("\n")[2].strip()


class LastNumber:
    """The text of the last number. It must stand alone, as for the verifier `numeric`."""

    rules = "1"
    marker = ""

    def find(self, text: str) -> str | None:
        found = number_at_end(text)
        if found is None:
            return None
        numerator, denominator = found
        return f"{numerator}/{denominator}" if denominator else numerator


class TagParameters(Section):
    """Parameters of `tag`."""

    tag: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")] = "answer"
    """Name of the tag."""


class Tag:
    """What the last pair of tags holds. Pairs do not nest: each begins at the first opening tag after the pair before."""

    Parameters = TagParameters
    rules = "1"

    def __init__(self, parameters: TagParameters) -> None:
        self._opening, self._closing = f"<{parameters.tag}>", f"</{parameters.tag}>"
        self.marker = self._opening

    def find(self, text: str) -> str | None:
        found, position = None, 0
        while (begin := text.find(self._opening, position)) >= 0:
            begin += len(self._opening)
            end = text.find(self._closing, begin)
            if end < 0:
                break
            found, position = (begin, end), end + len(self._closing)
        return None if found is None else text[slice(*found)].strip()


_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class Boxed:
    r"""What the last `\boxed{…}` with balanced braces holds; the last is the one that begins last. `\{` and `\}` do not count."""

    rules = "1"
    marker = "\\boxed{"

    def find(self, text: str) -> str | None:
        last: tuple[int, int] | None = None
        open_braces: list[int] = []
        """Where the content of each box begins; -1 for other braces."""
        for brace in _BRACES.finditer(text):
            kind = brace.group()
            if kind == "{":
                open_braces.append(-1)
            elif kind == "}" and open_braces:
                begin = open_braces.pop()
                if begin >= 0 and (last is None or begin > last[0]):
                    last = begin, brace.start()
            elif kind.startswith("\\boxed"):
                open_braces.append(brace.end())
        return None if last is None else text[slice(*last)].strip()


class AfterThink:
    """What follows the last `</think>`."""

    rules = "1"
    marker = "</think>"

    def find(self, text: str) -> str | None:
        _, found, after = text.rpartition(self.marker)
        return after.strip() if found else None


class PatternParameters(Section):
    """Parameters of `pattern`."""

    pattern: Annotated[str, Field(max_length=1024)]
    """Regular expression (RE2) with one group, which is the answer. Of several matches the one that begins last counts."""

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        check_pattern(pattern)
        check_pattern(_last_match(pattern))
        groups = compiled(pattern, captures=True).groups
        if groups != 1:
            raise ValueError(
                f"a pattern must have exactly one group, got {groups} in {pattern!r}; put ( ) around the answer and (?: ) "
                "around other parts"
            )
        return pattern


class PatternGroup:
    """The group of the last match of a pattern."""

    Parameters = PatternParameters
    rules = "1"
    marker = ""

    def __init__(self, parameters: PatternParameters) -> None:
        self._compiled: Any = compiled(_last_match(parameters.pattern), captures=True)

    def find(self, text: str) -> str | None:
        if not is_unicode(text):
            return None
        try:
            found = self._compiled.match(text)
        except re2.error:  # beyond its memory
            return None
        return None if found is None or found.group(1) is None else str(found.group(1)).strip()


def _last_match(pattern: str) -> str:
    """A pattern that finds the last match in one search: going from match to match would take the square of the time."""
    return f"(?s:.*)(?:{pattern})"

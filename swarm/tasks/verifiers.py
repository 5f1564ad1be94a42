r"""Verifiers of JSONL tasks compare an answer's text with the expected one and give a reward, here 1 or 0.

Texts come from policies, including those of strangers. Every verifier bounds their length first and then takes time in
proportion to it. White space at both ends never counts. Case counts, unless a pattern begins with `(?i)`.

`numeric` reads the last number of a text. It must stand alone: between white space, quotes, brackets, Markdown's asterisks,
currency signs or tags, or behind `=`, a colon or `\boxed{`. A text whose last digit belongs to anything else (`v7`, `0x7`, `7!`,
`√7`, `7-3`, `5_7`, `7kg`, digits of other scripts) has no number.

A verifier is one `Verifier` here, or in a file of its own, and one line in `swarm/extensions/points.py`.
"""

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import re2

from swarm.extensions.points import VERIFIERS
from swarm.extensions.registry import Isolation

MAX_ANSWER_CHARS = 4_096
"""Longer answers are wrong."""
PATTERN_BYTES = 256 << 10
"""Memory for one compiled pattern. It also bounds the time: a fifth of a second for the worst pattern and text that we found."""

_RELATIVE_TOLERANCE = Fraction(1, 10**6)
_MAX_EXPONENT = 400
_MANTISSA = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_BEFORE = r"(?:^|[\s=~≈]|[^0-9]:|<[^<>\s]*>|\\(?:boxed|text|mathbf|mathrm)\{)[\"'`(\[{*$€£¥#\\]*"
_NUMBER_AT_END = re2.compile(rf"{_BEFORE}([-+]?{_MANTISSA}(?:[eE][-+]?[0-9]+)?)(?:/({_MANTISSA}))?$")
_AFTER = re2.compile(r"\\?%?[.,;:?\"'`)\]}*$€£¥\\]*(?:$|\s|</)")


def exact(expected: str, text: str) -> float:
    """The text equals the expected one, except for white space at both ends."""
    return float(len(text) <= MAX_ANSWER_CHARS and text.strip() == expected.strip())


def numeric(expected: str, text: str) -> float:
    """The last number of the text equals the expected one.

    Whole numbers must be equal exactly. Where the expected number has a fraction, such as 2.5 or 1/3, the two may differ by
    1e-6 relative to it. 1,000 and 1e3 and 3/4 and 50% are numbers; the percent sign is ignored.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return 0.0
    wanted, given = last_number(expected), last_number(text)
    if wanted is None or given is None:
        return 0.0
    tolerance = 0 if wanted.denominator == 1 else _RELATIVE_TOLERANCE * abs(wanted)
    return float(abs(wanted - given) <= tolerance)


def regex(expected: str, text: str, max_chars: int = MAX_ANSWER_CHARS) -> float:
    """The whole text matches the pattern, which the author of the file wrote, in time proportional to the text."""
    text = text.strip()
    if len(text) > max_chars or not is_unicode(text):
        return 0.0
    return float(compiled(expected).fullmatch(text) is not None)


@dataclass(frozen=True, slots=True)
class Verifier:
    """How the answers to lines of a file are scored. All nodes give the same answer the same reward."""

    score: Callable[[str, str], float]
    """(expected answer, text) -> reward in [0, 1]. The text may be anybody's, of any length."""
    check: Callable[[str], None]
    """Raises ValueError, with rule and value, for an expected answer that no text can match."""
    isolation: Isolation
    """Lines of files are scored in the node, so a verifier must need no isolation, or have a sandbox of its own."""
    rules: Callable[[], str] = str
    """What decides its results beside the code of this version, such as the versions of packages; part of the config digest."""


def rules_of(names: Iterable[str]) -> str:
    """What decides the results of these verifiers, as part of a config digest."""
    return "".join(f"{VERIFIERS.load(name).rules()}:" for name in sorted(set(names))).strip(":")


def check_length(expected: str) -> None:
    if len(expected) > MAX_ANSWER_CHARS:
        raise ValueError(f"an answer must have at most {MAX_ANSWER_CHARS} characters, got {len(expected)}")


def check_number(expected: str) -> None:
    check_length(expected)
    if last_number(expected) is None:
        raise ValueError(
            f"a numeric answer must have a number that stands alone, such as 12, -2.5 or 3/4, got {expected!r}"
        )


def check_pattern(expected: str) -> None:
    check_length(expected)
    try:
        compiled(expected)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error, re2.error) else str(error)
        raise ValueError(
            "a pattern must be a valid pattern of RE2, which knows no backreferences, no lookaround, no \\Z and "
            f"no repeat above 1000, and fit into {PATTERN_BYTES >> 10} KiB, got {expected!r}: {reason}; rewrite it"
        ) from None


EXACT = Verifier(exact, check_length, Isolation.NONE_NEEDED)
NUMERIC = Verifier(numeric, check_number, Isolation.NONE_NEEDED)
REGEX = Verifier(regex, check_pattern, Isolation.NONE_NEEDED)


def checked_verifier(name: object, expected: str) -> Verifier:
    """The verifier that a file names for an expected answer. Raises ValueError, with rule and value, if it cannot score that."""
    if not isinstance(name, str) or not VERIFIERS.is_built_in(name):
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS.names)}, got {name!r}")
    chosen: Verifier = VERIFIERS.load(name)
    if chosen.isolation is Isolation.PROCESS:
        raise ValueError(
            f"a verifier of a file must need no isolation or have its own, got {name}, which needs "
            f"Isolation.{chosen.isolation.name}; write a task source for it"
        )
    chosen.check(expected)
    return chosen


def last_number(text: str) -> Fraction | None:
    """The last number of a text, or None where there is none, where it does not stand alone, or beyond 1e±400."""
    number = number_at_end(text)
    if number is None:
        return None
    try:
        numerator, denominator = (Decimal((part or "1").replace(",", "")) for part in number)
        if max(abs(numerator.adjusted()), abs(denominator.adjusted())) > _MAX_EXPONENT:
            return None
        return Fraction(numerator) / Fraction(denominator)
    except ArithmeticError:  # division by zero, exponents that Decimal cannot hold
        return None


def number_at_end(text: str) -> tuple[str, str | None] | None:
    """(numerator, denominator or None) of the last number as it is written, or None where it does not stand alone."""
    last = next(
        (position for position in reversed(range(len(text))) if unicodedata.category(text[position])[0] == "N"), -1
    )
    if last < 0 or not is_unicode(text):
        return None
    number = _NUMBER_AT_END.search(text[: last + 1].replace("\N{MINUS SIGN}", "-"))
    return None if number is None or _AFTER.match(text[last + 1 :]) is None else number.groups()


def is_unicode(text: str) -> bool:
    """Whether the text is without lone surrogates, which UTF-8 and with it RE2 cannot hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@lru_cache(maxsize=256)
def compiled(pattern: str, *, captures: bool = False) -> Any:
    """A pattern of RE2. Raises re2.error and UnicodeEncodeError."""
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    options.never_capture = not captures  # without groups matching is faster
    options.log_errors = False
    return re2.compile(pattern, options)

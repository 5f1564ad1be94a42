"""Verifiers of JSONL tasks: an answer's text against the expected one, reward 1 or 0.

Texts come from policies, own and foreign, so every verifier bounds them before it looks at them. White space at the ends
never counts; case does (a regex may begin with `(?i)`).
"""

import re
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from functools import lru_cache

MAX_ANSWER_CHARS = 4_096
"""Longer answers are wrong."""
MAX_MATCH_STEPS = 20_000_000
"""Bound on the work of one regular expression, about a quarter of a second."""

_RELATIVE_TOLERANCE = Decimal("1e-6")
_MAX_EXPONENT = 400
_ARITHMETIC = Context()
"""Of our own, on every thread: packages with tasks change the precision of the thread that they run on, and leave it so."""
_MANTISSA = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(rf"(?:(?<![\w.)])[-+])?{_MANTISSA}(?:[eE][-+]?[0-9]+)?(?:/{_MANTISSA})?")
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[0-9]*,?[0-9]*\}|\(\?[:aiLmsux-]*|.", re.DOTALL)


def exact(expected: str, text: str) -> float:
    """Equal but for white space at the ends."""
    return float(len(text) <= MAX_ANSWER_CHARS and text.strip() == expected.strip())


def numeric(expected: str, text: str) -> float:
    """The last number of the text equals the expected one within 1e-6 relative; 1,000 and 1e3 and 3/4 are numbers."""
    if len(text) > MAX_ANSWER_CHARS:
        return 0.0
    wanted, given = last_number(expected), last_number(text)
    if wanted is None or given is None:
        return 0.0
    with localcontext(_ARITHMETIC):
        return float(abs(wanted - given) <= _RELATIVE_TOLERANCE * max(abs(wanted), abs(given)))


def regex(expected: str, text: str) -> float:
    """The whole text matches the pattern, which the author of the file wrote.

    Backtracking takes up to length ** repeats steps; a text is wrong without a look where that passes MAX_MATCH_STEPS.
    """
    text = text.strip()
    return float(len(text) <= _longest_match(expected) and re.fullmatch(expected, text) is not None)


VERIFIERS: dict[str, Callable[[str, str], float]] = {"exact": exact, "numeric": numeric, "regex": regex}


def check_expected(verifier: str, expected: str) -> None:
    """Raises ValueError, with rule and value, for an expected answer that no text, or no cheap check, can match."""
    if len(expected) > MAX_ANSWER_CHARS:
        raise ValueError(f"an answer must have at most {MAX_ANSWER_CHARS} characters, got {len(expected)}")
    if verifier == "numeric" and last_number(expected) is None:
        raise ValueError(f"a numeric answer must have a number, got {expected!r}")
    if verifier == "regex":
        try:
            re.compile(expected)
        except re.error as error:
            raise ValueError(f"a regex answer must be a valid pattern, got {expected!r}: {error}") from None
        count_repeats(expected)


def last_number(text: str) -> Decimal | None:
    """The last number of a text, or None if there is none or it is beyond 1e±400."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found:
        return None
    numerator, _, denominator = found[-1].replace(",", "").partition("/")
    try:
        with localcontext(_ARITHMETIC):
            value = Decimal(numerator) / Decimal(denominator or 1)
    except ArithmeticError:  # division by zero, exponents that Decimal cannot hold
        return None
    return value if abs(value.adjusted()) <= _MAX_EXPONENT else None


def count_repeats(pattern: str) -> int:
    """Number of unbounded or counted repeats in a valid pattern.

    Raises ValueError where a repeated group holds a repeat or an alternative: such a pattern may take exponential time on
    the right text, and strangers write the texts.
    """
    parts = _PATTERN_PART.findall(pattern)
    repeats, risky = 0, [False]  # one flag per open group: whether it holds a repeat or an alternative
    for position, part in enumerate(parts):
        following = parts[position + 1] if position + 1 < len(parts) else ""
        if part.startswith("("):
            risky.append(False)
        elif part == ")":
            group_is_risky = risky.pop()
            if group_is_risky and _is_repeat(following):
                raise ValueError(f"a repeated group must hold no repeat and no alternative, got {pattern!r}")
            risky[-1] |= group_is_risky
        elif part == "|":
            risky[-1] = True
        elif _is_repeat(part):
            risky[-1] = True
            repeats += 1
    return repeats


def _is_repeat(part: str) -> bool:
    return part in ("*", "+") or (part.startswith("{") and part.endswith("}") and part != "{}")


@lru_cache(maxsize=4096)
def _longest_match(pattern: str) -> int:
    repeats = count_repeats(pattern)
    return min(MAX_ANSWER_CHARS, int(MAX_MATCH_STEPS ** (1 / max(1, repeats))))

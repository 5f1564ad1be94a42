"""Verifiers of JSONL tasks: values by hand, and properties over any text."""

import time
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.extensions.points import VERIFIERS
from swarm.tasks.verifiers import MAX_ANSWER_CHARS, exact, last_number, numeric, regex


@pytest.mark.parametrize(
    ("expected", "text", "reward"),
    [
        ("Paris", "Paris", 1.0),
        ("Paris", "  Paris\n", 1.0),
        ("Paris", "paris", 0.0),
        ("Paris", "Paris.", 0.0),
        ("", "x", 0.0),
        ("a", "a" * (MAX_ANSWER_CHARS + 1), 0.0),
    ],
)
def test_exact_ignores_only_white_space_at_the_ends(expected: str, text: str, reward: float) -> None:
    assert exact(expected, text) == reward


SEVEN = (
    r"\boxed{7}", "$7$", "**7**", "<answer>7</answer>", "#### 7", "answer:7", "(7)", "x=7.", "7.0", "7e0", "14/2", "7%", "$7",
    r"\(7\)", "+7", '"7"', "7 kg", "it is 7, I think",
)  # fmt: skip
NO_SEVEN = (
    "√7", "7!", "0x7", "v7", "f(7)", "√(7)", "(7)!", "x_7", "5_7", "7²", "7kg", "3*7", "1.7.7", "10:7", "2^7",
    "7\N{ROMAN NUMERAL ONE}",
)  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "text", "reward"),
    [
        ("4", "4", 1.0),
        ("4", "4.0", 1.0),
        ("4", "2 + 2 = 4.", 1.0),
        ("4", "4 or 5", 0.0),
        ("1000", "1,000", 1.0),
        ("1000", "1e3", 1.0),
        ("-3", "x=-3", 1.0),
        ("-3", "\N{MINUS SIGN}3", 1.0),
        ("3", "7-3", 0.0),
        ("-3", "7-3", 0.0),
        ("7", "2+2+3=7", 1.0),
        ("0.75", "3/4", 1.0),
        ("1/3", "0.33333333", 1.0),
        ("1/3", "0.3333", 0.0),
        ("1000000", "1000001", 0.0),
        ("1000000", "1000000.5", 0.0),
        ("1000000", "1000000." + "0" * 60 + "1", 0.0),
        ("7", f"7{'0' * 40}1/1{'0' * 41}", 0.0),
        ("2.5", "2.500001", 1.0),
        ("2.5", "2.50001", 0.0),
        ("0", "0.0", 1.0),
        ("0", "1e-9", 0.0),
        (".5", "0.5", 1.0),
        ("1", "1/0", 0.0),
        ("1", "", 0.0),
        ("1", "no number", 0.0),
        ("1", "nan", 0.0),
        ("1", "1e999999999999", 0.0),
        ("1", "1e-401", 0.0),
        ("12345", "1,2345", 0.0),
        ("9", "\N{ARABIC-INDIC DIGIT NINE}", 0.0),
        ("9", "9 or \N{ARABIC-INDIC DIGIT EIGHT}", 0.0),
        *(("7", text, 0.0) for text in NO_SEVEN),
        *(("7", text, 1.0) for text in SEVEN),
        ("1", "e1" * 2048, 0.0),
        ("7", "\ud800 7", 0.0),
        ("1", "1" + " " * MAX_ANSWER_CHARS, 0.0),
    ],
)
def test_numeric_compares_the_last_number(expected: str, text: str, reward: float) -> None:
    assert numeric(expected, text) == reward


@pytest.mark.parametrize(
    ("pattern", "text", "reward"),
    [
        (r"\d+ apples?", "12 apples", 1.0),
        (r"\d+ apples?", "I have 12 apples", 0.0),
        (r"(?i)yes", " YES ", 1.0),
        (r".*\b42", "it is 42", 1.0),
        (r"[(*+]\|x", "*|x", 1.0),
    ],
)
def test_regex_matches_the_whole_text(pattern: str, text: str, reward: float) -> None:
    assert regex(pattern, text) == reward


@pytest.mark.parametrize(
    "pattern", [r"(a|b)\1", r"(?=a)b", r"(?<=a)b", r"a\Z", "a{1001}", "(?:a{999}b?){999}", "\ud800"]
)
def test_patterns_that_linear_time_cannot_match_are_refused_with_a_reason(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"valid pattern of RE2.*got .*rewrite it"):
        VERIFIERS.load("regex").check(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:\d\d?,?)+", r"(?:\d+,?)+x", r"(a+)+b", r"((a*))*", r"(a|a)*b", r"(?:\d+,){3}", ".*.*.*x", r"\d*\d*\d*\d*\d*x",
        r"(?:a?b?c?)*d", r"(?:(?:a|b|ab|ba|aa|bb){0,999})+x", r"(?:[ab]*a[ab]{999}[ab]{999})b?",
    ],
)  # fmt: skip
def test_any_pattern_decides_the_worst_text_in_bounded_time(pattern: str) -> None:
    """Each of these takes a backtracking engine longer than the universe is old on one of these texts."""
    VERIFIERS.load("regex").check(pattern)
    started = time.perf_counter()
    for text in ("1" * 60 + "!", "1" * MAX_ANSWER_CHARS, "a" * MAX_ANSWER_CHARS, "ab" * (MAX_ANSWER_CHARS // 2)):
        regex(pattern, text)
    assert time.perf_counter() - started < 5


def test_a_text_that_is_no_unicode_matches_no_pattern() -> None:
    assert regex("(?s).*", "\ud800") == 0.0
    assert regex("(?s).*", "\0\N{SNOWMAN}") == 1.0


@pytest.mark.parametrize(
    ("verifier", "expected", "rule"),
    [
        ("numeric", "many", "must have a number"),
        ("regex", "(", "valid pattern"),
        ("numeric", "v7", "must have a number"),
        ("exact", "x" * (MAX_ANSWER_CHARS + 1), "at most"),
    ],
)
def test_answers_that_nothing_can_match_are_refused(verifier: str, expected: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        VERIFIERS.load(verifier).check(expected)


@given(st.sampled_from(VERIFIERS.names), st.text(max_size=200))
def test_any_text_gets_zero_or_one(verifier: str, text: str) -> None:
    assert VERIFIERS.load(verifier).score("12", text) in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12), st.text("abc =:\n", max_size=20))
def test_an_integer_is_found_after_any_words(number: int, words: str) -> None:
    assert numeric(str(number), f"{words} {number:,}") == 1.0


def test_numbers_are_exact_on_a_thread_whose_precision_somebody_has_changed() -> None:
    with localcontext() as context:
        context.prec = 2
        assert last_number("0.001001") == Fraction("0.001001")
        assert (numeric("1000000", "1000002"), numeric("1/3", "0.33333333")) == (0.0, 1.0)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=6))
def test_a_decimal_reads_as_itself(number: Decimal) -> None:
    assert last_number(f"{number:f}") == Fraction(number)

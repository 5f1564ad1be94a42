"""Verifiers of JSONL tasks: values by hand, and properties over any text."""

import time
from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.tasks.verifiers import (
    MAX_ANSWER_CHARS,
    VERIFIERS,
    check_expected,
    count_repeats,
    exact,
    last_number,
    numeric,
    regex,
)


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
        ("3", "7-3", 1.0),
        ("0.75", "3/4", 1.0),
        ("1/3", "0.33333333", 1.0),
        ("1/3", "0.3333", 0.0),
        ("1000000", "1000000.5", 1.0),
        ("1000000", "1000002", 0.0),
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
    ("pattern", "repeats"),
    [
        ("abc", 0),
        (r"\*\+", 0),
        (r"[*+]", 0),
        (r"[]*]+", 1),
        (r"a+b*c{2}", 3),
        (r"(?:ab)+", 1),
        (r"(a|b) c?", 0),
        (r"(?P<year>\d+)-(?P<day>\d+)", 2),
    ],
)
def test_repeats_are_counted_outside_classes_and_escapes(pattern: str, repeats: int) -> None:
    assert count_repeats(pattern) == repeats


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"((a*))*", r"(a|a)*b", r"(?:\d+,){3}", r"((?:x|y)z)+"])
def test_patterns_that_could_take_exponential_time_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="repeated group"):
        check_expected("regex", pattern)


@pytest.mark.parametrize("pattern", [".*", ".*.*x", r".*.*.*x", r"\d*\d*\d*\d*\d*x"])
def test_the_worst_text_is_decided_in_bounded_time(pattern: str) -> None:
    check_expected("regex", pattern)
    started = time.perf_counter()
    for length in (20, 60, 250, 4_000, 100_000):
        regex(pattern, "1" * length)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("verifier", "expected", "rule"),
    [
        ("numeric", "many", "must have a number"),
        ("regex", "(", "valid pattern"),
        ("exact", "x" * (MAX_ANSWER_CHARS + 1), "at most"),
    ],
)
def test_answers_that_nothing_can_match_are_refused(verifier: str, expected: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        check_expected(verifier, expected)


@given(st.sampled_from(sorted(VERIFIERS)), st.text(max_size=200))
def test_any_text_gets_zero_or_one(verifier: str, text: str) -> None:
    assert VERIFIERS[verifier]("12", text) in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12), st.text("abc =:\n", max_size=20))
def test_an_integer_is_found_after_any_words(number: int, words: str) -> None:
    assert numeric(str(number), f"{words} {number:,}") == 1.0


def test_numbers_are_exact_on_a_thread_whose_precision_somebody_has_changed() -> None:
    with localcontext() as context:
        context.prec = 2
        assert last_number("0.001001") == Decimal("0.001001")
        assert (numeric("1000000", "1000002"), numeric("1/3", "0.33333333")) == (0.0, 1.0)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=6))
def test_a_decimal_reads_as_itself(number: Decimal) -> None:
    assert last_number(f"{number:f}") == number

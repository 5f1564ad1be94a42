"""What a founder may set of a task source, held against every data set of the installed library."""

from collections.abc import Iterator
from dataclasses import Field, fields
from functools import cache
from typing import Any, Literal

import pytest

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.tasks.parameter_rules import (
    MAX_ITEMS,
    MAX_NUMBER,
    check_declared,
    check_shape,
    declared_by_class,
    declared_by_function,
)
from swarm.tasks.reasoning_gym_source import REFUSED, ReasoningGymSource, import_library

WORDS = {
    "advanced_geometry.task_types", "aiw.female_names", "aiw.male_names", "arc_agi.mirrors", "arc_agi.rotations",
    "basic_arithmetic.format_style", "basic_arithmetic.operators", "basic_arithmetic.whitespace", "boxnet.colour_list",
    "caesar_cipher.delimiter", "calendar_arithmetic.tasks", "complex_arithmetic.operations", "countdown.operators",
    "family_relationships.female_names", "family_relationships.male_names", "fraction_simplification.styles",
    "polynomial_equations.operators", "puzzle24.operators", "simple_equations.operators", "time_intervals.task_types",
}  # fmt: skip
"""Parameters that take words, each reviewed: its words choose what a task is about, and reach neither a file nor an evaluator."""
NEITHER_NUMBERS_NOR_WORDS = {
    "aiw.task_types", "arc_agi.board_format_opts", "figlet_font.static_font", "figlet_font.static_word",
    "rearc.board_format_opts", "spell_backward.data_file", "time_intervals.max_date", "time_intervals.max_time",
    "time_intervals.min_date", "time_intervals.min_time", "word_sorting.transformation",
}  # fmt: skip
"""No founder can set them."""
DECLARED = cache(declared_by_class)
TEXTS = (
    "/etc/passwd",
    "secrets.txt",
    "../secrets",
    "/proc/self/cwd/secrets.txt",
    "words3to10.txt",
    "https://x/y",
    "id_rsa",
    "",
)


def library() -> Iterator[tuple[str, type, list[Field[Any]]]]:
    """(data set, configuration class, what it declares beside seed and size) of all that can be a source."""
    for name, (_, config_class) in import_library().factory.DATASETS.items():
        if name not in REFUSED:
            yield name, config_class, [one for one in fields(config_class) if one.name not in ("seed", "size")]


def accepts(config_class: type, parameters: dict[str, Any]) -> bool:
    try:
        check_declared(DECLARED(config_class), parameters)
    except ValueError:
        return False
    return True


def words_of(config_class: type, name: str) -> set[str]:
    """Words among those that the class itself names for a parameter, and TEXTS, which it takes."""
    hint, default = DECLARED(config_class)[name]
    named = [*(getattr(hint, "__args__", ())), *(default if isinstance(default, list | tuple) else (default,))]
    return {word for word in [*named, *TEXTS] if type(word) is str and accepts(config_class, {name: word})}


def test_no_parameter_of_any_data_set_takes_a_text_that_its_class_does_not_name() -> None:
    taken = [
        (data_set, field.name, text)
        for data_set, config_class, declared in library()
        for field in declared
        for text in TEXTS
        for value in (text, [text], [1, [text]])
        if accepts(config_class, {field.name: value})
    ]
    assert taken == []


def test_every_parameter_that_takes_words_has_been_reviewed() -> None:
    """A new release of the library may add one: read what the data set does with it, then list it here."""
    found = {f"{name}.{one.name}" for name, kind, declared in library() for one in declared if words_of(kind, one.name)}
    assert found == WORDS


def test_numbers_are_taken_wherever_the_library_takes_them_and_nowhere_else() -> None:
    without = {
        f"{name}.{one.name}"
        for name, kind, declared in library()
        for one in declared
        if not accepts(kind, {one.name: 3})
    }
    assert without - WORDS == NEITHER_NUMBERS_NOR_WORDS
    for name, kind, declared in library():
        for one in declared:
            assert not accepts(kind, {one.name: MAX_NUMBER + 1}), f"{name}.{one.name}"
        assert not accepts(kind, {"seed": 1}) and not accepts(kind, {"size": 10**9}) and not accepts(kind, {"path": 1})


@pytest.mark.parametrize(
    ("data_set", "parameters"),
    [
        ("chain_sum", {"min_terms": 2, "max_terms": 3, "allow_negation": True}),
        ("basic_arithmetic", {"operators": ["+", "-"], "format_style": "natural"}),
        ("rearc", {"rng_difficulty_ranges": [[0.0, 0.1], [0.1, 0.2]], "rng_difficulty_weights": [0.5, 0.5]}),
        ("complex_arithmetic", {"operations_weights": [0.1, 0.2, 0.3, 0.4]}),
        ("caesar_cipher", {"delimiter": ".", "max_words": 5}),
        ("calendar_arithmetic", {"tasks": ["count_days"]}),
    ],
)
def test_what_the_library_declares_goes_on_working(data_set: str, parameters: dict[str, Any]) -> None:
    source = ReasoningGymSource(TaskSourceSection(name=data_set, parameters=parameters), TasksSection(sandboxed=True))
    assert source.task(16, 0).prompt != source.task(16, 1).prompt


@pytest.mark.parametrize(
    ("data_set", "parameters", "rule"),
    [
        ("spell_backward", {"data_file": "/proc/self/cwd/secrets.txt"}, "a manifest names no file"),
        ("spell_backward", {"data_file": "secrets"}, "parameter data_file must be one of words3to10.txt"),
        ("figlet_font", {"static_word": "secrets"}, "static_word must be no text"),
        ("puzzle24", {"operators": ["+", "x1"]}, "operators must be one of"),
        ("gcd", {"max_value": "9"}, "max_value must be no text"),
        ("gcd", {"max_value": 10**13}, "within"),
        ("gcd", {"max_value": float("inf")}, "within"),
        ("gcd", {"max_value": [1] * (MAX_ITEMS + 1)}, "shorten it"),
        ("gcd", {"max_value": [[[1]]]}, "shorten it"),
        ("gcd", {"max_value": {"a": 1}}, "numbers, booleans and words"),
        ("gcd", {"__class__": 1}, "letters, digits"),
        ("gcd", {f"x{number}": 1 for number in range(MAX_ITEMS + 1)}, "at most 64 parameters"),
    ],
)
def test_what_no_founder_may_set_is_refused_with_its_rule(data_set: str, parameters: dict[str, Any], rule: str) -> None:
    with pytest.raises(TaskError) as caught:
        ReasoningGymSource(TaskSourceSection(name=data_set, parameters=parameters), TasksSection(sandboxed=True))
    assert rule in str(caught.value)


def test_the_operators_own_source_may_name_a_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("some\nwords\nof\nmy\nown\n")
    source = TaskSourceSection(name="spell_backward", parameters={"data_file": str(path), "min_word_len": 2})
    prompt = ReasoningGymSource(source, TasksSection()).task(16, 0).prompt
    assert prompt.rsplit(" ", 1)[1] in path.read_text()


def test_words_of_a_reward_function_are_those_that_it_declares() -> None:
    def polite(
        prompt: str, expected: str, answer: str, word: str = "please", *, form: Literal["a", "b"] = "a", n: int = 1
    ) -> float:
        return 0.0

    declared = declared_by_function(polite)
    check_declared(declared, {"word": "please", "form": "b", "n": 3})
    for refused in ({"word": "secrets"}, {"form": "c"}, {"n": "please"}, {"prompt": 1}, {"other": 1}):
        with pytest.raises(ValueError, match="got"):
            check_declared(declared, refused)


def test_code_tasks_take_no_words() -> None:
    check_shape({"cpu_s": 2}, with_words=False)
    with pytest.raises(ValueError, match="a number or boolean"):
        check_shape({"cpu_s": "two"}, with_words=False)

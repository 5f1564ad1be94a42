"""reasoning-gym sources: golden digests and prompts, streams, refusals."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import DEMO_TASKS, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.tasks.reasoning_gym_source import (
    ALPHABETS,
    NEEDS_PYCOSAT,
    REFUSED,
    ReasoningGymSource,
    admissible,
    import_library,
    score_once,
)
from swarm.tasks.task_source import EVALUATION_SEED, INDEX_SPAN, MAX_SEED, SUPERVISED_SEED, TaskFailure, score

FENCED = TasksSection(sandboxed=True)
GCD = TaskSourceSection(name="gcd", parameters={"min_value": 1, "max_value": 60})


@pytest.fixture(scope="module")
def gcd() -> ReasoningGymSource:
    return ReasoningGymSource(GCD, FENCED)


def test_prompts_and_digest_are_golden(gcd: ReasoningGymSource) -> None:
    assert gcd.config_digest == "e0f8dfddfab980e9"
    question = "Find the Greatest Common Divisor (GCD) of these numbers: {}. Give only the GCD as your final answer."
    assert (gcd.task(16, 0).prompt, gcd.answer(16, 0)) == (question.format("27, 27"), "27")
    last = (MAX_SEED, INDEX_SPAN - 1)
    assert (gcd.task(*last).prompt, gcd.answer(*last)) == (question.format("52, 1"), "1")


def test_the_digest_covers_name_and_parameters_but_neither_label_nor_order_nor_weight() -> None:
    same = TaskSourceSection(name="gcd", label="x", weight=3.0, parameters={"max_value": 60, "min_value": 1})
    harder = TaskSourceSection(name="gcd", parameters={"min_value": 1, "max_value": 61})
    other = TaskSourceSection(name="lcm", parameters={"min_value": 1, "max_value": 60})
    digests = [ReasoningGymSource(item, FENCED).config_digest for item in (GCD, same, harder, other)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_task_is_the_first_item_of_the_data_set_of_its_number(gcd: ReasoningGymSource) -> None:
    reasoning_gym = import_library()
    number = 17 * INDEX_SPAN + 5
    item = reasoning_gym.create_dataset("gcd", seed=number, size=1, min_value=1, max_value=60)[0]
    assert (gcd.task(17, 5).prompt, gcd.answer(17, 5)) == (item["question"], item["answer"])


def test_streams_do_not_overlap() -> None:
    source = ReasoningGymSource(
        TaskSourceSection(
            name="chain_sum", parameters={"min_terms": 6, "max_terms": 6, "min_digits": 4, "max_digits": 4}
        ),
        FENCED,
    )
    streams = (SUPERVISED_SEED, EVALUATION_SEED, 16, 17, MAX_SEED)
    # The end of one stream meets the beginning of the next: that is where an off-by-one would show.
    indices = [*range(100), *range(INDEX_SPAN - 100, INDEX_SPAN)]
    prompts = [source.task(seed, index).prompt for seed in streams for index in indices]
    assert len(set(prompts)) == len(streams) * len(indices)


def test_the_librarys_partial_credit_is_kept() -> None:
    task = ReasoningGymSource(TaskSourceSection(name="spell_backward"), FENCED).task(16, 0)
    word = task.prompt.rsplit(" ", 1)[1]
    right = word[::-1]
    assert score(task, right) == 1.0
    assert score(task, right[:-1] + "#") == pytest.approx((len(word) - 1) / len(word))


def test_a_data_set_that_fixes_its_items_when_built_is_built_per_task() -> None:
    source = ReasoningGymSource(TaskSourceSection(name="list_functions"), FENCED)
    assert source.task(16, 0).prompt != source.task(16, 1).prompt
    assert (
        source.task(16, 1).prompt
        == ReasoningGymSource(TaskSourceSection(name="list_functions"), FENCED).task(16, 1).prompt
    )
    assert score(source.task(MAX_SEED, INDEX_SPAN - 1), source.answer(MAX_SEED, INDEX_SPAN - 1)) == 1.0


def test_a_process_imports_the_data_sets_that_it_needs_and_each_of_them_can_be_imported_so() -> None:
    program = (
        "import sys\n"
        "from swarm.config import DEMO_TASKS\n"
        "from swarm.tasks.reasoning_gym_source import import_data_sets\n"
        "import_data_sets(section.name for section in DEMO_TASKS)\n"
        "from reasoning_gym.factory import DATASETS\n"
        "print(*sorted({'sympy', 'matplotlib'} & set(sys.modules)), len(DATASETS))\n"
        "import_data_sets(sys.argv[1:])\n"
        "print(*sorted(DATASETS))\n"
    )
    reasoning_gym = import_library()
    names = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})
    ended = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=True)
    few, every = ended.stdout.splitlines()
    assert few == str(len({section.name for section in DEMO_TASKS}) + 1), (
        "no sympy, no matplotlib; composite comes along"
    )
    assert every.split() == sorted(reasoning_gym.factory.DATASETS)


def test_prompts_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    program = (
        "from swarm.config import DEMO_TASKS, TasksSection\n"
        "from swarm.tasks.reasoning_gym_source import ReasoningGymSource, import_data_sets\n"
        "import_data_sets(section.name for section in DEMO_TASKS)\n"
        "for section in DEMO_TASKS:\n"
        "    source = ReasoningGymSource(section, TasksSection(sandboxed=True))\n"
        "    print(source.config_digest, [(source.task(99, i).prompt, source.answer(99, i)) for i in range(20)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == len(DEMO_TASKS)


@pytest.mark.parametrize(
    ("section", "rule"),
    [
        (TaskSourceSection(name="chain_sums"), "did you mean chain_sum?"),
        (TaskSourceSection(name="qqq"), "DATASETS"),
        (TaskSourceSection(name="gcd", parameters={"max_valeu": 3}), "max_valeu"),
        (
            TaskSourceSection(name="gcd", parameters={"max_valeu": 3}),
            "it knows max_numbers, max_value, min_numbers, min_value",
        ),
        (TaskSourceSection(name="gcd", parameters={"min_value": 5, "max_value": 2}), "max_value must be"),
        (TaskSourceSection(name="gcd", parameters={"seed": 3}), "seed"),
        (TaskSourceSection(name="gcd", parameters={"max_value": {1, 2}}), "numbers, texts, lists or tables"),
        (TaskSourceSection(name="spell_backward", parameters={"data_file": "none.txt"}), "accepts them"),
    ],
)
def test_a_source_that_cannot_be_built_says_why(section: TaskSourceSection, rule: str) -> None:
    with pytest.raises(TaskError) as caught:
        ReasoningGymSource(section, FENCED)
    assert rule in str(caught.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsafe_and_unrepeatable_data_sets_are_refused(name: str) -> None:
    with pytest.raises(TaskError, match="safe and the same on every node"):
        ReasoningGymSource(TaskSourceSection(name=name), FENCED)


WITHOUT_PYCOSAT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "pycosat":
            raise ModuleNotFoundError(name)

import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, *rest: None if name == "pycosat" else found(name, *rest)
sys.meta_path.insert(0, Missing())
from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.tasks.reasoning_gym_source import ReasoningGymSource, import_data_sets, import_library
IMPORT
print(len(ReasoningGymSource(TaskSourceSection(name="gcd"), TasksSection()).task(16, 0).prompt) > 0, "pycosat" in sys.modules)
try:
    ReasoningGymSource(TaskSourceSection(name="zebra_puzzles"), TasksSection())
except TaskError as error:
    print(error)
"""


@pytest.mark.parametrize("first", ["import_library()", "import_data_sets(['gcd', 'zebra_puzzles'])"])
def test_without_pycosat_all_work_but_the_data_set_that_calls_it(first: str) -> None:
    """It has to be compiled, so most machines do not have it."""
    program = WITHOUT_PYCOSAT.replace("IMPORT", first)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    works, refused = ended.stdout.splitlines()
    assert works == "True False", "the stand-in is gone: sympy would use it"
    assert re.search(r"zebra_puzzles needs the package pycosat, got none; .* -m pip install pycosat==[\d.]+ ", refused)


def test_every_verifier_of_the_library_that_runs_code_is_guarded() -> None:
    """A new release of the library may add one: then this test names the module."""
    reasoning_gym = import_library()
    # These run only text that the generator itself wrote.
    harmless = {"basic_arithmetic", "bitwise_arithmetic", "number_sorting", "propositional_logic"}
    root = Path(reasoning_gym.__file__).parent
    suspects = {
        path.stem
        for path in root.glob("*/*.py")
        if any(word in path.read_text() for word in ("eval(", "exec(", "parse_expr(", "sympify(", "parse_latex("))
    }
    assert suspects - harmless <= set(ALPHABETS) | set(REFUSED)


@pytest.mark.parametrize(
    ("data_set", "text"),
    [
        ("binary_matrix", "__import__('os').abort()"),
        ("binary_matrix", "[[0, 1], [exit()]]"),
        ("spiral_matrix", "9**9**9"),
        ("n_queens", "[Q.__class__]"),
        ("string_insertion", "A.__class__"),
        ("countdown", "9 ** 9 ** 9 ** 9"),
        ("countdown", "9* *9"),
        ("countdown", "9//2"),
        ("puzzle24", "exit()"),
        ("coin_flip", "1e999999999"),
        ("gcd", "1" * 20_000),
    ],
)
def test_hostile_answers_do_not_reach_the_verifier(data_set: str, text: str) -> None:
    assert admissible(data_set, text) == ""


@pytest.mark.parametrize(
    ("data_set", "text"),
    [
        ("binary_matrix", "[[0, 1], [1, 2]]"),
        ("spiral_matrix", "1 2 -3"),
        ("n_queens", "_ Q\nQ _"),
        ("string_insertion", "['A', \"B\"]"),
        ("countdown", "(3 + 4)*5 - 10/2"),
        ("coin_flip", "3/8"),
        ("gcd", "the answer is 7"),
    ],
)
def test_ordinary_answers_reach_the_verifier(data_set: str, text: str) -> None:
    assert admissible(data_set, text) == text


@pytest.mark.parametrize("name", sorted(ALPHABETS))
def test_right_answers_pass_the_guard(name: str) -> None:
    source = ReasoningGymSource(TaskSourceSection(name=name), FENCED)
    task, answer = source.task(16, 3), source.answer(16, 3)
    if name != "puzzle24":  # its answer column is one solution with the target: "(1 + 2) * 8 = 24"
        assert admissible(name, answer) == answer
        assert score(task, answer) == 1.0


def in_other_digits(answer: str, zero: int) -> str:
    return answer.translate({ord(str(digit)): chr(zero + digit) for digit in range(10)})


CONTAINING: dict[str, Callable[[str], str]] = {
    "sentence": lambda answer: f"It is not this: {answer} nor that.",
    "more after": lambda answer: f"{answer} or maybe not",
    "more before": lambda answer: f"I guess {answer}",
    "last line": lambda answer: f"wrong\n{answer}",
    "first line": lambda answer: f"{answer}\n\nwrong",
    "negated": lambda answer: f"not {answer}",
    "another number": lambda answer: f"{answer}, 7",
    "tagged": lambda answer: f"wrong<answer>{answer}</answer>wrong",
    "twice": lambda answer: f"{answer}\n{answer}",
    "underscore": lambda answer: re.sub(r"(\d)(\d)", r"\1_\2", answer, count=1),
    "underscore at the end": lambda answer: answer + "_",
    "arabic": lambda answer: in_other_digits(answer, 0x660),
    "wide": lambda answer: in_other_digits(answer, 0xFF10),
    "zero": lambda answer: re.sub(r"(?<![\d.])(\d)", r"0\1", answer, count=1),
}
MEANT_SO = {
    ("sokoban", "twice"): "moves after the solution may leave it solved",
    ("time_intervals", "zero"): "clocks write 01:04",
}
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "puzzle24", "rubiks_cube", "rush_hour"}
"""Of these a text is judged by what it does, not by what it says; there is no answer that a text could contain."""


def test_no_data_set_of_the_library_rewards_a_text_that_merely_contains_the_answer() -> None:
    """All data sets of the installed release: one that is new, or judges otherwise than before, shows here."""
    reasoning_gym = import_library()
    rewarded, without_answer = set(), set()
    missing = NEEDS_PYCOSAT if find_spec("pycosat") is None else set()
    for name in sorted(set(reasoning_gym.factory.DATASETS) - set(REFUSED) - missing):
        data_set = reasoning_gym.create_dataset(name, seed=5, size=2)
        for entry in data_set:
            answer = str(entry["answer"])
            if entry["answer"] is None or score_once(name, data_set.score_answer, entry, answer) < 0.999:
                without_answer.add(name)
                continue
            for variant, write in CONTAINING.items():
                try:
                    text = write(answer)
                    if text != answer and score_once(name, data_set.score_answer, entry, text) > 0.999:
                        rewarded.add((name, variant))
                except ValueError:
                    pass  # a verifier that fails costs the task
    assert rewarded - set(MEANT_SO) == set()
    assert without_answer - WITHOUT_ANSWER - {"coin_flip"} == set()


def test_what_contains_the_answer_gets_less_the_more_else_it_says() -> None:
    source = ReasoningGymSource(TaskSourceSection(name="game_of_life_halting"), FENCED)
    task, answer = source.task(16, 0), source.answer(16, 0)
    assert [score(task, text) for text in (answer, f" {answer}\n", answer.lower())] == [1.0] * 3
    assert score(task, "True, or rather False") == pytest.approx(0.5 * len(answer) / 21)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.text("0123456789.,-+*/()[]eE \n'\"ABQ_", max_size=60))
def test_any_text_scores_within_bounds_or_costs_the_task(text: str) -> None:
    for source in GUARDED_SOURCES:
        try:
            assert 0.0 <= score(source.task(16, 1), text) <= 1.0
        except TaskFailure as failure:
            assert failure.source == source.name


GUARDED_SOURCES = [
    ReasoningGymSource(TaskSourceSection(name=name), FENCED) for name in ("binary_matrix", "countdown", "gcd")
]

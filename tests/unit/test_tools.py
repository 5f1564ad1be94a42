"""Tools that answers may call, and the game."""

from pathlib import Path

import pytest

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.policy.prompts.chat_template import tools_as_text
from swarm.tasks.environments.calculator import Calculator, NoParameters
from swarm.tasks.environments.episodes import Play, state_digests
from swarm.tasks.environments.tool import ToolError, called
from swarm.tasks.environments.tool_source import tools_of
from swarm.tasks.task_mixture import TaskMixture
from swarm.types import Task

SUMS = {
    "name": "chain_sum",
    "label": "sums",
    "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def source(*tools: str, **settings: object) -> TaskSourceSection:
    return TaskSourceSection.model_validate({**SUMS, "tools": [{"name": name} for name in tools], **settings})


def task_of(section: TaskSourceSection, index: int = 0) -> Task:
    return TaskMixture(TasksSection(sources=(section,))).sources["sums"].task(20, index)


CALCULATOR = Calculator(NoParameters(), source("calculator"), TasksSection(sources=(source("calculator"),)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6 * 7", "42"),
        ("(12 + 3) * 4 / 5", "12"),
        ("1/3", "0.333333333333"),
        ("2 ** 10 - 1", "1023"),
        ("2^3", "8"),
        ("7 // 2 + 7 % 2", "4"),
        ("-3 + +2", "-1"),
        ("0.1 + 0.2", "0.3"),
        ("12 × 3 =", "36"),
    ],
)
def test_the_calculator_is_exact(text: str, value: str) -> None:
    assert CALCULATOR.run(text) == value


@pytest.mark.parametrize(
    "text",
    ["1 / 0", "9 ** 9 ** 9", "2 ** 0.5", "__import__('os')", "x", "", "(" * 250, "1" * 300, "True", "1j", "[1]", "1 if 1 else 2"],
)  # fmt: skip
def test_the_calculator_refuses_all_else(text: str) -> None:
    with pytest.raises(ToolError):
        CALCULATOR.run(text)


@pytest.mark.parametrize(
    "answer",
    [
        'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>',
        '{"name": "calculator", "parameters": {"expression": "6 * 7"}}',
        '[{"name": "calculator", "arguments": {"expression": "6 * 7"}}]',
        "I ask: <tool>calculator: 6 * 7</tool>",
        "<tool>calculator: 1</tool> no: <tool>calculator: 6 * 7",
    ],
)
def test_calls_of_several_forms_are_read(answer: str) -> None:
    call = called(answer, {"calculator": CALCULATOR}, {})
    assert call is not None and (call.name, call.text) == ("calculator", "6 * 7")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("I ask <calc>6 * 7</calc>", "6 * 7"),
        ("<calc>1</calc> no <calc> 6 * 7", "6 * 7"),
        ("<tool>calculator: 1</tool>", "1"),
    ],
)
def test_a_source_may_have_marks_of_its_own(answer: str, text: str) -> None:
    call = called(answer, {"calculator": CALCULATOR}, {"calculator": ("<calc>", "</calc>")})
    assert call is not None and (call.name, call.text) == ("calculator", text)


def test_marks_are_part_of_the_digest_and_say_how_examples_call() -> None:
    facts = {"name": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 2}}
    plain, marked = (
        TaskMixture(TasksSection(sources=(TaskSourceSection.model_validate(facts | {"tools": [tool]}),)))
        for tool in ({"name": "calculator"}, {"name": "calculator", "marks": ["<calc>", "</calc>"]})
    )
    sources = [one.sources["chain_sum"] for one in (plain, marked)]
    assert sources[0].config_digest != sources[1].config_digest
    task = sources[1].task(16, 0)
    assert task.context.tools == "" and sources[0].task(16, 0).context.tools
    call, final = sources[1].demonstrate(16, 0)  # type: ignore[attr-defined]
    assert call.startswith("<calc>") and call.endswith("</calc>")
    play = Play.of(task)
    assert (play.step(call).reply, play.step(final).reward) == (final, 1.0)


@pytest.mark.parametrize("marks", [["<a>"], ["<a>", "</a>", "x"], ["", "</a>"], ["<a>", "\n"], ["<a>", "x" * 33]])
def test_marks_are_two_short_texts(marks: list[str]) -> None:
    with pytest.raises(ValueError, match="marks"):
        TaskSourceSection.model_validate({"name": "chain_sum", "tools": [{"name": "calculator", "marks": marks}]})


def test_two_tools_are_not_called_in_one_way() -> None:
    tools = [{"name": name, "marks": ["<a>", "</a>"]} for name in ("calculator", "python")]
    with pytest.raises(ValueError, match="marks of two tools must begin differently"):
        TaskSourceSection.model_validate({"name": "chain_sum", "tools": tools})


@pytest.mark.parametrize("answer", ["42", "the name of {it}", '{"answer": 42}', ""])
def test_an_answer_without_a_call_is_final(answer: str) -> None:
    assert called(answer, {"calculator": CALCULATOR}, {}) is None


@pytest.mark.parametrize(
    "answer",
    ["<tool_call>{</tool_call>", '<tool_call>{"name": "calculator"}</tool_call>', '{"name": 3, "arguments": {}}'],
)
def test_a_call_that_cannot_be_read_is_an_error_that_the_policy_reads(answer: str) -> None:
    play = Play.of(task_of(source("calculator")))
    step = play.step(answer)
    assert step.reply.startswith("error: the call must") and step.role == "tool" and not step.is_done


def test_results_are_turns_and_the_final_answer_is_verified() -> None:
    section = source("calculator", max_turns=3)
    task = task_of(section)
    right = TaskMixture(TasksSection(sources=(section,))).sources["sums"].answer(20, 0)
    play = Play.of(task)
    assert play.step("<tool>calculator: 6 * 7</tool>").reply == "42"
    assert play.step("<tool>abacus: 1</tool>").reply == "error: there is no tool 'abacus'; there is calculator"
    assert play.step(right).is_done and play.reward == 1.0
    late = Play.of(task)
    for _ in range(2):
        late.step("<tool>calculator: 1</tool>")
    assert late.step("<tool>calculator: 1</tool>").is_done and late.reward < 1


def test_equal_results_are_an_equal_state() -> None:
    plays = [Play.of(task_of(source("calculator"))) for _ in range(3)]
    for play, text in zip(plays, ("2 + 3", "3 + 2", "9"), strict=True):
        play.step(f"<tool>calculator: {text}</tool>")
        play.step("5")
    one, two, other = (state_digests(play.steps) for play in plays)
    assert one == two and one[0] == other[0] and one[1] != other[1]


def test_tools_are_part_of_what_a_task_is() -> None:
    digests = [
        task_of(one).ref.config_digest
        for one in (source(), source("calculator"), source("calculator", max_turns=5), source("python"))
    ]
    assert len(set(digests)) == 4
    assert task_of(source()).begin is None


def test_a_python_program_runs_in_the_sandbox() -> None:
    section = source("python")
    (tool,) = tools_of(section, TasksSection(sources=(section,)))
    assert tool.run("print(sum(range(10)))") == "45"
    assert tool.run("x = 1") == "(nothing was printed)"
    assert tool.run("1 / 0") == "ZeroDivisionError: division by zero"
    assert "PermissionError" in (found := tool.run("open('/etc/passwd').read()")) or "Error" in found
    assert tool.run("import random\nprint(random.random())") == tool.run("import random\nprint(random.random())")
    assert len(tool.run("print('x' * 100000)")) <= 2049
    with pytest.raises(ToolError, match="was stopped"):
        tool.run("while True: pass")


def test_search_finds_passages_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sea.md").write_text("Whales live in the sea.\n\n" + "A long paragraph about ships. " * 30)
    (tmp_path / "land.txt").write_text("Foxes live on land.")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    section = source("search", search_folder=str(tmp_path))
    (tool,) = tools_of(section, TasksSection(sources=(section,)))
    assert tool.run("where do whales live?").startswith("[sea.md] Whales live in the sea.")
    with pytest.raises(ToolError, match="no passage"):
        tool.run("quantum")
    first = tool.rules
    (tmp_path / "land.txt").write_text("Foxes live in dens.")
    (again,) = tools_of(section, TasksSection(sources=(section,)))
    assert again.rules != first


@pytest.mark.parametrize("content", [None, "", b"\xff\xfe"])
def test_a_folder_that_cannot_be_searched_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    section = source("search", search_folder=str(tmp_path))
    with pytest.raises(
        TaskError, match=r"the folder of the tool search must hold .*; set tasks.sources.search_folder of 'sums'"
    ):
        tools_of(section, TasksSection(sources=(section,)))


def test_bases_without_tools_in_their_template_read_them_as_text() -> None:
    text = tools_as_text(task_of(source("calculator", "python")).context.tools)
    assert "<tool>its name: a text</tool>" in text
    assert "- calculator: Computes" in text and "- python: Runs" in text


# the game

GAME = {"kind": "game", "name": "guess_number", "parameters": {"lowest": 1, "highest": 15, "max_turns": 4}}


def game(index: int) -> tuple[Task, int]:
    mixture = TaskMixture(TasksSection(sources=(TaskSourceSection.model_validate(GAME),)))
    source = mixture.sources["guess_number"]
    return source.task(20, index), int(source.answer(20, index))


def test_halving_what_is_left_wins_every_game() -> None:
    for index in range(30):
        task, _ = game(index)
        play, low, high = Play.of(task), 1, 15
        while play.may_go_on:
            guess = (low + high) // 2
            step = play.step(f"{guess}.")
            low, high = (guess + 1, high) if step.reply == "higher" else (low, guess - 1)
        assert play.reward == 1.0


def test_a_game_ends_with_its_guesses_and_answers_odd_ones() -> None:
    task, number = game(3)
    wrong = next(guess for guess in range(1, 16) if guess != number)
    play = Play.of(task)
    for text in ("100", "no idea", "٣"):
        assert play.step(text).reply == "That is no whole number from 1 to 15."
    last = play.step(str(wrong))
    assert last.is_done and play.reward == 0 and not play.may_go_on


@pytest.mark.parametrize("parameters", [{"highest": 1}, {"max_turns": 1}, {"colour": "red"}])
def test_parameters_that_make_no_game_are_refused(parameters: dict[str, object]) -> None:
    section = TaskSourceSection.model_validate({**GAME, "parameters": parameters})
    with pytest.raises(TaskError, match=r"tasks.sources.parameters of 'guess_number'"):
        TaskMixture(TasksSection(sources=(section,)))


def test_games_have_neither_signals_nor_tools() -> None:
    for more in (
        {"signals": [{"name": "format", "parameters": {"tags": ["answer"]}}]},
        {"tools": [{"name": "calculator"}]},
    ):
        with pytest.raises(TaskError, match="got the"):
            TaskMixture(TasksSection(sources=(TaskSourceSection.model_validate({**GAME, **more}),)))

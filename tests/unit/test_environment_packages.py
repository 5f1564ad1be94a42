"""Environments of `verifiers` and OpenEnv, with the real packages: played, replayed, and refused where nobody can replay them."""

import sys
import textwrap
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.tasks.environments.episodes import Play, replayed
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import EVALUATION_SEED, ForgedEpisode, score
from swarm.types import Rollout, Task, Turn

VERIFIERS = '''
    import verifiers as vf
    from datasets import Dataset

    SUMS = Dataset.from_list([{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)])
    PARSER = vf.XMLParser(["answer"])

    def right(parser, completion, answer):
        return float(parser.parse_answer(completion) == answer)

    def short(completion):
        return float(len(completion[-1].content) < 40)

    class Hints(vf.MultiTurnEnv):
        """Tells whether a guess is too small, and ends once it is right."""

        async def setup_state(self, state):
            state["goal"] = int(state["answer"])
            return state

        @vf.stop
        async def is_right(self, state):
            return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == str(state["goal"])

        async def env_response(self, messages, state, **kwargs):
            guess = messages[-1].content
            told = "no number" if not guess.isdigit() else "more" if int(guess) < state["goal"] else "less"
            return [{"role": "user", "content": told}]

    def found(state):
        return float(state["trajectory"][-1]["completion"][-1].content == str(state["goal"]))

    def double(number: int) -> int:
        """Doubles a number."""
        return 2 * number

    def load_environment(kind="single", num_rows=40):
        rows = SUMS.select(range(num_rows))
        if kind == "single":
            rubric = vf.Rubric([right, short], weights=[1.0, 1.0], parser=PARSER)
            return vf.SingleTurnEnv(dataset=rows, system_prompt="Be short.", parser=PARSER, rubric=rubric)
        if kind == "hints":
            return Hints(dataset=rows, eval_dataset=rows.select(range(3)), max_turns=4, rubric=vf.Rubric([found]))
        if kind == "tools":
            last = vf.Rubric([lambda completion, answer: float(answer in completion[-1].content)])
            return vf.ToolEnv(dataset=rows, tools=[double], max_turns=3, rubric=last)
        if kind == "group":
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completions: [0.0] * len(completions)]))
        if kind == "rewriting":
            class Rewriting(Hints):
                async def get_prompt_messages(self, state):
                    return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]
            return Rewriting(dataset=rows, max_turns=4, rubric=vf.Rubric([found]))
        if kind == "judge":
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.JudgeRubric(judge_client=object()))
        import socket
        socket.create_connection(("127.0.0.1", 9), 0.1)
'''
OPENENV = """
    import random

    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        text: str

    class Move(Action):
        row: int
        column: int

    class Told(Observation):
        text: str

    class HotOrCold(Environment[Guess, Told, State]):
        def reset(self, seed=None, episode_id=None, **kwargs) -> Told:
            self._goal = random.Random(seed).randint(1, 9)
            return Told(text="I think of 1 to 9.")

        def step(self, action: Guess, timeout_s=None, **kwargs) -> Told:
            if action.text == str(self._goal):
                return Told(text="right", done=True, reward=2.0)
            return Told(text="cold", done=False, reward=0.0)

        @property
        def state(self) -> State:
            return State()

    class Board(HotOrCold):
        def step(self, action: Move, timeout_s=None, **kwargs) -> Told:
            return Told(text=f"{action.row}, {action.column}", done=action.row == action.column, reward=0.5)

    class Chance(HotOrCold):
        def step(self, action: Guess, timeout_s=None, **kwargs) -> Told:
            return Told(text=str(random.random()))
"""


def _package(folder: Path, name: str, needs: str, code: str, version: str = "1.0") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {needs}\n")
    (info / "top_level.txt").write_text(f"{name}\n")
    (folder / f"{name}.py").write_text(textwrap.dedent(code))


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    _package(folder, "sums_env", "verifiers>=0.1", VERIFIERS)
    _package(folder, "hot_env", "openenv>=0.1", OPENENV)
    _package(folder, "stranger", "requests", "def load_environment():\n    raise SystemExit\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    invalidate_caches()
    return folder


def mixture_of(kind: str, name: str, /, **parameters: Any) -> TaskMixture:
    source = TaskSourceSection(kind=kind, name=name, label="mine", parameters=parameters)
    return TaskMixture(TasksSection(sources=(source,)))


def played(task: Task, *answers: str) -> tuple[list[str], float]:
    """(replies before the last step, reward)."""
    play = Play.of(task)
    for answer in answers:
        play.step(answer)
    assert play.is_done
    return [step.reply for step in play.steps[:-1]], play.reward


def transcript(play: Play, answers: tuple[str, ...]) -> Rollout:
    """What an author would send of an episode."""
    turns = tuple(
        Turn(text, step.reply, step.role, number, number + 1)
        for number, (text, step) in enumerate(zip(answers, play.steps[:-1], strict=False))
    )
    return Rollout(answers[-1], (1,) * 8, (0.0,) * 8, True, play.reward, turns=turns)


@pytest.mark.extra("verifiers")
def test_a_single_turn_environment_is_a_source_with_its_rubric() -> None:
    mixture = mixture_of("verifiers", "sums_env")
    source = mixture.sources["mine"]
    assert source.num_held_out == 4
    task = source.task(EVALUATION_SEED, 1)
    assert (task.prompt, source.answer(EVALUATION_SEED, 1)) == ("Be short.\n\nWhat is 10 + 1?", "11")
    assert score(task, "<answer>11</answer>") == 1.0
    assert score(task, "<answer>12</answer>") == 0.5
    assert score(task, "<answer>11</answer>" + " so it is" * 9) == 0.5
    mixture.close()


@pytest.mark.extra("verifiers")
def test_several_turns_are_played_and_replayed() -> None:
    mixture = mixture_of("verifiers", "sums_env", kind="hints")
    source = mixture.sources["mine"]
    assert source.num_held_out == 3
    task = source.task(EVALUATION_SEED, 2)
    answers = ("none", "9", "3")
    assert played(task, *answers) == (["no number", "less"], 1.0)
    assert played(task, "1", "1", "1", "1") == (["more"] * 3, 0.0)
    play = Play.of(task)
    for answer in answers:
        play.step(answer)
    rollout = transcript(play, answers)
    assert replayed(task, rollout).reward == 1.0
    forged = Rollout("3", (1,) * 8, (0.0,) * 8, True, 1.0, turns=(Turn("none", "no number, but 3", "user", 0, 1),))
    with pytest.raises(ForgedEpisode):
        replayed(task, forged)
    mixture.close()


@pytest.mark.extra("verifiers")
def test_tools_are_described_and_their_calls_are_read() -> None:
    mixture = mixture_of("verifiers", "sums_env", kind="tools")
    task = mixture.sources["mine"].task(EVALUATION_SEED, 0)
    assert '"name": "double"' in task.prompt and task.prompt.endswith("What is 0 + 1?")
    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    assert played(task, call, "so 1") == (["42"], 1.0)
    replies, reward = played(
        task, "<tool_call>{no JSON</tool_call>", '<tool_call>{"name": "nose", "arguments": {}}</tool_call>', "2"
    )
    assert len(replies) == 2 and all(replies) and reward == 0.0
    mixture.close()


@pytest.mark.extra("verifiers")
@pytest.mark.parametrize(
    ("name", "parameters", "rule"),
    [
        ("sums_env", {"kind": "group"}, "reward each answer by itself"),
        ("sums_env", {"kind": "judge"}, "without a judge"),
        ("sums_env", {"kind": "network"}, "be built without a network"),
        ("sums_env", {"colour": 3}, "be built without a network, got TypeError"),
        ("sums_env", {"kind": "rewriting"}, "a conversation must only grow"),
        ("sums_env", {"num_rows": 1}, "rows to train on and to hold out, got 0 and 1"),
        ("nowhere", {}, "needs the installed package nowhere, got none"),
        ("stranger", {}, "must be a package that needs verifiers, got stranger"),
    ],
)
def test_what_nobody_can_replay_is_refused(name: str, parameters: dict[str, Any], rule: str) -> None:
    with pytest.raises(TaskError, match=rule):
        mixture_of("verifiers", name, **parameters)


@pytest.mark.extra("verifiers")
def test_version_and_rows_are_part_of_the_digest(packages: Path) -> None:
    digests = {
        mixture_of("verifiers", "sums_env", **one).sources["mine"].config_digest for one in ({}, {"num_rows": 30})
    }
    (packages / "sums_env-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sums_env\nVersion: 1.1\nRequires-Dist: verifiers\n"
    )
    invalidate_caches()
    assert len(digests | {mixture_of("verifiers", "sums_env").sources["mine"].config_digest}) == 3


@pytest.mark.extra("openenv")
def test_an_environment_of_openenv_is_played() -> None:
    mixture = mixture_of("openenv", "hot_env.HotOrCold", instruction="Guess.", max_turns=9, reward_scale=2.0)
    task = mixture.sources["mine"].task(77, 5)
    assert task.prompt == "Guess.\n\nI think of 1 to 9."
    play = Play.of(task)
    for number in range(1, 10):
        if play.may_go_on:
            play.step(str(number))
    assert (play.is_done, play.reward) == (True, 1.0)
    assert {step.reply for step in play.steps[:-1]} <= {"cold"}
    mixture.close()


@pytest.mark.extra("openenv")
def test_an_action_of_several_fields_is_json() -> None:
    mixture = mixture_of("openenv", "hot_env.Board", max_turns=4)
    task = mixture.sources["mine"].task(77, 5)
    replies, reward = played(
        task, "left", '{"row": 1, "depth": 2}', '{"row": "x", "column": 1}', '{"row": 2, "column": 2}'
    )
    assert replies == ["error: the answer must be JSON with valid column, row"] * 3, "the same on every machine"
    assert reward == 0.5
    mixture.close()


@pytest.mark.extra("openenv")
@pytest.mark.parametrize(
    ("name", "parameters", "rule"),
    [
        ("hot_env.Chance", {}, "must give equal steps for equal answers"),
        ("hot_env.Nothing", {}, "be importable, got AttributeError"),
        ("stranger.load_environment", {}, "a class derived from Environment of openenv"),
        ("hot_env.HotOrCold", {"max_turns": 0}, "max_turns"),
        ("nowhere.Environment", {}, "needs the installed package nowhere, got none"),
    ],
)
def test_what_is_no_environment_of_openenv_is_refused(name: str, parameters: dict[str, Any], rule: str) -> None:
    with pytest.raises(TaskError, match=rule):
        mixture_of("openenv", name, **parameters)

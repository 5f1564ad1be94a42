"""Plays episodes, and replays those of others: the answers of a rollout go to the environment of its task again.

    answer ─▶ Episode.step ─▶ checked step ─▶ reply, or the reward of the episode

Environments are deterministic, so a reader computes the replies and the reward from the answers alone. A task of one answer is
an episode of one turn, whose verifier is its environment.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.errors import TaskError
from swarm.tasks.task_source import (
    EVALUATION_SEED,
    MAX_TEXT_CHARS,
    ForgedEpisode,
    Score,
    TaskFailure,
    TaskSource,
    assess,
    within_range,
)
from swarm.types import MAX_TURNS, Episode, Rollout, Step, Task, Turn

_CHECKED_TASKS = 3
_PROBES = ("", "1", "What?", "<answer>0</answer>")


@dataclass(slots=True)
class Play:
    """One episode of a task with its steps so far. It belongs to one thread at a time."""

    task: Task
    steps: list[Step]
    reward: float = 0.0
    """Sum over the steps."""
    _episode: Episode | None = None

    @classmethod
    def of(cls, task: Task) -> "Play":
        """An episode that has not begun."""
        return cls(task, [])

    @property
    def is_done(self) -> bool:
        return bool(self.steps) and self.steps[-1].is_done

    @property
    def may_go_on(self) -> bool:
        """Whether another answer may follow."""
        return not self.is_done and len(self.steps) < min(self.task.max_turns, MAX_TURNS)

    def step(self, answer: str, num_tokens: int | None = None) -> Step:
        """Take an answer of so many tokens. Raises TaskFailure where the environment fails or breaks its contract."""
        if self.task.begin is None:
            step = Step("", assess(self.task, answer, num_tokens).reward, is_done=True)
        else:
            step = self._stepped(answer)
        self.reward = within_range(self.task, "reward of an episode", self.reward + step.reward)
        self.steps.append(step)
        return step

    def _stepped(self, answer: str) -> Step:
        assert self.task.begin is not None, "an episode of several turns"
        source = self.task.ref.source
        try:
            if self._episode is None:
                self._episode = self.task.begin()
            step = self._episode.step(answer)
        except TaskFailure:
            raise
        except Exception as error:  # environments of others meet hostile text
            raise TaskFailure(source, f"environment: {type(error).__name__}: {error}") from error
        is_step = (
            isinstance(step.reply, str)
            and isinstance(step.state, str)
            and isinstance(step.is_done, bool)
            and step.role in ("user", "tool")
        )
        if not is_step or len(step.reply) > MAX_TEXT_CHARS:
            raise TaskFailure(source, f"environment: a reply must be a text of at most {MAX_TEXT_CHARS} characters")
        return step


def state_digests(steps: Sequence[Step]) -> tuple[str, ...]:
    """What identifies the situation before each answer, [turns]: the beginning, then what each step but the last led to."""
    states = ["", *(f"s{step.state}" if step.state else f"r{step.reply}" for step in steps[:-1])]
    return tuple(hashlib.sha256(state.encode(errors="surrogatepass")).hexdigest()[:16] for state in states)


def replayed(task: Task, rollout: Rollout, check_budget: Callable[[], None] = lambda: None) -> Play:
    """Play the answers of a rollout. Raises ForgedEpisode where the environment replies otherwise, TaskFailure where it fails.

    `check_budget` is called before each step, since a tool may take seconds. What it raises ends the replay.
    """
    if rollout.turns and (task.begin is None or len(rollout.turns) >= min(task.max_turns, MAX_TURNS)):
        raise ForgedEpisode(f"{len(rollout.turns) + 1} turns, bound {task.max_turns if task.begin else 1}")
    play = Play.of(task)
    for number, turn in enumerate(rollout.turns, 1):
        check_budget()
        _check_turn(task, number, turn, play.step(turn.text))
    check_budget()
    play.step(rollout.text, len(rollout.token_ids))
    return play


def _check_turn(task: Task, number: int, turn: Turn, step: Step) -> None:
    if step.is_done:
        raise ForgedEpisode(f"the episode was over after turn {number}")
    if (step.reply, step.role) != (turn.reply, turn.role):
        if not step.is_exact:
            raise TaskFailure(
                task.ref.source, f"another reply here in turn {number}, which may differ between machines"
            )
        raise ForgedEpisode(f"the environment replied otherwise in turn {number}")


def scored(task: Task, rollout: Rollout, check_budget: Callable[[], None] = lambda: None) -> Score:
    """The score of a rollout. Calls and raises as `replayed`."""
    if task.begin is None and not rollout.turns:
        return assess(task, rollout.text, len(rollout.token_ids))
    return Score(replayed(task, rollout, check_budget).reward, ())


def with_scores(task: Task, rollout: Rollout) -> Rollout:
    """The rollout with what is never sent: reward signals, states, rewards of turns, whether it was cut. Raises as `replayed`."""
    if task.begin is None and not rollout.turns:
        return replace(rollout, signals=scored(task, rollout).signals)
    play = replayed(task, rollout)
    rewards = tuple(step.reward for step in play.steps)
    return replace(rollout, turn_rewards=rewards, states=state_digests(play.steps), is_cut=not play.is_done)


def check_repeatable(source: TaskSource) -> None:
    """Raise TaskError where an environment gives two runs of one task other steps for the same answers.

    It finds what depends on chance, on the clock or on earlier episodes. Readers would take such episodes for forged.
    """
    try:
        for index in range(_CHECKED_TASKS):
            answers = [*_PROBES, *_right_answers(source, index)]
            first, second = (_probed(source.task(EVALUATION_SEED, index), answers) for _ in range(2))
            if first != second:
                raise TaskError(
                    f"an environment must give equal steps for equal answers, got others in a second run of task "
                    f"{EVALUATION_SEED}/{index} of {source.name!r}; draw all chance from the seed of the task"
                )
    except TaskFailure as failure:
        raise TaskError(f"an environment must take any answer, got {failure}; fix it") from None


def _right_answers(source: TaskSource, index: int) -> list[str]:
    """Of a held-out task: one, or none where the source knows none."""
    try:
        return [source.answer(EVALUATION_SEED, index)]
    except TaskFailure:
        return []


def _probed(task: Task, answers: Sequence[str]) -> tuple[str, list[Step]]:
    play = Play.of(task)
    for answer in answers:
        if not play.may_go_on:
            break
        play.step(answer)
    return task.prompt, play.steps

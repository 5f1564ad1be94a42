"""Hints: parts of peers' right answers, with which own answers to tasks begin that this node cannot solve yet.

    pool ─▶ right answers (`BatchBuilder.right_answers`) ─▶ task, length of the beginning ─▶ `RolloutWorker.follow`
                                                                                                  │
                 batch ◀─ own tokens only are trained on, the reward is of the whole answer ◀─────┘

A group without a right answer teaches nothing. After a part of one, the rest is within reach, and with every success at the
source the part gets shorter.
"""

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.config import RolloutsSection
from swarm.policy.policy import TextPolicy
from swarm.tasks.task_source import TaskFailure, score
from swarm.types import Rollout, Task

logger = logging.getLogger(__name__)

SOLVED_RATE = 0.5
"""From this success rate on a source has no hints: ordinary groups have signal there."""
FULL_REWARD = 1 - 1e-6
_LARGEST_PART = 3 / 4
"""A hint is no more of an answer, because its last part is what the verifier compares."""
_CUT_CHARACTER = "\ufffd"
_TRIED_ENDS = 8
"""Ends of a hint that are tried, each a token before the last: decoding takes time, and the text is a stranger's."""


@dataclass(frozen=True, slots=True)
class RightAnswer:
    """An answer of another node with the full reward, in tokens of this node, to a task of one turn."""

    task: Task
    rollout: Rollout
    author: str


@dataclass(frozen=True, slots=True)
class Hint:
    """The tokens with which all answers of one group begin."""

    task: Task
    token_ids: tuple[int, ...]


def hint_tokens(num_tokens: int, success_rate: float, draw: float, max_new_tokens: int) -> int:
    """Number of tokens of a hint from an answer of `num_tokens`, without its EOS: round(f · num_tokens) with f in (0, 1 − p].

    `draw`, in [0, 1), chooses f; p is the success rate. At least 1, at most 3/4 of the answer, and one token less than
    `max_new_tokens`; 0 where these leave no room.
    """
    most = min(int(_LARGEST_PART * num_tokens), max_new_tokens - 1)
    return min(most, max(1, round((1 - draw) * (1 - success_rate) * num_tokens)))


class HintChooser:
    """Makes hints of right answers. It keeps no state between rounds and belongs to the compute thread."""

    def __init__(self, config: RolloutsSection, policy: TextPolicy, success_rate: Callable[[str], float]) -> None:
        """`success_rate`: of own answers to a source."""
        self._config = config
        self._policy = policy
        self._success_rate = success_rate

    def choose(self, answers: Iterable[RightAnswer], rng: random.Random) -> list[Hint]:
        """The hints of a round: at most `config.hints`, and one of an author, of the first answers that give one."""
        hints: dict[str, Hint] = {}  # by author
        for answer in answers if self._config.hints else ():
            hint = self._hint(answer, rng.random()) if answer.author not in hints else None
            if hint is not None:
                hints[answer.author] = hint
            if len(hints) == self._config.hints:
                break
        return list(hints.values())

    def _hint(self, answer: RightAnswer, draw: float) -> Hint | None:
        """The hint; None where no part of the answer is one."""
        task, rollout = answer.task, answer.rollout
        rate = self._success_rate(task.ref.source)
        if task.begin is not None or rate >= SOLVED_RATE:
            return None
        num_own = len(rollout.token_ids) - rollout.finished
        longest = hint_tokens(num_own, rate, draw, self._config.max_new_tokens)
        for num_tokens in range(longest, max(0, longest - _TRIED_ENDS), -1):
            part = rollout.token_ids[:num_tokens]
            text = self._policy.decode(part)
            if self._may_end_here(text):
                return None if self._is_right(task, text, num_tokens) else Hint(task, part)
        return None

    def _may_end_here(self, text: str) -> bool:
        """Whether neither a character nor a stop string is cut: the engine looks for stop strings behind the hint only."""
        stop = self._config.stop
        beginnings = (string[:length] for string in stop for length in range(1, len(string)))
        return not text.endswith((_CUT_CHARACTER, *beginnings)) and not any(string in text for string in stop)

    def _is_right(self, task: Task, text: str, num_tokens: int) -> bool:
        """Whether a part is right by itself already, so that answers would be rewarded for what they did not write."""
        try:
            return score(task, text, num_tokens) >= FULL_REWARD
        except TaskFailure as failure:
            logger.debug("no hint for a task of %s: %s", task.ref.source, failure)
            return True

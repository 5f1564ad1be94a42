"""Rollouts without a policy: random answers to tasks whose reward anyone sees, in the real formats."""

import random

from swarm.records.admission import Vocabulary
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.tasks.task_source import FIRST_TRAINING_SEED
from swarm.types import Lineage, Rollout, RolloutGroup, TaskRef

SOURCE, CONFIG_DIGEST, PROMPT_DIGEST = "light", "11" * 8, "22" * 8
LINEAGE = Lineage("33" * 16, "44" * 16)
EOS_TOKEN = 1
_FIRST_LETTER = 10
_ANSWER_LETTERS = 8
VOCABULARY = Vocabulary(
    LINEAGE,
    size=64,
    eos_token_ids=frozenset({EOS_TOKEN}),
    decode=lambda ids: "".join(chr(token - _FIRST_LETTER + ord("a")) for token in ids if token != EOS_TOKEN),
)


class LightJudge:
    """The TaskJudge of admission: an answer is right if it begins with `a`."""

    def check_known(self, ref: TaskRef) -> None:
        if (ref.source, ref.config_digest) != (SOURCE, CONFIG_DIGEST):
            raise InvalidRecord(Rejection.UNKNOWN_TASK, f"{ref.source[:40]!r}")
        if ref.seed < FIRST_TRAINING_SEED:
            raise InvalidRecord(Rejection.HELD_OUT_TASK, f"stream {ref.seed}")

    def rewards(self, group: RolloutGroup) -> tuple[float, ...]:
        self.check_known(group.task)
        if group.prompt_digest != PROMPT_DIGEST:
            raise InvalidRecord(Rejection.TASK_MISMATCH, group.task.source)
        return tuple(_reward(rollout.text) for rollout in group.rollouts)


def light_group(author: str, index: int, group_size: int, rng: random.Random) -> RolloutGroup:
    """One group of `group_size` answers, the first of them right and the second wrong: it carries signal."""
    letters = ["a", "b", *rng.choices("ab", k=group_size - 2)]
    rollouts = tuple(_rollout(first + "".join(rng.choices("cdefgh", k=_ANSWER_LETTERS - 1))) for first in letters)
    task = TaskRef(SOURCE, CONFIG_DIGEST, FIRST_TRAINING_SEED, index % 2**20)
    return RolloutGroup(task, PROMPT_DIGEST, rollouts, author, LINEAGE, policy_version=index)


def _rollout(text: str) -> Rollout:
    ids = (*(_FIRST_LETTER + ord(letter) - ord("a") for letter in text), EOS_TOKEN)
    return Rollout(text, ids, (-1.0,) * len(ids), finished=True, reward=_reward(text))


def _reward(text: str) -> float:
    return float(text.startswith("a"))

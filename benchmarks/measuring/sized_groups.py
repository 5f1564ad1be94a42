"""Bodies of an asked size out of real rollout groups, and the judge that recomputes their rewards.

Answers are random tokens of a made-up vocabulary, so they compress about as badly as real ones: per token four letters of
text, an id and a log-prob take 6 to 7 bytes of the body.
"""

import random
from functools import cache

from swarm.admission.admission import Vocabulary
from swarm.records.codec import encode_body
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.tasks.task_source import FIRST_TRAINING_SEED
from swarm.types import Lineage, Rollout, RolloutGroup, TaskRef

GROUPS_PER_BODY = 3
LINEAGE = Lineage("33" * 16, "44" * 16)
_SOURCE, _CONFIG_DIGEST, _PROMPT_DIGEST = "sized", "11" * 8, "22" * 8
_EOS = 0
_VOCABULARY_SIZE = 32_000
_WORD_LETTERS = 4
_TOKENS_PER_ANSWER = 512
_SIZE_TOLERANCE = 0.01


@cache
def words() -> tuple[str, ...]:
    """[vocabulary size] text of each token; that of EOS is empty. The same in every process."""
    rng = random.Random(0)
    return (
        "",
        *("".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=_WORD_LETTERS)) for _ in range(_VOCABULARY_SIZE - 1)),
    )


def vocabulary() -> Vocabulary:
    table = words()
    return Vocabulary(
        LINEAGE, _VOCABULARY_SIZE, frozenset({_EOS}), decode=lambda ids: "".join(map(table.__getitem__, ids))
    )


class SizedJudge:
    """The TaskVerifier of admission: the share of an answer's letters that are an `e`."""

    def check_known(self, ref: TaskRef) -> None:
        if (ref.source, ref.config_digest) != (_SOURCE, _CONFIG_DIGEST):
            raise InvalidRecord(Rejection.UNKNOWN_TASK, f"{ref.source[:40]!r}")

    def rewards(self, group: RolloutGroup) -> tuple[float, ...]:
        self.check_known(group.task)
        if group.prompt_digest != _PROMPT_DIGEST:
            raise InvalidRecord(Rejection.TASK_MISMATCH)
        return tuple(_reward(rollout.text) for rollout in group.rollouts)


def sized_groups(author: str, number: int, body_bytes: int, rng: random.Random) -> list[RolloutGroup]:
    """GROUPS_PER_BODY groups whose body has `body_bytes` within one percent; `number` tells rounds apart."""
    tokens = body_bytes // 8
    for _ in range(8):
        groups = [_group(author, number, index, tokens // GROUPS_PER_BODY, rng) for index in range(GROUPS_PER_BODY)]
        size = len(encode_body(groups))
        if abs(size - body_bytes) <= _SIZE_TOLERANCE * body_bytes:
            break
        tokens = round(tokens * body_bytes / size)
    return groups


def _group(author: str, number: int, index: int, tokens: int, rng: random.Random) -> RolloutGroup:
    group_size = max(4, round(tokens / _TOKENS_PER_ANSWER))
    lengths = [tokens // group_size + (place < tokens % group_size) for place in range(group_size)]
    rollouts = tuple(_rollout(length, rng) for length in lengths)
    task = TaskRef(_SOURCE, _CONFIG_DIGEST, FIRST_TRAINING_SEED, (number * GROUPS_PER_BODY + index) % 2**20)
    return RolloutGroup(task, _PROMPT_DIGEST, rollouts, author, LINEAGE, policy_version=number)


def _rollout(length: int, rng: random.Random) -> Rollout:
    table = words()
    ids = (*(rng.randrange(1, _VOCABULARY_SIZE) for _ in range(max(1, length - 1))), _EOS)
    text = "".join(map(table.__getitem__, ids))
    logprobs = tuple(-rng.expovariate(1.0) for _ in ids)
    return Rollout(text, ids, logprobs, finished=True, reward=_reward(text))


def _reward(text: str) -> float:
    return text.count("e") / len(text)

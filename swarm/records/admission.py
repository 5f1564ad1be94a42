"""The one door into the experience pool.

    index entry → header checks → (pull the body) → body checks → groups with recomputed rewards

Checks run cheap ones first, each with a reason of its own. Nothing a peer sends raises anything but InvalidRecord here,
and what is remembered about peers is bounded.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from swarm.config import SharingSection
from swarm.observability.tracing import traced
from swarm.records.codec import body_hash, decode_body
from swarm.records.copies import CopyWatch
from swarm.records.header_admission import HeaderAdmission
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import Header, Lineage, RolloutGroup, TaskRef

REWARD_TOLERANCE = 1e-4


class TaskJudge(Protocol):
    """Rebuilds tasks from references and recomputes rewards; both raise InvalidRecord."""

    def check_known(self, ref: TaskRef) -> None:
        """Raises InvalidRecord with UNKNOWN_TASK or HELD_OUT_TASK."""
        ...

    def rewards(self, group: RolloutGroup) -> tuple[float, ...]:
        """[G] recomputed rewards. Raises InvalidRecord with TASK_MISMATCH, TASK_FAILED or TOO_SLOW."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What admission needs of the own tokenizer to check token ids of the same tokenizer."""

    lineage: Lineage
    size: int
    eos_token_ids: frozenset[int]
    decode: Callable[[tuple[int, ...]], str]


class Admission(HeaderAdmission):
    """Header and body checks of one node."""

    def __init__(
        self,
        config: SharingSection,
        swarm_id: str,
        own_peer_id: str,
        judge: TaskJudge,
        vocabulary: Vocabulary,
        clock: Callable[[], float],
        copies: CopyWatch | None = None,
    ) -> None:
        """`copies`: knows the groups of others by their answers, and the own ones; without it nothing is a copy."""
        super().__init__(config, swarm_id, own_peer_id, judge.check_known, clock)
        self._judge = judge
        self._vocabulary = vocabulary
        self._copies = copies

    @traced("admit", lambda groups, _, header, *__: {"author": header.author, "groups": len(groups)})
    def admit_body(self, header: Header, body: bytes) -> tuple[RolloutGroup, ...]:
        """The groups of the body with recomputed rewards, without those that others have sent before.

        One false claim turns the whole body away.
        """
        if len(body) != header.body_bytes:
            raise InvalidRecord(Rejection.WRONG_HASH, f"{len(body)} bytes, announced {header.body_bytes}")
        if body_hash(body) != header.body_hash:
            raise InvalidRecord(Rejection.WRONG_HASH)
        groups = decode_body(body, header.author, header.lineage, header.policy_version)
        self._check_matches_header(header, groups)
        admitted = tuple(self._admit_group(group) for group in groups)
        return admitted if self._copies is None else self._copies.take(admitted)

    def _admit_group(self, group: RolloutGroup) -> RolloutGroup:
        if len(group.rollouts) > self._config.max_group_size:
            raise InvalidRecord(Rejection.OVERSIZE, f"{len(group.rollouts)} rollouts > {self._config.max_group_size}")
        for rollout in group.rollouts:
            self._check_tokens(group.lineage, rollout.token_ids, rollout.text, rollout.finished)
        rewards = self._judge.rewards(group)
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            if abs(rollout.reward - reward) > REWARD_TOLERANCE:
                raise InvalidRecord(Rejection.REWARD_MISMATCH, f"claims {rollout.reward:.4f}, is {reward:.4f}")
        rollouts = tuple(replace(r, reward=reward) for r, reward in zip(group.rollouts, rewards, strict=True))
        return replace(group, rollouts=rollouts)

    @staticmethod
    def _check_matches_header(header: Header, groups: tuple[RolloutGroup, ...]) -> None:
        if len(groups) != len(header.groups):
            raise InvalidRecord(Rejection.HEADER_MISMATCH, f"{len(groups)} groups, announced {len(header.groups)}")
        for summary, group in zip(header.groups, groups, strict=True):
            announced = (summary.task, summary.num_rollouts)
            if announced != (group.task, len(group.rollouts)) or abs(summary.mean_reward - group.mean_reward) > 1e-3:
                raise InvalidRecord(Rejection.HEADER_MISMATCH, "task, count or mean reward differ")

    def _check_tokens(self, lineage: Lineage, ids: tuple[int, ...], text: str, finished: bool) -> None:
        """Same tokenizer: the ids must spell the text, else a right answer could carry poisoned tokens."""
        if not 1 <= len(ids) <= self._config.max_answer_tokens:
            raise InvalidRecord(Rejection.TOKENS, f"{len(ids)} tokens, bound {self._config.max_answer_tokens}")
        own = self._vocabulary
        if lineage.tokenizer != own.lineage.tokenizer:
            return  # only the text is used
        if max(ids) >= own.size:
            raise InvalidRecord(Rejection.TOKENS, f"id {max(ids)} outside a vocabulary of {own.size}")
        ends = [position for position, token in enumerate(ids) if token in own.eos_token_ids]
        if ends != ([len(ids) - 1] if finished else []):
            raise InvalidRecord(Rejection.TOKENS, "EOS is not exactly where the answer ends")
        if own.decode(ids) != text:
            raise InvalidRecord(Rejection.TOKENS, "the ids do not spell the text")

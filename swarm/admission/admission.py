"""The checks that every header and body of another node passes before it reaches the experience pool.

    index entry → header checks → (pull the body) → body checks → groups with recomputed rewards

Cheap checks run first, each with a reason of its own. Whatever a peer sends, nothing but InvalidRecord is raised here, and what
is remembered about peers is bounded. `HeaderAdmission` needs neither tasks nor a model: header relays use it alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from swarm.admission.copies import CopyWatch
from swarm.config import SharingSection
from swarm.limits.bounded_maps import ExpiringKeys
from swarm.limits.token_bucket import PeerBuckets
from swarm.observability.tracing import traced
from swarm.records.codec import (
    body_hash,
    decode_body,
    decode_header,
    decode_record,
    max_text_chars,
    readable_answer_tokens,
)
from swarm.records.context import SwarmContext
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import signature_is_valid
from swarm.types import GroupSummary, Header, Lineage, Role, Rollout, RolloutGroup, TaskRef

MAX_CLOCK_SKEW_S = 10.0
"""A header from further in the future is rejected. hivemind asks for clocks within 3 s anyway."""
MAX_TIME_TO_LIVE_S = 3600.0
_MAX_REMEMBERED_BODIES = 65_536
_MAX_REMEMBERED_PEERS = 4_096


class HeaderAdmission:
    """The header checks of one node or header relay. It runs on its loop."""

    def __init__(self, config: SharingSection, context: SwarmContext, *, check_task: Callable[[TaskRef], None]) -> None:
        """`check_task` raises InvalidRecord with UNKNOWN_TASK or HELD_OUT_TASK."""
        self._config = config
        self._swarm_id = context.swarm_id
        self._own_peer_id = context.peer_id
        self._clock = context.clock
        self._check_task = check_task
        self._announced: ExpiringKeys[tuple[str, str, bytes]] = ExpiringKeys(context.clock, _MAX_REMEMBERED_BODIES)
        """(place, author, body hash)"""
        per_minute = config.max_records_per_peer_per_minute
        self._headers = PeerBuckets(per_minute / 60.0, per_minute, _MAX_REMEMBERED_PEERS)

    def admit_header(self, data: bytes, place: str = "") -> Header:
        """Decode a header and check that it is authentic, current, new, within its author's rate and about allowed tasks.

        What is new, and how many there were, is counted for each `place` by itself. Raises InvalidRecord.
        """
        record = decode_record(data)
        header = decode_header(record.payload, record.author)
        if header.swarm_id != self._swarm_id:
            raise InvalidRecord(Rejection.FOREIGN_SWARM)
        if not signature_is_valid(record, self._swarm_id):
            raise InvalidRecord(Rejection.BAD_SIGNATURE, record.author)
        if header.author == self._own_peer_id:
            raise InvalidRecord(Rejection.OWN_RECORD)
        self._check_time(header)
        self._check_new(header, place)
        self._check_rate(header.author, place)
        for group in header.groups:
            self._check_task(group.task)
        return header

    def _check_time(self, header: Header) -> None:
        now = self._clock()
        if header.expires_at <= now:
            raise InvalidRecord(Rejection.EXPIRED, f"{now - header.expires_at:.0f} s ago")
        if header.created_at > now + MAX_CLOCK_SKEW_S:
            raise InvalidRecord(Rejection.CLOCK_SKEW, f"created {header.created_at - now:.0f} s in the future")
        if header.expires_at - header.created_at > MAX_TIME_TO_LIVE_S:
            raise InvalidRecord(Rejection.CLOCK_SKEW, f"lives longer than {MAX_TIME_TO_LIVE_S:.0f} s")

    def _check_new(self, header: Header, place: str) -> None:
        """Reject a body that this author has announced before.

        Bodies are remembered by author, so that nobody can shut an author out by announcing its body first. An expired header
        is rejected anyway and need not be remembered.
        """
        key = (place, header.author, header.body_hash)
        if key in self._announced:
            raise InvalidRecord(Rejection.REPLAY)
        self._announced.add(key, header.expires_at)

    def _check_rate(self, author: str, place: str) -> None:
        """Allow one minute's headers at once, refilled evenly. An author that goes on at a higher rate gets none at all."""
        now = self._clock()
        bucket = self._headers.of(f"{author} {place}", now)
        if not bucket.try_take(1, now):
            bucket.drain()
            raise InvalidRecord(
                Rejection.RATE, f"more than {self._config.max_records_per_peer_per_minute} headers per minute"
            )


def check_answer_length(config: SharingSection, header: Header) -> None:
    """Raise InvalidRecord with TOO_LONG for a body of longer answers than this node accepts."""
    limit = readable_answer_tokens(config.max_answer_tokens)
    if header.max_answer_tokens > limit:
        raise InvalidRecord(Rejection.TOO_LONG, f"answers of up to {header.max_answer_tokens} tokens, bound {limit}")


REWARD_TOLERANCE = 1e-4
MEAN_REWARD_TOLERANCE = 1e-3


class TaskVerifier(Protocol):
    """Rebuilds tasks from references and recomputes rewards; both raise InvalidRecord."""

    def check_known(self, ref: TaskRef) -> None:
        """Raises InvalidRecord with UNKNOWN_TASK or HELD_OUT_TASK."""
        ...

    def rewards(self, group: RolloutGroup) -> tuple[float, ...]:
        """[G] recomputed rewards. Raises InvalidRecord with TASK_MISMATCH, TASK_FAILED or TOO_SLOW."""
        ...


def no_replies(task: TaskRef, text: str, role: Role, after_eos: bool) -> Sequence[int]:
    """For a node without environments: no token ids are those of a reply."""
    return ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What admission needs of the node's tokenizer to check the token ids of peers with the same tokenizer."""

    lineage: Lineage
    size: int
    eos_token_ids: frozenset[int]
    decode: Callable[[tuple[int, ...]], str]
    encode_reply: Callable[[TaskRef, str, Role, bool], Sequence[int]] = no_replies
    """(task, text, role, whether EOS stands before it) -> token ids of an environment's reply, as the policy encodes it."""


class Admission(HeaderAdmission):
    """The header and body checks of one node. Headers are checked on its loop, bodies in threads, one at a time."""

    def __init__(
        self,
        config: SharingSection,
        context: SwarmContext,
        *,
        verifier: TaskVerifier,
        vocabulary: Vocabulary,
        copies: CopyWatch | None = None,
    ) -> None:
        """`copies`: knows own and admitted groups by their answers; without it nothing counts as a copy."""
        super().__init__(config, context, check_task=verifier.check_known)
        self._verifier = verifier
        self._vocabulary = vocabulary
        self._copies = copies

    @traced("admit", lambda groups, _, header, *__: {"author": header.author, "groups": len(groups)})
    def admit_body(self, header: Header, body: bytes) -> tuple[RolloutGroup, ...]:
        """Return the groups of a body with recomputed rewards, without those that other authors sent before.

        One false claim rejects the whole body. Raises InvalidRecord.
        """
        check_answer_length(self._config, header)
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
            self._check_tokens(group, rollout)
        rewarded = zip(group.rollouts, self._verifier.rewards(group), strict=True)
        return replace(group, rollouts=tuple(_with_reward(rollout, reward) for rollout, reward in rewarded))

    @staticmethod
    def _check_matches_header(header: Header, groups: tuple[RolloutGroup, ...]) -> None:
        if len(groups) != len(header.groups):
            raise InvalidRecord(Rejection.HEADER_MISMATCH, f"{len(groups)} groups, announced {len(header.groups)}")
        if not all(map(_summarizes, header.groups, groups)):
            raise InvalidRecord(Rejection.HEADER_MISMATCH, "task, count or mean reward differ")
        longest, bound = _longest_text(groups), max_text_chars(header.max_answer_tokens)
        if longest > bound:
            raise InvalidRecord(Rejection.OVERSIZE, f"a text of {longest} characters, bound {bound}")

    def _check_tokens(self, group: RolloutGroup, rollout: Rollout) -> None:
        """With the same tokenizer, the ids must spell the texts, or else a right answer could carry poisoned tokens."""
        ids = rollout.token_ids
        if not 1 <= len(ids) <= self._config.max_answer_tokens:
            raise InvalidRecord(Rejection.TOKENS, f"{len(ids)} tokens, bound {self._config.max_answer_tokens}")
        own = self._vocabulary
        if group.lineage.tokenizer != own.lineage.tokenizer:
            return  # another tokenizer: only the text is used
        if max(ids) >= own.size:
            raise InvalidRecord(Rejection.TOKENS, f"id {max(ids)} outside a vocabulary of {own.size}")
        start = 0
        for turn in rollout.turns:
            answer = ids[start : turn.start]
            has_eos = answer[-1] in own.eos_token_ids
            self._check_answer(answer, turn.text, has_eos)
            reply = own.encode_reply(group.task, turn.reply, turn.role, has_eos)
            if tuple(reply) != ids[turn.start : turn.stop]:
                raise InvalidRecord(Rejection.TOKENS, "the ids of a reply are not those of its text")
            start = turn.stop
        self._check_answer(ids[start:], rollout.text, rollout.finished)

    def _check_answer(self, ids: tuple[int, ...], text: str, has_eos: bool) -> None:
        own = self._vocabulary
        ends = [position for position, token in enumerate(ids) if token in own.eos_token_ids]
        if ends != ([len(ids) - 1] if has_eos else []):
            raise InvalidRecord(Rejection.TOKENS, "EOS is not exactly where the answer ends")
        if own.decode(ids) != text:
            raise InvalidRecord(Rejection.TOKENS, "the ids do not spell the text")


def _longest_text(groups: tuple[RolloutGroup, ...]) -> int:
    return max(rollout.num_chars for group in groups for rollout in group.rollouts)


def _with_reward(rollout: Rollout, reward: float) -> Rollout:
    """Return the rollout with its recomputed reward. Raises InvalidRecord where it claims another one."""
    if abs(rollout.reward - reward) > REWARD_TOLERANCE:
        raise InvalidRecord(Rejection.REWARD_MISMATCH, f"claims {rollout.reward:.4f}, is {reward:.4f}")
    return replace(rollout, reward=reward)


def _summarizes(summary: GroupSummary, group: RolloutGroup) -> bool:
    """Return whether a header's summary is of this group."""
    announced = (summary.task, summary.num_rollouts)
    is_near = abs(summary.mean_reward - group.mean_reward) <= MEAN_REWARD_TOLERANCE
    return announced == (group.task, len(group.rollouts)) and is_near

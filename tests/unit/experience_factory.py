"""Groups, headers, a verifier and the parts of a node's sharing, for tests of what crosses the wire."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarm.admission.admission import Admission, Vocabulary
from swarm.config import SharingSection
from swarm.network.context import NodeContext
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.codec import body_hash, encode_body, encode_header, encode_record
from swarm.records.context import SwarmContext
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import sign_record
from swarm.sharing.inbox import Inbox
from swarm.sharing.parts import GroupObserver, NoObserver, SharingParts, make_sharing_parts
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.totals import SharingPause, SharingTotals
from swarm.types import GroupSummary, Header, Lineage, Rollout, RolloutGroup, TaskRef

SWARM_ID = "ab" * 16
NOW = 1_800_000_000.0
LINEAGE = Lineage("11" * 16, "22" * 16)
EOS = 1
ALICE = Identity(b"a" * 32)
MALLORY = Identity(b"m" * 32)
READER = Identity(b"r" * 32)
REASONS_OF_FLIPPED_BYTES = {"bad_signature", "malformed", "wrong_slot", "version", "foreign_swarm", "clock_skew"}
"""What a record may be refused for whose bytes changed on the way: its fields are checked before its signature."""


def ids_of(text: str, finished: bool = True) -> tuple[int, ...]:
    """The tests' tokenizer: one token per letter, 10 and up."""
    return tuple(10 + ord(letter) - ord("a") for letter in text) + ((EOS,) if finished else ())


def decode(ids: tuple[int, ...]) -> str:
    return "".join(chr(token - 10 + ord("a")) for token in ids if token != EOS)


def rollout(text: str, reward: float | None = None, finished: bool = True) -> Rollout:
    ids = ids_of(text, finished)
    return Rollout(text, ids, (-0.5,) * len(ids), finished, float(text == "right") if reward is None else reward)


def group(*texts: str, index: int = 0, author: str = ALICE.peer_id, lineage: Lineage = LINEAGE) -> RolloutGroup:
    rollouts = tuple(rollout(text) for text in texts or ("right", "wrong"))
    return RolloutGroup(TaskRef("spelling", "cd" * 8, 99, index), "ef" * 8, rollouts, author, lineage, 7)


def long_group(
    num_tokens: int, num_chars: int, *, num_long: int = 8, author: str = ALICE.peer_id, index: int = 0
) -> RolloutGroup:
    """A group of `num_long` answers of another tokenizer, which hardly compress, and a right one."""
    rng = random.Random(index)

    def answer() -> Rollout:
        text = "".join(map(chr, rng.choices(range(0x4E00, 0x9FA5), k=num_chars)))  # three bytes each
        ids = tuple(rng.choices(range(152_000), k=num_tokens))
        return Rollout(text, ids, tuple(-rng.expovariate(2.0) for _ in ids), finished=False, reward=0.0)

    rollouts = (*(answer() for _ in range(num_long)), rollout("right"))
    lineage = Lineage("33" * 16, "44" * 16)
    return replace(group(index=index, author=author, lineage=lineage), rollouts=rollouts)


def header_of(groups: list[RolloutGroup], body: bytes, **changes: object) -> Header:
    fields = {
        "swarm_id": SWARM_ID,
        "author": ALICE.peer_id,
        "sequence": 3,
        "body_hash": body_hash(body),
        "body_bytes": len(body),
        "groups": tuple(GroupSummary(g.task, len(g.rollouts), g.mean_reward) for g in groups),
        "lineage": LINEAGE,
        "policy_version": 7,
        "created_at": NOW,
        "expires_at": NOW + 600,
    }
    return Header(**(fields | changes))  # type: ignore[arg-type]


def signed(header: Header, identity: Identity = ALICE, swarm_id: str = SWARM_ID) -> bytes:
    return encode_record(sign_record(identity, swarm_id, encode_header(header)))


def body_and_header(*groups: RolloutGroup) -> tuple[bytes, Header]:
    listed = list(groups) or [group()]
    body = encode_body(listed)
    return body, header_of(listed, body)


@dataclass
class SpellingVerifier:
    """Rewards the text `right`; knows one source."""

    prompt_digest: str = "ef" * 8
    judged: list[RolloutGroup] = field(default_factory=list)

    def check_known(self, ref: TaskRef) -> None:
        if ref.source != "spelling":
            raise InvalidRecord(Rejection.UNKNOWN_TASK)
        if ref.seed < 16:
            raise InvalidRecord(Rejection.HELD_OUT_TASK)

    def rewards(self, group: RolloutGroup) -> tuple[float, ...]:
        if group.prompt_digest != self.prompt_digest:
            raise InvalidRecord(Rejection.TASK_MISMATCH)
        self.judged.append(group)
        return tuple(float(rollout.text == "right") for rollout in group.rollouts)


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


def context_of(identity: Identity = READER, clock: Callable[[], float] | None = None) -> SwarmContext:
    return SwarmContext(identity, SWARM_ID, clock or Clock())


def admission(context: SwarmContext | None = None, **settings: object) -> Admission:
    """By default of READER."""
    vocabulary = Vocabulary(LINEAGE, 64, frozenset({EOS}), decode)
    config = SharingSection.model_validate(settings)
    return Admission(config, context or context_of(), verifier=SpellingVerifier(), vocabulary=vocabulary)


def sharing_parts(
    config: SharingSection,
    context: NodeContext,
    *,
    tracker: PeerTracker | None = None,
    observer: GroupObserver | None = None,
) -> SharingParts:
    """The parts of a node that shares over this transport. To be made before the transport starts."""
    tracker = tracker or PeerTracker(config, context, seen_at=context.transport.seen_at)
    return make_sharing_parts(config, context, tracker, pause=SharingPause(), observer=observer or NoObserver())


def make_inbox(
    config: SharingSection,
    clock: Callable[[], float],
    *,
    tracker: PeerTracker | None = None,
    admits: Admission | None = None,
) -> Inbox:
    """The inbox of READER."""
    context = context_of(clock=clock)
    return Inbox(
        config,
        context,
        SharingTotals(clock),
        admission=admits or admission(context, **config.model_dump()),
        pool=ExperiencePool(":memory:", config, clock),
        tracker=tracker or PeerTracker(config, context),
        rng=random.Random(0),
    )

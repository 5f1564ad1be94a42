"""Answers of another under one's own name, sent again, or alike by nature."""

import random
from dataclasses import replace

import pytest

from swarm.admission.admission import Admission, Vocabulary
from swarm.admission.copies import MIN_SURPRISE_NATS, CopyWatch
from swarm.config import SharingSection
from swarm.records.codec import encode_body
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.reputation import Reputation
from swarm.tasks.task_mixture import STREAMS_PER_PEER, owns_stream, training_seed
from swarm.types import RolloutGroup
from tests.unit.experience_factory import (
    ALICE,
    EOS,
    LINEAGE,
    MALLORY,
    READER,
    Clock,
    SpellingVerifier,
    context_of,
    decode,
    group,
    header_of,
)

ANSWERS = ("right", "wrong", "wring", "wrung")


def of(author: str, *texts: str, index: int = 0, stream_of: str = "", nats: float = 0.5) -> RolloutGroup:
    """A group on a task of its author's stream, unless another's is named; each token costs `nats`."""
    made = group(*(texts or ANSWERS), index=index, author=author)
    rollouts = tuple(replace(one, logprobs=(-nats,) * len(one.token_ids)) for one in made.rollouts)
    task = replace(made.task, seed=training_seed(stream_of or author, 3))
    return replace(made, task=task, rollouts=rollouts)


ALICE_ID, MALLORY_ID = ALICE.peer_id, MALLORY.peer_id


def reason_of(watch: CopyWatch, *groups: RolloutGroup) -> Rejection | None:
    try:
        watch.take(groups)
    except InvalidRecord as error:
        return error.reason
    return None


def test_a_stream_belongs_to_one_peer() -> None:
    own = {training_seed(ALICE_ID, number) for number in range(1000)}
    assert len(own) == STREAMS_PER_PEER
    assert all(owns_stream(ALICE_ID, seed) and not owns_stream(MALLORY_ID, seed) for seed in own)


def test_anothers_answers_to_anothers_task_are_a_copy_in_any_order_and_with_any_log_probs() -> None:
    watch = CopyWatch(owns_stream)
    assert reason_of(watch, of(ALICE_ID)) is None
    assert reason_of(watch, of(MALLORY_ID, *ANSWERS[::-1], stream_of=ALICE_ID, nats=0.0)) is Rejection.COPIED
    mixed = of(MALLORY_ID, *ANSWERS[:2], "new", "newer", stream_of=ALICE_ID)
    assert reason_of(watch, mixed) is Rejection.COPIED
    assert reason_of(watch, of(MALLORY_ID, ANSWERS[0], "a", "b", "c", stream_of=ALICE_ID)) is None


def test_own_groups_are_known_too() -> None:
    watch = CopyWatch(owns_stream)
    watch.note([of(READER.peer_id)])
    assert reason_of(watch, of(MALLORY_ID, stream_of=READER.peer_id)) is Rejection.COPIED


def test_a_copy_that_comes_before_its_original_is_held_against_the_copier() -> None:
    blamed: list[tuple[str, Rejection]] = []
    watch = CopyWatch(owns_stream, lambda author, reason: blamed.append((author, reason)))
    assert reason_of(watch, of(MALLORY_ID, stream_of=ALICE_ID)) is None
    assert reason_of(watch, of(ALICE_ID)) is None
    assert blamed == [(MALLORY_ID, Rejection.COPIED)]


def test_short_answers_to_the_same_prompt_are_alike_by_nature() -> None:
    """Two streams ask the same, as small tasks do; all answers are the same, and neither author is blamed."""
    watch = CopyWatch(owns_stream)
    assert reason_of(watch, of(ALICE_ID, index=1)) is None
    assert reason_of(watch, of(MALLORY_ID, index=2)) is None


LONG = tuple("".join(random.Random(number).choices("abcdefgh", k=30)) for number in range(4))
LONG_NATS = MIN_SURPRISE_NATS / 4 / 31 * 1.01  # 4 answers of 31 tokens


def test_what_chance_does_not_repeat_is_taken_once() -> None:
    watch = CopyWatch(owns_stream)
    assert reason_of(watch, of(ALICE_ID, *LONG, index=1, nats=LONG_NATS)) is None
    assert reason_of(watch, of(MALLORY_ID, *LONG, index=2, nats=LONG_NATS)) is Rejection.REPLAY
    assert reason_of(watch, of(READER.peer_id, *LONG, index=3, nats=LONG_NATS / 2)) is None, "the smaller claim counts"


def test_what_chance_does_not_repeat_is_a_copy_in_ones_own_stream_too() -> None:
    watch = CopyWatch(owns_stream)
    watch.note([of(READER.peer_id, *LONG, index=1, nats=LONG_NATS)])
    assert reason_of(watch, of(MALLORY_ID, *LONG, index=2, nats=LONG_NATS)) is Rejection.COPIED


@pytest.mark.parametrize("num_good", [0, 6], ids=["stranger", "known"])
def test_who_hears_an_author_and_repeats_it_first_does_not_have_it_banned(num_good: int) -> None:
    """Mallory puts Alice's answers under the same prompt of its own stream, and is read before her."""
    reputation = Reputation(21_600.0, Clock())
    watch = CopyWatch(owns_stream, reputation.refused)
    for _ in range(num_good):
        reputation.admitted(ALICE_ID)
    others = [of(ALICE_ID, "own", "words", index=index) for index in range(10, 14)]
    for index in range(8):
        texts = tuple(f"{text}{index}" for text in LONG)
        watch.take([of(MALLORY_ID, *texts, index=100 + index, nats=1.0)])
        fresh = [replace(one, task=replace(one.task, index=one.task.index + 100 * index)) for one in others]
        body = [of(ALICE_ID, *texts, index=index, nats=1.0), *fresh]
        assert watch.take(body) == tuple(fresh), "only what was sent before is left out"
        reputation.admitted(ALICE_ID)
    assert not reputation.is_banned(ALICE_ID) and reputation.is_known(ALICE_ID)
    assert reputation.trust(ALICE_ID) > 0.5 and reputation.trust(MALLORY_ID) < 0.1, (
        "both have hints, and one has shown nothing else"
    )


def test_names_that_repeat_an_author_take_no_more_than_one_hint_per_body_from_its_standing() -> None:
    """Fresh names repeat each body of Alice under the same prompts of their own streams, eight of them each time."""
    reputation = Reputation(21_600.0, Clock())
    watch = CopyWatch(owns_stream, reputation.refused)
    for index in range(8):
        texts = tuple(f"{text}{index}" for text in LONG)
        watch.take([of(ALICE_ID, *texts, index=index, nats=1.0), of(ALICE_ID, index=100 + index)])
        reputation.admitted(ALICE_ID)
        for number in range(8):
            fresh = Identity(bytes([index, number] * 16)).peer_id
            assert reason_of(watch, of(fresh, *texts, index=200, nats=1.0)) is Rejection.REPLAY
    assert reputation.is_known(ALICE_ID) and reputation.trust(ALICE_ID) > 0.5


def test_nobody_is_blamed_by_what_another_claimed() -> None:
    watch = CopyWatch(owns_stream)
    assert reason_of(watch, of(MALLORY_ID, index=2, nats=1000.0)) is None  # said to be very unlikely
    assert reason_of(watch, of(ALICE_ID, index=1)) is None


def test_who_repeats_itself_is_turned_away_but_no_liar() -> None:
    watch = CopyWatch(owns_stream)
    assert reason_of(watch, of(ALICE_ID)) is None
    assert reason_of(watch, of(ALICE_ID)) is Rejection.REPLAY
    assert reason_of(watch, of(ALICE_ID, "a", "b")) is None, "the same task with new answers"
    assert reason_of(watch, of(ALICE_ID, index=5)) is None, "and the same answers to another"


def test_a_group_counts_once_in_one_body_too() -> None:
    hints: list[tuple[str, Rejection]] = []
    watch = CopyWatch(owns_stream, lambda author, reason: hints.append((author, reason)))
    once, other = of(ALICE_ID), of(ALICE_ID, index=5)
    reordered = of(ALICE_ID, *ANSWERS[::-1])
    assert watch.take([once, other, once, reordered]) == (once, other)
    assert hints == [(ALICE_ID, Rejection.REPLAY)]


def test_memory_is_bounded() -> None:
    watch = CopyWatch(owns_stream)
    for number in range(5000):
        watch.note([replace(of(ALICE_ID, index=number), prompt_digest=f"{number:016x}")])
    for number in range(100):
        watch.note([of(ALICE_ID, index=number)])
    assert len(watch) == 4096
    assert max(len(groups) for _, groups in watch._seen.items()) == 8


def test_admission_turns_a_copied_body_away() -> None:
    vocabulary = Vocabulary(LINEAGE, 64, frozenset({EOS}), decode)
    door = Admission(
        SharingSection(),
        context_of(),
        verifier=SpellingVerifier(),
        vocabulary=vocabulary,
        copies=CopyWatch(owns_stream),
    )
    original, copy = of(ALICE_ID), of(MALLORY_ID, stream_of=ALICE_ID)
    body = encode_body([original])
    assert door.admit_body(header_of([original], body), body) == (original,)
    body = encode_body([copy])
    with pytest.raises(InvalidRecord) as caught:
        door.admit_body(header_of([copy], body, author=MALLORY_ID), body)
    assert caught.value.reason is Rejection.COPIED

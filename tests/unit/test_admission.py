"""Each check of the one door, told apart by its reason."""

from dataclasses import replace

import pytest

from swarm.admission.admission import MAX_CLOCK_SKEW_S, MAX_TIME_TO_LIVE_S, Admission
from swarm.records.codec import body_hash, encode_body
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import Header, Lineage, Rollout, RolloutGroup, TaskRef
from tests.unit.experience_factory import (
    EOS,
    MALLORY,
    NOW,
    READER,
    Clock,
    SpellingVerifier,
    admission,
    body_and_header,
    context_of,
    decode,
    group,
    header_of,
    ids_of,
    rollout,
    signed,
)


def header_reason(door: Admission, data: bytes) -> Rejection:
    with pytest.raises(InvalidRecord) as caught:
        door.admit_header(data)
    return caught.value.reason


def body_reason(*groups: RolloutGroup, header: Header | None = None, body: bytes | None = None) -> Rejection:
    made_body, made_header = body_and_header(*groups)
    with pytest.raises(InvalidRecord) as caught:
        admission().admit_body(header or made_header, made_body if body is None else body)
    return caught.value.reason


def test_honest_record_passes_and_keeps_its_rewards() -> None:
    body, header = body_and_header(group("right", "wrong", "right"))
    door = admission()
    assert door.admit_header(signed(header)) == header
    (admitted,) = door.admit_body(header, body)
    assert [r.reward for r in admitted.rollouts] == [1.0, 0.0, 1.0]


def test_forged_author_is_rejected() -> None:
    record = signed(body_and_header()[1], MALLORY)
    forged = record.replace(MALLORY.peer_id.encode(), header_of([group()], b"x").author.encode())
    assert header_reason(admission(), forged) is Rejection.BAD_SIGNATURE


def test_altered_payload_is_rejected() -> None:
    record = bytearray(signed(body_and_header()[1]))
    position = record.index(b"spelling")
    record[position] ^= 1
    assert header_reason(admission(), bytes(record)) is Rejection.BAD_SIGNATURE


def test_record_signed_for_another_swarm_is_rejected() -> None:
    _, header = body_and_header()
    assert header_reason(admission(), signed(header, swarm_id="cd" * 16)) is Rejection.BAD_SIGNATURE
    other = replace(header, swarm_id="cd" * 16)
    assert header_reason(admission(), signed(other, swarm_id="cd" * 16)) is Rejection.FOREIGN_SWARM


def test_own_record_from_elsewhere_is_rejected() -> None:
    assert header_reason(admission(), signed(body_and_header()[1], READER)) is Rejection.OWN_RECORD


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expires_at": NOW - 1}, Rejection.EXPIRED),
        ({"created_at": NOW + MAX_CLOCK_SKEW_S + 1, "expires_at": NOW + 100}, Rejection.CLOCK_SKEW),
        ({"expires_at": NOW + 10_000}, Rejection.CLOCK_SKEW),
        ({"expires_at": NOW}, Rejection.EXPIRED),
        ({"created_at": NOW - MAX_TIME_TO_LIVE_S, "expires_at": NOW + 1}, Rejection.CLOCK_SKEW),
        ({"expires_at": NOW + 1}, None),
        ({"created_at": NOW + MAX_CLOCK_SKEW_S}, None),
        ({"created_at": NOW - MAX_TIME_TO_LIVE_S + 1, "expires_at": NOW + 1}, None),
    ],
)
def test_time_is_checked(changes: dict[str, float], reason: Rejection | None) -> None:
    body, _ = body_and_header()
    header = header_of([group()], body, **changes)
    if reason is None:
        assert admission().admit_header(signed(header)) == header
    else:
        assert header_reason(admission(), signed(header)) is reason


def test_replayed_header_and_copied_body_are_rejected() -> None:
    body, header = body_and_header()
    door = admission()
    copy = replace(header, author=MALLORY.peer_id)
    door.admit_header(signed(copy, MALLORY))  # first to announce another's body
    with pytest.raises(InvalidRecord) as caught:
        door.admit_body(copy, body)
    assert caught.value.reason is Rejection.HEADER_MISMATCH
    door.admit_header(signed(header))  # does not shut the author out
    assert len(door.admit_body(header, body)) == 1
    assert header_reason(door, signed(header)) is Rejection.REPLAY


def test_bodies_are_remembered_until_they_expire() -> None:
    clock = Clock()
    door = admission(context_of(clock=clock))
    for number in range(3):
        body = encode_body([group(index=number)])
        times = {"created_at": clock.now, "expires_at": clock.now + 600}
        door.admit_header(signed(header_of([group(index=number)], body, sequence=number, **times)))
        clock.now += 301
    assert len(door._announced) == 2


def test_allowance_of_headers_refills_evenly_up_to_one_minute() -> None:
    clock = Clock()
    door = admission(context_of(clock=clock), max_records_per_peer_per_minute=120)
    numbers = iter(range(10_000))

    def num_admitted(asked: int) -> int:
        reasons = []
        for _ in range(asked):
            try:
                door.admit_header(
                    signed(header_of([group()], b"%d" % next(numbers), created_at=clock.now, expires_at=clock.now + 60))
                )
            except InvalidRecord as error:
                reasons.append(error.reason)
        assert set(reasons) <= {Rejection.RATE}
        return asked - len(reasons)

    assert num_admitted(130) == 120
    clock.now += 2.0
    assert num_admitted(10) == 4  # two per second
    clock.now += 600.0
    assert num_admitted(130) == 120


def test_rate_is_per_author_and_recovers() -> None:
    clock = Clock()
    door = admission(context_of(clock=clock), max_records_per_peer_per_minute=2)

    def fresh_header(number: int) -> bytes:
        body = encode_body([group(index=number)])
        return signed(header_of([group(index=number)], body, sequence=number))

    door.admit_header(fresh_header(0))
    door.admit_header(fresh_header(1))
    assert header_reason(door, fresh_header(2)) is Rejection.RATE
    clock.now += 31
    assert door.admit_header(fresh_header(3)).sequence == 3


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (TaskRef("secrets", "cd" * 8, 99, 0), Rejection.UNKNOWN_TASK),
        (TaskRef("spelling", "cd" * 8, 1, 0), Rejection.HELD_OUT_TASK),
    ],
)
def test_tasks_are_known_and_not_held_out(ref: TaskRef, reason: Rejection) -> None:
    _, header = body_and_header(replace(group(), task=ref))
    assert header_reason(admission(), signed(header)) is reason


def test_body_must_be_the_announced_one() -> None:
    _, header = body_and_header()
    other = encode_body([group("right", "other")])
    assert body_reason(header=header, body=other) is Rejection.WRONG_HASH
    relabelled = replace(header, body_hash=body_hash(other), body_bytes=len(other), policy_version=7)
    assert body_reason(header=relabelled, body=encode_body([group(index=5)])) is Rejection.WRONG_HASH


def test_body_must_hold_the_groups_of_its_header() -> None:
    body = encode_body([group(index=5)])
    header = header_of([group(index=4)], body)
    assert body_reason(header=header, body=body) is Rejection.HEADER_MISMATCH


@pytest.mark.parametrize(("claimed", "is_near"), [(0.001, True), (0.0011, False)])
def test_a_header_may_round_the_mean_reward(claimed: float, is_near: bool) -> None:
    body, header = body_and_header(group("wrong", "worse"))
    header = replace(header, groups=(replace(header.groups[0], mean_reward=claimed),))
    if is_near:
        assert len(admission().admit_body(header, body)) == 1
    else:
        assert body_reason(header=header, body=body) is Rejection.HEADER_MISMATCH


@pytest.mark.parametrize("num_announced", [1, 3])
def test_a_body_holds_as_many_groups_as_announced(num_announced: int) -> None:
    groups = [group(index=number) for number in range(3)]
    body = encode_body(groups[:2])
    assert body_reason(header=header_of(groups[:num_announced], body), body=body) is Rejection.HEADER_MISMATCH


def test_a_body_has_the_announced_number_of_rollouts_and_bytes() -> None:
    body, header = body_and_header()
    summary = replace(header.groups[0], num_rollouts=3)
    assert body_reason(header=replace(header, groups=(summary,)), body=body) is Rejection.HEADER_MISMATCH
    assert body_reason(header=replace(header, body_bytes=len(body) + 1), body=body) is Rejection.WRONG_HASH


@pytest.mark.parametrize(("claimed", "is_near"), [(1e-4, True), (1.1e-4, False)])
def test_a_claimed_reward_may_be_rounded_and_the_recomputed_one_counts(claimed: float, is_near: bool) -> None:
    sent = replace(group(), rollouts=(rollout("wrong", reward=claimed), rollout("worse", reward=0.0)))
    if is_near:
        body, header = body_and_header(sent)
        (admitted,) = admission().admit_body(header, body)
        assert [one.reward for one in admitted.rollouts] == [0.0, 0.0]
    else:
        assert body_reason(sent) is Rejection.REWARD_MISMATCH


def test_a_verifier_that_gives_too_few_rewards_is_a_bug_and_shortens_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpellingVerifier, "rewards", lambda self, group: (1.0,))
    body, header = body_and_header()
    with pytest.raises(ValueError, match="shorter"):
        admission().admit_body(header, body)


def test_false_reward_is_rejected() -> None:
    liar = replace(group(), rollouts=(rollout("wrong", reward=1.0), rollout("right", reward=0.0)))
    assert body_reason(liar) is Rejection.REWARD_MISMATCH


def test_right_text_over_other_tokens_is_rejected() -> None:
    poisoned = replace(rollout("right"), token_ids=ids_of("wrong"))
    assert body_reason(replace(group(), rollouts=(poisoned, rollout("wrong")))) is Rejection.TOKENS


@pytest.mark.parametrize(
    "ids",
    [(), (10_000, EOS), (27, EOS, 18, 16, 17, 29, EOS), ids_of("right", finished=False)],
    ids=["empty", "outside the vocabulary", "EOS inside", "finished without EOS"],
)
def test_token_ids_are_checked(ids: tuple[int, ...]) -> None:
    bad = replace(rollout("right"), token_ids=ids, logprobs=(-0.5,) * len(ids))
    assert body_reason(replace(group(), rollouts=(bad, rollout("wrong")))) is Rejection.TOKENS


@pytest.mark.parametrize(
    ("token", "num_tokens", "is_valid"), [(63, 4, True), (64, 4, False), (10, 8, True), (10, 9, False), (10, 1, True)]
)
def test_bounds_of_tokens_are_those_of_vocabulary_and_configuration(
    token: int, num_tokens: int, is_valid: bool
) -> None:
    """The vocabulary of the tests has 64 tokens. The answers are cut off, so none ends with EOS."""
    ids = (token,) * num_tokens
    cut = Rollout(decode(ids), ids, (-0.5,) * num_tokens, finished=False, reward=0.0)
    body, header = body_and_header(replace(group(), rollouts=(cut, rollout("wrong"))))
    door = admission(max_answer_tokens=8)
    if is_valid:
        assert len(door.admit_body(header, body)) == 1
    else:
        with pytest.raises(InvalidRecord) as caught:
            door.admit_body(header, body)
        assert caught.value.reason is Rejection.TOKENS


def test_tokens_of_another_tokenizer_are_not_looked_at() -> None:
    other = Lineage("33" * 16, "44" * 16)
    strange = replace(rollout("right"), token_ids=(4_000_000_000,) * 6, logprobs=(-1.0,) * 6)
    sent = replace(group(lineage=other), rollouts=(strange, rollout("wrong")))
    body = encode_body([sent])
    (admitted,) = admission().admit_body(header_of([sent], body, lineage=other), body)
    assert admitted.rollouts[0].reward == 1.0


def test_group_beyond_the_size_bound_is_rejected() -> None:
    body, header = body_and_header(group(*["right", "wrong"] * 3))
    with pytest.raises(InvalidRecord) as caught:
        admission(max_group_size=5).admit_body(header, body)
    assert caught.value.reason is Rejection.OVERSIZE
    assert len(admission(max_group_size=6).admit_body(header, body)[0].rollouts) == 6


def test_prompt_that_was_rebuilt_differently_is_rejected() -> None:
    assert body_reason(replace(group(), prompt_digest="00" * 8)) is Rejection.TASK_MISMATCH

"""What is sent comes back equal; what is hostile is refused with a reason and nothing else."""

import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.records.codec import (
    MAX_ANSWER_TOKENS,
    MAX_BODY_BYTES,
    MAX_GROUPS_PER_BODY,
    MAX_RECORD_BYTES,
    MAX_ROLLOUTS_PER_BODY,
    MAX_TEXT_CHARS,
    MAX_TOKENS_PER_BODY,
    MAX_UNPACKED_BODY_BYTES,
    decode_body,
    decode_header,
    decode_record,
    encode_body,
    encode_header,
    encode_record,
    fits_into_body,
    needed_answer_tokens,
    readable_answer_tokens,
)
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import BEACON_BYTES, Header, RolloutGroup, SignedRecord, Turn
from tests.unit.experience_factory import ALICE, LINEAGE, body_and_header, group, header_of, rollout, signed


def reason_of(call, *arguments) -> Rejection:
    with pytest.raises(InvalidRecord) as caught:
        call(*arguments)
    return caught.value.reason


def test_header_comes_back_equal_and_fits_into_an_index_entry() -> None:
    groups = [group(index=i) for i in range(8)]
    _, header = body_and_header(*groups)
    record = signed(header)
    assert len(record) <= 700 <= MAX_RECORD_BYTES
    envelope = decode_record(record)
    assert decode_header(envelope.payload, envelope.author) == header


def episode(*places: tuple[int, int]) -> RolloutGroup:
    """A group whose first rollout has turns with replies at these places among 12 tokens."""
    turns = tuple(Turn(f"answer {start}", "reply é", "tool", start, stop) for start, stop in places)
    one = replace(rollout("right"), token_ids=tuple(range(1, 13)), logprobs=(-0.5,) * 12, turns=turns)
    return replace(group(), rollouts=(one, rollout("wrong")))


def test_an_episode_comes_back_equal() -> None:
    sent = episode((2, 4), (5, 8))
    assert decode_body(encode_body([sent]), ALICE.peer_id, LINEAGE, 7) == (sent,)
    assert fits_into_body([sent]) and needed_answer_tokens([sent], 0) == 4096
    long = replace(sent.rollouts[0].turns[0], reply="x" * 40_000)
    sent = replace(sent, rollouts=(replace(sent.rollouts[0], turns=(long,)), sent.rollouts[1]))
    assert needed_answer_tokens([sent], 0) > 5000


@pytest.mark.parametrize(
    "places", [[(0, 2)], [(2, 2)], [(4, 2)], [(2, 12)], [(2, 5), (5, 7)], [(6, 8), (2, 4)], [(2, 99)]]
)
def test_turns_that_do_not_follow_one_another_are_malformed(places: list[tuple[int, int]]) -> None:
    body = encode_body([episode(*places)])
    assert reason_of(decode_body, body, ALICE.peer_id, LINEAGE, 7) is Rejection.MALFORMED


def test_more_turns_than_an_episode_has_are_malformed() -> None:
    turns = tuple(Turn("", "", "user", 2 * n + 1, 2 * n + 2) for n in range(64))
    one = replace(rollout("right"), token_ids=(1,) * 200, logprobs=(-0.5,) * 200, turns=turns)
    body = encode_body([replace(group(), rollouts=(one, rollout("wrong")))])
    assert reason_of(decode_body, body, ALICE.peer_id, LINEAGE, 7) is Rejection.MALFORMED


def test_body_comes_back_equal() -> None:
    groups = (group("right", "wrong"), group("a", "b", "c", index=1))
    assert decode_body(encode_body(groups), ALICE.peer_id, LINEAGE, 7) == groups


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=20), st.text(max_size=40))
def test_body_keeps_logprobs_to_half_precision_and_any_text(logprobs: list[float], text: str) -> None:
    one = replace(rollout("a"), text=text, token_ids=(5,) * len(logprobs), logprobs=tuple(logprobs))
    sent = replace(group(), rollouts=(one, rollout("b")))
    try:
        body = encode_body([sent])
    except UnicodeEncodeError:  # lone surrogates are no text
        return
    (received,) = decode_body(body, ALICE.peer_id, LINEAGE, 7)
    assert received.rollouts[0].text == text
    assert received.rollouts[0].logprobs == pytest.approx(logprobs, rel=1e-3, abs=1e-4)


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_random_bytes_raise_nothing_but_invalid_record(data: bytes) -> None:
    for decode in (decode_record, lambda b: decode_header(b, "x"), lambda b: decode_body(b, "x", LINEAGE, 0)):
        with pytest.raises(InvalidRecord):
            decode(data)


@pytest.mark.essential
@settings(max_examples=300)
@given(st.data())
def test_a_changed_field_raises_nothing_but_invalid_record(data: st.DataObject) -> None:
    fields = msgpack.unpackb(encode_header(body_and_header()[1]))
    anything = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=6,
    )
    fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(anything)
    try:
        payload = msgpack.packb(fields)
    except UnicodeEncodeError:
        return
    try:
        decode_header(payload, "x")
    except InvalidRecord:
        pass


def test_decompression_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (MAX_UNPACKED_BODY_BYTES + 1))
    assert len(bomb) < 2000
    assert reason_of(decode_body, bomb, "x", LINEAGE, 0) is Rejection.OVERSIZE


def test_frame_that_hides_its_size_is_refused() -> None:
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 100)
    assert reason_of(decode_body, hidden, "x", LINEAGE, 0) in (Rejection.OVERSIZE, Rejection.MALFORMED)


def test_bytes_after_the_frame_are_refused() -> None:
    assert reason_of(decode_body, encode_body([group()]) + b"x", ALICE.peer_id, LINEAGE, 0) is Rejection.MALFORMED


def test_deeply_nested_arrays_are_refused() -> None:
    assert reason_of(decode_header, b"\x91" * 100_000, "x") is Rejection.MALFORMED


def test_other_protocol_version_is_named() -> None:
    fields = msgpack.unpackb(encode_header(body_and_header()[1]))
    assert reason_of(decode_header, msgpack.packb([2, *fields[1:]]), "x") is Rejection.VERSION


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.1, True, "1"])
def test_reward_outside_its_range_is_refused(value: object) -> None:
    one = replace(rollout("a"), reward=value)  # type: ignore[arg-type]
    body = encode_body([replace(group(), rollouts=(one, rollout("b")))])
    assert reason_of(decode_body, body, ALICE.peer_id, LINEAGE, 0) is Rejection.MALFORMED


def packed_body(tokens: bytes, logprobs: bytes) -> bytes:
    """A body whose first answer has these bytes, which no encoder of ours would write."""
    fields = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(encode_body([group()])))
    fields[2][0][5][0][1:3] = [tokens, logprobs]
    return zstandard.ZstdCompressor(write_content_size=True).compress(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [
        (bytes(8), bytes(2)),
        (bytes(8), bytes(6)),
        (bytes(6), bytes(3)),  # not whole numbers, although as many bytes as they should be
        (bytes(8), struct.pack("<2e", -0.5, float("nan"))),
        (bytes(8), struct.pack("<2e", -0.5, float("inf"))),
        (bytes(8), struct.pack("<2e", -0.5, float("-inf"))),
        (bytes(8), struct.pack("<2e", 2e-3, -0.5)),
    ],
)
def test_bytes_that_are_no_log_probs_of_these_tokens_are_refused(tokens: bytes, logprobs: bytes) -> None:
    assert reason_of(decode_body, packed_body(tokens, logprobs), ALICE.peer_id, LINEAGE, 0) is Rejection.LOGPROBS


def test_a_log_prob_may_be_zero_very_low_or_above_zero_by_its_rounding() -> None:
    body = packed_body(bytes(12), struct.pack("<3e", 0.0, -6e4, 9e-4))
    (read,) = decode_body(body, ALICE.peer_id, LINEAGE, 0)
    assert read.rollouts[0].logprobs == pytest.approx((0.0, -6e4, 9e-4), rel=1e-3)


def test_logprobs_of_another_length_are_refused() -> None:
    one = replace(rollout("abc"), logprobs=(-0.5,))
    body = encode_body([replace(group(), rollouts=(one, rollout("b")))])
    assert reason_of(decode_body, body, ALICE.peer_id, LINEAGE, 0) is Rejection.LOGPROBS


def test_record_of_the_largest_size_is_read() -> None:
    empty = len(encode_record(SignedRecord(ALICE.peer_id, bytes(256), bytes(64)))) - 256
    largest = SignedRecord(ALICE.peer_id, bytes(MAX_RECORD_BYTES - empty), bytes(64))
    assert len(encode_record(largest)) == MAX_RECORD_BYTES and decode_record(encode_record(largest)) == largest


def test_oversize_record_is_refused() -> None:
    assert reason_of(decode_record, b"x" * (MAX_RECORD_BYTES + 1)) is Rejection.OVERSIZE


def test_header_of_too_many_groups_is_refused() -> None:
    body, _ = body_and_header()
    header = header_of([group(index=i) for i in range(13)], body)
    assert reason_of(decode_header, encode_header(header), "x") is Rejection.MALFORMED


def header_with(**changes: Any) -> Header:
    """A header with changed fields of its own, of its only group, or of the task of that group."""

    def changed(item: Any) -> Any:
        return replace(item, **{name: value for name, value in changes.items() if hasattr(item, name)})

    header = body_and_header()[1]
    (summary,) = header.groups
    groups = (replace(changed(summary), task=changed(summary.task)),)
    return changed(replace(header, groups=groups))


@pytest.mark.parametrize(
    ("field", "largest", "above"),
    [
        ("sequence", 2**48, 2**48 + 1),
        ("policy_version", 2**48, 2**48 + 1),
        ("body_bytes", 1 << 20, (1 << 20) + 1),
        ("max_answer_tokens", MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS + 1),
        ("created_at", 1e11, 1.1e11),
        ("expires_at", 1e11, 1.1e11),
        ("beacon", bytes(BEACON_BYTES), bytes(BEACON_BYTES + 1)),
        ("mean_reward", 1.0, 1.01),
        ("num_rollouts", MAX_ROLLOUTS_PER_BODY, MAX_ROLLOUTS_PER_BODY + 1),
        ("seed", 2**31 - 1, 2**31),
        ("index", 2**20 - 1, 2**20),
    ],
)
def test_header_is_read_up_to_the_largest_value_of_each_field(field: str, largest: object, above: object) -> None:
    sent = header_with(**{field: largest})
    assert decode_header(encode_header(sent), sent.author) == sent
    assert reason_of(decode_header, encode_header(header_with(**{field: above})), "x") is Rejection.MALFORMED


def test_a_header_says_how_long_answers_are_only_above_the_usual_length() -> None:
    usual, long = header_with(max_answer_tokens=4096), header_with(max_answer_tokens=4097)
    assert len(msgpack.unpackb(encode_header(usual))) == 11 and msgpack.unpackb(encode_header(usual))[0] == 1
    for beacon in (b"", bytes(BEACON_BYTES)):
        sent = replace(long, beacon=beacon, body_bytes=4097 * 256)
        assert decode_header(encode_header(sent), sent.author) == sent
        above = replace(sent, body_bytes=sent.body_bytes + 1)
        assert reason_of(decode_header, encode_header(above), "x") is Rejection.MALFORMED
    fields = msgpack.unpackb(encode_header(long))
    assert reason_of(decode_header, msgpack.packb([*fields[:11], 4096]), "x") is Rejection.MALFORMED
    assert reason_of(decode_header, msgpack.packb([101, *fields[1:11]]), "x") is Rejection.MALFORMED
    assert reason_of(decode_header, msgpack.packb([1, *fields[1:]]), "x") is Rejection.MALFORMED


@pytest.mark.parametrize(
    ("num_tokens", "num_chars", "body_bytes", "needed"),
    [
        (1, 1, 1, 4096),
        (4096, 32_768, 1 << 20, 4096),
        (4097, 1, 1, 4097),
        (1, 32_769, 1, 4097),
        (1, 1, (1 << 20) + 1, 4097),
        (16_384, 65_536, 1 << 20, 16_384),
    ],
)
def test_tokens_texts_and_the_body_decide_who_can_read_it(
    num_tokens: int, num_chars: int, body_bytes: int, needed: int
) -> None:
    assert needed_answer_tokens(sized(1, 2, num_tokens, text="a" * num_chars), body_bytes) == needed


def test_a_node_reads_the_usual_length_at_least_and_the_longest_at_most() -> None:
    limits = [readable_answer_tokens(tokens) for tokens in (1, 4096, 4097, MAX_ANSWER_TOKENS, 1 << 19)]
    assert limits == [4096, 4096, 4097, MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS]


@pytest.mark.parametrize(("field", "value"), [("body_bytes", 0), ("groups", ()), ("sequence", -1), ("num_rollouts", 1)])
def test_header_below_the_least_value_of_a_field_is_refused(field: str, value: object) -> None:
    assert reason_of(decode_header, encode_header(header_with(**{field: value})), "x") is Rejection.MALFORMED


def test_body_is_refused_by_its_size_only_above_the_limits() -> None:
    """What is as large as allowed is refused for its content, here no frame and no array."""
    assert reason_of(decode_body, bytes(MAX_BODY_BYTES), "x", LINEAGE, 0) is Rejection.MALFORMED
    assert reason_of(decode_body, bytes(MAX_BODY_BYTES + 1), "x", LINEAGE, 0) is Rejection.OVERSIZE
    unpacked = zstandard.ZstdCompressor().compress(bytes(MAX_UNPACKED_BODY_BYTES))
    assert reason_of(decode_body, unpacked, "x", LINEAGE, 0) is Rejection.MALFORMED


def sized(num_groups: int, num_rollouts: int, num_tokens: int = 1, text: str = "") -> list[RolloutGroup]:
    one = replace(rollout("a"), text=text, token_ids=(5,) * num_tokens, logprobs=(-0.5,) * num_tokens)
    return [replace(group(index=index), rollouts=(one,) * num_rollouts) for index in range(num_groups)]


@pytest.mark.parametrize(
    "groups",
    [
        sized(MAX_GROUPS_PER_BODY, MAX_ROLLOUTS_PER_BODY // MAX_GROUPS_PER_BODY),
        sized(1, MAX_ROLLOUTS_PER_BODY),
        sized(2, 2, MAX_TOKENS_PER_BODY // 4),
        sized(1, 60, text="\U0001f9a6" * 32_768),
        sized(1, 7, text="\U0001f9a6" * MAX_TEXT_CHARS),
        sized(
            1, 64, 2, text="\U0001f9a6" * 32_509
        ),  # 64 · (2 · 6 + 32 509 · 4) bytes, and 64 KiB around them, are 8 MiB
    ],
    ids=("groups", "rollouts", "tokens", "texts", "long texts", "all"),
)
def test_largest_body_is_sent_and_taken(groups: list[RolloutGroup]) -> None:
    assert fits_into_body(groups)
    assert decode_body(encode_body(groups), ALICE.peer_id, LINEAGE, 7) == tuple(groups)


@pytest.mark.parametrize(
    "groups",
    [
        sized(MAX_GROUPS_PER_BODY + 1, 2),
        sized(2, MAX_ROLLOUTS_PER_BODY // 2 + 1),
        sized(2, 2, MAX_TOKENS_PER_BODY // 4 + 1),
        sized(1, 2, text="a" * (MAX_TEXT_CHARS + 1)),
        sized(1, 65, text="\U0001f9a6" * 32_768),
        sized(1, 8, text="\U0001f9a6" * MAX_TEXT_CHARS),
    ],
    ids=("groups", "rollouts", "tokens", "text", "texts", "long texts"),
)
def test_larger_body_is_neither_sent_nor_taken(groups: list[RolloutGroup]) -> None:
    assert not fits_into_body(groups)
    refused = reason_of(decode_body, encode_body(groups), ALICE.peer_id, LINEAGE, 7)
    assert refused in (Rejection.OVERSIZE, Rejection.MALFORMED)


def test_body_is_not_sent_where_its_largest_size_would_be_above_the_limit() -> None:
    assert not fits_into_body(sized(1, 64, 3, text="a" * 32_509))
    assert not fits_into_body(sized(1, 64, 2, text="a" * 32_510))


def test_body_under_another_name_is_refused() -> None:
    assert reason_of(decode_body, encode_body([group()]), "x", LINEAGE, 0) is Rejection.HEADER_MISMATCH


@pytest.mark.parametrize("extra", [b"\xc0", b"\x90", b"x" * 100])
def test_bytes_after_the_last_item_are_refused(extra: bytes) -> None:
    packed = zstandard.ZstdDecompressor().decompress(encode_body([group()])) + extra
    body = zstandard.ZstdCompressor(write_content_size=True).compress(packed)
    assert reason_of(decode_body, body, ALICE.peer_id, LINEAGE, 0) is Rejection.MALFORMED

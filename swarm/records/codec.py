"""The wire format of records: headers and bodies as msgpack arrays, bodies compressed with zstd.

Decoders accept hostile bytes. They limit sizes before they allocate, check every type and range, and raise only
InvalidRecord. Encoders write the canonical form; what was received is never encoded again.

The msgpack of a body is read item by item. A third of a kilobyte may unpack to 8 MiB of empty arrays, and those to 550
MB of Python objects in 3 s, before anything is checked. So arrays are opened one at a time, only where the format has
one, with a limit on their length. Everything else must be a number, a text or bytes.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import zstandard

from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import (
    MAX_ARRAY_ITEMS,
    PROTOCOL_VERSION,
    Purpose,
    check_array,
    check_bool,
    check_bytes,
    check_float,
    check_int,
    check_list,
    check_text,
    check_version,
    check_versioned,
    pack,
    sign_record,
    signature_is_valid,
    unpack,
)
from swarm.types import (
    BEACON_BYTES,
    MAX_TURNS,
    USUAL_ANSWER_TOKENS,
    GroupSummary,
    Header,
    Lineage,
    Role,
    Rollout,
    RolloutGroup,
    SignedRecord,
    TaskRef,
    Turn,
    is_list,
)

MAX_ROLLOUTS_PER_BODY = 1024
MAX_TOKENS_PER_BODY = 1 << 19
"""Tokens of all rollouts together. As Python numbers they take 68 bytes each."""


class BodyReader:
    """Reads one body from the first byte to the last. Every method raises InvalidRecord for malformed content."""

    def __init__(self, packed: bytes) -> None:
        self._num_bytes = len(packed)
        self._unpacker = msgpack.Unpacker(
            raw=False, max_buffer_size=max(1, len(packed)), max_array_len=0, max_map_len=0, max_ext_len=0
        )
        self._unpacker.feed(packed)
        self._num_rollouts = 0
        self._num_tokens = 0

    def array(self, least: int, most: int) -> int:
        """Open an array of `least` to `most` items, which are read next. Returns its length."""
        length = self._next(self._unpacker.read_array_header)
        if not least <= length <= most:
            raise InvalidRecord(Rejection.MALFORMED, f"expected an array of {least} to {most}")
        return length

    def item(self) -> Any:
        """Read a number, text, bytes, boolean or nil. Arrays and maps are empty or refused."""
        return self._next(self._unpacker.unpack)

    def rollouts(self) -> int:
        """Open the array of a group's rollouts. Returns its length."""
        length = self.array(2, MAX_ROLLOUTS_PER_BODY)
        self._num_rollouts += length
        if self._num_rollouts > MAX_ROLLOUTS_PER_BODY:
            raise InvalidRecord(Rejection.OVERSIZE, f"more than {MAX_ROLLOUTS_PER_BODY} rollouts")
        return length

    def count_tokens(self, num_tokens: int) -> None:
        """Count the tokens of one more rollout, before they become numbers."""
        self._num_tokens += num_tokens
        if self._num_tokens > MAX_TOKENS_PER_BODY:
            raise InvalidRecord(Rejection.OVERSIZE, f"more than {MAX_TOKENS_PER_BODY} tokens")

    def finish(self) -> None:
        if self._unpacker.tell() != self._num_bytes:
            raise InvalidRecord(Rejection.MALFORMED, "bytes after the last item")

    def _next(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (ValueError, msgpack.UnpackException) as error:
            raise InvalidRecord(Rejection.MALFORMED, type(error).__name__) from None


MAX_RECORD_BYTES = 1024
"""A header must fit into one index entry."""
_BODY_BYTES_PER_ANSWER_TOKEN = 256
_CHARS_PER_ANSWER_TOKEN = 8
MAX_ANSWER_TOKENS = 32_768
"""Longest answers that a header may announce. A reader's own limit is `sharing.max_answer_tokens`."""
MAX_BODY_BYTES = MAX_ANSWER_TOKENS * _BODY_BYTES_PER_ANSWER_TOKEN
"""Largest body as transferred, where its header announces the longest answers; `max_body_bytes` for others."""
MAX_UNPACKED_BODY_BYTES = 8 << 20
"""Largest body after decompression."""
_MAX_BODY_FRAMING_BYTES = 64 << 10
"""Bytes of an unpacked body besides texts, token ids and log-probs: 26 per rollout, and some per group."""
_TURN_FRAMING_BYTES = 24
"""Bytes of one turn of an episode besides its texts."""
MAX_GROUPS_PER_BODY = 12
MAX_TEXT_CHARS = MAX_ANSWER_TOKENS * _CHARS_PER_ANSWER_TOKEN
"""Longest text of an answer, where its header announces the longest answers; `max_text_chars` for others."""
MAX_PEER_ID_CHARS = 64
MAX_NAME_CHARS = 64
_HEADER_FIELDS = 11
"""Number of fields, version included, without the beacon."""
_LONG_HEADER_VERSION = 101
"""The version of headers that announce longer answers than usual: version 1 with one field more. Older nodes ignore them."""


def max_body_bytes(max_answer_tokens: int) -> int:
    """Return the largest body, as transferred, of answers with so many tokens: 1 MiB up to the usual length."""
    return max(max_answer_tokens, USUAL_ANSWER_TOKENS) * _BODY_BYTES_PER_ANSWER_TOKEN


def max_text_chars(max_answer_tokens: int) -> int:
    """Return the longest text of answers with so many tokens: 32,768 characters up to the usual length."""
    return max(max_answer_tokens, USUAL_ANSWER_TOKENS) * _CHARS_PER_ANSWER_TOKEN


def needed_answer_tokens(groups: Sequence[RolloutGroup], body_bytes: int) -> int:
    """Return the `max_answer_tokens` of the header of a body: the least by which tokens, texts and body are allowed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_tokens = max((len(rollout.token_ids) for rollout in rollouts), default=0)
    num_chars = max((rollout.num_chars for rollout in rollouts), default=0)
    by_size = max(-(-num_chars // _CHARS_PER_ANSWER_TOKEN), -(-body_bytes // _BODY_BYTES_PER_ANSWER_TOKEN))
    return max(num_tokens, by_size, USUAL_ANSWER_TOKENS)


def readable_answer_tokens(max_answer_tokens: int) -> int:
    """Return the largest `max_answer_tokens` of a header that a node with this `sharing.max_answer_tokens` reads."""
    return min(max(max_answer_tokens, USUAL_ANSWER_TOKENS), MAX_ANSWER_TOKENS)


def encode_record(record: SignedRecord) -> bytes:
    return pack([record.author, record.payload, record.signature])


def decode_record(data: bytes) -> SignedRecord:
    """Decode an envelope of at most MAX_RECORD_BYTES. Does not check the signature."""
    author, payload, signature = check_array(unpack(data, max_bytes=MAX_RECORD_BYTES), 3)
    return SignedRecord(check_text(author, MAX_PEER_ID_CHARS), check_bytes(payload), check_bytes(signature, 64))


def sign_fields(identity: Identity, swarm_id: str, fields: list[Any], *, purpose: Purpose) -> bytes:
    """Return a signed record whose payload is msgpack [version, swarm id, *fields]."""
    payload = pack([PROTOCOL_VERSION, bytes.fromhex(swarm_id), *fields])
    return encode_record(sign_record(identity, swarm_id, payload, purpose=purpose))


def open_fields(data: bytes, swarm_id: str, *, num_fields: int) -> tuple[SignedRecord, list[Any]]:
    """Return the record that `sign_fields` made, and its fields, which the caller still has to check. Raises InvalidRecord.

    It does not verify the signature: that is the slowest check, so `check_signature` comes after those of the fields.
    """
    record = decode_record(data)
    named_swarm, *fields = check_versioned(unpack(record.payload), num_fields + 2)
    if check_bytes(named_swarm, 16).hex() != swarm_id:
        raise InvalidRecord(Rejection.FOREIGN_SWARM)
    return record, fields


def check_signature(record: SignedRecord, swarm_id: str, purpose: Purpose) -> None:
    """Raise InvalidRecord unless the author of the record signed it for this swarm and purpose."""
    if not signature_is_valid(record, swarm_id, purpose):
        raise InvalidRecord(Rejection.BAD_SIGNATURE)


def check_lifetime(created_at: float, expires_at: float, max_s: float) -> None:
    """Raise InvalidRecord for a record that claims a longer life than `max_s` seconds."""
    if expires_at - created_at > max_s:
        raise InvalidRecord(Rejection.CLOCK_SKEW, f"lives longer than {max_s:.0f} s")


def header_of(
    groups: Sequence[RolloutGroup],
    body: bytes,
    *,
    swarm_id: str,
    sequence: int,
    now: float,
    time_to_live_s: float,
    beacon: bytes = b"",
) -> Header:
    """Return the header that announces the body of these groups."""
    return Header(
        swarm_id=swarm_id,
        author=groups[0].author,
        sequence=sequence,
        body_hash=body_hash(body),
        body_bytes=len(body),
        groups=tuple(GroupSummary(group.task, len(group.rollouts), group.mean_reward) for group in groups),
        lineage=groups[0].lineage,
        policy_version=min(group.policy_version for group in groups),  # some may have waited for several rounds
        created_at=now,
        expires_at=now + time_to_live_s,
        beacon=beacon,
        max_answer_tokens=needed_answer_tokens(groups, len(body)),
    )


def encode_header(header: Header) -> bytes:
    """Encode the payload of a signed record. The author is in the envelope, whose signature covers this payload."""
    is_long = header.max_answer_tokens > USUAL_ANSWER_TOKENS
    return pack(
        [
            _LONG_HEADER_VERSION if is_long else PROTOCOL_VERSION,
            bytes.fromhex(header.swarm_id),
            header.sequence,
            header.body_hash,
            header.body_bytes,
            [[*_ref_fields(group.task), group.num_rollouts, group.mean_reward] for group in header.groups],
            bytes.fromhex(header.lineage.policy),
            bytes.fromhex(header.lineage.tokenizer),
            header.policy_version,
            header.created_at,
            header.expires_at,
            *([header.max_answer_tokens] if is_long else []),
            *([header.beacon] if header.beacon else []),
        ]
    )


def decode_header(payload: bytes, author: str) -> Header:
    *fields, answer_tokens, beacon = _header_fields(unpack(payload))
    swarm_id, sequence, body_hash, body_bytes, groups, policy, tokenizer, version, created_at, expires_at = fields
    return Header(
        swarm_id=check_bytes(swarm_id, 16).hex(),
        author=author,
        sequence=check_int(sequence, 0, 2**48),
        body_hash=check_bytes(body_hash, 32),
        body_bytes=check_int(body_bytes, 1, max_body_bytes(answer_tokens)),
        groups=tuple(_summary(row) for row in check_list(groups, 1, MAX_GROUPS_PER_BODY)),
        lineage=Lineage(check_bytes(policy, 16).hex(), check_bytes(tokenizer, 16).hex()),
        policy_version=check_int(version, 0, 2**48),
        created_at=check_float(created_at, 0.0, 1e11),
        expires_at=check_float(expires_at, 0.0, 1e11),
        beacon=beacon,
        max_answer_tokens=answer_tokens,
    )


def _header_fields(value: Any) -> list[Any]:
    """Return the fields after the version. The last two, checked, are the length of answers and the beacon, or empty."""
    is_long = is_list(value) and value[:1] == [_LONG_HEADER_VERSION]
    least = _HEADER_FIELDS + is_long
    has_beacon = is_list(value) and len(value) == least + 1
    fields = check_versioned(value, least + has_beacon, _LONG_HEADER_VERSION if is_long else PROTOCOL_VERSION)
    beacon = check_bytes(fields.pop(), BEACON_BYTES) if has_beacon else b""
    tokens = check_int(fields.pop(), USUAL_ANSWER_TOKENS + 1, MAX_ANSWER_TOKENS) if is_long else USUAL_ANSWER_TOKENS
    return [*fields, tokens, beacon]


def encode_body(groups: Sequence[RolloutGroup]) -> bytes:
    """Encode groups of one author, lineage and policy version. The author is inside, so nobody else can announce the
    body.
    """
    if any(rollout.num_given for group in groups for rollout in group.rollouts):
        raise ValueError("answers that begin with a hint must stay private, got one to send; report this")
    packed = pack([PROTOCOL_VERSION, groups[0].author, [_group_fields(group) for group in groups]])
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(packed)


def decode_body(body: bytes, author: str, lineage: Lineage, policy_version: int) -> tuple[RolloutGroup, ...]:
    """Decode groups with their claimed rewards. Token ids and log-probs are checked for shape and range only."""
    reader = BodyReader(_decompress(body))
    num_fields = reader.array(1, MAX_ARRAY_ITEMS)
    check_version(reader.item())
    if num_fields != 3:
        raise InvalidRecord(Rejection.MALFORMED, f"expected 3 fields, got {num_fields}")
    if reader.item() != author:
        raise InvalidRecord(Rejection.HEADER_MISMATCH, "the body names another author")
    num_groups = reader.array(1, MAX_GROUPS_PER_BODY)
    groups = tuple(_group(reader, author, lineage, policy_version=policy_version) for _ in range(num_groups))
    reader.finish()
    return groups


def fits_into_body(groups: Sequence[RolloutGroup]) -> bool:
    """Whether any reader accepts this many groups, rollouts, tokens and characters. `needed_answer_tokens` says which one."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    num_chars = sum(rollout.num_chars for rollout in rollouts)
    num_turns = sum(len(rollout.turns) for rollout in rollouts)
    most_bytes = 6 * num_tokens + 4 * num_chars + _MAX_BODY_FRAMING_BYTES + _TURN_FRAMING_BYTES * num_turns
    return (
        len(groups) <= MAX_GROUPS_PER_BODY
        and len(rollouts) <= MAX_ROLLOUTS_PER_BODY
        and num_tokens <= MAX_TOKENS_PER_BODY
        and all(rollout.num_chars <= MAX_TEXT_CHARS for rollout in rollouts)
        and most_bytes <= MAX_UNPACKED_BODY_BYTES
    )


def body_hash(body: bytes) -> bytes:
    """Return the SHA-256 of a body as transferred, which is its address."""
    return hashlib.sha256(body).digest()


def _ref_fields(ref: TaskRef) -> list[Any]:
    return [ref.source, bytes.fromhex(ref.config_digest), ref.seed, ref.index]


def _group_fields(group: RolloutGroup) -> list[Any]:
    rollouts = [
        [
            rollout.text,
            np.asarray(rollout.token_ids, dtype="<u4").tobytes(),  # [T]
            np.clip(rollout.logprobs, -6e4, 0.0).astype("<f2").tobytes(),  # [T]; half precision, finite
            rollout.finished,
            rollout.reward,
            *([[_turn_fields(turn) for turn in rollout.turns]] if rollout.turns else []),
        ]
        for rollout in group.rollouts
    ]
    return [*_ref_fields(group.task), bytes.fromhex(group.prompt_digest), rollouts]


def _turn_fields(turn: Turn) -> list[Any]:
    return [turn.text, turn.reply, turn.role == "tool", turn.start, turn.stop]


def _summary(row: Any) -> GroupSummary:
    source, digest, seed, index, num_rollouts, mean_reward = check_array(row, 6)
    num_rollouts = check_int(num_rollouts, 2, MAX_ROLLOUTS_PER_BODY)
    return GroupSummary(_ref(source, digest, seed, index), num_rollouts, check_float(mean_reward, 0.0, 1.0))


def _group(reader: BodyReader, author: str, lineage: Lineage, policy_version: int) -> RolloutGroup:
    reader.array(6, 6)
    return RolloutGroup(
        task=_ref(reader.item(), reader.item(), reader.item(), reader.item()),
        prompt_digest=check_bytes(reader.item(), 8).hex(),
        rollouts=tuple(_rollout(reader) for _ in range(reader.rollouts())),
        author=author,
        lineage=lineage,
        policy_version=policy_version,
    )


def _rollout(reader: BodyReader) -> Rollout:
    num_fields = reader.array(5, 6)
    text = check_text(reader.item(), MAX_TEXT_CHARS)
    token_bytes, logprob_bytes = check_bytes(reader.item()), check_bytes(reader.item())
    finished, reward = check_bool(reader.item()), check_float(reader.item(), 0.0, 1.0)
    if len(token_bytes) % 4 or len(logprob_bytes) != len(token_bytes) // 2:
        raise InvalidRecord(
            Rejection.LOGPROBS, f"{len(logprob_bytes)} bytes of log-probs for {len(token_bytes)} of tokens"
        )
    reader.count_tokens(len(token_bytes) // 4)
    values = np.frombuffer(logprob_bytes, dtype="<f2").astype(np.float32)  # [T]
    if not np.all((values <= 1e-3) & (values > -np.inf)):  # NaN fails both
        raise InvalidRecord(Rejection.LOGPROBS, "a log-prob is positive, infinite or not a number")
    return Rollout(
        text=text,
        token_ids=tuple(np.frombuffer(token_bytes, dtype="<u4").tolist()),
        logprobs=tuple(values.tolist()),
        finished=finished,
        reward=reward,
        turns=_turns(reader, len(values)) if num_fields == 6 else (),
    )


def _turns(reader: BodyReader, num_tokens: int) -> tuple[Turn, ...]:
    """Read the turns of an episode, in which each answer and each reply has a token at least."""
    turns: list[Turn] = []
    stop = 0
    for _ in range(reader.array(1, MAX_TURNS - 1)):
        reader.array(5, 5)
        text, reply = check_text(reader.item(), MAX_TEXT_CHARS), check_text(reader.item(), MAX_TEXT_CHARS)
        role: Role = "tool" if check_bool(reader.item()) else "user"
        start = check_int(reader.item(), stop + 1, num_tokens - 2)
        stop = check_int(reader.item(), start + 1, num_tokens - 1)
        turns.append(Turn(text, reply, role, start, stop))
    return tuple(turns)


def _ref(source: Any, digest: Any, seed: Any, index: Any) -> TaskRef:
    return TaskRef(
        source=check_text(source, MAX_NAME_CHARS),
        config_digest=check_bytes(digest, 8).hex(),
        seed=check_int(seed, 0, 2**31 - 1),
        index=check_int(index, 0, 2**20 - 1),
    )


def _decompress(body: bytes) -> bytes:
    """Decompress a frame, which must state its size: zstandard allocates what the frame claims, whatever limit it is
    given.
    """
    if len(body) > MAX_BODY_BYTES:
        raise InvalidRecord(Rejection.OVERSIZE, f"{len(body)} bytes > {MAX_BODY_BYTES}")
    try:
        parameters = zstandard.get_frame_parameters(body)
        if parameters.content_size > MAX_UNPACKED_BODY_BYTES:  # an unstated size reads as 2**64 - 1
            raise InvalidRecord(
                Rejection.OVERSIZE, f"claims {parameters.content_size} bytes > {MAX_UNPACKED_BODY_BYTES}"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_UNPACKED_BODY_BYTES)
        return decompressor.decompress(body, max_output_size=MAX_UNPACKED_BODY_BYTES, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidRecord(Rejection.MALFORMED, str(error)) from None

"""Bytes on the wire: headers and bodies as msgpack arrays, bodies zstd-compressed.

Decoders take hostile bytes. They bound size before they allocate, check every type and range, and raise nothing but
InvalidRecord. Encoders write the canonical form; what was received is never encoded again.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import zstandard

from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import GroupSummary, Header, Lineage, Rollout, RolloutGroup, SignedRecord, TaskRef

PROTOCOL_VERSION = 1
MAX_RECORD_BYTES = 1024
"""A header must fit into one index entry."""
MAX_BODY_BYTES = 1 << 20
"""Largest body as transferred."""
MAX_UNPACKED_BODY_BYTES = 8 << 20
"""Largest body after decompression."""
MAX_GROUPS_PER_BODY = 12
MAX_TEXT_CHARS = 32_768
MAX_PEER_ID_CHARS = 64
MAX_NAME_CHARS = 64


def encode_record(record: SignedRecord) -> bytes:
    return _pack([record.author, record.payload, record.signature])


def decode_record(data: bytes) -> SignedRecord:
    """Envelope of at most MAX_RECORD_BYTES. Says nothing about the signature."""
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidRecord(Rejection.OVERSIZE, f"{len(data)} bytes > {MAX_RECORD_BYTES}")
    author, payload, signature = _array(_unpack(data), 3)
    return SignedRecord(_text(author, MAX_PEER_ID_CHARS), _bytes(payload), _bytes(signature, 64))


def encode_header(header: Header) -> bytes:
    """Payload of a signed record; the author is in the envelope, bound by its signature."""
    return _pack(
        [
            PROTOCOL_VERSION,
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
        ]
    )


def decode_header(payload: bytes, author: str) -> Header:
    fields = _versioned(_unpack(payload), 11)
    swarm_id, sequence, body_hash, body_bytes, groups, policy, tokenizer, version, created_at, expires_at = fields
    return Header(
        swarm_id=_bytes(swarm_id, 16).hex(),
        author=author,
        sequence=_int(sequence, 0, 2**48),
        body_hash=_bytes(body_hash, 32),
        body_bytes=_int(body_bytes, 1, MAX_BODY_BYTES),
        groups=tuple(_summary(row) for row in _list(groups, 1, MAX_GROUPS_PER_BODY)),
        lineage=Lineage(_bytes(policy, 16).hex(), _bytes(tokenizer, 16).hex()),
        policy_version=_int(version, 0, 2**48),
        created_at=_float(created_at, 0.0, 1e11),
        expires_at=_float(expires_at, 0.0, 1e11),
    )


def encode_body(groups: Sequence[RolloutGroup]) -> bytes:
    """Groups of one author, lineage and policy version. The author is inside, so that nobody can announce it as their own."""
    packed = _pack([PROTOCOL_VERSION, groups[0].author, [_group_fields(group) for group in groups]])
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(packed)


def decode_body(body: bytes, author: str, lineage: Lineage, policy_version: int) -> tuple[RolloutGroup, ...]:
    """Groups with their claimed rewards; token ids and log-probs are checked for shape and range only."""
    _, named_author, groups = _array(_check_version(_unpack(_decompress(body))), 3)
    if named_author != author:
        raise InvalidRecord(Rejection.HEADER_MISMATCH, "the body names another author")
    return tuple(_group(row, author, lineage, policy_version) for row in _list(groups, 1, MAX_GROUPS_PER_BODY))


def body_hash(body: bytes) -> bytes:
    """SHA-256 of a body as transferred: its address."""
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
        ]
        for rollout in group.rollouts
    ]
    return [*_ref_fields(group.task), bytes.fromhex(group.prompt_digest), rollouts]


def _summary(row: Any) -> GroupSummary:
    source, digest, seed, index, num_rollouts, mean_reward = _array(row, 6)
    return GroupSummary(_ref(source, digest, seed, index), _int(num_rollouts, 2, 1024), _float(mean_reward, 0.0, 1.0))


def _group(row: Any, author: str, lineage: Lineage, policy_version: int) -> RolloutGroup:
    source, digest, seed, index, prompt_digest, rollouts = _array(row, 6)
    return RolloutGroup(
        task=_ref(source, digest, seed, index),
        prompt_digest=_bytes(prompt_digest, 8).hex(),
        rollouts=tuple(_rollout(item) for item in _list(rollouts, 2, 1024)),
        author=author,
        lineage=lineage,
        policy_version=policy_version,
    )


def _rollout(row: Any) -> Rollout:
    text, token_ids, logprobs, finished, reward = _array(row, 5)
    token_bytes, logprob_bytes = _bytes(token_ids), _bytes(logprobs)
    if len(token_bytes) % 4 or len(logprob_bytes) != len(token_bytes) // 2:
        raise InvalidRecord(
            Rejection.LOGPROBS, f"{len(logprob_bytes)} bytes of log-probs for {len(token_bytes)} of tokens"
        )
    values = np.frombuffer(logprob_bytes, dtype="<f2").astype(np.float32)  # [T]
    if values.size and not bool(np.all((values <= 1e-3) & (values > -np.inf))):  # NaN fails both
        raise InvalidRecord(Rejection.LOGPROBS, "a log-prob is positive, infinite or not a number")
    if not isinstance(finished, bool):
        raise InvalidRecord(Rejection.MALFORMED, "finished is no boolean")
    return Rollout(
        text=_text(text, MAX_TEXT_CHARS),
        token_ids=tuple(np.frombuffer(token_bytes, dtype="<u4").tolist()),
        logprobs=tuple(values.tolist()),
        finished=finished,
        reward=_float(reward, 0.0, 1.0),
    )


def _ref(source: Any, digest: Any, seed: Any, index: Any) -> TaskRef:
    return TaskRef(
        _text(source, MAX_NAME_CHARS), _bytes(digest, 8).hex(), _int(seed, 0, 2**31 - 1), _int(index, 0, 2**20 - 1)
    )


def _decompress(body: bytes) -> bytes:
    """The frame must state its size: zstandard allocates what the frame claims, whatever limit it is given."""
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


def _pack(fields: list[Any]) -> bytes:
    packed = msgpack.packb(fields)
    assert packed is not None, "only a streaming packer returns None"
    return packed


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise InvalidRecord(Rejection.MALFORMED, type(error).__name__) from None


def _check_version(fields: Any) -> Any:
    if not isinstance(fields, list) or not fields:
        raise InvalidRecord(Rejection.MALFORMED, "no array")
    if fields[0] != PROTOCOL_VERSION:
        raise InvalidRecord(Rejection.VERSION, f"got {str(fields[0])[:20]}, this node speaks {PROTOCOL_VERSION}")
    return fields


def _versioned(fields: Any, length: int) -> list[Any]:
    return _array(_check_version(fields), length)[1:]


def _array(value: Any, length: int) -> list[Any]:
    return _list(value, length, length)


def _list(value: Any, least: int, most: int) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise InvalidRecord(Rejection.MALFORMED, f"expected an array of {least} to {most}")
    return value


def _bytes(value: Any, length: int | None = None) -> bytes:
    if not isinstance(value, bytes) or (length is not None and len(value) != length):
        raise InvalidRecord(Rejection.MALFORMED, f"expected {'some' if length is None else length} bytes")
    return value


def _text(value: Any, max_chars: int) -> str:
    if not isinstance(value, str) or len(value) > max_chars:
        raise InvalidRecord(Rejection.MALFORMED, f"expected text of at most {max_chars} characters")
    return value


def _int(value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRecord(Rejection.MALFORMED, f"expected an integer from {least} to {most}")
    return value


def _float(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRecord(Rejection.MALFORMED, "expected a number")
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidRecord(Rejection.MALFORMED, f"expected a number from {least} to {most}")
    return float(value)

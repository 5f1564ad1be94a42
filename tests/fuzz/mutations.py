"""Ways to spoil a valid encoding, on the level of bytes and of msgpack. Everything follows from the `rng`."""

import random
from typing import Any

import msgpack
import zstandard

_EDGES = (0, 1, 15, 16, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_NUMBERS = (*_EDGES, *(-edge for edge in _EDGES if edge <= 2**63), float("nan"), float("inf"), -0.0, 1e308, 5e-324, 1.5)
_TEXTS = ("", "\0", "\n", "٣", "é", "𝟙", "a" * 70, "12D3KooW", "e\u0301", "\u202e", "/", "0.0", "\U0010ffff")
_RAW = (
    b"\xc1",  # never used
    b"\xdd\xff\xff\xff\xff",  # array of 4 G items
    b"\xdf\xff\xff\xff\xff",  # map of as many
    b"\xc6\xff\xff\xff\xff",  # bytes of as many
    b"\xdb\xff\xff\xff\xff",  # text of as many
    b"\x91" * 600,  # deeper than the parser goes
    b"\xdc\x04\x00" + b"\x90" * 1024,
    b"\xd6\xff\xff\xff\xff\xff",  # timestamp
    b"\xc7\x0c\xff" + b"\xff" * 12,  # timestamp out of range
    b"\xc7\x00\x40",  # empty extension: a tuple of hivemind
    b"\xd5\x50\x90\x90",  # extension: a dictionary of hivemind
    b"\xa2\xff\xfe",  # text that is no UTF-8
    b"\xa3\xed\xa0\x80",  # a lone surrogate
    b"\x82\xa1a\x01\xa1a\x02",  # one key twice
    b"\x81\x90\x01",  # an array as a key
    b"\xca\x7f\xc0\x00\x00",  # float32 infinity
)
MAX_BYTES = 1 << 20


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One to four mutations of `data`, with parts of `other`."""
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(_MUTATIONS)(data, other, rng)[:MAX_BYTES]
    return data


def mutate_body(body: bytes, other: bytes, rng: random.Random) -> bytes:
    """A zstd frame spoiled inside, outside, or followed by another."""
    kind = rng.randrange(4)
    if kind == 0:
        return mutate(body, other, rng)
    decompressor = zstandard.ZstdDecompressor()
    try:
        if zstandard.get_frame_parameters(body).content_size > MAX_BYTES:  # as much as that would be allocated
            return mutate(body, other, rng)
        inside = decompressor.decompress(body)
    except zstandard.ZstdError:  # spoiled before
        return mutate(body, other, rng)
    packed = mutate(inside, decompressor.decompress(other), rng)
    frame = zstandard.ZstdCompressor(write_content_size=kind != 3).compress(packed)
    if kind == 2:
        skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"junk"
        return rng.choice((skippable + frame, frame + skippable, frame + other, frame * 2, skippable))
    return frame


def _flip(data: bytes, other: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_byte(data: bytes, other: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(data) + 1)
    return (
        data[:position] + bytes([rng.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xDD, 0xFF))]) + data[position + 1 :]
    )


def _truncate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _splice(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _repeat(data: bytes, other: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = rng.randint(start, min(len(data), start + 64))
    return data[:end] + data[start:end] * rng.choice((1, 2, 16, 300)) + data[end:]


def _insert_raw(data: bytes, other: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(data) + 1)
    return data[:position] + rng.choice(_RAW) + data[position + rng.choice((0, 1)) :]


def _change_structure(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Valid msgpack with one value, at any depth, exchanged for another, of another type as a rule."""
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
        return _packed(_exchanged(value, rng, depth=0))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return _flip(data, other, rng)


def _exchanged(value: Any, rng: random.Random, depth: int) -> Any:
    if isinstance(value, bytes) and rng.random() < 0.5:  # a payload inside an envelope is msgpack again
        try:
            inner = msgpack.unpackb(value)
        except (ValueError, msgpack.UnpackException):
            inner = None
        if isinstance(inner, list):
            return _packed(_exchanged(inner, rng, depth + 1))
    if isinstance(value, list) and value and (depth == 0 or rng.random() < 0.7):
        changed, position = list(value), rng.randrange(len(value))
        kind = rng.randrange(10)
        if kind == 0:
            del changed[position]
        elif kind == 1:
            changed.insert(position, changed[position])
        elif kind == 2:
            changed[position], changed[0] = changed[0], changed[position]
        else:
            changed[position] = _exchanged(changed[position], rng, depth + 1)
        return changed
    return _other_value(value, rng)


def _other_value(value: Any, rng: random.Random) -> Any:
    size = len(value) if isinstance(value, bytes | str) else 4
    return rng.choice(
        (
            rng.choice(_NUMBERS),
            rng.choice(_NUMBERS),
            rng.choice(_TEXTS),
            rng.randbytes(size),
            rng.randbytes(rng.randrange(70)),
            rng.choice((None, True, False, [], {}, [[]], {"a": 1}, [value] * 3)),
            msgpack.ExtType(rng.randrange(128), rng.randbytes(rng.randrange(9))),
            value * 2 if isinstance(value, bytes | str) else value,
        )
    )


def _packed(value: Any) -> bytes:
    return msgpack.packb(value, unicode_errors="surrogatepass") or b""


_MUTATIONS = (
    _flip,
    _set_byte,
    _truncate,
    _splice,
    _repeat,
    _insert_raw,
    _change_structure,
    _change_structure,
    _change_structure,
)

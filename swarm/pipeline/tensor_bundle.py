"""The wire format of commands and replies between machines: a few fields and tensors as bytes.

    bundle = head length (u32) · msgpack [fields, [[name, kind, [size, …]], …]] · the bytes of all tensors, in order

| kind | what | bytes |
|---|---|---|
| `f4`, `i8` | float32, int64, exactly | little-endian numbers |
| `fp32`, `bf16`, `int8` | hidden states and their gradients | an activation, see below |

Sizes are checked against the received bytes before anything is allocated, so a bundle takes no more memory than its bytes.
A head has at most MAX_HEAD_BYTES.

An activation is a head of 16 bytes followed by little-endian numbers:

    head = "SA", version, precision, then three sizes of 4 bytes; missing leading dimensions have size 1

| precision | bytes of a row of W values | error of a value x |
|---|---|---|
| `fp32` | 4·W | none |
| `bf16` | 2·W | at most 2⁻⁸·|x| |
| `int8` | 4 + W: a float32 scale, then a byte per value | at most (row's largest |x|) / 254 |

Rounding in float32 adds a millionth of the row's largest |x|, and subnormal numbers add 1e-35. A row holds the values of one
token, so its scale does not depend on other tokens. In large models a few channels are hundreds of times larger than the
rest, which int8 then represents with few levels: use int8 for slow connections and bf16 otherwise.

Both sides refuse NaN and infinity, so a stage that diverges is noticed at that stage and not three machines later.
"""

import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgpack
import numpy as np
import torch
from torch import Tensor

from swarm.errors import PipelineError

WirePrecision = Literal["fp32", "bf16", "int8"]

_HEAD = struct.Struct("<2sBB3I")
_MAGIC, _VERSION = b"SA", 1
_CODES: dict[str, int] = {"fp32": 0, "bf16": 1, "int8": 2}
_LEVELS = 127
_SMALLEST_SCALE = 1.2e-38
"""Rows with a smaller scale, which would be subnormal, are sent as zeros."""
_LARGEST = float(np.finfo(np.float32).max)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. Nine times faster on a CPU than `torch.isfinite`, and NaN spreads to the largest."""
    return tensor.abs().max().item() <= _LARGEST


def encoded_bytes(shape: tuple[int, ...], precision: WirePrecision) -> int:
    """Return the number of bytes of any tensor of this shape."""
    blocks, rows, width = _three(shape)
    return _HEAD.size + blocks * rows * _row_bytes(width, precision)


def encode_activation(tensor: Tensor, precision: WirePrecision) -> bytes:
    """Encode a floating-point tensor of one to three dimensions. Raises PipelineError for NaN, infinity or no values."""
    values = tensor.detach().to("cpu", torch.float32).contiguous()
    if not 1 <= values.dim() <= 3 or values.numel() == 0:
        raise PipelineError(f"an activation must have one to three dimensions and values, got {tuple(values.shape)}")
    if not is_finite(values):
        raise PipelineError("an activation must be finite, got NaN or infinity; drop the batch")
    head = _HEAD.pack(_MAGIC, _VERSION, _CODES[precision], *_three(tuple(values.shape)))
    if precision == "fp32":
        return head + values.numpy().astype("<f4").tobytes()
    if precision == "bf16":
        # clamp, since rounding up must not reach infinity
        limit = torch.finfo(torch.bfloat16).max
        return head + values.clamp(-limit, limit).to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()
    scales, numbers = _quantised(values.numpy().reshape(-1, values.shape[-1]))
    return head + scales.tobytes() + numbers.tobytes()


def decode_activation(data: bytes, shape: tuple[int, ...], precision: WirePrecision) -> Tensor:
    """Decode a float32 tensor of the `shape` and precision that the receiver expects.

    The receiver knows the shape in advance (rows and columns from the command, width from the model), so the sender cannot
    decide how much memory is taken. Raises PipelineError, and nothing else, for bytes that `encode_activation` cannot give.
    """
    expected = encoded_bytes(shape, precision)
    if len(data) != expected:
        raise PipelineError(
            f"an activation of shape {shape} in {precision} must have {expected} bytes, got {len(data)}"
        )
    magic, version, code, *sizes = _HEAD.unpack_from(data)
    if (magic, version, code) != (_MAGIC, _VERSION, _CODES[precision]) or tuple(sizes) != _three(shape):
        raise PipelineError(f"an activation must announce {precision} and shape {shape}, got another head")
    body = memoryview(data)[_HEAD.size :]
    if precision == "fp32":
        values = np.frombuffer(body, "<f4").astype(np.float32)
    elif precision == "bf16":
        values = (np.frombuffer(body, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = _restored(body, shape[-1])
    if not (np.abs(values) <= _LARGEST).all():  # also false for NaN
        raise PipelineError("an activation must be finite, got NaN or infinity; drop the batch")
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(shape)


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if not 1 <= len(shape) <= 3 or min(shape) < 1 or max(shape) >= 2**32:
        raise PipelineError(f"an activation must have one to three dimensions and values, got {shape}")
    blocks, rows, width = (1,) * (3 - len(shape)) + tuple(shape)
    return blocks, rows, width


def _row_bytes(width: int, precision: WirePrecision) -> int:
    return {"fp32": 4 * width, "bf16": 2 * width, "int8": 4 + width}[precision]


def _quantised(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales [rows] and integers [rows, W] in [−127, 127]."""
    scales = (np.abs(rows).max(axis=1) / _LEVELS).astype("<f4")
    scales[scales < _SMALLEST_SCALE] = 0.0
    divisors = np.where(scales > 0, scales, np.float32(np.inf))
    return scales, np.clip(np.rint(rows / divisors[:, None]), -_LEVELS, _LEVELS).astype(np.int8)


def _restored(body: memoryview, width: int) -> np.ndarray:
    """Return float32 values [rows, W]."""
    num_rows = len(body) // (4 + width)
    scales = np.frombuffer(body[: 4 * num_rows], "<f4")
    numbers = np.frombuffer(body[4 * num_rows :], np.int8).reshape(num_rows, width)
    # the encoder may round its largest scale up by one step
    if not ((scales >= 0) & (scales <= _LARGEST / _LEVELS * (1 + 1e-6))).all() or numbers.min() < -_LEVELS:
        raise PipelineError("an activation must have scales of at least 0 and numbers within ±127; drop the batch")
    # float64, because 127 times the largest scale may exceed float32 by that step
    return np.clip(numbers * scales[:, None].astype(np.float64), -_LARGEST, _LARGEST).astype(np.float32)


MAX_HEAD_BYTES = 768 << 10
"""Fits names and shapes of weights and optimizer state of 1800 parameters; unpacked it takes up to 72 times the memory."""
_LENGTH = struct.Struct(">I")
_EXACT: dict[str, tuple[str, torch.dtype]] = {"f4": ("<f4", torch.float32), "i8": ("<i8", torch.int64)}
_PRECISIONS = get_args(WirePrecision)
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Bundle:
    """The fields and tensors of one message."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Numbers, texts, None, and sequences of these, which arrive as tuples."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


def encode_bundle(bundle: Bundle, precisions: Mapping[str, WirePrecision] | None = None) -> bytes:
    """Encode tensors named in `precisions` as activations, the others exactly. Raises PipelineError for other values."""
    entries: list[list[Any]] = []
    parts: list[bytes] = []
    for name, tensor in bundle.tensors.items():
        precision = (precisions or {}).get(name)
        if precision is not None:
            kind, data = precision, encode_activation(tensor, precision)
        else:
            kind = "f4" if tensor.is_floating_point() else "i8"
            exact = tensor.detach().to("cpu", _EXACT[kind][1]).contiguous()
            data = exact.numpy().astype(_EXACT[kind][0], copy=False).tobytes()
        entries.append([name, kind, list(tensor.shape)])
        parts.append(data)
    head = msgpack.packb([bundle.fields, entries])
    assert head is not None, "only a streaming packer returns None"
    if len(head) > MAX_HEAD_BYTES:
        raise PipelineError(
            f"the head of a bundle must have at most {MAX_HEAD_BYTES} bytes, got {len(head)}; send less"
        )
    return b"".join((_LENGTH.pack(len(head)), head, *parts))


def decode_bundle(data: bytes) -> Bundle:
    """Decode a bundle. Raises PipelineError, and nothing else, for bytes that `encode_bundle` cannot give."""
    fields, entries, start = _head(data)
    view, tensors = memoryview(data), dict[str, Tensor]()
    for entry in entries:
        name, kind, shape = _entry(entry)
        length = _num_bytes(kind, shape)
        if name in tensors or start + length > len(data):
            raise PipelineError(f"a bundle must hold each tensor once and whole; {name[:64]!r} is repeated or cut off")
        part = view[start : start + length]
        if kind in _EXACT:
            numbers = np.frombuffer(part, _EXACT[kind][0]).astype(_EXACT[kind][0][1:], copy=True)
            tensors[name] = torch.from_numpy(numbers).reshape(shape)
        else:
            tensors[name] = decode_activation(bytes(part), shape, kind)  # type: ignore[arg-type]  # one of _PRECISIONS
        start += length
    if start != len(data):
        raise PipelineError(f"a bundle must end with its tensors, got {len(data) - start} more bytes")
    return Bundle(fields, tensors)


def _head(data: bytes) -> tuple[dict[str, Any], tuple[Any, ...], int]:
    try:
        (length,) = _LENGTH.unpack_from(data)
        stop = _LENGTH.size + length
        if length > MAX_HEAD_BYTES or stop > len(data):
            raise ValueError("the head has another length than announced")
        # tuples and a single map, because a million empty lists or maps would occupy the garbage collector for seconds
        fields, entries = msgpack.unpackb(
            data[_LENGTH.size : stop], raw=False, use_list=False, max_ext_len=0, object_pairs_hook=_one_map()
        )
    except (struct.error, ValueError, TypeError, msgpack.UnpackException) as error:
        raise PipelineError(f"a bundle must have a valid head, got {type(error).__name__}") from None
    if (
        not isinstance(fields, dict)
        or not isinstance(entries, tuple)
        or not all(isinstance(key, str) for key in fields)
    ):
        raise PipelineError("a bundle must have fields by name and a list of tensors; the message has other types")
    return fields, entries, stop


def _one_map() -> Callable[[Sequence[tuple[Any, Any]]], dict[Any, Any]]:
    """Return a hook that builds the first map and refuses a second one: the fields are the only map."""
    num_maps = itertools.count()

    def made(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
        if next(num_maps):
            raise ValueError("the fields contain a map")
        return dict(pairs)

    return made


def _entry(entry: Any) -> tuple[str, str, tuple[int, ...]]:
    name, kind, shape = entry if isinstance(entry, tuple) and len(entry) == 3 else (None, None, None)
    is_shape = isinstance(shape, tuple) and len(shape) <= _MAX_DIMENSIONS
    if not is_shape or not all(type(size) is int and 0 < size < 2**32 for size in shape or ()):
        raise PipelineError("a tensor of a bundle must have up to four sizes, each above 0; the message has others")
    if not isinstance(name, str) or not isinstance(kind, str) or kind not in (*_EXACT, *_PRECISIONS):
        raise PipelineError("a tensor of a bundle must have a name and a known kind; the message has others")
    return name, kind, shape or ()


def _num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    if kind in _EXACT:
        return math.prod(shape) * int(_EXACT[kind][0][2])
    return encoded_bytes(shape, kind)  # type: ignore[arg-type]  # one of _PRECISIONS

"""Encodes an adapter as bytes for a partner of the same lineage: only numbers, in an order that both know.

Tensors follow each other by name. Both sides know names and shapes, so the length is known beforehand and nothing is
parsed. All numbers are little-endian.

| precision | bytes of a tensor | error of a value x |
|---|---|---|
| `bf16` | 2 per value | at most 2⁻⁸·|x| |
| `int8` | a float32 scale per row, then 1 per value | at most (row's largest |x|) / 254 |
| `int4` | a float32 scale per row, then 1 per two values | at most (row's largest |x|) / 14 |

to which rounding in float32 adds a millionth of the row's largest |x|, and subnormal numbers 1e-35. A row is a vector along the
longer side: one per unit of rank, so scales cost 4·r bytes, however large the layer is.

With an `origin`, weights that both sides have, such as the start of their lineage, only the difference from it is sent. At few
bits that matters: the start of A is far larger than what training adds to it, and the error is relative to what is sent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from swarm.errors import MergeError

Precision = Literal["bf16", "int8", "int4"]
Shapes = Mapping[str, Sequence[int]]

LARGEST_WEIGHT = 1e4
"""Adapters in use have no larger factors; larger values are refused on both sides."""

_ROUNDING = 1 + 1e-5
_LEVELS: dict[str, int] = {"int8": 127, "int4": 7}
_SMALLEST_SCALE = 1.2e-38
"""Rows whose scale would be subnormal are sent as zeros."""
_FOUR_BIT_ZERO = 8
"""Four-bit values are stored as q + 8, which is 1 … 15; 0 is refused."""


def encoded_bytes(shapes: Shapes, precision: Precision) -> int:
    """Length in bytes of every adapter of these shapes."""
    return sum(_tensor_bytes(shape, precision) for shape in shapes.values())


def encode_adapter(
    tensors: Mapping[str, Tensor], precision: Precision, origin: Mapping[str, Tensor] | None = None
) -> bytes:
    """Encode an adapter in `encoded_bytes` bytes. Raises MergeError for values that are not finite or beyond LARGEST_WEIGHT."""
    parts: list[bytes] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu", torch.float32)
        if origin is not None:
            tensor = tensor - origin[name].to(tensor)
        if not bool((tensor.abs() <= LARGEST_WEIGHT).all()):  # false for NaN as well
            raise MergeError(f"an adapter to send must be finite and at most {LARGEST_WEIGHT:g}, got more in {name}")
        if precision == "bf16":
            parts.append(tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().astype("<i2").tobytes())
        else:
            parts += _quantised(_by_rows(tensor.numpy()), _LEVELS[precision])
    return b"".join(parts)


def decode_adapter(
    data: bytes, shapes: Shapes, precision: Precision, origin: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Decode the float32 tensors of `shapes` that `encode_adapter` encoded with the same origin.

    Raises MergeError, and nothing else, for a wrong length, NaN, infinity, values beyond LARGEST_WEIGHT, negative or
    absurd scales, and numbers that `encode_adapter` never writes.
    """
    expected = encoded_bytes(shapes, precision)
    if len(data) != expected:
        raise MergeError(
            f"an adapter in {precision} must have {expected} bytes, got {len(data)}; use the same settings"
        )
    tensors: dict[str, Tensor] = {}
    for name, part in _parts(data, shapes, precision):
        shape = tuple(shapes[name])
        if precision == "bf16":
            values = (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        else:
            values = _from_rows(_restored(part, _row_shape(shape), _LEVELS[precision], name), shape)
        if not (np.abs(values) <= LARGEST_WEIGHT * _ROUNDING).all():
            raise MergeError(f"a received adapter must be finite and at most {LARGEST_WEIGHT:g}, got more in {name}")
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        tensors[name] = tensor if origin is None else tensor + origin[name].to(tensor)
    return tensors


def _parts(data: bytes, shapes: Shapes, precision: Precision) -> Iterator[tuple[str, memoryview]]:
    rest = memoryview(data)
    for name in sorted(shapes):
        size = _tensor_bytes(shapes[name], precision)
        yield name, rest[:size]
        rest = rest[size:]


def _tensor_bytes(shape: Sequence[int], precision: Precision) -> int:
    num_rows, row_len = _row_shape(shape)
    if precision == "bf16":
        return 2 * num_rows * row_len
    return num_rows * (4 + (row_len if precision == "int8" else (row_len + 1) // 2))


def _row_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, values per row): rows along the longer side of a matrix, all else is one row."""
    return (min(shape), max(shape)) if len(shape) == 2 else (1, math.prod(shape))


def _by_rows(values: np.ndarray) -> np.ndarray:
    rows = values.T if values.ndim == 2 and values.shape[0] > values.shape[1] else values
    return rows.reshape(_row_shape(values.shape))


def _from_rows(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return rows.T if len(shape) == 2 and shape[0] > shape[1] else rows.reshape(shape)


def _quantised(rows: np.ndarray, levels: int) -> list[bytes]:
    """Scales [rows] and whole numbers in [−levels, levels]."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scales = (largest / levels).astype("<f4")
    scales[scales < _SMALLEST_SCALE] = 0.0
    divisors = np.where(scales > 0, scales, np.inf)
    numbers = np.clip(np.rint(rows / divisors[:, None]), -levels, levels).astype(np.int8)
    if levels == _LEVELS["int8"]:
        return [scales.tobytes(), numbers.tobytes()]
    stored = (numbers + _FOUR_BIT_ZERO).astype(np.uint8)
    if stored.shape[1] % 2:
        stored = np.pad(stored, ((0, 0), (0, 1)), constant_values=_FOUR_BIT_ZERO)
    return [scales.tobytes(), (stored[:, ::2] | stored[:, 1::2] << 4).tobytes()]


def _restored(part: memoryview, row_shape: tuple[int, int], levels: int, name: str) -> np.ndarray:
    """float32 [rows, values per row]."""
    num_rows, row_len = row_shape
    scales = np.frombuffer(part[: 4 * num_rows], "<f4")
    if not ((scales >= 0) & (scales <= LARGEST_WEIGHT / levels)).all():  # false for NaN as well
        raise MergeError(
            f"scales of a received adapter must be in [0, {LARGEST_WEIGHT / levels:g}], got others in {name}"
        )
    if levels == _LEVELS["int8"]:
        numbers = np.frombuffer(part[4 * num_rows :], np.int8).reshape(num_rows, row_len)
        is_out_of_range = numbers.min(initial=0) < -levels
    else:
        packed = np.frombuffer(part[4 * num_rows :], np.uint8).reshape(num_rows, -1)
        stored = np.stack([packed & 15, packed >> 4], axis=-1).reshape(num_rows, -1)
        is_out_of_range = stored.min(initial=1) == 0 or bool((stored[:, row_len:] != _FOUR_BIT_ZERO).any())
        numbers = stored[:, :row_len].astype(np.int8) - np.int8(_FOUR_BIT_ZERO)
    if is_out_of_range:
        raise MergeError(f"numbers of a received adapter must be within ±{levels}, got others in {name}")
    return numbers.astype(np.float32) * scales[:, None]

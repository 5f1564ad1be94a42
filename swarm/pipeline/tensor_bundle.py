"""A few fields and tensors as bytes, for orders and replies between machines.

    bundle = head length (u32) · msgpack [fields, [[name, kind, [size, …]], …]] · the tensors' bytes, one after the other

| kind | what | bytes |
|---|---|---|
| `f4`, `i8` | float32, int64, exactly | little-endian numbers |
| `fp32`, `bf16`, `int8` | hidden states and their gradients | `activation_wire` |

Sizes are checked against the bytes that are there before anything is made of them, so a bundle takes no more memory than
what was received, and a head has at most MAX_HEAD_BYTES.
"""

import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgpack
import numpy as np
import torch
from torch import Tensor

from swarm.errors import PipelineError
from swarm.pipeline.activation_wire import WirePrecision, decode_activation, encode_activation, encoded_bytes

MAX_HEAD_BYTES = 768 << 10
"""Room for names and shapes of weights and optimizer state of 1800 parameters; unpacked, at most 72 times as much memory."""
_LENGTH = struct.Struct(">I")
_EXACT: dict[str, tuple[str, torch.dtype]] = {"f4": ("<f4", torch.float32), "i8": ("<i8", torch.int64)}
_PRECISIONS = get_args(WirePrecision)
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is sent at once."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Numbers, texts, None, and sequences of those, which arrive as tuples."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


def encode_bundle(bundle: Bundle, precisions: Mapping[str, WirePrecision] | None = None) -> bytes:
    """Tensors named in `precisions` go as activations, the others exactly. Raises PipelineError for what cannot be sent."""
    entries: list[list[Any]] = []
    parts: list[bytes] = []
    for name, tensor in bundle.tensors.items():
        precision = (precisions or {}).get(name)
        if precision is not None:
            kind, data = precision, encode_activation(tensor, precision)
        else:
            kind = "f4" if tensor.is_floating_point() else "i8"
            kept = tensor.detach().to("cpu", _EXACT[kind][1]).contiguous()
            data = kept.numpy().astype(_EXACT[kind][0], copy=False).tobytes()
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
    """Raises PipelineError, and nothing else, for all that `encode_bundle` would not have made."""
    fields, entries, start = _head(data)
    view, tensors = memoryview(data), dict[str, Tensor]()
    for entry in entries:
        name, kind, shape = _entry(entry)
        length = _num_bytes(kind, shape)
        if name in tensors or start + length > len(data):
            raise PipelineError(f"a tensor of a bundle must be there once and whole, got {name[:64]!r} otherwise")
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
            raise ValueError("a head of another length than announced")
        # arrays as tuples and one map: a million empty lists or maps would keep the garbage collector busy for seconds
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
        raise PipelineError("a bundle must have fields by name and a list of tensors, got others")
    return fields, entries, stop


def _one_map() -> Callable[[Sequence[tuple[Any, Any]]], dict[Any, Any]]:
    """Makes the first map, and refuses the second: fields are the only one."""
    num_maps = itertools.count()

    def made(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
        if next(num_maps):
            raise ValueError("a map within fields")
        return dict(pairs)

    return made


def _entry(entry: Any) -> tuple[str, str, tuple[int, ...]]:
    name, kind, shape = entry if isinstance(entry, tuple) and len(entry) == 3 else (None, None, None)
    is_shape = isinstance(shape, tuple) and len(shape) <= _MAX_DIMENSIONS
    if not is_shape or not all(type(size) is int and 0 < size < 2**32 for size in shape or ()):
        raise PipelineError("a tensor of a bundle must have sizes above 0, got others")
    if not isinstance(name, str) or not isinstance(kind, str) or kind not in (*_EXACT, *_PRECISIONS):
        raise PipelineError("a tensor of a bundle must have a name and a known kind, got others")
    return name, kind, shape or ()


def _num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    if kind in _EXACT:
        return math.prod(shape) * int(_EXACT[kind][0][2])
    return encoded_bytes(shape, kind)  # type: ignore[arg-type]  # one of _PRECISIONS

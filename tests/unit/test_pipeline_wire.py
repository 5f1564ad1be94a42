"""Activations as bytes: errors within their bounds, and nothing but errors of one kind for hostile bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.errors import PipelineError
from swarm.pipeline.tensor_bundle import WirePrecision, decode_activation, encode_activation, encoded_bytes, is_finite

PRECISIONS: tuple[WirePrecision, ...] = ("fp32", "bf16", "int8")
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5)
ARRAYS = hnp.arrays(np.float32, SHAPES, elements=st.floats(allow_nan=False, allow_infinity=False, width=32))


@given(ARRAYS, st.sampled_from(PRECISIONS))
def test_errors_stay_within_the_documented_bounds(values: np.ndarray, precision: WirePrecision) -> None:
    data = encode_activation(torch.from_numpy(values), precision)
    assert len(data) == encoded_bytes(values.shape, precision)
    found = decode_activation(data, values.shape, precision)
    assert found.dtype == torch.float32
    assert tuple(found.shape) == values.shape
    error = np.abs(found.numpy().astype(np.float64) - values)
    largest = np.abs(values.astype(np.float64)).max(axis=-1, keepdims=True)
    bound = {"fp32": 0.0, "bf16": np.abs(values.astype(np.float64)) * 2**-8, "int8": largest / 254}[precision]
    slack = 0.0 if precision == "fp32" else 1e-6 * largest + 1e-35
    assert (error <= bound + slack).all()


def test_sizes_are_those_promised() -> None:
    values = torch.randn(2, 3, 64)
    sizes = {precision: len(encode_activation(values, precision)) for precision in PRECISIONS}
    assert sizes == {"fp32": 16 + 6 * 256, "bf16": 16 + 6 * 128, "int8": 16 + 6 * 68}


def test_rounding_what_was_rounded_changes_nothing() -> None:
    values = torch.randn(4, 7, 33, generator=torch.Generator().manual_seed(2)) * 3
    for precision in PRECISIONS:
        once = decode_activation(encode_activation(values, precision), (4, 7, 33), precision)
        twice = decode_activation(encode_activation(once, precision), (4, 7, 33), precision)
        torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


def test_a_row_keeps_its_own_scale() -> None:
    values = torch.tensor([[1e-6, -5e-7], [1e6, 3e5], [0.0, 0.0]])
    found = decode_activation(encode_activation(values, "int8"), (3, 2), "int8")
    torch.testing.assert_close(found, values, rtol=1e-2, atol=0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_sent(precision: WirePrecision, odd: float) -> None:
    values = torch.zeros(2, 3)
    values[1, 2] = odd
    with pytest.raises(PipelineError, match="finite"):
        encode_activation(values, precision)
    assert is_finite(torch.zeros(2)) and not any(is_finite(values.to(kind)) for kind in (torch.float32, torch.bfloat16))
    for shape in ((), (0, 3), (1, 1, 1, 1)):
        with pytest.raises(PipelineError, match="one to three dimensions"):
            encode_activation(torch.zeros(shape), precision)


def test_what_is_not_finite_is_not_received() -> None:
    patterns_of: dict[WirePrecision, tuple[int, int]] = {"fp32": (0x7FC00000, 0x7F800000), "bf16": (0x7FC0, 0xFF80)}
    for precision, patterns in patterns_of.items():
        data = bytearray(encode_activation(torch.zeros(2), precision))
        for pattern in patterns:
            size = 4 if precision == "fp32" else 2
            data[16 : 16 + size] = pattern.to_bytes(size, "little")
            with pytest.raises(PipelineError, match="finite"):
                decode_activation(bytes(data), (2,), precision)
    for scale in (float("nan"), float("inf"), -1.0, 3e38):
        data = bytearray(encode_activation(torch.ones(2), "int8"))
        data[16:20] = np.float32(scale).tobytes()
        with pytest.raises(PipelineError, match="scales"):
            decode_activation(bytes(data), (2,), "int8")
    data = bytearray(encode_activation(torch.ones(2), "int8"))
    data[20] = 0x80  # −128 is never written
    with pytest.raises(PipelineError, match="±127"):
        decode_activation(bytes(data), (2,), "int8")


@settings(max_examples=300)
@given(
    data=st.binary(max_size=200),
    has_head=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
)
def test_hostile_bytes_give_finite_tensors_or_one_kind_of_error(
    data: bytes, has_head: bool, precision: WirePrecision, shape: tuple[int, int, int]
) -> None:
    if has_head:  # past the first checks
        body = (data * 60)[: encoded_bytes(shape, precision) - 16]
        data = encode_activation(torch.zeros(shape), precision)[:16] + body
    try:
        found = decode_activation(data, shape, precision)
    except PipelineError:
        return
    assert tuple(found.shape) == shape
    assert bool(torch.isfinite(found).all())


@given(st.integers(0, 15), st.integers(1, 255))
def test_no_byte_of_the_head_may_differ(index: int, flip: int) -> None:
    data = bytearray(encode_activation(torch.ones(2, 3), "bf16"))
    data[index] ^= flip
    with pytest.raises(PipelineError, match="another head"):
        decode_activation(bytes(data), (2, 3), "bf16")


def test_lengths_and_shapes_must_be_those_expected() -> None:
    data = encode_activation(torch.ones(2, 3), "bf16")
    for odd in (data[:-1], data + b"\0", b""):
        with pytest.raises(PipelineError, match="must have 28 bytes"):
            decode_activation(odd, (2, 3), "bf16")
    for shape in ((3, 2), (2, 3, 1), (6,)):
        with pytest.raises(PipelineError):
            decode_activation(data, shape, "bf16")
    with pytest.raises(PipelineError, match="must have"):
        decode_activation(data, (2, 3), "fp32")

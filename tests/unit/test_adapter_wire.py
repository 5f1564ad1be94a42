"""Adapters as bytes: stated errors hold, lengths are known, and damaged bytes raise one error only."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from swarm.errors import MergeError
from swarm.merging.adapter_wire import LARGEST_WEIGHT, Precision, decode_adapter, encode_adapter, encoded_bytes

PRECISIONS: tuple[Precision, ...] = ("bf16", "int8", "int4")
SHAPES = {"layer.lora_B": (7, 2), "layer.lora_A": (2, 9), "other": (5,)}

values = st.floats(-LARGEST_WEIGHT, LARGEST_WEIGHT, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32)
matrices = npst.arrays(np.float32, npst.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=values)


def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@given(matrix=matrices, precision=st.sampled_from(PRECISIONS))
@settings(max_examples=100, deadline=None)
def test_error_stays_within_what_is_stated(matrix: np.ndarray, precision: Precision) -> None:
    data = encode_adapter({"w": torch.from_numpy(matrix)}, precision)
    restored = decode_adapter(data, {"w": matrix.shape}, precision)["w"].numpy().astype(np.float64)
    largest = np.abs(matrix).max(axis=int(matrix.shape[0] <= matrix.shape[1]), keepdims=True).astype(np.float64)
    bound = {"bf16": np.abs(matrix) * 2.0**-8, "int8": largest / 254, "int4": largest / 14}[precision]
    assert (np.abs(restored - matrix) <= bound + 1e-6 * largest + 1e-35).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_length_is_known_and_order_of_names_does_not_matter(precision: Precision) -> None:
    tensors = sample()
    data = encode_adapter(tensors, precision)
    assert len(data) == encoded_bytes(SHAPES, precision)
    assert encode_adapter(dict(reversed(tensors.items())), precision) == data
    restored = decode_adapter(data, SHAPES, precision)
    assert {name: tuple(tensor.shape) for name, tensor in restored.items()} == SHAPES
    assert encode_adapter(restored, precision) == data, "what was rounded once is not rounded again"


def test_layout_is_fixed() -> None:
    row = {"w": torch.tensor([[7.0, -3.5, 0.0]])}
    assert encode_adapter(row, "int4") == np.float32(1).tobytes() + bytes([15 | 4 << 4, 8 | 8 << 4])
    assert encode_adapter(row, "int8")[4:] == bytes([127, 256 - 64, 0])
    assert encode_adapter(row, "bf16") == bytes([0xE0, 0x40, 0x60, 0xC0, 0, 0])


def test_sizes_are_those_of_the_bits() -> None:
    shapes = {"q.lora_A": (16, 896), "q.lora_B": (896, 16)}
    assert [encoded_bytes(shapes, precision) for precision in PRECISIONS] == [57344, 28672 + 128, 14336 + 128]


def test_an_origin_leaves_more_precision_for_what_was_learned() -> None:
    generator = torch.Generator().manual_seed(0)
    origin = {"w": torch.randn(4, 64, generator=generator)}
    learned = 0.01 * torch.randn(4, 64, generator=generator)
    tensors = {"w": origin["w"] + learned}
    plain = decode_adapter(encode_adapter(tensors, "int4"), {"w": (4, 64)}, "int4")
    from_origin = decode_adapter(encode_adapter(tensors, "int4", origin), {"w": (4, 64)}, "int4", origin)
    assert (plain["w"] - tensors["w"]).norm() > 5 * learned.norm(), "the plain error drowns what was learned"
    assert (from_origin["w"] - tensors["w"]).norm() < 0.2 * learned.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2 * LARGEST_WEIGHT])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_own_odd_values_are_not_sent(precision: Precision, bad: float) -> None:
    with pytest.raises(MergeError, match="finite"):
        encode_adapter({"w": torch.tensor([[1.0, bad]])}, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("change", [-1, 1, -10_000])
def test_wrong_length_is_refused(precision: Precision, change: int) -> None:
    data = encode_adapter(sample(), precision)
    data = data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(MergeError, match="bytes"):
        decode_adapter(data, SHAPES, precision)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, LARGEST_WEIGHT])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_absurd_scales_are_refused(precision: Precision, scale: float) -> None:
    data = np.float32(scale).tobytes() + encode_adapter({"w": torch.ones(1, 8)}, precision)[4:]
    with pytest.raises(MergeError, match="scales"):
        decode_adapter(data, {"w": (1, 8)}, precision)


@pytest.mark.parametrize(
    ("precision", "part"),
    [("int8", b"\x80\x00\x00"), ("int4", b"\x08\x88"), ("int4", b"\x88\x18"), ("int4", b"\x80\x88")],
)
def test_numbers_that_nobody_writes_are_refused(precision: Precision, part: bytes) -> None:
    with pytest.raises(MergeError, match="numbers"):
        decode_adapter(np.float32(1).tobytes() + part, {"w": (1, 3)}, precision)


@given(data=st.data(), precision=st.sampled_from(PRECISIONS))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_usable_weights_or_the_one_error(data: st.DataObject, precision: Precision) -> None:
    length = encoded_bytes(SHAPES, precision)
    spoiled = bytearray(encode_adapter(sample(), precision))
    for _ in range(data.draw(st.integers(0, 4))):
        spoiled[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    content = bytes(spoiled) if data.draw(st.booleans()) else data.draw(st.binary(max_size=length))
    try:
        restored = decode_adapter(content, SHAPES, precision)
    except MergeError:
        return
    assert all(bool((tensor.abs() <= 1.001 * LARGEST_WEIGHT).all()) for tensor in restored.values())


def test_largest_weights_survive_every_precision() -> None:
    for precision in PRECISIONS:
        data = encode_adapter({"w": torch.full((2, 3), LARGEST_WEIGHT)}, precision)
        decode_adapter(data, {"w": (2, 3)}, precision)

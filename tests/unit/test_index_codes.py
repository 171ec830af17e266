"""Index codes: what is written is what docs/format.md says, is small, and reads back; every code is reached."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import reference_format as reference
from arrays import array_of, as_numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.compressors import Context, TopK, TopKInt8
from hvd_gradcomp.errors import PayloadError, UnsupportedError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.frame import frame_kept
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.payload import write_payload
from hvd_gradcomp.wire.positions import (
    ALL,
    BITMAP,
    HEADER,
    RAW,
    RICE,
    decode_positions,
    encode_positions,
    expected_bits,
)

LARGEST = 2**31 - 1


def encoded(ops: Ops, positions: list[int] | np.ndarray | None, size: int) -> Array:
    like = array_of(ops, np.zeros(1, np.float32))
    return encode_positions(
        ops, None if positions is None else array_of(ops, np.array(positions, np.int64)), size, like
    )


def decoded(ops: Ops, data: Array, size: int, count: int) -> list[int] | None:
    reader = Reader(ops, data)
    positions = decode_positions(reader, size, count)
    reader.end()
    return None if positions is None else as_numpy(positions).tolist()


@st.composite
def gathered(draw: st.DrawFn) -> tuple[list[int], int]:
    """Positions of every pattern, in tensors from one element to the largest."""
    size = draw(st.one_of(st.integers(1, 300), st.sampled_from([10_000, 2**20, LARGEST])))
    one = st.integers(0, size - 1)
    near_the_ends = st.one_of(st.integers(0, min(size - 1, 40)), st.integers(max(0, size - 40), size - 1))
    positions = draw(st.one_of(st.sets(one, max_size=60), st.sets(near_the_ends, max_size=60)))
    start, stride = draw(st.integers(0, size - 1)), draw(st.integers(1, 400))
    positions |= set(range(start, size, stride)[: draw(st.integers(0, 60))])
    return sorted(positions), size


@settings(max_examples=150)
@given(case=gathered())
def test_positions_read_back_and_are_written_as_documented(ops, case):
    positions, size = case
    data = encoded(ops, positions, size)
    assert bytes(as_numpy(data)) == reference.write_positions(positions, size)
    code, found = reference.read_positions(reference.Bytes(bytes(as_numpy(data))), size, len(positions))
    assert found == positions
    assert decoded(ops, data, size, len(positions)) == (None if code == ALL else positions)


@pytest.mark.parametrize(
    ("positions", "size", "code"),
    [
        (None, 5, ALL),
        ([0, 1, 2], 3, ALL),
        ([0], 1, ALL),
        ([], 0, ALL),
        ([], 1, RICE),
        ([], LARGEST, RICE),
        ([7], 100, RICE),
        (range(0, 100, 2), 100, RICE),
        ([0, 2**20 - 1], 2**20, RICE),
        ([0, LARGEST - 1], LARGEST, RAW),
        ([5], 2**30, RAW),
        ([LARGEST - 1], LARGEST, RAW),
        ([0], LARGEST, RAW),
    ],
)
def test_every_code_is_reached(ops, positions, size, code):
    given = None if positions is None else list(positions)
    data = encoded(ops, given, size)
    assert int(as_numpy(data)[0]) == code
    assert decoded(ops, data, size, size if given is None else len(given)) == (None if code == ALL else given)


def test_a_bitmap_can_be_read(ops):
    """No version writes one at present: a Rice code with no low bits is a bitmap that ends at the last position."""
    positions = [0, 3, 8, 15, 16]
    bits = reference.pack([int(place in positions) for place in range(19)])
    data = array_of(ops, np.frombuffer(HEADER.pack(BITMAP, 0, 0) + reference.padded(bits), np.uint8))
    assert decoded(ops, data, 19, 5) == positions


@settings(max_examples=100)
@given(bits=st.lists(st.booleans(), min_size=2, max_size=200).filter(lambda bits: not all(bits)))
def test_never_longer_than_a_bitmap_or_raw(ops, bits):
    positions = [place for place, bit in enumerate(bits) if bit]
    length = len(encoded(ops, positions, len(bits))) - HEADER.size
    # A bitmap of whole words, or 4 bytes each; two streams may need two paddings.
    assert length <= min(4 * math.ceil(len(bits) / 32), 4 * len(positions)) + 4


# -- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_within_5_percent_of_the_entropy_of_random_positions(ops, ratio):
    size = 2**20
    positions = np.flatnonzero(np.random.default_rng(1).random(size) < ratio)
    count = len(positions)
    entropy = (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2)
    data = encoded(ops, positions, size)
    assert 8 * len(data) <= 1.05 * entropy + 8 * HEADER.size
    assert 8 * len(data) >= entropy
    # The estimate by which the engine chooses an exchange.
    assert expected_bits(ratio) * count == pytest.approx(8 * len(data), rel=0.02)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 0.05, 1e-4, 1e-6])
def test_the_estimate_is_that_of_random_positions(ratio):
    assert expected_bits(ratio) <= 1 / ratio
    if ratio < 1:
        entropy = -(ratio * math.log2(ratio) + (1 - ratio) * math.log2(1 - ratio)) / ratio
        assert entropy <= expected_bits(ratio) <= 1.05 * entropy


def test_two_bytes_for_each_kept_value(ops):
    """At ratio 0.01 on random positions: the whole payload, all headers and scales included."""
    size = 2**20
    x = np.random.default_rng(2).standard_normal(size).astype(np.float32)
    frame, _ = TopKInt8(ratio=0.01).encode(ops, array_of(ops, x), Context())
    payload = write_payload(ops, [frame], 0, frame)
    kept = math.ceil(0.01 * size)
    assert frame_kept(ops, frame) == kept
    assert 2.0 * kept < len(payload) <= 2.03 * kept


@pytest.mark.parametrize("ratio", [0.3, 0.1, 0.01, 0.001])
def test_the_expected_bytes_of_a_compressor_are_those_of_its_frames(ops, ratio):
    x = np.random.default_rng(3).standard_normal(200_000).astype(np.float32)
    for compressor in (TopK(ratio), TopKInt8(ratio)):
        frame, _ = compressor.encode(ops, array_of(ops, x), Context())
        assert compressor.expected_bytes(len(x)) == pytest.approx(len(frame), rel=0.05, abs=50)


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_a_tensor_too_large_for_the_format(ops):
    with pytest.raises(UnsupportedError, match=f"{LARGEST + 1} elements"):
        encoded(ops, [1], LARGEST + 1)


@pytest.mark.parametrize(
    ("data", "size", "count", "message"),
    [
        (HEADER.pack(9, 0, 0), 10, 1, "unknown index code 9"),
        (HEADER.pack(ALL, 0, 0), 10, 9, "all of 10"),
        (HEADER.pack(RICE, 32, 0), LARGEST, 1, "Rice code with 32 low bits"),
        (HEADER.pack(RICE, 4, 0), 10, 2, "Rice code with 4 low bits for 2 of 10"),
        (HEADER.pack(RICE, 0, 4) + bytes([1, 0, 0, 0]), 10, 2, "holds 1 gaps"),
        (HEADER.pack(RICE, 0, 4) + bytes([0, 0, 0, 128]), 10, 1, "not ascending within a tensor of 10"),
        (HEADER.pack(RICE, 0, 400), 10, 1, "truncated"),
        (HEADER.pack(BITMAP, 0, 0) + bytes([255, 3, 0, 0]), 10, 9, "holds 10 positions"),
        (HEADER.pack(RAW, 0, 0) + struct.pack("<2I", 5, 5), 10, 2, "not ascending"),
        (HEADER.pack(RAW, 0, 0) + struct.pack("<2I", 6, 5), 10, 2, "not ascending"),
        (HEADER.pack(RAW, 0, 0) + struct.pack("<2I", 5, 10), 10, 2, "not ascending within a tensor of 10"),
        (HEADER.pack(RAW, 0, 0) + struct.pack("<I", 2**32 - 1), 10, 1, "not ascending within"),
        (HEADER.pack(RAW, 0, 0), 10, 1, "truncated"),
        (HEADER.pack(RAW, 0, 0)[:5], 10, 1, "truncated"),
    ],
)
def test_bytes_that_are_no_positions(ops, data, size, count, message):
    with pytest.raises(PayloadError, match=message):
        decoded(ops, array_of(ops, np.frombuffer(data, np.uint8)), size, count)

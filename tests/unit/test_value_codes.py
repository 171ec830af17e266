"""Value codes: layouts of floats and of int8 blocks, read back bit by bit, and bytes that are none."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import reference_format as reference
from arrays import array_of, as_numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import HEADER
from hvd_gradcomp.wire.levels import encode_linear8
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.values import decode_values, encode_floats

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def decoded(ops: Ops, data: Array, count: int) -> np.ndarray:
    reader = Reader(ops, data)
    values = decode_values(reader, count)
    reader.end()
    assert ops.dtype_of(values) == "float32"
    return as_numpy(values)


@pytest.mark.parametrize(("kind", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
@settings(max_examples=50)
@given(values=st.lists(st.one_of(floats, st.floats(-6e4, 6e4, width=32)), max_size=40))
def test_floats_are_rounded_to_nearest_and_read_back(ops, kind, bits, values):
    x = np.array(values, np.float32)
    x[np.abs(x) > (65504 if kind == "float16" else 3.38e38)] = 0
    data = encode_floats(ops, array_of(ops, x), kind)
    found = decoded(ops, data, len(x))
    code, expected = reference.read_values(reference.Bytes(bytes(as_numpy(data))), len(x))
    assert code == ("float32", "float16", "bfloat16").index(kind)
    assert found.tobytes() == expected.tobytes()
    smallest = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}[kind]
    allowed = np.maximum(np.abs(x.astype(np.float64)) * 2.0**-bits, smallest / 2)
    assert (np.abs(found.astype(np.float64) - x) <= allowed).all()
    # What is exact already stays as it is.
    again = decoded(ops, encode_floats(ops, array_of(ops, found), kind), len(x))
    assert again.tobytes() == found.tobytes()


@settings(max_examples=50)
@given(
    levels=st.lists(st.integers(-128, 127), max_size=70),
    block_log2=st.sampled_from([0, 1, 3, 5, 9, 31]),
    seed=st.integers(0, 1000),
)
def test_int8_blocks_read_back(ops, levels, block_log2, seed):
    blocks = -(-len(levels) // 2**block_log2)
    steps = np.random.default_rng(seed).standard_normal(blocks).astype(np.float32)
    data = encode_linear8(ops, array_of(ops, np.array(levels, np.int8)), array_of(ops, steps), block_log2)
    found = decoded(ops, data, len(levels))
    code, expected = reference.read_values(reference.Bytes(bytes(as_numpy(data))), len(levels))
    assert code == 3
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_values_may_lie_at_any_place_in_a_buffer(ops, shift):
    """What an allgather returns is cut anywhere: no read needs an aligned start."""
    x = np.array([1.5, -2.25, 1e-40], np.float32)
    data = as_numpy(encode_floats(ops, array_of(ops, x), "float32"))
    buffer = array_of(ops, np.concatenate([np.zeros(shift, np.uint8), data]))
    np.testing.assert_array_equal(decoded(ops, buffer[shift:], 3), x)


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (HEADER.pack(10, 0, 0), 0, "unknown value code 10"),
        (HEADER.pack(255, 0, 0), 3, "unknown value code 255"),
        (HEADER.pack(3, 32, 0) + bytes(100), 3, r"blocks of 2\*\*32"),
        (HEADER.pack(3, 0, 0) + bytes(8), 3, "truncated"),
        (HEADER.pack(3, 2, 0) + bytes(4), 3, "truncated"),
        (HEADER.pack(0, 0, 0) + bytes(8), 3, "truncated"),
        (HEADER.pack(1, 0, 0) + bytes(4), 3, "truncated"),
        (b"\0\0", 3, "truncated"),
        (HEADER.pack(0, 0, 0) + struct.pack("<f", 1) * 4, 3, "4 bytes more"),
    ],
)
def test_bytes_that_are_no_values(ops, data, count, message):
    with pytest.raises(PayloadError, match=message):
        decoded(ops, array_of(ops, np.frombuffer(data, np.uint8)), count)

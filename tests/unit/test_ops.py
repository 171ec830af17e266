"""The array primitives: each against plain Python or numpy's own words, on every backend, and all backends alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from arrays import array_of, as_numpy, gradient, kinds, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.errors import UnsupportedError
from hvd_gradcomp.ops import backend, ops_for
from hvd_gradcomp.ops.base import FLOAT_BYTES

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def f32(values) -> np.ndarray:
    return np.array(values, np.float32)


# -- which backend ----------------------------------------------------------------------------------------------------


def test_an_array_finds_its_backend():
    assert ops_for(np.zeros(1)).name == "numpy"
    assert ops_for(torch.zeros(1)).name == "torch"
    assert ops_for(torch.nn.Parameter(torch.zeros(1))).name == "torch"
    assert ops_for(np.zeros(1)) is backend("numpy")

    class Mine(np.ndarray):
        pass

    assert ops_for(np.zeros(1).view(Mine)).name == "numpy"
    with pytest.raises(UnsupportedError, match=r"cannot compress a builtins.list; expected .* one of: .*numpy"):
        ops_for([1.0])
    with pytest.raises(UnsupportedError, match=r"no array primitives for 'jax'; known: .*numpy"):
        backend("jax")


# -- making and converting --------------------------------------------------------------------------------------------


def test_flat32_copies_only_what_it_must(ops):
    x = array_of(ops, gradient("normal", (4, 6), 1))
    flat = ops.flat32(x)
    ops.clear(flat)
    assert not as_numpy(x).any(), "a float32 array in order is looked at, not copied"
    transposed = array_of(ops, gradient("normal", (4, 6), 1)).T
    np.testing.assert_array_equal(as_numpy(ops.flat32(transposed)), as_numpy(transposed).reshape(-1))
    assert ops.flat32(array_of(ops, f32(3.0))).shape == (1,)
    assert ops.dtype_of(ops.flat32(array_of(ops, np.arange(3.0)))) == "float32"


def test_flat32_leaves_no_trace_in_autograd():
    x = torch.ones(3, requires_grad=True)
    assert not backend("torch").flat32(x * 2).requires_grad


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_new_arrays(ops, dtype):
    like = array_of(ops, np.zeros(1))
    zeros = ops.zeros(3, dtype, like)
    assert (ops.dtype_of(zeros), as_numpy(zeros).tolist()) == (dtype, [0, 0, 0])
    numbers = ops.arange(4, like)
    assert (ops.dtype_of(numbers), as_numpy(numbers).tolist()) == ("int64", [0, 1, 2, 3])
    assert ops.dtype_of(ops.cast(numbers, dtype)) == dtype


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_bytes_and_back(ops, dtype, count):
    x = np.arange(count).astype(dtype) - np.ones(count, dtype)
    data = ops.bytes_of(array_of(ops, x))
    assert ops.dtype_of(data) == "uint8"
    assert ops.to_host(data) == x.tobytes()
    back = ops.from_bytes(ops.from_host(x.tobytes(), data), dtype) if count else ops.from_bytes(data, dtype)
    assert (ops.dtype_of(back), as_numpy(back).tobytes()) == (dtype, x.tobytes())


@settings(max_examples=100)
@given(values=st.lists(floats, max_size=20))
@pytest.mark.parametrize("kind", FLOAT_BYTES)
def test_packed_floats_are_rounded_to_nearest_even(ops, kind, values):
    x = f32(values)
    data = ops.pack_float(array_of(ops, x), kind)
    assert len(data) == FLOAT_BYTES[kind] * len(x)
    # torch rounds as IEEE says, and is another implementation than numpy's by hand.
    expected = torch.from_numpy(x).to(getattr(torch, kind)).to(torch.float32).numpy()
    assert as_numpy(ops.unpack_float(data, kind)).tobytes() == expected.tobytes()


# -- choosing and placing ---------------------------------------------------------------------------------------------


def test_placing(ops):
    x = array_of(ops, f32([1, 2, 3, 4]))
    at = array_of(ops, np.array([3, 1]))
    assert as_numpy(ops.take(x, at)).tolist() == [4, 2]
    assert as_numpy(ops.put(ops.copy(x), at, array_of(ops, f32([7, 8])))).tolist() == [1, 8, 3, 7]
    assert as_numpy(ops.put_add(ops.copy(x), at, array_of(ops, f32([7, 8])))).tolist() == [1, 10, 3, 11]
    assert as_numpy(x).tolist() == [1, 2, 3, 4]
    mask = x > 2
    assert as_numpy(ops.nonzero(mask)).tolist() == [2, 3]
    assert ops.dtype_of(ops.nonzero(mask)) == "int64"
    assert as_numpy(ops.where(mask, x, 0.0)).tolist() == [0, 0, 3, 4]
    assert as_numpy(ops.where(mask, x, -x)).tolist() == [-1, -2, 3, 4]
    assert ops.dtype_of(ops.where(mask, x, 0.0)) == "float32"
    assert as_numpy(ops.concat([x[:1], x[3:], x[:0]])).tolist() == [1, 4]
    assert as_numpy(ops.repeat(x[:2], 3)).tolist() == [1, 1, 1, 2, 2, 2]
    assert as_numpy(ops.pad(ops.cast(x, "uint8")[:3], 4)).tolist() == [1, 2, 3, 0]
    assert as_numpy(ops.pad(x, 4)).tolist() == [1, 2, 3, 4]


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_arithmetic(ops):
    x = array_of(ops, f32([-2.5, -0.5, 0.5, 1.5, 2.5, 3.4]))
    assert as_numpy(ops.round(x)).tolist() == [-2, 0, 0, 2, 2, 3]
    assert as_numpy(ops.abs(x)).tolist() == [2.5, 0.5, 0.5, 1.5, 2.5, f32(3.4)]
    assert as_numpy(ops.clip(x, -1.0, 2.0)).tolist() == [-1, -0.5, 0.5, 1.5, 2, 2]
    assert as_numpy(ops.row_max(x, 3)).tolist() == [0.5, f32(3.4)]
    assert as_numpy(ops.accumulate(ops.copy(x), x)).tolist() == (2 * as_numpy(x)).tolist()
    assert as_numpy(ops.divide(array_of(ops, f32([1, 2])), 3)).tolist() == (f32([1, 2]) / f32(3)).tolist()
    numbers = array_of(ops, np.array([5, 0, 2**40]))
    assert as_numpy(ops.cumsum(numbers)).tolist() == [5, 5, 5 + 2**40]
    assert ops.total(numbers) == 5 + 2**40
    assert ops.total(x > 0) == 4
    assert as_numpy(ops.shift_right(numbers, 2)).tolist() == [1, 0, 2**38]
    assert as_numpy(ops.bit_and(numbers, 4)).tolist() == [4, 0, 0]
    for result in (ops.round(x), ops.clip(x, -1.0, 2.0), ops.divide(ops.copy(x), 3), x * x, x / x):
        assert ops.dtype_of(result) == "float32"


@settings(max_examples=100)
@given(kind=kinds, size=st.integers(1, 200), seed=seeds, data=st.data())
def test_the_kth_largest(ops, kind, size, seed, data):
    x = gradient(kind, (size,), seed)
    k = data.draw(st.integers(1, size))
    assert ops.kth_largest(array_of(ops, x), k) == sorted(x.tolist(), reverse=True)[k - 1]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_values_that_are_not_finite_are_found(ops, poison, place):
    x = gradient("1e30", (1000,), 1)
    assert ops.all_finite(array_of(ops, x))
    assert ops.all_finite(array_of(ops, f32([])))
    assert ops.all_finite(array_of(ops, f32([3.4028235e38, -3.4028235e38, 1e-45])))
    x[place] = poison
    assert not ops.all_finite(array_of(ops, x))


# -- bits -------------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(bits=st.lists(st.integers(0, 1), max_size=70))
def test_bits(ops, bits):
    data = ops.pack_bits(array_of(ops, np.array(bits, np.uint8)))
    number = sum(bit << place for place, bit in enumerate(bits))
    assert ops.to_host(data) == number.to_bytes((len(bits) + 7) // 8, "little")
    unpacked = ops.unpack_bits(data, len(bits))
    assert (ops.dtype_of(unpacked), as_numpy(unpacked).tolist()) == ("uint8", bits)


@settings(max_examples=150)
@given(width=st.integers(0, 32), data=st.data())
def test_numbers_of_few_bits(ops, width, data):
    numbers = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=30))
    packed = ops.pack_uint(array_of(ops, np.array(numbers, np.int64)), width)
    joined = sum(number << width * place for place, number in enumerate(numbers))
    assert ops.to_host(packed) == joined.to_bytes((width * len(numbers) + 7) // 8, "little")
    unpacked = ops.unpack_uint(packed, width, len(numbers))
    assert (ops.dtype_of(unpacked), as_numpy(unpacked).tolist()) == ("int64", numbers)


@settings(max_examples=100)
@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_checksum(ops, words):
    data = np.array(words, "<u4").view(np.uint8)
    expected = sum((2 * place + 1) * word for place, word in enumerate(words)) % 2**32
    assert ops.checksum(array_of(ops, data)) == expected


def test_the_checksum_of_many_words_wraps_around(ops):
    data = np.full(4 * 100_003, 255, np.uint8)
    assert ops.checksum(array_of(ops, data)) == sum((2 * i + 1) * (2**32 - 1) for i in range(100_003)) % 2**32

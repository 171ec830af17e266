"""Linear quantization: its levels and steps, the bound of nearest rounding, and stochastic rounding without bias."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy, bits_of, gradient, kinds, seeds
from hypothesis import given
from hypothesis import strategies as st
from value_codes import CONTEXT, assert_unbiased, coded, through

from hvd_gradcomp.compressors import Int8, Linear
from hvd_gradcomp.compressors.linear import quantize
from hvd_gradcomp.ops import Array, Ops, backend
from hvd_gradcomp.ops.numpy_ops import NumpyOps


def steps_of(values: np.ndarray, block: int, most: int) -> np.ndarray:
    """Each value's step, in float64, from the formula of the docstring."""
    blocks = [np.abs(values[start : start + block]).max() for start in range(0, len(values), block)]
    return np.repeat(np.array(blocks) / most, block)[: len(values)]


@given(kind=kinds, seed=seeds, count=st.integers(1, 300), bits=st.integers(2, 8))
def test_nearest_rounding_is_off_by_half_a_step_at_most(kind: str, seed: int, count: int, bits: int) -> None:
    values = gradient(kind, (count,), seed).astype(np.float64)
    found = through(Linear(bits=bits, block=32), values.astype(np.float32))
    steps = steps_of(values, 32, 2 ** (bits - 1) - 1)
    error = np.abs(found - values)
    # A step below 2**-100 counts as zero.
    assert (error <= np.where(steps > 2.0**-99, steps * 0.50001, np.maximum(np.abs(values), steps))).all()


def test_bytes_of_a_small_block(ops: Ops) -> None:
    values = np.float32([7, -7, 3.4, 3.6, -0.5, 0.5, 1.5, 0, 14])
    data, _ = coded(Linear(bits=4, block=8), ops, values)
    # code 4, block 2**3, 7 levels; steps 1 and 2; level + 7 in four bits, the first value lowest.
    assert bits_of(data).hex(" ") == "04 03 07 00 00 00 80 3f 00 00 00 40 0e ba 77 79 0e 00 00 00"


def test_bytes_of_eight_bits_are_those_of_int8(ops: Ops) -> None:
    values = gradient("normal", (1300,), 4)
    assert bits_of(coded(Linear(bits=8), ops, values)[0]) == bits_of(coded(Int8(), ops, values)[0])
    data, _ = coded(Int8(block=4), ops, np.float32([127, -127, 63.5, 0, 1]))
    # code 3, block 2**2; steps 1 and 1 / 127 (0x3c010204); levels (63.5 goes to the even 64).
    assert bits_of(data).hex(" ") == "03 02 00 00 00 00 80 3f 04 02 01 3c 7f 81 40 00 7f 00 00 00"


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_level_has_exactly_that_many_bits(bits: int) -> None:
    values = gradient("normal", (8000,), bits)
    data, _ = coded(Linear(bits=bits, block=None), backend("numpy"), values)
    assert len(data) == 4 + 4 + 8000 * bits // 8


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_stochastic_rounding_is_unbiased_within_its_variance(bits: int) -> None:
    values = gradient("normal", (200,), bits)
    steps = steps_of(values.astype(np.float64), 64, 2 ** (bits - 1) - 1)
    variance = assert_unbiased(Linear(bits=bits, block=64, rounding="stochastic"), values, steps)
    assert (variance <= steps**2 / 4).all()


def test_levels_and_whole_multiples_are_not_moved_by_chance() -> None:
    values = np.float32([3, -3, 1, 2, -1, 0, -0.0, 1e-40, -1e-40])
    for seed in range(20):
        found = through(Linear(bits=3, block=None, rounding="stochastic", seed=seed), values)
        assert found.tolist() == [3, -3, 1, 2, -1, 0, 0, 0, 0]


def test_a_block_of_tiny_values_is_kept_for_later(ops: Ops) -> None:
    values = np.full(64, 1e-29, np.float32)
    _, residual = Linear(bits=8, block=64).encode(ops, array_of(ops, values), CONTEXT)
    assert as_numpy(residual).tolist() == values.tolist()


class LowestDraws(NumpyOps):
    """Draws what comes once in 2**24 draws."""

    def uniform(self, count: int, key: int, like: Array) -> Array:
        return np.zeros(count, np.float32)


def test_the_lowest_draw_moves_nothing_that_is_whole_or_subnormal() -> None:
    values = np.float32([0, 1, -2, 1e-40, -1e-40, 0.25, -0.25])
    levels, _ = quantize(LowestDraws(), values, np.float32([1]), 2**31, 3, key=1)
    assert levels.tolist() == [0, 1, -2, 0, 0, 1, 0]

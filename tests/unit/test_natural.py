"""Natural compression: powers of two around each value, unbiased, variance of an eighth."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import bits_of, gradient, kinds, seeds
from hypothesis import given
from hypothesis import strategies as st
from value_codes import assert_unbiased, coded, through

from hvd_gradcomp.compressors import Natural
from hvd_gradcomp.ops import Ops, backend


def test_unbiased_within_the_papers_variance() -> None:
    values = (gradient("normal", (200,), 1) * 10.0 ** np.arange(-20, 20, 0.2)).astype(np.float32)
    below = 2.0 ** np.floor(np.log2(np.abs(values.astype(np.float64))))
    variance = assert_unbiased(Natural(), values, below)
    # E||C(v)||^2 <= (9/8) ||v||^2, reached by v = 4/3 of a power of two.
    assert (variance <= values.astype(np.float64) ** 2 / 8).all()
    worst = np.float32([4 / 3])
    assert assert_unbiased(Natural(), worst, 1.0)[0] == pytest.approx(worst[0] ** 2 / 8)


@given(kind=kinds, seed=seeds, count=st.integers(0, 300))
def test_values_become_a_power_of_two_beside_them(kind: str, seed: int, count: int) -> None:
    values = gradient(kind, (count,), seed)
    found = through(Natural(), values)
    normal = np.abs(values) >= 2.0**-126
    assert not found[~normal].any()
    mantissa, exponent = np.frexp(np.abs(values[normal]))
    below = exponent - 1
    power = np.log2(np.abs(found[normal]))
    assert np.array_equal(np.sign(found[normal]), np.sign(values[normal]))
    assert ((power == below) | (power == below + 1)).all()
    assert (power == below)[mantissa == 0.5].all()


def test_bytes(ops: Ops) -> None:
    values = np.float32([1, -2, 0, 0.25, 4, -0.0, 1e-45])
    data, _ = coded(Natural(), ops, values)
    # code 8, lowest exponent 125; indices 3 4 0 1 5 0 0 and signs, in 4 bits: 6, 9, 0, 2, 10, 0, 0.
    assert bits_of(data).hex(" ") == "08 7d 04 00 96 20 0a 00"


def test_zeros_take_no_bytes(ops: Ops) -> None:
    data, _ = coded(Natural(), ops, np.zeros(1000, np.float32))
    assert len(data) == 4


def test_never_more_than_nine_bits() -> None:
    values = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    data, decoded = coded(Natural(), backend("numpy"), values)
    assert np.array_equal(decoded, values)
    assert len(data) <= 4 + -(-len(values) * 9 // 8) + 3

"""QSGD: unbiased, within the variance of the paper's Lemma 3.1, and in the shorter of its two codes."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy, bits_of, gradient, kinds, seeds
from hypothesis import given
from hypothesis import strategies as st
from value_codes import CONTEXT, assert_unbiased, coded, repeated

from hvd_gradcomp.compressors import QSGD
from hvd_gradcomp.compressors.blocks import Ratios
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.wire.codes import LEVELS, LEVELS_GAMMA
from hvd_gradcomp.wire.levels import encode_levels, gamma_bits
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.values import decode_values


@pytest.mark.parametrize("levels", [1, 4, 16])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_unbiased_within_the_papers_variance(levels: int, norm: str) -> None:
    values = gradient("normal", (128,), levels)
    squares = (values.astype(np.float64) ** 2).reshape(2, 64).sum(axis=1)
    largest = np.abs(values).reshape(2, 64).max(axis=1).astype(np.float64)
    steps = np.repeat((np.sqrt(squares) if norm == "l2" else largest) / levels, 64)
    variance = assert_unbiased(QSGD(levels=levels, norm=norm, bucket=64), values, steps).reshape(2, 64).sum(axis=1)
    bound = squares * min(64 / levels**2, 8 / levels) if norm == "l2" else 64 * largest**2 / (4 * levels**2)
    assert (variance <= bound).all()


@given(kind=kinds, seed=seeds, count=st.integers(1, 300), levels=st.integers(1, 127))
def test_levels_are_the_two_around_the_value(kind: str, seed: int, count: int, levels: int) -> None:
    values = gradient(kind, (count,), seed).astype(np.float64)
    norms = np.array([np.linalg.norm(values[start : start + 32]) for start in range(0, count, 32)])
    steps = np.repeat(norms / levels, 32)[:count]
    for found in repeated(QSGD(levels=levels, bucket=32), values.astype(np.float32), 2):
        usable = steps > 2.0**-99
        assert (np.abs(found - values)[usable] <= steps[usable] * 1.00001).all()
        assert (found[steps < 2.0**-100] == 0).all()


@given(
    levels=st.lists(st.integers(-20, 20), max_size=300),
    most=st.integers(20, 127),
)
def test_gamma_code_gives_the_levels_back_in_the_bits_that_it_announces(levels: list[int], most: int) -> None:
    ops = backend("numpy")
    whole = np.array(levels, np.int64)
    steps = np.ones(min(len(levels), 1), np.float32)
    data = encode_levels(ops, whole, steps, 31, most, shorter=True)
    reader = Reader(ops, data)
    assert decode_values(reader, len(levels)).tolist() == levels
    reader.end()
    fixed = encode_levels(ops, whole, steps, 31, most)
    assert len(data) <= len(fixed) + 4
    if data[0] == LEVELS_GAMMA:
        bits = sum(gamma_bits(abs(level)) for level in levels)
        # Three headers and two streams, each padded to four bytes.
        assert bits / 8 <= len(data) - 12 <= bits / 8 + 8


def test_gamma_code_by_hand(ops: Ops) -> None:
    levels = array_of(ops, np.array([0, 1, 0, -2, 0, 0, 6] + [0] * 33))
    data = encode_levels(ops, levels, array_of(ops, np.ones(1, np.float32)), 31, 7, shorter=True)
    # v = 1 2 1 3 1 1 7 ones: lengths 0 1 0 1 0 0 2 0 ...: unary 1 01 1 01 1 1 001 1..., in 44 bits;
    # bit 0 of 2, 3, 7: 0 1 1; bit 1 of 7: 1; signs of 1, -2, 6: 0 1 0.
    assert bits_of(data).hex(" ") == "05 1f 07 00 00 00 80 3f 06 00 00 00 ed fc ff ff ff 0f 00 00 2e 00 00 00"


@pytest.mark.parametrize(("code", "expected"), [(QSGD(), LEVELS_GAMMA), (QSGD(levels=2, bucket=2), LEVELS)], ids=str)
def test_the_shorter_code_travels(code: QSGD, expected: int) -> None:
    data, _ = coded(code, backend("numpy"), gradient("normal", (4096,), 1))
    assert data[0] == expected


def test_four_levels_in_buckets_of_512_take_about_one_and_a_half_bits() -> None:
    data, _ = coded(QSGD(), backend("numpy"), gradient("normal", (1 << 16,), 1))
    assert 8 * len(data) / (1 << 16) == pytest.approx(1.5, abs=0.05)


@given(kind=kinds, seed=seeds, count=st.integers(1, 300), block=st.sampled_from([1, 8, 512, 2**31]))
def test_norms_are_exact_to_rounding(kind: str, seed: int, count: int, block: int) -> None:
    ops = backend("numpy")
    values = gradient(kind, (count,), seed)
    found = Ratios.of(ops, values, block).norm(ops)
    for norm, start in zip(found, range(0, count, block), strict=True):
        part = values[start : start + block].astype(np.float64)
        assert norm == pytest.approx(np.linalg.norm(part) if np.abs(part).max() >= 2.0**-100 else 0, rel=1e-6)


def test_norm_of_the_largest_values_stays_finite(ops: Ops) -> None:
    values = np.full(500, -3.4e38, np.float32)
    _, residual = QSGD(bucket=None).encode(ops, array_of(ops, values), CONTEXT)
    assert np.isfinite(as_numpy(residual)).all()

"""TernGrad: unbiased up to its clipping, its variance, and five trits in a byte."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy, bits_of, gradient, kinds, seeds
from hypothesis import given
from hypothesis import strategies as st
from value_codes import assert_unbiased, bernstein, coded, through

from hvd_gradcomp.compressors import TernGrad
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.trits import encode_trits
from hvd_gradcomp.wire.values import decode_values


def test_unbiased_with_the_variance_of_its_formula() -> None:
    values = gradient("normal", (150,), 4)
    magnitudes = np.abs(values.astype(np.float64))
    variance = assert_unbiased(TernGrad(clip=None), values, magnitudes.max())
    # s ||w||_1 - ||w||_2^2
    assert variance.sum() == pytest.approx(magnitudes.max() * magnitudes.sum() - (magnitudes**2).sum(), rel=1e-6)


def test_clipping_changes_nothing_but_what_lies_beyond_it() -> None:
    values = gradient("normal", (2000,), 5)
    values[7] = 100
    sigma = np.sqrt((values.astype(np.float64) ** 2).mean())
    scale = np.abs(through(TernGrad(), values)).max()
    assert scale == pytest.approx(2.5 * sigma, rel=1e-6)
    small = values[:150].copy()
    small[7] = 20
    limit = 2.5 * np.sqrt((small.astype(np.float64) ** 2).mean())
    assert limit < 20
    clipped = np.clip(small, -limit, limit).astype(np.float32)
    mean = np.mean([through(TernGrad(seed=seed), small) for seed in range(3000)], axis=0)
    variance = np.maximum(limit * np.abs(clipped) - clipped**2, 0)
    assert (np.abs(mean - clipped) <= bernstein(3000, variance, limit) + 1e-5).all()


@given(kind=kinds, seed=seeds, count=st.integers(1, 300), block=st.sampled_from([None, 32]))
def test_values_become_one_of_three(kind: str, seed: int, count: int, block: int | None) -> None:
    values = gradient(kind, (count,), seed)
    found = through(TernGrad(block=block), values)
    for start in range(0, count, block or count):
        part, decoded = (each[start : start + (block or count)] for each in (values, found))
        scales = set(np.abs(decoded[decoded != 0]).tolist())
        assert len(scales) <= 1
        assert all(scale <= np.abs(part).max() for scale in scales)
        assert (np.sign(decoded) * part >= 0).all()


def test_values_of_equal_magnitude_arrive_whole() -> None:
    values = np.float32([0.5, -0.5] * 50)
    assert through(TernGrad(), values).tolist() == values.tolist()


def test_five_trits_a_byte_by_hand(ops: Ops) -> None:
    levels = array_of(ops, np.float32([-1, 0, 1, 1, -1, 1, 1]))
    data = encode_trits(ops, levels, array_of(ops, np.float32([2])), 31)
    # 0 + 1*3 + 2*9 + 2*27 + 0*81 = 75 = 0x4b; 2 + 2*3 = 8
    assert bits_of(data).hex(" ") == "06 1f 00 00 00 00 00 40 4b 08 00 00"


def test_every_byte_of_trits_reads_back(ops: Ops) -> None:
    digits = np.array([[byte // 3**place % 3 for place in range(5)] for byte in range(243)])
    levels = array_of(ops, (digits.reshape(-1) - 1).astype(np.float32))
    data = encode_trits(ops, levels, array_of(ops, np.float32([1])), 31)
    assert as_numpy(data)[8 : 8 + 243].tolist() == list(range(243))
    assert as_numpy(decode_values(Reader(ops, data), 5 * 243)).tolist() == as_numpy(levels).tolist()


def test_at_most_1_6_bits_travel() -> None:
    data, _ = coded(TernGrad(), backend("numpy"), gradient("normal", (10_000,), 1))
    assert len(data) == 4 + 4 + 2000

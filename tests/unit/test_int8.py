"""Int8: the error bound of each block, blocks that do not starve each other, and the ends of float32's range."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy, gradient, kinds, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.compressors import Context, Int8, TopK, TopKInt8
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Ops
from hvd_gradcomp.wire.parts import Reader

LARGEST = np.finfo(np.float32).max


def sent(ops: Ops, compressor: Int8, x: np.ndarray) -> np.ndarray:
    """What receivers decode; checked to be what the residual lacks."""
    frame, residual = compressor.encode(ops, array_of(ops, x), Context())
    reader = Reader(ops, frame)
    out = as_numpy(compressor.decode_add(ops, reader, array_of(ops, np.zeros(len(x), np.float32))))
    reader.end()
    np.testing.assert_array_equal(as_numpy(residual), x - out)
    return out


@settings(max_examples=100)
@given(kind=kinds, size=st.integers(1, 600), seed=seeds, block_log2=st.integers(0, 10))
def test_the_error_is_at_most_half_a_step_of_the_block(ops, kind, size, seed, block_log2):
    x = gradient(kind, (size,), seed)
    block = 2**block_log2
    out = sent(ops, Int8(block=block), x)
    for start in range(0, size, block):
        values, found = x[start : start + block].astype(np.float64), out[start : start + block]
        step = np.abs(values).max() / 127
        # A step below 2**-100 counts as zero, and nothing of such a block is sent.
        bound = step / 2 if step > 2.0**-100 * (1 + 1e-6) else np.abs(values).max()
        assert np.abs(values - found).max() <= bound * (1 + 1e-5)
        assert np.abs(found).max() <= np.abs(values).max() * (1 + 1e-6)


def test_the_largest_value_of_a_block_is_exact_to_rounding(ops):
    x = gradient("normal", (4096,), 1)
    out = sent(ops, Int8(block=64), x)
    rows, found = np.abs(x).reshape(-1, 64), np.abs(out).reshape(-1, 64)
    np.testing.assert_allclose(found.max(1), rows.max(1), rtol=1e-6)


def test_small_values_are_not_starved_by_large_ones_elsewhere(ops):
    """Two layers in one tensor, a million times apart: each is as exact as alone."""
    small, large = gradient("normal", (512,), 1) * np.float32(1e-6), gradient("normal", (512,), 2)
    out = sent(ops, Int8(block=512), np.concatenate([small, large]))
    assert np.abs(out[:512] - small).max() <= np.abs(small).max() / 127
    assert np.abs(out[512:] - large).max() <= np.abs(large).max() / 127
    starved = sent(ops, Int8(block=1024), np.concatenate([small, large]))
    assert not starved[:512].any()


def test_kept_values_behind_a_sparsifier_are_not_starved_either(ops):
    x = np.concatenate([gradient("normal", (5000,), 1) * np.float32(1e-6), gradient("normal", (5000,), 2)])
    frame, _ = (TopK(ratio=1.0) >> Int8(block=64)).encode(ops, array_of(ops, x), Context())
    out = as_numpy(TopKInt8().decode_add(ops, Reader(ops, frame), array_of(ops, np.zeros(10_000, np.float32))))
    assert np.count_nonzero(out[:4900]) > 4700


@pytest.mark.parametrize("x", [[LARGEST], [-LARGEST, LARGEST], [LARGEST, 1, -LARGEST / 2], [LARGEST / 127, LARGEST]])
def test_the_largest_float_stays_finite(ops, x):
    values = np.array(x, np.float32)
    out = sent(ops, Int8(), values)
    assert np.isfinite(out).all()
    assert np.abs(out - values).max() <= LARGEST / 127


def test_subnormals_are_kept_or_left_for_later(ops):
    x = np.array([1e-45, -3e-44, 1e-40, -1.1e-38, 0.0], np.float32)
    for block in (1, 512):
        out = sent(ops, Int8(block=block), x)
        assert np.isfinite(out).all()
        assert (np.abs(out) <= np.abs(x) * (1 + 127 * 2.0**-149 / 1e-45)).all()
        assert (np.sign(out) * np.sign(x) >= 0).all()


def test_zeros_stay_zeros(ops):
    assert not sent(ops, Int8(block=4), np.zeros(10, np.float32)).any()
    x = np.array([0, 0, 5, 0, 0, 0, 0, 0], np.float32)
    np.testing.assert_allclose(sent(ops, Int8(block=4), x), x, rtol=1e-6)


@pytest.mark.parametrize("block", [0, -1, 3, 512.0, "512", True, 2**32, 2**400])
def test_blocks_that_cannot_be(block):
    with pytest.raises(ConfigurationError, match="block must be a power of two") as caught:
        Int8(block=block)
    assert repr(block) in str(caught.value)


def test_the_largest_block_works(ops):
    x = gradient("normal", (100,), 1)
    np.testing.assert_array_equal(sent(ops, Int8(block=2**31), x), sent(ops, Int8(block=128), x))

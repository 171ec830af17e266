"""Top-k selection: exactly the k largest magnitudes, ties to the lower position, zeros never; sampled or not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from arrays import array_of, as_numpy, gradient, kinds, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.compressors import Context, TopK
from hvd_gradcomp.ops import Ops
from hvd_gradcomp.wire.parts import Reader


def oracle(x: np.ndarray, k: int) -> list[int]:
    """By sorting: largest magnitude first, then lowest position."""
    magnitudes = np.abs(x)
    order = np.lexsort((np.arange(len(x)), -magnitudes))[:k]
    return sorted(int(place) for place in order if magnitudes[place] > 0)


def selected(ops: Ops, x: np.ndarray, ratio: float) -> list[int]:
    positions = TopK(ratio).select(ops, array_of(ops, x), Context())
    assert ops.dtype_of(positions) == "int64"
    return as_numpy(positions).tolist()


@settings(max_examples=150)
@given(kind=kinds, size=st.integers(1, 400), seed=seeds, ratio=st.floats(1e-6, 1))
def test_exactly_the_largest(ops, kind, size, seed, ratio):
    x = gradient(kind, (size,), seed)
    assert selected(ops, x, ratio) == oracle(x, math.ceil(ratio * size))


@settings(max_examples=100)
@given(
    levels=st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 2.0]), min_size=1, max_size=60),
    k=st.integers(1, 60),
)
def test_ties_go_to_the_lower_position_and_zeros_nowhere(ops, levels, k):
    x = np.array(levels, np.float32)
    positions = ops.top_positions(array_of(ops, x), min(k, len(x)))
    assert as_numpy(positions).tolist() == oracle(x, k)


@pytest.mark.parametrize("ratio", [1.0, 1, 0.5, 1e-9])
@pytest.mark.parametrize("value", [3.0, -1e-45, 0.0])
def test_a_single_element(ops, value, ratio):
    assert selected(ops, np.array([value], np.float32), ratio) == ([0] if value else [])


def test_ratio_1_sends_everything_but_zeros(ops):
    x = gradient("sparse", (500,), 1)
    assert selected(ops, x, 1.0) == np.flatnonzero(x).tolist()


# -- sizes from which a sample gives a first bound --------------------------------------------------------------------


def _patterns(size: int) -> dict[str, np.ndarray]:
    """Tensors for which a strided sample says little, nothing, or the wrong thing."""
    place = np.arange(size)
    rng = np.random.default_rng(5)
    normal = rng.standard_normal(size)
    patterns = {
        "normal": normal,
        "constant": np.ones(size),
        "few values": rng.integers(1, 4, size),
        "mostly zero": normal * (rng.random(size) < 0.004),
        "all zero": np.zeros(size),
        "one value": (place == size - 1) * 1.0,
        "rising": place + 1.0,
        "falling": size - place * 1.0,
        "large at the end": normal * (place > 0.99 * size),
        "two layers": normal * np.where(place < size // 2, 1e-6, 1e6),
        "heavy tail": normal**9,
        "subnormal": rng.integers(0, 500, size) * 2.0**-149,
    }
    for stride in (2, 3, 4, 8, 16, 64):
        # A sample of this stride, or of a divisor or multiple, sees large values only, or none.
        patterns[f"large on a stride of {stride}"] = np.where(place % stride == 0, 10 + normal, normal)
        patterns[f"zero on a stride of {stride}"] = np.where(place % stride == 0, 0, normal)
        patterns[f"large beside a stride of {stride}"] = np.where(place % stride == 1, 10 + normal, 0.01 * normal)
    return patterns


SIZE = 2 * 16384 + 77
PATTERNS = _patterns(SIZE)


@pytest.mark.parametrize("name", PATTERNS)
def test_exactly_the_largest_of_many(ops, name):
    x = PATTERNS[name].astype(np.float32)
    for ratio in (0.001, 0.01, 0.1, 0.25, 0.6):
        assert selected(ops, x, ratio) == oracle(x, math.ceil(ratio * SIZE))


@pytest.mark.parametrize("size", [16383, 16384, 16385, 65536, 300_000])
def test_exactly_the_largest_around_the_size_at_which_sampling_begins(ops, size):
    x = gradient("normal", (size,), size)
    assert selected(ops, x, 0.01) == oracle(x, math.ceil(0.01 * size))


# -- what becomes of them ---------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(kind=kinds, size=st.integers(1, 300), seed=seeds, ratio=st.floats(0.01, 1))
def test_what_is_sent_is_exact_and_the_rest_stays(ops, kind, size, seed, ratio):
    x = gradient(kind, (size,), seed)
    compressor = TopK(ratio)
    frame, residual = compressor.encode(ops, array_of(ops, x), Context())
    sent = as_numpy(compressor.decode_add(ops, Reader(ops, frame), array_of(ops, np.zeros(size, np.float32))))
    expected = np.zeros(size, np.float32)
    kept = oracle(x, math.ceil(ratio * size))
    expected[kept] = x[kept]
    np.testing.assert_array_equal(sent, expected)
    np.testing.assert_array_equal(as_numpy(residual), x - expected)
    # The contraction that error feedback relies on.
    squares = np.square(x.astype(np.float64)).sum()
    left = np.square(as_numpy(residual).astype(np.float64)).sum()
    assert left <= (1 - math.ceil(ratio * size) / size) * squares * (1 + 1e-9)

"""Dynamic eight bits: the table of the paper, the nearest entry, and the errors of its docstring."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from arrays import array_of, bits_of, gradient, kinds, seeds
from hypothesis import given
from hypothesis import strategies as st
from value_codes import coded, through

from hvd_gradcomp.compressors import Dynamic8, Int8
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.wire.nonuniform import TABLE, nearest_indices


def test_table_is_the_dynamic_tree() -> None:
    """As `bitsandbytes` builds it: in decade i, 2**i means of neighbours among 2**i + 1 points from 0.1 to 1."""
    expected = [0.0, 1.0]
    for bits in range(7):
        points = np.linspace(0.1, 1, 2**bits + 1)
        means = 10.0 ** (bits - 6) * (points[:-1] + points[1:]) / 2
        expected += [*means, *-means]
    assert len(TABLE) == 256
    assert np.allclose(TABLE, sorted(expected), rtol=1e-12, atol=0)


@given(seed=seeds)
def test_nearest_entry(seed: int) -> None:
    table = np.float32(TABLE)
    rng = np.random.default_rng(seed)
    x = (rng.uniform(-1.1, 1.1, 200) * 10.0 ** rng.integers(-9, 1, 200)).astype(np.float32)
    found = table[nearest_indices(backend("numpy"), x)].astype(np.float64)
    best = np.abs(x[:, None].astype(np.float64) - table[None]).min(axis=1)
    assert (np.abs(found - x) <= best * (1 + 1e-6)).all()


def test_a_value_in_the_middle_goes_to_the_lower_entry(ops: Ops) -> None:
    table = np.float32(TABLE)
    middles = np.float32([(low + high) / 2 for low, high in pairwise(TABLE)])
    assert (np.diff(middles) > 0).all()
    found = nearest_indices(ops, array_of(ops, np.concatenate([table, middles])))
    assert np.asarray(found).tolist() == [*range(256), *range(255)]


@given(kind=kinds, seed=seeds, count=st.integers(1, 300))
def test_errors_are_within_the_docstrings_bound(kind: str, seed: int, count: int) -> None:
    values = gradient(kind, (count,), seed).astype(np.float64)
    scale = np.abs(values).max()
    if scale < 2.0**-99:
        return
    found = through(Dynamic8(block=None), values.astype(np.float32))
    ratio = np.abs(values) / scale
    decade = np.clip(np.floor(-np.log10(np.maximum(ratio, 1e-9))), 0, 6)
    bound = 0.45 * 10.0**-decade / 2 ** (6 - decade)
    assert (np.abs(found - values) <= scale * np.maximum(bound, 5.5e-7) * 1.0001).all()


def test_better_than_int8_for_values_of_several_decades() -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(4096) * 10.0 ** rng.uniform(-3, 0, 4096)).astype(np.float32)

    def error(code: Dynamic8 | Int8) -> float:
        return float(np.median(np.abs(through(code, values) / values - 1)))

    assert error(Dynamic8(block=None)) < error(Int8(block=None)) / 2


def test_bytes(ops: Ops) -> None:
    data, _ = coded(Dynamic8(block=4), ops, np.float32([2, 0, -2, 0.02, 1]))
    # code 9, blocks of 4; scales 2 and 1; the largest is 255, zero 127, -1 the lowest, and 0.01 the first above
    # a hundredth.
    table = np.float32(TABLE)
    middle = int(np.abs(table - np.float32(0.01)).argmin())
    expected = [255, int(np.flatnonzero(table == 0)[0]), 0, middle, 255]
    assert bits_of(data).hex(" ") == f"09 02 00 00 00 00 00 40 00 00 80 3f {bytes(expected).hex(' ')} 00 00 00"

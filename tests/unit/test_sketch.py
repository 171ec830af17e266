"""Count sketch: linearity, the error of estimates, heavy values found in the sum, exact values sent."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy, gradient
from methods import Run

from hvd_gradcomp.compressors import CountSketch, compression_from_spec
from hvd_gradcomp.compressors.marks import MARKS
from hvd_gradcomp.compressors.sketch import Hashes, estimates, sketch
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import backend
from hvd_gradcomp.ops.hashing import words


def hashes(rows: int, columns: int, key: int = 1) -> Hashes:
    return Hashes(words(key, 2 * rows), rows, columns)


def test_sketches_add_up(ops):
    """The sketch of a sum is the sum of the sketches, which is why an allreduce may add them."""
    x, y = gradient("normal", (500,), 1), gradient("normal", (500,), 2)
    one, other, both = (as_numpy(sketch(ops, array_of(ops, each), hashes(3, 64))) for each in (x, y, x + y))
    np.testing.assert_allclose(one + other, both, atol=1e-4)


def test_backends_hash_alike():
    x = gradient("wild", (3000,), 3)
    x[np.abs(x) > 1e6] = 1
    found = [as_numpy(sketch(ops, array_of(ops, x), hashes(5, 100))) for ops in (backend("numpy"), backend("torch"))]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4 * np.abs(found[0]).max())
    ones = np.ones(3000, np.float32)
    # Sums of ones are exact: these show the hashes bit by bit.
    found = [as_numpy(sketch(ops, array_of(ops, ones), hashes(5, 100))) for ops in (backend("numpy"), backend("torch"))]
    np.testing.assert_array_equal(found[0], found[1])


def test_hashes_spread_evenly():
    """Columns and signs of 20,000 elements: chi-square and the balance of signs within 6 standard deviations."""
    ops = backend("numpy")
    for row in range(3):
        columns, signs = hashes(3, 50, key=77).of(ops, row, 0, 20_000, np.zeros(1))
        counts = np.bincount(columns, minlength=50)
        assert len(counts) == 50
        assert ((counts - 400.0) ** 2 / 400).sum() <= 49 + 6 * np.sqrt(98)
        assert abs(signs.sum()) <= 6 * np.sqrt(20_000)
        assert set(np.unique(signs)) == {-1.0, 1.0}


def test_estimates_err_as_seldom_as_the_paper_says(ops):
    """At most 1/9 of the medians of five are off by 2 ||x|| / sqrt(columns) or more; in truth far fewer."""
    x = gradient("normal", (4000,), 4)
    wrong = 0
    for key in range(10):
        table = hashes(5, 100, key)
        found = as_numpy(estimates(ops, sketch(ops, array_of(ops, x), table), table, len(x)))
        wrong += np.count_nonzero(np.abs(found - x) >= 2 * np.linalg.norm(x) / 10)
    assert wrong <= 10 * len(x) / 9


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_estimates_are_medians_over_the_rows(ops, rows):
    x = gradient("normal", (300,), 5)
    table = hashes(rows, 40)
    sums = as_numpy(sketch(ops, array_of(ops, x), table)).reshape(rows, 40)
    guesses = []
    for row in range(rows):
        columns, signs = (as_numpy(each) for each in table.of(ops, row, 0, 300, array_of(ops, x)))
        guesses.append(sums[row][columns] * signs)
    found = as_numpy(estimates(ops, array_of(ops, sums.reshape(-1)), table, 300))
    np.testing.assert_array_equal(found, np.median(guesses, axis=0).astype(np.float32))


def test_large_values_of_the_sum_are_found_and_sent_exactly(ops):
    """Each worker has its own noise; three positions are large in the sum only."""
    rng = np.random.default_rng(6)
    noise = rng.standard_normal((4, 2000)).astype(np.float32) * np.float32(0.02)
    for place in (5, 700, 1999):
        noise[:, place] = 1.0
    run = Run(ops, CountSketch(ratio=0.01, dense_below=0), 4, [(2000,)])
    result = run.step([{"p0": row} for row in noise])["p0"]
    for place in (5, 700, 1999):
        assert result[place] == 1.0
    sent = np.flatnonzero(result)
    assert 3 <= len(sent) <= 20
    np.testing.assert_allclose(result[sent], noise.mean(0)[sent], rtol=1e-5, atol=1e-7)
    for after, row in zip(run.after, noise, strict=True):
        assert not after["p0"]["residual"][sent].any()
        rest = np.setdiff1d(np.arange(2000), sent)
        np.testing.assert_array_equal(after["p0"]["residual"][rest], row[rest])


def test_what_travels(ops):
    run = Run(ops, CountSketch(ratio=0.01, rows=3, width=4, dense_below=0), 2, [(3000,), (10,)])
    run.step()
    first, second = (sent.request for sent in run.cluster.sent[0] if "settings" not in sent.name)
    assert len(first.values) == MARKS + 3 * 4 * 30 + 10  # the small tensor travels whole
    assert len(second.values) == 30
    assert run.compressor.expected_bytes(3000) == 4 * (3 * 120 + 30)
    assert run.engines[0].counters.total.kept == 40


def test_nothing_to_find(ops):
    """Zeros everywhere: no second round, and a step like any other."""
    run = Run(ops, CountSketch(ratio=0.01, dense_below=0), 2, [(3000,)])
    assert not run.step([{"p0": np.zeros(3000, np.float32)}] * 2)["p0"].any()
    assert len(run.cluster.sent[0]) == 2
    run.assert_conserved(run.step())


def test_settings():
    assert compression_from_spec("sketch(0.01, rows=3, width=2.5)") == CountSketch(ratio=0.01, rows=3, width=2.5)
    for options, message in (
        ({"ratio": 2}, "ratio must be a number with 0 < ratio <= 1, got 2"),
        ({"rows": 2}, r"rows must be one of \(1, 3, 5\), got 2"),
        ({"width": 0.5}, "width must be a number with width >= 1, got 0.5"),
        ({"seed": None}, "seed must be an integer, got None"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            CountSketch(**options)

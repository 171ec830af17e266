"""Sixteen-bit floats: rounding, ranges, sums that must not overflow, and both ways of adding bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy
from simulated_cluster import Cluster
from steps import decode_sent, engines_of, parameters_of, residuals_of, step

from hvd_gradcomp.compressors import BF16, FP16, Context, NoCompression
from hvd_gradcomp.wire.parts import Reader

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
ADDS = {"one round": ("float32", "float16", "bfloat16"), "two rounds": ("float32",)}


@pytest.mark.parametrize("adds", ADDS.values(), ids=ADDS)
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("compressor", [FP16(), BF16()], ids=str)
def test_values_beyond_the_format_neither_overflow_nor_get_lost(compressor, ops, workers, adds):
    cluster = Cluster(workers, adds=adds)
    engines = engines_of(cluster, compressor, parameters_of([(6,)]))
    huge = np.array([3.4e38, -3.4e38, 7e4, 65504, 1.0, 0.0], np.float32)
    results = step(cluster, engines, ops, [{"p0": huge}] * workers)
    largest = LARGEST[compressor.sum_kind]
    for rank, (engine, result) in enumerate(zip(engines, results, strict=True)):
        assert np.isfinite(result["p0"]).all()
        assert largest / workers * 0.9 < result["p0"][0] <= largest / workers
        assert result["p0"][4] == 1
        sent = decode_sent(engine, ops, cluster.sent[rank])["p0"]
        np.testing.assert_allclose(result["p0"], sent, rtol=workers * (2.0**-8))
        np.testing.assert_array_equal(residuals_of(engine)["p0"], huge - sent)


@pytest.mark.parametrize("compressor", [FP16(), BF16()], ids=str)
def test_local_encoding_rounds_to_nearest_even_and_saturates(compressor, ops):
    tie = 2.0**-11 if compressor == FP16() else 2.0**-8
    tiny, even = 2.0**-30, 2.0**20
    x = np.array([1 + tie, 1 + 3 * tie, 1 + 1.01 * tie, tiny, -even, 3.4028235e38, -0.0], np.float32)
    frame, residual = compressor.encode(ops, array_of(ops, x), Context())
    decoded = as_numpy(compressor.decode_add(ops, Reader(ops, frame), array_of(ops, np.zeros(7, np.float32))))
    np.testing.assert_array_equal(as_numpy(residual), x - decoded)
    top = LARGEST[compressor.sum_kind]
    in_range = [tiny, -even] if compressor == BF16() else [0, -top]
    np.testing.assert_array_equal(decoded, np.array([1, 1 + 4 * tie, 1 + 2 * tie, *in_range, top, 0], np.float32))


def test_no_compression_sends_every_value_as_it_is(ops):
    cluster = Cluster(3)
    engines = engines_of(cluster, NoCompression(), parameters_of([(2,), ()]))
    results = step(cluster, engines, ops, [{"p0": np.array([w, 2.0**100]), "p1": np.array(2.0 * w)} for w in range(3)])
    for engine, result in zip(engines, results, strict=True):
        np.testing.assert_array_equal(result["p0"], np.array([1, 2.0**100], np.float32))
        np.testing.assert_array_equal(result["p1"], [2])
        assert engine.residuals == {}

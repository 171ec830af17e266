"""Invariant 2, same bits: after a step every worker holds bit-identical results.

Within one process this shows that no worker's result depends on its own rank, order or memory.
"""

from __future__ import annotations

import numpy as np
import pytest
from arrays import COMPRESSORS, array_of, bits_of, gradient, kinds, seeds, shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import Cluster
from steps import engines_of, parameters_of, residuals_of, step

from hvd_gradcomp.compressors import NoCompression, TopKInt8

ROUNDS = {"one round": ("float32", "float16", "bfloat16"), "two rounds": ("float32",)}


@pytest.mark.parametrize("adds", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("compressor", [*COMPRESSORS, NoCompression()], ids=str)
@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
@settings(max_examples=4)
@given(shapes=st.lists(shapes, min_size=1, max_size=4), workers=st.integers(2, 5), seed=seeds, kind=kinds)
def test_same_bits_at_every_worker(compressor, ops, adds, average, shapes, workers, seed, kind):
    cluster = Cluster(workers, adds=adds)
    parameters = parameters_of(shapes)
    engines = engines_of(cluster, compressor, parameters, average=average, bucket_bytes=500)
    for number in range(3):
        gradients = [
            {
                each.name: gradient(kind, shape, (seed, number, rank))
                for each, shape in zip(parameters, shapes, strict=True)
            }
            for rank in range(workers)
        ]
        results = step(cluster, engines, ops, gradients)
        assert results[0].keys() == {each.name for each in parameters}
        for result in results[1:]:
            assert {name: x.tobytes() for name, x in result.items()} == {
                name: x.tobytes() for name, x in results[0].items()
            }


def test_same_bits_when_one_worker_is_not_finite(ops):
    cluster = Cluster(3)
    engines = engines_of(cluster, TopKInt8(ratio=0.5), parameters_of([(20,)]))
    gradients = [{"p0": np.full(20, value, np.float32)} for value in (1.0, np.nan, 3.0)]
    results = step(cluster, engines, ops, gradients)
    assert len({result["p0"].tobytes() for result in results}) == 1


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_results_are_the_average_or_the_sum_of_what_was_sent(ops, average):
    """With everything sent exactly, the result is the plain average or sum."""
    cluster = Cluster(3)
    engines = engines_of(cluster, TopKInt8(ratio=1.0), parameters_of([(4,), (2, 2)]), average=average)
    base = np.array([127.0, -64.0, 0.0, 1.0], np.float32)
    gradients = [{"p0": base * rank, "p1": -base.reshape(2, 2)} for rank in (1, 2, 6)]
    for result in step(cluster, engines, ops, gradients):
        np.testing.assert_array_equal(result["p0"], base * (3 if average else 9))
        np.testing.assert_array_equal(result["p1"], -base * (1 if average else 3))


@pytest.mark.parametrize("compressor", [*COMPRESSORS, NoCompression()], ids=str)
def test_results_have_memory_of_their_own(ops, compressor):
    """A user may write over what the optimizer gives back: no residual and no later result changes with it."""

    def outcome(overwrite: bool) -> list[bytes]:
        cluster = Cluster(2)
        engines = engines_of(cluster, compressor, parameters_of([(50,), (30,)]), bucket_bytes=2**20)
        seen: list[bytes] = []

        def work(transport):
            engine = engines[transport.rank]
            for number in range(4):
                for place, each in enumerate(engine.parameters):
                    x = gradient("normal", (each.size,), (number, transport.rank, place))
                    engine.submit(each.name, array_of(ops, x))
                results = engine.finish()
                if transport.rank == 0:
                    seen.extend(bits_of(result) for result in results.values())
                if overwrite:
                    for result in results.values():
                        ops.clear(result)

        cluster.run(work)
        return seen + [residuals_of(engine)[name].tobytes() for engine in engines for name in ("p0", "p1")]

    assert outcome(overwrite=True) == outcome(overwrite=False)

"""Invariant 3, names, not order: workers that reach parameters in different orders meet in the same exchanges."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import COMPRESSORS, array_of, gradient, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import Cluster
from steps import decode_sent, engines_of, parameters_of, step

from hvd_gradcomp.compressors import NoCompression, TopKInt8

ROUNDS = {"one round": ("float32", "float16", "bfloat16"), "two rounds": ("float32",)}
SHAPES = [(40,), (3, 5), (), (100,), (7,), (64,)]
PARAMETERS = parameters_of(SHAPES)
NAMES = [each.name for each in PARAMETERS]


def _gradients(workers: int, seed: int) -> list[dict[str, np.ndarray]]:
    return [
        {
            name: gradient("normal", shape, (seed, rank, place))
            for place, (name, shape) in enumerate(zip(NAMES, SHAPES, strict=True))
        }
        for rank in range(workers)
    ]


@pytest.mark.parametrize("adds", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("compressor", [*COMPRESSORS, NoCompression()], ids=str)
@settings(max_examples=5)
@given(
    orders=st.lists(st.permutations(NAMES), min_size=3, max_size=3),
    # One bucket for each parameter, a few buckets of several, one for all.
    bucket_bytes=st.sampled_from([4, 260, 500, 10_000]),
    seed=seeds,
)
def test_names_not_order_decide_what_meets(compressor, ops, adds, orders, bucket_bytes, seed):
    cluster = Cluster(3, adds=adds)
    mixed = engines_of(cluster, compressor, PARAMETERS, bucket_bytes=bucket_bytes)
    straight = engines_of(cluster, compressor, PARAMETERS, bucket_bytes=bucket_bytes)
    for number in range(2):
        gradients = _gradients(3, seed + number)
        expected = step(cluster, straight, ops, gradients)
        results = step(cluster, mixed, ops, gradients, orders=orders)
        for result in results:
            assert result.keys() == set(NAMES)
            for name in NAMES:
                np.testing.assert_array_equal(result[name], expected[0][name])


def test_buckets_begin_as_soon_as_they_are_full(ops):
    """An exchange begins while other gradients are still being made, and not before its own are all there."""
    cluster = Cluster(1)
    (engine,) = engines_of(cluster, TopKInt8(ratio=0.1), PARAMETERS, bucket_bytes=300)
    begun: list[tuple[str, int]] = []

    def work(transport):
        for each in reversed(PARAMETERS):
            engine.submit(each.name, array_of(ops, np.ones(each.size, np.float32)))
            begun.append((each.name, sum(not sent.name.endswith(".settings") for sent in cluster.sent[0])))
        return engine.finish()

    (results,) = cluster.run(work)
    assert results.keys() == set(NAMES)
    assert [[each.name for each in bucket.parameters] for bucket in engine.buckets] == [
        ["p5", "p4"],
        ["p3"],
        ["p2", "p1", "p0"],
    ]
    assert begun == [("p5", 0), ("p4", 1), ("p3", 2), ("p2", 2), ("p1", 2), ("p0", 3)]


def test_parameters_left_out_of_a_step(ops):
    """`None` leaves a parameter out, on all workers: the others of its bucket are exchanged all the same."""
    cluster = Cluster(2)
    engines = engines_of(cluster, TopKInt8(ratio=0.2), PARAMETERS, bucket_bytes=500)
    for number, absent in enumerate([{"p1"}, set(), {"p4", "p5"}, set(NAMES), {"p0"}, set()]):
        gradients = [
            {name: None if name in absent else x for name, x in each.items()} for each in _gradients(2, number)
        ]
        before = [dict(engine.residuals) for engine in engines]
        results = step(cluster, engines, ops, gradients, orders=[NAMES, NAMES[::-1]])
        for result, engine, old in zip(results, engines, before, strict=True):
            assert result.keys() == set(NAMES) - absent
            assert all(engine.residuals.get(name) is old.get(name) for name in absent)


def test_two_engines_of_equal_names_do_not_meet(ops):
    """Two optimizers in one process over parameters of the same names, told apart by scope, in crossed order."""
    cluster = Cluster(2)
    parameters = parameters_of([(30,)])
    first = engines_of(cluster, TopKInt8(ratio=1.0), parameters, average=False)
    second = engines_of(cluster, TopKInt8(ratio=1.0), parameters, average=False, scope="2:")

    def work(transport):
        rank = transport.rank
        pair = [(first[rank], 127.0), (second[rank], 254.0)]
        for engine, value in pair if rank == 0 else pair[::-1]:
            engine.submit("p0", ops.zeros(30, "float32", array_of(ops, np.zeros(0))) + value)
        return [float(engine.finish()["p0"][3]) for engine in (first[rank], second[rank])]

    assert cluster.run(work) == [[254.0, 508.0]] * 2


def test_what_a_worker_sends_does_not_depend_on_the_order(ops):
    cluster = Cluster(2)
    engines = engines_of(cluster, TopKInt8(ratio=0.1), PARAMETERS, bucket_bytes=500)
    gradients = [_gradients(1, 0)[0]] * 2
    step(cluster, engines, ops, gradients, orders=[NAMES, NAMES[::-1]])
    one, other = (decode_sent(engine, ops, sent) for engine, sent in zip(engines, cluster.sent, strict=True))
    assert one.keys() == other.keys() == set(NAMES)
    for name in NAMES:
        np.testing.assert_array_equal(one[name], other[name])

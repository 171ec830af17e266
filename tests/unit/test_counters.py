"""Counters: bytes and elements as they were handed to collectives, for each bucket and in all."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from arrays import gradient
from simulated_cluster import Cluster
from steps import engines_of, parameters_of, step

from hvd_gradcomp.collectives import Allgather, Allreduce, moves_fewer_bytes
from hvd_gradcomp.compressors import BF16, FP16, NoCompression, TopK, TopKInt8
from hvd_gradcomp.telemetry import BucketCounters, Counters

SHAPES = [(100,), (20, 5), ()]


def counted(ops, compressor, workers=2, steps=1, kind="float32", adds=("float32", "float16"), **options):
    """The cluster and the engines after some steps in buckets of p2 with p1, and p0."""
    cluster = Cluster(workers, adds=adds)
    engines = engines_of(cluster, compressor, parameters_of(SHAPES, kind), bucket_bytes=410, **options)
    assert [bucket.name for bucket in engines[0].buckets] == ["p2", "p0"]
    for number in range(steps):
        gradients = [
            {f"p{place}": gradient("normal", shape, (number, rank, place)) for place, shape in enumerate(SHAPES)}
            for rank in range(workers)
        ]
        step(cluster, engines, ops, gradients)
    return cluster, engines


def test_gathered_payloads(ops):
    cluster, engines = counted(ops, TopKInt8(ratio=0.05), workers=3, steps=2)
    for rank, engine in enumerate(engines):
        for bucket, size, kept in (("p2", 101, 6), ("p0", 100, 5)):
            counters = engine.counters.buckets[bucket]
            assert (counters.exchanges, counters.elements, counters.kept) == (2, 2 * size, 2 * kept)
            assert counters.dense_bytes == 2 * 4 * size
            sent = [
                [len(each.request.payload) for each in requests if each.name == bucket] for requests in cluster.sent
            ]
            assert counters.sent_bytes == sum(sent[rank])
            assert counters.received_bytes == sum(map(sum, sent)) - sum(sent[rank])
            assert (counters.fallbacks, counters.non_finite) == (0, 0)


@pytest.mark.parametrize(
    ("compressor", "width", "adds"),
    [
        (FP16(), 2, ("float32", "float16")),
        (BF16(), 2, ("float32",)),
        (BF16(), 2, ("float32", "bfloat16")),
        (NoCompression(), 4, ("float32",)),
    ],
    ids=str,
)
def test_sums(ops, compressor, width, adds):
    """Counted as an allreduce of the vector, also where it takes two rounds."""
    _, engines = counted(ops, compressor, adds=adds)
    for engine in engines:
        total = engine.counters.total
        assert (total.exchanges, total.elements, total.kept) == (2, 201, 201)
        assert (total.dense_bytes, total.sent_bytes, total.received_bytes) == (4 * 201, width * 201, width * 201)


@pytest.mark.parametrize(
    ("kind", "dense", "sent"), [("float16", 2, 2), ("bfloat16", 2, 2), ("float32", 4, 4), ("float64", 8, 4)]
)
def test_dense_fallback(ops, kind, dense, sent):
    """Sent in the format of the gradient, float64 as float32."""
    cluster, engines = counted(ops, TopK(ratio=1.0), workers=4, kind=kind)
    for engine in engines:
        total = engine.counters.total
        assert total.fallbacks == total.exchanges == 2
        assert (total.dense_bytes, total.sent_bytes, total.kept) == (dense * 201, sent * 201, 201)
    kinds = {each.request.kind for each in cluster.sent[0] if isinstance(each.request, Allreduce)}
    assert kinds == ({"float32"} if sent == 4 else {"float16"} if kind == "float16" else set())


def test_no_fallback_where_compression_pays(ops):
    cluster, engines = counted(ops, TopKInt8(ratio=0.05), workers=2)
    assert engines[0].counters.total.fallbacks == 0
    assert {type(each.request) for each in cluster.sent[0]} == {Allgather}


@pytest.mark.parametrize(
    ("payload", "dense", "workers", "expected"),
    [(50, 100, 1, True), (99, 100, 2, True), (100, 100, 2, False), (2, 100, 99, True), (2, 100, 100, False)],
)
def test_which_exchange_moves_fewer_bytes(payload, dense, workers, expected):
    """(N - 1) payloads arrive by an allgather, 2 (N - 1) / N times the dense bytes by a ring allreduce."""
    assert moves_fewer_bytes(payload, dense, workers) is expected
    if workers > 1:
        assert ((workers - 1) * payload < 2 * (workers - 1) / workers * dense) is expected


def test_a_step_that_is_not_finite(ops):
    cluster = Cluster(2)
    engines = engines_of(cluster, TopKInt8(ratio=0.5), parameters_of([(10,)]))
    step(cluster, engines, ops, [{"p0": np.full(10, value, np.float32)} for value in (np.nan, 1)])
    for engine in engines:
        total = engine.counters.total
        assert (total.exchanges, total.non_finite, total.elements) == (1, 1, 10)
        assert total.sent_bytes > 0
    # The worker with the bad value sends none at all.
    assert [engine.counters.total.kept for engine in engines] == [0, 5]


def test_time_is_counted_where_it_is_spent(ops):
    _, engines = counted(ops, TopKInt8(ratio=0.05))
    for counters in engines[0].counters.buckets.values():
        assert counters.compress_seconds > 0
        assert counters.exchange_seconds > 0
        assert counters.decompress_seconds > 0


def test_a_stopwatch_adds_up_and_stops_at_an_error():
    counters = BucketCounters(compress_seconds=5.0)
    with pytest.raises(KeyError), counters.timed("compress"):
        raise KeyError
    assert 5.0 < counters.compress_seconds < 6.0
    assert counters.exchange_seconds == counters.decompress_seconds == 0


def test_totals_and_reset():
    counters = Counters()
    assert counters.total == BucketCounters()
    counters.bucket("a").sent_bytes += 3
    counters.bucket("b").sent_bytes += 4
    counters.bucket("b").exchange_seconds += 0.5
    assert counters.bucket("a") is counters.bucket("a")
    assert asdict(counters.total) == asdict(BucketCounters(sent_bytes=7, exchange_seconds=0.5))
    counters.reset()
    assert counters.buckets == {}

"""Granularity: a bucket or the whole model compressed as one vector gives what that vector would give as one tensor."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of
from methods import METHODS, WAYS, Run, with_options
from simulated_cluster import Cluster, MemoryTransport
from steps import step

from hvd_gradcomp.compressors import DGC, TopK, compression_from_spec
from hvd_gradcomp.engine import Engine, Parameter, plan_buckets
from hvd_gradcomp.feedback import ErrorFeedback, MomentumCorrection
from hvd_gradcomp.ops import backend

NUMPY, TORCH = backend("numpy"), backend("torch")
SHAPES = ((30, 4), (50,), (), (20, 20))


def joined(run: Run, gradients: list[dict[str, np.ndarray]], names: list[str]) -> list[dict[str, np.ndarray]]:
    """The same gradients as one vector each, called after the first name."""
    return [{names[0]: np.concatenate([each[name].reshape(-1) for name in names])} for each in gradients]


class AsOne:
    """Engines that know the tensors of one bucket as a single vector."""

    def __init__(self, run: Run, method, names: list[str]) -> None:
        self.cluster = Cluster(run.cluster.workers)
        size = sum(each.size for each in run.parameters if each.name in names)
        self.engines = [
            Engine(method, [Parameter(names[0], size, "float32")], MemoryTransport(self.cluster, rank))
            for rank in range(run.cluster.workers)
        ]


@pytest.mark.parametrize(
    ("ops", "granularity", "method"),
    [(NUMPY, "bucket", each) for each in METHODS]
    + [(NUMPY, "model", each) for each in WAYS]
    + [(TORCH, "bucket", each) for each in WAYS],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_what_is_joined_is_compressed_as_one_vector(ops, method, granularity):
    """Results, residuals and velocities are those of one tensor with all the elements, split."""
    memory = MomentumCorrection()
    coarse = with_options(method, memory=memory, granularity=granularity)
    run = Run(ops, coarse, 2, SHAPES, bucket_bytes=1700 if granularity == "bucket" else 4)
    buckets = [[each.name for each in bucket.parameters] for bucket in run.engines[0].buckets]
    assert buckets == ([["p3", "p2"], ["p1", "p0"]] if granularity == "bucket" else [["p3", "p2", "p1", "p0"]])
    ones = [AsOne(run, with_options(method, memory=memory), names) for names in buckets]
    for _ in range(3):
        gradients = run.gradients()
        results = run.step(gradients)
        for names, one in zip(buckets, ones, strict=True):
            expected = step(one.cluster, one.engines, ops, joined(run, gradients, names))[0][names[0]]
            found = np.concatenate([results[name] for name in names])
            assert found.tobytes() == expected.tobytes()
            for after, engine in zip(run.after, one.engines, strict=True):
                for part in memory.parts:
                    whole = np.concatenate([after[name][part] for name in names])
                    assert whole.tobytes() == np.asarray(engine.state[names[0]][part]).tobytes()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_layers_by_themselves_do_not_see_their_buckets(method):
    """At granularity "layer", the default, re-bucketing changes nothing, not one bit."""
    assert method.granularity == "layer"
    runs = [Run(NUMPY, method, 2, SHAPES, bucket_bytes=size) for size in (4, 1700, 2**20)]
    for _ in range(3):
        results = [run.step() for run in runs]
        for name in results[0]:
            assert len({result[name].tobytes() for result in results}) == 1


def test_a_bucket_sends_its_largest_values_wherever_they_are(ops):
    """Of two layers, one has gradients a thousand times larger: all that is sent is there, unless layers are apart."""
    for granularity, counts in (("layer", (10, 10)), ("bucket", (0, 20)), ("model", (0, 20))):
        run = Run(ops, TopK(ratio=0.1, dense_below=0, granularity=granularity), 1, [(100,), (100,)])
        gradients = run.gradients()
        gradients[0]["p1"] *= np.float32(1000)
        results = run.step(gradients)
        assert tuple(np.count_nonzero(results[name]) for name in ("p0", "p1")) == counts


def test_groups_are_buckets_and_the_model_is_one_whatever_the_groups(ops):
    groups = [["p0", "p2"], ["p1"]]
    names = []
    for granularity in ("bucket", "model"):
        run = Run(ops, TopK(granularity=granularity), 1, [(5,), (6,), (7,)], groups=groups)
        names.append([[each.name for each in bucket.parameters] for bucket in run.engines[0].buckets])
    assert names == [[["p0", "p2"], ["p1"]], [["p2", "p1", "p0"]]]


@pytest.mark.parametrize("method", WAYS, ids=str)
def test_state_survives_a_change_of_granularity(ops, method):
    """It is kept by parameter, so nothing that is owed is lost when units change."""
    run = Run(ops, with_options(method, memory=ErrorFeedback()), 2, SHAPES)
    run.step()
    for granularity in ("bucket", "layer", "bucket"):
        run.compressor = with_options(method, granularity=granularity)
        for engine in run.engines:
            engine.compressor = run.compressor
        for _ in range(2):
            run.assert_conserved(run.step())


def test_small_tensors_stay_out_of_a_joined_vector_that_carries_momentum(ops):
    """They are there for their momentum only, and travel whole beside it."""
    run = Run(ops, DGC(ratio=0.01, granularity="bucket"), 2, [(10,), (2000,), (3000,)])
    for _ in range(2):
        results = run.step()
    assert np.count_nonzero(results["p0"]) == 10
    assert np.count_nonzero(np.concatenate([results["p1"], results["p2"]])) <= 100


def test_gradients_that_take_another_way_are_left_out_of_the_vector(ops):
    run = Run(ops, TopK(ratio=0.1, dense_below=0, granularity="bucket"), 2, [(100,), (200,), (100,)])
    run.step()
    kept = [engine.state["p1"]["residual"] for engine in run.engines]
    gradients = [{"p0": x["p0"], "p1": None, "p2": x["p2"]} for x in run.gradients()]
    results = step(run.cluster, run.engines, ops, gradients)
    assert sorted(results[0]) == ["p0", "p2"]
    assert all(engine.state["p1"]["residual"] is before for engine, before in zip(run.engines, kept, strict=True))
    run.assert_conserved(run.step())


def test_granularity_in_specs():
    for spec in (
        "topk(granularity=bucket)",
        "randomk(granularity=model) >> fp16",
        "powersgd(rank=2, granularity=model)",
    ):
        assert str(compression_from_spec(spec)) == spec
    assert (TopK(granularity="bucket") >> compression_from_spec("int8")).granularity == "bucket"


def test_plan_is_the_same_list_of_buckets_as_before():
    parameters = [Parameter(f"p{index}", 10, "float32") for index in range(4)]
    assert [[each.name for each in bucket.parameters] for bucket in plan_buckets(parameters, 80)] == [
        ["p3", "p2"],
        ["p1", "p0"],
    ]


def test_results_of_a_joined_vector_may_be_overwritten(ops):
    """They share memory with each other, but with no residual and no later result."""

    def outcome(overwrite: bool) -> list[bytes]:
        run = Run(ops, TopK(ratio=0.1, dense_below=0, granularity="bucket"), 2, SHAPES)
        seen = []

        def work(transport):
            engine = run.engines[transport.rank]
            for number in range(3):
                run.steps = number
                for name, g in run.gradients()[transport.rank].items():
                    engine.submit(name, array_of(ops, g))
                for x in engine.finish().values():
                    seen.append(np.asarray(x).tobytes()) if transport.rank == 0 else None
                    if overwrite:
                        x *= 0
            return

        run.cluster.run(work)
        return seen

    assert outcome(True) == outcome(False)

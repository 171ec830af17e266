"""How payloads meet: conservation over both stages, same bits, names and not order, uneven sizes, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from arrays import array_of, as_numpy, gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import METHODS, Run, corrected, with_options
from simulated_cluster import Cluster, MemoryTransport
from steps import engines_of, parameters_of, step

from hvd_gradcomp.collectives import Allgather, Alltoall, Request, node_key, nodes_of, process_set_of
from hvd_gradcomp.compressors import Compressor, Int8, Sign, Threshold, TopK, TopKInt8, compression_from_spec
from hvd_gradcomp.engine.segments import least_bucket_bytes
from hvd_gradcomp.errors import ConfigurationError, GradcompError, PayloadError, UnsupportedError
from hvd_gradcomp.feedback import ErrorFeedback, MomentumCorrection, mean_residuals, residuals_from, whole_parts
from hvd_gradcomp.feedback.shares import join_shares, share_of, share_size, shared_part
from hvd_gradcomp.ops import Ops, backend, ops_for

NUMPY = backend("numpy")
GATHERED = [method for method in METHODS if method.meets == "gather"]
SHAPES = ((40,), (), (30, 20), (8, 3, 5), (2500,))
#: The collective, and the number of workers on each node.
WAYS = {
    "owners": ("scatter_reduce", (3,)),
    "one worker": ("scatter_reduce", (1,)),
    "nodes": ("hierarchical", (2, 2)),
    "uneven nodes": ("hierarchical", (2, 1, 3)),
    "many nodes": ("hierarchical", (2, 1, 1, 1, 2)),
    "one node": ("hierarchical", (3,)),
    "a worker a node": ("hierarchical", (1, 1)),
}
each_way = pytest.mark.parametrize("way", WAYS)


def run_of(way: str, method: Compressor, ops: Ops = NUMPY, **options: Any) -> Run:
    collective, nodes = WAYS[way]
    run = Run(ops, with_options(method, collective=collective), sum(nodes), options.pop("shapes", SHAPES), **options)
    run.cluster.nodes = nodes
    return run


def kept(run: Run, states: Sequence[Mapping[str, Mapping[str, np.ndarray]]], name: str, size: int) -> dict[str, Any]:
    """Part -> the sum over the workers of what they keep of one parameter, their shares included."""
    found: dict[str, Any] = {}
    for state in states:
        for part, values in whole_parts(NUMPY, name, size, state.get(name, {})).items():
            found[part] = found.get(part, np.zeros(size)) + values.astype(np.float64)
    return found


def assert_conserved(run: Run, results: Mapping[str, np.ndarray]) -> None:
    """What the workers together owe and bring has arrived, or is kept by one of them."""
    workers = run.cluster.workers
    for each in run.parameters:
        total = sum(gradients[each.name].astype(np.float64).reshape(-1) for gradients in run.used)
        x = corrected(run.compressor.memory, total, kept(run, run.before, each.name, each.size), workers)["x"]
        left = kept(run, run.after, each.name, each.size).get("residual", 0.0)
        arrived = results[each.name].astype(np.float64) * workers
        largest = max(np.abs(x).max(), np.abs(left).max() if np.ndim(left) else 0, 1e-3)
        np.testing.assert_allclose(arrived + left, x, rtol=0, atol=2e-5 * largest * workers)


@each_way
@pytest.mark.parametrize("method", GATHERED, ids=str)
def test_conservation(method, way):
    """Also the same bits at every worker, in every step (which `Run.step` asserts)."""
    for memory in (ErrorFeedback(decay=0.5), MomentumCorrection()):
        run = run_of(way, with_options(method, memory=memory), bucket_bytes=3000)
        for _ in range(3):
            results = run.step()
            if not (memory.is_momentum and run.steps == 1):
                assert_conserved(run, results)


def test_both_backends_give_the_same(ops):
    for way in WAYS:
        for method in (TopKInt8(ratio=0.1, dense_below=0), Int8(block=64, dense_below=0)):
            here, there = run_of(way, method), run_of(way, method, ops)
            for _ in range(2):
                one, other = here.step(), there.step()
                assert {name: x.tobytes() for name, x in one.items()} == {
                    name: x.tobytes() for name, x in other.items()
                }


@pytest.mark.parametrize("way", ["owners", "uneven nodes"])
@pytest.mark.parametrize("method", [TopK(ratio=0.1, dense_below=0), Int8(dense_below=0)], ids=str)
def test_state_survives_a_change_of_collective(way, method):
    """Owners' residuals of any kind are sent on by any other exchange, dense ones included."""
    run = run_of(way, method)
    for collective in ("scatter_reduce", "hierarchical", "allgather", "hierarchical", "scatter_reduce"):
        run.compressor = with_options(method, collective=collective)
        for engine in run.engines:
            engine.compressor = run.compressor
            engine._agreed_workers = 0
        assert_conserved(run, run.step())
    run.compressor = TopK(ratio=1.0, dense_below=0)
    for engine in run.engines:
        engine.compressor = run.compressor
    assert_conserved(run, run.step())
    assert run.engines[0].counters.total.fallbacks > 0
    assert not any(run.after)


def test_checkpoint_of_shares_for_another_number_of_workers():
    method = TopK(ratio=0.05, dense_below=0)
    for way in ("owners", "nodes"):
        run = run_of(way, method)
        for _ in range(3):
            run.step()
        workers = run.cluster.workers
        totals = {each.name: kept(run, run.after, each.name, each.size) for each in run.parameters}
        mean = mean_residuals(NUMPY, totals, workers, step=3)
        sizes = {each.name: each.size for each in run.parameters}
        for other in WAYS:
            new = run_of(other, method)
            for engine in new.engines:
                state, number = residuals_from(mean, sizes)
                copied = {n: {p: v.astype(np.float32) for p, v in parts.items()} for n, parts in state.items()}
                engine.load_state(copied, number)
            assert_conserved(new, new.step())


def test_votes_are_what_they_are_in_an_allgather(ops):
    """Sums of votes are not compressed again, so that no tie becomes a vote."""
    for method in (Sign(), TopK(ratio=0.2, dense_below=0) >> Sign()):
        runs = [Run(ops, with_options(method, collective=each), 4, SHAPES) for each in ("allgather", "scatter_reduce")]
        expected, found = (run.step() for run in runs)
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x)
            assert name != "p4" or {-1.0, 0.0, 1.0} == set(np.unique(x))


@pytest.mark.parametrize("way", ["owners", "nodes", "uneven nodes"])
def test_names_and_not_order(way):
    run = run_of(way, TopKInt8(ratio=0.1, dense_below=0), bucket_bytes=2000)
    names = [each.name for each in run.parameters]
    gradients = run.gradients()
    rng = np.random.default_rng(0)
    orders = [list(rng.permutation(names)) for _ in gradients]
    results = step(run.cluster, run.engines, NUMPY, gradients, orders)
    ordered = run_of(way, TopKInt8(ratio=0.1, dense_below=0), bucket_bytes=2000).step(gradients)
    for result in results:
        assert {name: x.tobytes() for name, x in result.items()} == {name: x.tobytes() for name, x in ordered.items()}


@pytest.mark.parametrize("way", ["owners", "nodes", "uneven nodes"])
def test_a_gradient_that_is_not_finite(way):
    run = run_of(way, TopKInt8(ratio=0.1, dense_below=0))
    run.step()
    gradients = run.gradients()
    gradients[-1]["p4"][7] = np.nan
    results = run.step(gradients)
    assert all(np.isnan(x).all() for x in results.values())
    for before, after in zip(run.before, run.after, strict=True):
        for name, parts in after.items():
            assert {part: x.tobytes() for part, x in parts.items()} == {
                part: x.tobytes() for part, x in before[name].items()
            }
    assert_conserved(run, run.step())


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    way=st.sampled_from(sorted(WAYS)),
    method=st.sampled_from(
        [TopKInt8(ratio=0.1, dense_below=0), Int8(block=64, dense_below=0), TopK(0.3, dense_below=0)]
    ),
    granularity=st.sampled_from(["layer", "bucket"]),
)
def test_sizes_of_every_kind(sizes, way, method, granularity):
    """Single elements, shares of nothing, buckets of one tensor and of all."""
    run = run_of(
        way, with_options(method, granularity=granularity), shapes=[(size,) for size in sizes], bucket_bytes=400
    )
    for _ in range(2):
        assert_conserved(run, run.step())


@given(size=st.integers(1, 50), owners=st.integers(1, 12), name=st.text(max_size=4))
def test_shares_make_up_the_whole(ops, size, owners, name):
    x = array_of(ops, np.arange(size, dtype=np.float32))
    shares = [share_of(ops, name, x, owner, owners) for owner in range(owners)]
    assert [len(share) for share in shares] == [share_size(name, size, owner, owners) for owner in range(owners)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    np.testing.assert_array_equal(as_numpy(join_shares(ops, name, shares, size)), np.arange(size))
    parts = {shared_part("residual", owner, owners): share for owner, share in enumerate(shares)}
    whole = whole_parts(ops, name, size, parts)
    np.testing.assert_array_equal(as_numpy(whole["residual"]), np.arange(size))


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["owners", "nodes", "uneven nodes", "many nodes"])
@pytest.mark.parametrize("kind", [Alltoall, Allgather], ids=["first round", "later rounds"])
def test_corrupt_bytes_are_an_error_at_every_worker(ops, way, kind):
    """Who finds them tells those who wait for what would have been made of them. (Here an owner sends them.)"""
    run = run_of(way, TopKInt8(ratio=0.1, dense_below=0), ops)
    victim = run.cluster.workers - run.cluster.nodes[-1]

    def tamper(rank: int, name: str, request: Request) -> Request:
        if rank != run.cluster.ranks[victim] or not isinstance(request, kind) or name.endswith(".settings"):
            return request
        payload = as_numpy(request.payload)
        payload[len(payload) // 2] ^= 64
        return replace(request, payload=array_of(ops_for(request.payload), payload))

    run.cluster.tamper = tamper

    def work(transport: MemoryTransport) -> None:
        engine = run.engines[transport.rank]
        for name, x in run.gradients()[transport.rank].items():
            engine.submit(name, array_of(ops, x))
        engine.finish()

    for outcome in run.cluster.outcomes(work):
        assert isinstance(outcome, PayloadError), outcome
        assert f"rank {run.cluster.ranks[victim]} sent a corrupt payload" in str(outcome)


@pytest.mark.parametrize("others", ["allgather", "hierarchical", "auto"])
def test_workers_that_would_meet_in_different_ways(others):
    parameters = parameters_of(SHAPES)
    cluster = Cluster(3, nodes=(2, 1))
    engines = engines_of(cluster, TopK(dense_below=0, collective="scatter_reduce"), parameters)
    engines[1] = engines_of(cluster, TopK(dense_below=0, collective=others), parameters)[1]

    def work(transport: MemoryTransport) -> None:
        for each in parameters:
            engines[transport.rank].submit(each.name, gradient("normal", (each.size,), 0))
        engines[transport.rank].finish()

    for outcome in cluster.outcomes(work):
        assert isinstance(outcome, GradcompError)
        assert "collective=scatter_reduce" in str(outcome)
        assert others == "allgather" or f"collective={others}" in str(outcome)


def test_what_cannot_be_hierarchical():
    """Gradients that are clipped before they are added cannot be clipped afterwards; nor votes be taken from sums."""
    method = TopK(memory=MomentumCorrection(clip=1.0), collective="hierarchical")
    with pytest.raises(ConfigurationError, match="clip"):
        engines_of(Cluster(2, nodes=(1, 1)), method, parameters_of([(3000,)]))
    with pytest.raises(ConfigurationError, match="each worker has a vote of its own"):
        engines_of(Cluster(2, nodes=(1, 1)), Sign(collective="hierarchical"), parameters_of([(3000,)]))


@pytest.mark.parametrize("spec", ["fp16(collective=scatter_reduce)", "powersgd(collective=hierarchical)"])
def test_methods_that_have_a_way_of_their_own(spec):
    with pytest.raises(ConfigurationError, match="collective"):
        engines_of(Cluster(2), compression_from_spec(spec), parameters_of([(3000,)]))


def test_collectives_in_specs():
    method = compression_from_spec("topk(ratio=0.01, collective=scatter_reduce) >> int8")
    assert method.collective == "scatter_reduce"
    assert compression_from_spec(str(method)) == method
    assert TopKInt8().collective == "allgather"
    with pytest.raises(ConfigurationError, match=r"collective must be one of .*'scatter_reduce'.*got 'ring'"):
        TopK(collective="ring")


# -- topology ---------------------------------------------------------------------------------------------------------


def test_who_shares_a_node(monkeypatch):
    monkeypatch.delenv("HVD_GRADCOMP_NODES", raising=False)
    assert nodes_of(b"".join(node_key(rank, 3) for rank in range(3))) == ((0, 1, 2),)
    monkeypatch.setenv("HVD_GRADCOMP_NODES", "2,1,3")
    assert nodes_of(b"".join(node_key(rank, 6) for rank in range(6))) == ((0, 1), (2,), (3, 4, 5))
    assert nodes_of(b"aaaaaaaabbbbbbbbaaaaaaaa") == ((0, 2), (1,))
    for wrong in ("2,1", "2,-1,5", "a", "6,0", ","):
        monkeypatch.setenv("HVD_GRADCOMP_NODES", wrong)
        with pytest.raises(ConfigurationError, match="workers on each node, 6 in all"):
            node_key(0, 6)


def test_process_sets_are_made_where_they_are_missing():
    sets = {0: [0, 1, 2, 3], 5: [0, 1]}
    groups = [[0, 1], [2, 3]]
    assert process_set_of(groups, 3, lambda: sets, lambda ranks: sets.update({7: ranks}), everyone=True) == 7
    assert process_set_of(groups, 0, lambda: sets, None, everyone=False) == 5
    with pytest.raises(UnsupportedError, match=r"hvd.init\(process_sets=\[...\]\) yourself.*Inside a process set"):
        process_set_of([[0, 2], [1, 3]], 0, lambda: sets, None, everyone=False)

    def refuse(ranks: list[int]) -> None:
        raise ValueError("dynamic process sets are off")

    with pytest.raises(UnsupportedError, match=r"dynamic process sets are off.*HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        process_set_of([[0, 2], [1, 3]], 0, lambda: sets, refuse, everyone=True)


# -- bytes ------------------------------------------------------------------------------------------------------------


def leaving(run: Run, worker: int) -> int:
    """Bytes that left a worker in the last step.

    Of an alltoall all parts but its own; of an allgather as many payloads as there are other workers, which is what a
    ring lets each pass on.
    """
    total = 0
    for each in run.cluster.sent[worker]:
        if isinstance(each.request, Alltoall):
            total += sum(each.request.splits) - each.request.splits[worker]
        elif not each.name.endswith(".settings"):
            total += (run.cluster.workers - 1) * len(each.request.payload)
    return total


@pytest.mark.parametrize("method", [TopK(ratio=0.05, dense_below=0) >> Int8(), Int8(dense_below=0)], ids=str)
def test_bytes_do_not_grow_with_the_workers(method):
    """Two payloads less what a worker keeps for itself, within 10 %, where an allgather sends N - 1."""
    shapes = [(60_000,), (200, 150)]
    payload = 0
    for workers in (2, 4, 8):
        runs = {}
        for collective in ("allgather", "scatter_reduce"):
            run = runs[collective] = Run(NUMPY, with_options(method, collective=collective), workers, shapes)
            run.step()
        if not runs["allgather"].engines[0].counters.total.fallbacks:
            payload = payload or leaving(runs["allgather"], 0)
            assert leaving(runs["allgather"], 1) == pytest.approx((workers - 1) * payload, rel=0.01)
        for worker in range(workers):
            sent = leaving(runs["scatter_reduce"], worker)
            assert sent == pytest.approx(2 * payload * (workers - 1) / workers, rel=0.1)


def test_bytes_between_nodes_are_shared_by_a_node_s_workers():
    """Each of L workers exchanges 1 / L of a payload with the other nodes."""
    shapes = [(60_000,), (200, 150)]
    between = {}
    for local in (1, 2, 4):
        run = Run(NUMPY, TopK(ratio=0.05, dense_below=0, collective="hierarchical") >> Int8(), 2 * local, shapes)
        run.cluster.nodes = (local, local)
        run.step()
        across = [
            len(each.request.payload)
            for each in run.cluster.sent[0]
            if isinstance(each.request, Allgather) and not each.request.label and not each.name.endswith(".settings")
        ]
        between[local] = sum(across)
        total = run.engines[0].counters.total
        assert total.sent_bytes - total.node_bytes == between[local]
        states = run.after[0]
        kept_here = sum(len(values) for parts in states.values() for values in parts.values())
        assert kept_here == pytest.approx(90_000 / local, abs=2)
    assert between[2] == pytest.approx(between[1] / 2, rel=0.05)
    assert between[4] == pytest.approx(between[1] / 4, rel=0.05)


def test_buckets_grow_with_the_owners():
    """So that headers stay small against what an owner sends and gets; the option of the user is the least."""
    parameters = parameters_of([(1000,)] * 40)

    def largest(workers: int, **options: Any) -> int:
        (engine, *_) = engines_of(Cluster(workers), TopKInt8(ratio=0.5, **options), parameters, bucket_bytes=8000)
        return max(bucket.size for bucket in engine.buckets)

    assert largest(1, collective="scatter_reduce") == 2000
    assert largest(20, collective="scatter_reduce") == largest(20, collective="hierarchical") > 15_000
    assert largest(20) == 2000
    assert least_bucket_bytes(Threshold(value=1.0), 1000) == 0

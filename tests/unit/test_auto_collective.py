"""`collective="auto"`: the cheapest exchange by the cost model, agreed upon by all, whatever each has measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from methods import Run
from simulated_cluster import Cluster, MemoryTransport
from test_collectives import assert_conserved

from hvd_gradcomp.collectives import agree, configured_network, measure
from hvd_gradcomp.compressors import Sign, TopK, TopKInt8
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.engine.choosing import Chooser
from hvd_gradcomp.engine.rehearsal import Echo, divisible, made_up, rehearse
from hvd_gradcomp.errors import ConfigurationError, UnsupportedError
from hvd_gradcomp.feedback import MomentumCorrection
from hvd_gradcomp.ops import backend
from hvd_gradcomp.policy.cost import COSTS, FREE, Links, Network, Topology

NUMPY = backend("numpy")
#: Slow between nodes and fast within; with next to no latency, or with much.
FAST_NODES = "1e-6,1e8,1e-7,1e12"
SLOW_START = "10.0,1e9,10.0,1e9"
SHAPES = ((3000,), (200, 100))


def auto_run(nodes: tuple[int, ...], method: Any = None) -> Run:
    run = Run(NUMPY, method or TopKInt8(ratio=0.05, collective="auto"), sum(nodes), SHAPES, bucket_bytes=20_000)
    run.cluster.nodes = nodes
    return run


@pytest.mark.parametrize(
    ("nodes", "network", "ratio", "counter"),
    [
        ((2, 2), FAST_NODES, 0.05, "nodewise"),
        ((1,) * 8, "1e-6,1e8", 0.05, "scattered"),
        ((1,) * 8, SLOW_START, 0.05, None),
        ((1,) * 8, SLOW_START, 0.9, "fallbacks"),
    ],
)
def test_each_way_where_it_is_cheapest(monkeypatch, nodes, network, ratio, counter):
    monkeypatch.setenv("HVD_GRADCOMP_NETWORK", network)
    run = auto_run(nodes, TopKInt8(ratio=ratio, collective="auto"))
    for _ in range(2):
        assert_conserved(run, run.step())
    for engine in run.engines:
        total = engine.counters.total
        found = {each: getattr(total, each) for each in ("nodewise", "scattered", "fallbacks")}
        assert found == {each: total.exchanges if each == counter else 0 for each in found}


def chooser_of(topology: Topology, network: Network, **rates: float) -> Chooser:
    method = TopKInt8(collective="auto")
    return Chooser(topology, dict.fromkeys(COSTS, Links(network)), None, {method: rates} if rates else {})


def test_each_bucket_by_itself():
    """Latency decides for small ones, bandwidth for large ones."""
    chooser, method = chooser_of(Topology((1,) * 16), Network(1e-3, 1e9)), TopKInt8(collective="auto")
    assert chooser.cheapest(method, 1e3, 1e4, 2500) == "allgather"
    assert chooser.cheapest(method, 1e6, 1e7, 2_500_000) == "scatter_reduce"
    assert chooser.cheapest(method, 2e5, 2e5, 50_000) == "dense"


def test_computing_counts():
    """The way with the fewest bytes may take the longest to compute; one that nobody rehearsed is not taken."""
    method, size = TopKInt8(collective="auto"), 2_500_000
    where, network = Topology((1,) * 16), Network(1e-3, 1e9)
    slow = chooser_of(where, network, dense=1e-9, allgather=1e-9, scatter_reduce=1e-7)
    assert slow.cheapest(method, 1e6, 1e7, size) == "allgather"
    assert chooser_of(where, network, dense=1e-9, allgather=1e-7).cheapest(method, 1e6, 1e7, size) == "dense"
    # What is known of another method says nothing.
    assert slow.cheapest(TopK(ratio=0.3, collective="auto"), 1e6, 1e7, size) == "scatter_reduce"


def test_workers_that_measured_different_things_choose_the_same(monkeypatch):
    """The mean of what they measured is the same bits on each."""
    large = (1.0, 1.25, 1.6, 2.0)

    def measured(ops: Any, transport: Any, kind: str, size: int, name: str, like: Any) -> float:
        return 10.0 ** -(3 + transport.rank) if size == 4 else large[transport.rank]

    monkeypatch.setattr("hvd_gradcomp.engine.choosing.measure", measured)
    run = auto_run((1, 1, 1, 1))
    run.step()
    first, *others = [engine.chooser for engine in run.engines if engine.chooser]
    assert len(others) == 3
    assert all((each.links, each.computing) == (first.links, first.computing) for each in others)
    network = first.links["allreduce"].between
    assert network.latency_s == pytest.approx(10.0**-4.5, rel=1e-4)
    assert network.bytes_per_s == pytest.approx(1.5 * (4 << 20) / 2**0.5, rel=1e-2)
    assert first.links["allreduce"].within == FREE


@pytest.mark.parametrize("kind", list(COSTS))
def test_measured_on_the_simulated_cluster(kind):
    found = Cluster(3).run(lambda transport: measure(NUMPY, transport, kind, 1 << 16, "network", np.zeros(1)))
    assert all(seconds > 0 for seconds in found)


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (2, 1), (1,) * 5 + (2,)])
def test_the_network_and_computing_are_measured_in_the_first_step(monkeypatch, nodes):
    monkeypatch.delenv("HVD_GRADCOMP_NETWORK", raising=False)
    run = auto_run(nodes)
    assert_conserved(run, run.step())
    first, *others = [engine.chooser for engine in run.engines if engine.chooser]
    assert len(others) == len(run.engines) - 1
    assert all(
        (each.topology, each.links, each.computing) == (first.topology, first.links, first.computing) for each in others
    )
    (rates,) = first.computing.values()
    assert rates
    assert all(0 < rate < 1 for rate in rates.values())
    assert first.links.keys() == COSTS.keys()
    run.step()
    assert run.engines[0].chooser is first, "measured once"


@pytest.mark.parametrize("way", ["dense", "allgather", "scatter_reduce", "hierarchical"])
def test_a_rehearsal_does_what_the_exchange_will_do(way):
    """Every worker is taken to have sent the same, in collectives of the kinds and sizes that the real ones have."""
    like = np.zeros(1, dtype=np.float32)
    parameters = (Parameter("w", 20_000, "float32"), Parameter("b", 3000, "float32"))
    method = TopKInt8(ratio=0.05, collective="allgather" if way == "dense" else way)
    found = rehearse(method, parameters, (2, 2), way, like)
    assert found.before_s > 0
    assert found.after_s > 0
    if way == "dense":
        assert found.requests == (("allreduce", 4.0 * 23_000),)
        return
    echo = Echo((2, 2))
    engine = Engine(method, parameters, echo)
    assert divisible(parameters, (2, 1)) == [Parameter("w", 20_004, "float32"), Parameter("b", 3000, "float32")]
    for name, gradient in made_up(parameters, 0, like).items():
        engine.submit(name, gradient)
    assert {name: len(each) for name, each in engine.finish().items()} == {"w": 20_000, "b": 3000}
    kinds = {
        "allgather": ["allgather"],
        "scatter_reduce": ["alltoall", "allgather"],
        "hierarchical": ["node alltoall", "across allgather", "node allgather"],
    }
    # Buckets are filled from the model's end.
    (bucket,) = engine.buckets
    assert [kind for kind, _ in echo.requests[bucket.name]][-len(kinds[way]) :] == kinds[way]
    sent = sum(size for _, size in echo.requests[bucket.name][-len(kinds[way]) :])
    assert engine.counters.total.sent_bytes == sent
    # Headers of other shares, at most.
    assert [kind for kind, _ in found.requests] == kinds[way]
    assert sum(size for _, size in found.requests) == pytest.approx(sent, rel=0.02)


def test_a_single_exchange_is_not_worth_measuring():
    assert TopKInt8(collective="auto").without_memory().collective == "allgather"
    assert TopKInt8(collective="scatter_reduce").without_memory().collective == "scatter_reduce"


def test_means_are_geometric():
    found = Cluster(2).run(
        lambda transport: agree(NUMPY, transport, [10.0**transport.rank, 1e9], "agreed", np.zeros(1))
    )
    assert found[0] == found[1] == pytest.approx([10.0**0.5, 1e9], rel=1e-5)


def test_without_process_sets_there_is_no_hierarchical(monkeypatch):
    def refuse(self: MemoryTransport, groups: Any) -> None:
        raise UnsupportedError("no process sets")

    monkeypatch.setattr(MemoryTransport, "part", refuse)
    monkeypatch.setenv("HVD_GRADCOMP_NETWORK", FAST_NODES)
    run = auto_run((2, 2))
    assert_conserved(run, run.step())
    assert run.engines[0].counters.total.nodewise == 0
    with pytest.raises(UnsupportedError, match="no process sets"):
        auto_run((2, 2), TopK(collective="hierarchical")).step()


def test_what_must_not_be_chosen(monkeypatch):
    """No sum before what has to see each worker's gradient, and nothing dense in place of a vote."""
    monkeypatch.setenv("HVD_GRADCOMP_NETWORK", FAST_NODES)
    run = auto_run((2, 2), TopK(ratio=0.05, memory=MomentumCorrection(clip=1.0), collective="auto"))
    run.step()
    assert run.engines[0].counters.total.nodewise == 0
    monkeypatch.setenv("HVD_GRADCOMP_NETWORK", SLOW_START)
    for nodes in ((1, 1), (2, 2)):
        run = auto_run(nodes, Sign(collective="auto"))
        assert {-1.0, 1.0} <= set(np.unique(np.concatenate(list(run.step().values())))) <= {-1.0, 0.0, 1.0}
        total = run.engines[0].counters.total
        assert total.fallbacks == total.nodewise == 0


def test_networks_that_are_configured(monkeypatch):
    monkeypatch.setenv("HVD_GRADCOMP_NETWORK", "5e-5,1.25e9")
    assert configured_network() == ((5e-5, 1.25e9),)
    monkeypatch.setenv("HVD_GRADCOMP_NETWORK", "5e-5,1.25e9, 2e-5,2e10")
    assert configured_network() == ((5e-5, 1.25e9), (2e-5, 2e10))
    for wrong in ("fast", "1", "1,2,3", "0,1", "1,inf", "-1,2"):
        monkeypatch.setenv("HVD_GRADCOMP_NETWORK", wrong)
        with pytest.raises(ConfigurationError, match="seconds and bytes per second"):
            configured_network()

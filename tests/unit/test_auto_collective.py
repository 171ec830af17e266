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
from hvd_gradcomp.engine.choosing import Chooser
from hvd_gradcomp.errors import ConfigurationError, UnsupportedError
from hvd_gradcomp.feedback import MomentumCorrection
from hvd_gradcomp.ops import backend
from hvd_gradcomp.policy.cost import FREE, Links, Network, Topology

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


def test_each_bucket_by_itself():
    """Latency decides for small ones, bandwidth for large ones."""
    chooser = Chooser(Topology((1,) * 16), Links(Network(1e-3, 1e9)), None)
    assert chooser.cheapest(1e3, 1e4, True) == "allgather"
    assert chooser.cheapest(1e6, 1e7, True) == "scatter_reduce"
    assert chooser.cheapest(2e5, 2e5, True) == "dense"


def test_workers_that_measured_different_things_choose_the_same(monkeypatch):
    """The mean of what they measured is the same bits on each."""
    networks = iter([(1e-6, 1e8), (1e-3, 1e9), (1e-6, 1e8), (1e-1, 1e12)])
    monkeypatch.setattr("hvd_gradcomp.engine.choosing.measure", lambda *_: next(networks))
    run = auto_run((1, 1, 1, 1))
    run.step()
    (links,) = {engine.chooser.links for engine in run.engines if engine.chooser}
    assert links.between.latency_s == pytest.approx((1e-6 * 1e-3 * 1e-6 * 1e-1) ** 0.25, rel=1e-4)
    assert links.between.bytes_per_s == pytest.approx((1e8 * 1e9 * 1e8 * 1e12) ** 0.25, rel=1e-4)
    assert links.within == FREE


def test_measured_on_the_simulated_cluster(monkeypatch):
    monkeypatch.delenv("HVD_GRADCOMP_NETWORK", raising=False)
    found = Cluster(3).run(lambda transport: measure(NUMPY, transport, "network", np.zeros(1)))
    assert all(latency > 0 and 0 < rate < float("inf") for latency, rate in found)
    run = auto_run((2, 1))
    assert_conserved(run, run.step())
    assert len({engine.chooser for engine in run.engines} - {None}) == len(run.engines)
    assert len({(each.chooser.topology, each.chooser.links) for each in run.engines if each.chooser}) == 1


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

"""The cost model against the textbook's numbers of bytes and, at the edges, against itself."""

from __future__ import annotations

import pytest

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.cost import (
    FREE,
    Links,
    Network,
    Topology,
    allgather,
    dense_allreduce,
    hierarchical,
    scatter_reduce,
)

WIRE = Network(1e-3, 1e8)
FLAT = Links(WIRE)


def test_a_dense_allreduce_sends_almost_two_gradients() -> None:
    cost = dense_allreduce(1000, Topology.even(4), FLAT)
    assert cost.sent_bytes == cost.received_bytes == cost.between_bytes == 1500
    assert cost.seconds == pytest.approx(1e-3 + 1500 / 1e8)


@pytest.mark.parametrize("workers", [2, 4, 64, 1024])
def test_an_allgather_grows_with_the_workers_and_scatter_reduce_does_not(workers: int) -> None:
    topology = Topology.even(workers)
    assert allgather(1000, topology, FLAT).sent_bytes == 1000 * (workers - 1)
    assert scatter_reduce(1000, topology, FLAT).sent_bytes == pytest.approx(2000 * (workers - 1) / workers)


def test_between_nodes_hierarchical_sends_one_payload_for_all_workers_of_a_node() -> None:
    topology = Topology.even(32, nodes=4)
    links = Links(WIRE, Network(1e-5, 1e10))
    cost = hierarchical(1000, 100_000, topology, links)
    assert cost.between_bytes == 3 * 1000
    assert cost.sent_bytes == 3 * 1000 / 8 + 2 * 7 / 8 * 100_000
    assert allgather(1000, topology, links).between_bytes == 31 * 1000
    # The card carries all eight shards at once.
    assert cost.seconds == pytest.approx(1e-3 + 3000 / 1e8 + 2 * (1e-5 + 87_500 / 1e10))


def test_hierarchical_with_one_worker_a_node_is_the_exchange_between_nodes() -> None:
    topology = Topology.even(4)
    assert hierarchical(1000, 100_000, topology, FLAT) == allgather(1000, topology, FLAT)
    across = hierarchical(1000, 100_000, topology, FLAT, across="scatter_reduce")
    assert across == scatter_reduce(1000, topology, FLAT)


def test_on_one_node_nothing_is_sent_between_nodes() -> None:
    topology, links = Topology.even(4, nodes=1), Links(WIRE, Network(1e-5, 1e10))
    for cost in (
        dense_allreduce(1000, topology, links),
        allgather(1000, topology, links),
        scatter_reduce(1000, topology, links),
        hierarchical(1000, 1000, topology, links),
    ):
        assert cost.between_bytes == 0
        assert 0 < cost.seconds < 1e-3


def test_one_worker_pays_nothing() -> None:
    alone = Topology.even(1)
    for cost in (
        dense_allreduce(1000, alone, FLAT),
        allgather(1000, alone, FLAT),
        scatter_reduce(1000, alone, FLAT),
        hierarchical(1000, 1000, alone, FLAT),
    ):
        assert cost.sent_bytes == cost.received_bytes == cost.seconds == 0


def test_uneven_nodes() -> None:
    topology = Topology.even(7, nodes=3)
    assert topology.local_sizes == (3, 2, 2)
    assert topology.workers == 7
    # The smallest node's two workers own half a payload each.
    assert hierarchical(1000, 0, topology, FLAT).sent_bytes == 2 * 500


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Network(-1, 1),
        lambda: Network(float("nan"), 1),
        lambda: Network(0, 0),
        lambda: Topology(()),
        lambda: Topology((2, 0)),
        lambda: Topology.even(2, nodes=3),
        lambda: hierarchical(1, 1, Topology.even(2), FLAT, across="ring"),
    ],
)
def test_what_cannot_be_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match=r"expected|must be"):
        wrong()  # type: ignore[operator]


def test_a_free_network_takes_no_time() -> None:
    assert dense_allreduce(1e12, Topology.even(8, nodes=1), Links(WIRE, FREE)).seconds == 0

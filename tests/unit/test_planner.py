"""The planner's formulas: fits, overlap, ranking and the sentence, on machines made up for the purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.cost import Links, Network, Topology, fit_network
from hvd_gradcomp.policy.models import MODELS, values
from hvd_gradcomp.policy.planner import (
    Compute,
    Machines,
    Method,
    Sending,
    advice,
    predict,
    rank,
)

MEGA = 1e6


def machines(bytes_per_s: float, topology: Topology | None = None) -> Machines:
    links = Links(Network(0.0, bytes_per_s), Network(0.0, 100 * bytes_per_s))
    return Machines(topology or Topology.even(4), dict.fromkeys(("allreduce", "allgather", "alltoall"), links))


def dense(buckets: int = 4) -> Method:
    return Method("dense", "allreduce", (Sending(25 * MEGA, (("allreduce", 25 * MEGA),)),) * buckets)


def topk(compress_s: float = 0.0, decompress_s: float = 0.0) -> Method:
    buckets = (Sending(25 * MEGA, (("allgather", 0.125 * MEGA),)),) * 4
    return Method("topk", "allgather", buckets, compress_s, decompress_s)


def test_latency_and_bandwidth_from_measured_points() -> None:
    # The one in the middle went through a buffer.
    network = fit_network([(1e5, 2e-3), (4, 2e-3), (1e7, 2e-3 + 1e7 / 5e7)])
    assert network.latency_s == 2e-3
    assert network.bytes_per_s == pytest.approx(5e7)
    with pytest.raises(ConfigurationError, match="two different sizes"):
        fit_network([(4, 1.0), (4, 1.1)])
    # Noise may make a large collective look faster than a small one.
    assert fit_network([(4, 2e-3), (1e3, 1e-3)]).bytes_per_s == float("inf")


def test_an_exchange_by_itself_is_compressing_wire_and_decoding() -> None:
    # 1.5 times 100 MB at 150 MB/s.
    assert predict(dense(), machines(150 * MEGA)).exchange_s == pytest.approx(1.0)
    # Three payloads of 0.5 MB; the last bucket's share follows the compressing, the others overlap with it.
    found = predict(topk(compress_s=0.4, decompress_s=0.1), machines(15 * MEGA))
    assert found.wire_s == pytest.approx(0.1)
    assert found.exchange_s == pytest.approx(0.4 + 0.1 / 4 + 0.1)
    assert topk().ratio == 0.005


def test_buckets_wait_for_latency_together() -> None:
    links = Links(Network(0.3, 15 * MEGA))
    where = Machines(Topology.even(4), dict.fromkeys(("allreduce", "allgather", "alltoall"), links))
    assert predict(topk(), where).wire_s == pytest.approx(0.1 + 0.3)
    assert predict(topk(), where).exchange_s == pytest.approx(0.1 + 0.3)


def test_what_overlaps_costs_nothing_but_the_last_bucket() -> None:
    compute = Compute(forward_s=1.0, backward_s=2.0)
    fast = predict(dense(), machines(1500 * MEGA), compute)
    assert fast.step_s == pytest.approx(3.0 + 0.1 / 4)
    slow = predict(dense(), machines(15 * MEGA), compute)
    # The network begins when the first quarter of backward is done and is then busy for 10 s.
    assert slow.step_s == pytest.approx(1.0 + 0.5 + 10.0)


def test_a_network_that_goes_on_slowly_while_workers_compute() -> None:
    compute = Compute(forward_s=1.0, backward_s=2.0)
    alone = machines(15 * MEGA)
    # Four buckets of 2.5 s each at full speed, the first after a quarter of backward.
    busy = replace(alone, overlap=0.5)
    assert predict(dense(), busy, compute).step_s == pytest.approx(1.0 + 2.0 + 10.0 - 0.5 * 1.5)
    assert predict(dense(), replace(alone, overlap=0.0), compute).step_s == pytest.approx(1.0 + 2.0 + 10.0)
    # Buckets that are over before the work is.
    quick = replace(machines(1500 * MEGA), overlap=0.5)
    assert predict(dense(), quick, compute).step_s == pytest.approx(3.0 + 0.1 / 4)
    assert predict(topk(compress_s=0.4), replace(machines(15 * MEGA), overlap=0.0)).exchange_s == pytest.approx(0.5)


def test_the_ranking_and_its_sentence() -> None:
    compute = Compute(1.0, 2.0)
    methods = [dense(), topk(compress_s=0.1, decompress_s=0.1)]
    slow = rank(methods, machines(15 * MEGA), compute)
    assert [each.method.name for each in slow] == ["topk", "dense"]
    assert slow[0].speed_up == pytest.approx(11.5 / (slow[0].step_s or 0))
    assert "topk is best here" in advice(slow, compute)
    fast = rank(methods, machines(1500 * MEGA), compute)
    assert fast[0].method.name == "dense"
    assert advice(fast, compute).startswith("dense is best here: the exchange hides behind backward")
    costly = rank([dense(), topk(compress_s=9.0, decompress_s=1.0)], machines(15 * MEGA), compute)
    assert advice(costly, compute) == "dense is best here: compressing takes as long as it saves on the network"
    assert "--step-ms" in advice(rank(methods, machines(15 * MEGA)))
    assert advice(rank([dense()], machines(15 * MEGA))).startswith("dense is best here")


def test_collectives_of_some_workers_only() -> None:
    """Eight shares cross from node to node at once, and gradients stay on the nodes."""
    many = machines(15 * MEGA, Topology.even(64, nodes=8))
    nodewise = (("node alltoall", 25 * MEGA), ("across allgather", 0.125 * MEGA / 8), ("node allgather", 25 * MEGA / 8))
    found = predict(Method("topk", "hierarchical", (Sending(25 * MEGA, nodewise),)), many)
    on_the_node = 2 * 7 / 8 * 25 / (100 * 15)
    assert found.wire_s == pytest.approx(on_the_node + 7 * 0.125 / 15)
    scattered = (("alltoall", 0.125 * MEGA), ("allgather", 0.125 * MEGA / 64))
    flat = machines(15 * MEGA, Topology.even(64))
    found = predict(Method("topk", "scatter_reduce", (Sending(25 * MEGA, scattered),)), flat)
    assert found.wire_s == pytest.approx(2 * 63 / 64 * 0.125 / 15)


@pytest.mark.parametrize(
    ("name", "tensors", "size"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("bert-base", 199, 109_482_240),
        ("gpt2", 148, 124_439_808),
    ],
)
def test_the_models_are_as_large_as_they_are(name: str, tensors: int, size: int) -> None:
    shapes = MODELS[name]()
    assert (len(shapes), values(shapes)) == (tensors, size)

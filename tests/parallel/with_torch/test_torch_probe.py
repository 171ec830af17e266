"""What the planner measures, on real workers: that it is there, adds up, and is the same on all of them."""

from __future__ import annotations

from dataclasses import astuple

import horovod.torch as hvd
import pytest
import torch

from hvd_gradcomp.policy.cost import Topology
from hvd_gradcomp.policy.planner import predict
from hvd_gradcomp.torch import FP16, Compressor, PowerSGD, TopKInt8, counters, probe

SHAPES = [(300, 100), (100,), (70, 100), (1000, 20), (20,)]
VALUES = sum(torch.Size(shape).numel() for shape in SHAPES)


def assert_agreed(numbers: tuple[float, ...]) -> None:
    everybody = hvd.allgather(torch.tensor([numbers], dtype=torch.float64), name="numbers")
    assert (everybody == everybody[0]).all()


def test_the_network_between_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SIZES", dict.fromkeys(probe.SIZES, (4, 256 << 10)))
    machines = probe.machines()
    assert machines.topology.local_sizes == (hvd.size(),)
    for links in machines.links.values():
        assert_agreed(astuple(links.between))
        assert links.within == links.between
    assert predict(probe.dense(SHAPES), machines).exchange_s > 0


@pytest.mark.parametrize("compressor", [TopKInt8(ratio=0.05), FP16(), PowerSGD(rank=2)], ids=str)
def test_what_a_method_sends_is_what_an_optimizer_sends(compressor: Compressor) -> None:
    found = probe.method("it", compressor, SHAPES, Topology.even(hvd.size()))
    assert_agreed((found.compress_s, found.decompress_s))
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.1),
        [(f"{compressor}.{i}", p) for i, p in enumerate(params)],
        compression=compressor,
    )
    # The second step's bytes: methods may say more in the first.
    for _ in range(2):
        before = counters(optimizer).total.sent_bytes
        sum((p * torch.randn(p.shape)).sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = counters(optimizer).total.sent_bytes - before
    assert sum(bucket.dense_bytes for bucket in found.buckets) == 4 * VALUES
    assert found.ratio == pytest.approx(sent / (4 * VALUES), rel=0.05)


@pytest.mark.parametrize("way", ["scatter_reduce", "hierarchical"])
def test_other_collectives_are_rehearsed_too(way: str) -> None:
    where = Topology((2, 2))
    assert probe.ways(TopKInt8(), where) == ["allgather", "scatter_reduce", "hierarchical"]
    assert probe.ways(FP16(), where) == ["allgather"]
    found = probe.method("it", TopKInt8(ratio=0.05), SHAPES, where, way)
    assert found.collective == way
    assert_agreed((found.compress_s, found.decompress_s))
    kinds = {kind for bucket in found.buckets for kind, _ in bucket.requests}
    assert {"alltoall", "allgather"} <= {kind.rpartition(" ")[2] for kind in kinds}
    assert ("across allgather" in kinds) == (way == "hierarchical")


def test_a_large_model_is_measured_on_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = probe.method("it", TopKInt8(ratio=0.05, dense_below=0), SHAPES, Topology.even(hvd.size()))
    monkeypatch.setattr(probe, "SAMPLE", VALUES // 4)
    part = probe.method("it", TopKInt8(ratio=0.05, dense_below=0), SHAPES, Topology.even(hvd.size()))
    assert sum(bucket.dense_bytes for bucket in part.buckets) == pytest.approx(4 * VALUES)
    # The headers of so small tensors count as well.
    assert part.ratio == pytest.approx(whole.ratio, rel=0.2)
    assert len(part.buckets) > len(whole.buckets)


def test_the_time_to_compute() -> None:
    module = torch.nn.Linear(30, 40)
    found = probe.compute(module, (torch.randn(8, 30),))
    assert_agreed(astuple(found))
    assert found.forward_s > 0
    assert found.backward_s > 0
    assert module.weight.grad is None

"""Counters agree with what was really handed to Horovod."""

from __future__ import annotations

from collections import Counter
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops
from known_gradients import parameters
from torch_workers import optimizer_for, train

from hvd_gradcomp.torch import FP16, NoCompression, TopK, TopKInt8, counters


class Traffic:
    """Bytes handed to Horovod, and bytes of results, by the collective's name."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    found = Traffic()
    names: dict[int, str] = {}

    def watch(function_name: str) -> None:
        original = getattr(mpi_ops, function_name)

        def watched(tensor: torch.Tensor, *args: Any, **options: Any) -> int:
            handle: int = original(tensor, *args, **options)
            # Optimizers after the first with these names have a number before them.
            name = names[handle] = options["name"].rpartition(":")[2]
            found.sent[name] += tensor.numel() * tensor.element_size()
            found.calls[name] += 1
            return handle

        monkeypatch.setattr(mpi_ops, function_name, watched)

    for each in ("allgather_async", "allreduce_async_", "alltoall_async"):
        watch(each)
    original = mpi_ops.synchronize

    def synchronize(handle: int) -> Any:
        result = original(handle)
        tensor = result[0] if isinstance(result, tuple) else result
        if handle in names:
            found.received[names.pop(handle)] += tensor.numel() * tensor.element_size()
        return result

    monkeypatch.setattr(mpi_ops, "synchronize", synchronize)
    return found


SMALL = 4 * (96 + 40)
LARGE = 4 * (96 * 40 + 40 * 50 + 5000)


def test_compressed_and_small_gradients(traffic: Traffic) -> None:
    params = parameters()
    optimizer = optimizer_for(params, TopKInt8(ratio=0.02))
    steps = 3
    train(params, optimizer, range(steps))
    found = counters(optimizer)
    bucket, dense, total = found.buckets["c"], found.buckets["dense"], found.total
    assert found.buckets.keys() == {"c", "dense"}

    assert bucket.exchanges == steps
    assert bucket.dense_bytes == steps * LARGE
    assert bucket.elements == steps * LARGE // 4
    # k = ceil(ratio n) of each tensor.
    assert bucket.kept == steps * (77 + 40 + 100)
    assert bucket.sent_bytes == traffic.sent["c"]
    assert bucket.received_bytes == traffic.received["c"] - traffic.sent["c"]
    # Payloads differ in length by a few bytes between workers.
    assert abs(bucket.received_bytes - (hvd.size() - 1) * bucket.sent_bytes) < 64 * hvd.size() * steps

    assert dense.exchanges == 2 * steps
    assert dense.dense_bytes == dense.sent_bytes == dense.received_bytes == steps * SMALL
    small = traffic.sent["b.bias"] + traffic.sent["a.bias.dense"]
    assert small == dense.sent_bytes
    assert dense.kept == dense.elements == steps * SMALL // 4

    assert total.dense_bytes == steps * (LARGE + SMALL)
    assert total.sent_bytes == bucket.sent_bytes + dense.sent_bytes
    assert total.kept == bucket.kept + dense.kept
    assert total.fallbacks == total.non_finite == 0
    for phase in ("compress", "exchange", "decompress"):
        assert getattr(bucket, f"{phase}_seconds") > 0
        assert getattr(total, f"{phase}_seconds") >= getattr(bucket, f"{phase}_seconds")
    assert dense.compress_seconds == 0 < dense.exchange_seconds

    # Nothing else went to Horovod but what workers compare in the first step.
    rest = traffic.calls.keys() - {"c", "b.bias", "a.bias.dense"}
    assert {name: traffic.calls[name] for name in rest} == {"a.bias": 2, "a.bias.layouts": 1}

    found.reset()
    assert found.total.sent_bytes == 0
    train(params, optimizer, [steps])
    assert found.total.exchanges == 3


def test_each_group_is_counted(traffic: Traffic) -> None:
    params = parameters()
    optimizer = optimizer_for(params, TopKInt8(ratio=0.02), groups=3)
    train(params, optimizer, [0, 1])
    buckets = counters(optimizer).buckets
    for name in ("a.weight", "b.weight", "c"):
        assert buckets[name].exchanges == 2
        assert buckets[name].sent_bytes == traffic.sent[name] > 0
        assert buckets[name].dense_bytes == 2 * 4 * params[name].numel()


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [
        (FP16, torch.float32),
        (FP16, torch.float64),
        (NoCompression, torch.float32),
        (NoCompression, torch.bfloat16),
        (TopK(ratio=1.0), torch.float32),
        (TopK(ratio=1.0), torch.float16),
    ],
    ids=str,
)
def test_other_ways(traffic: Traffic, compression: Any, dtype: torch.dtype) -> None:
    """Sums, and exchanges that fall back to dense, in every format: sent is what was handed to Horovod."""
    params = parameters(dtype=dtype)
    optimizer = optimizer_for(params, compression)
    train(params, optimizer, [0, 1], dtype=dtype)
    total = counters(optimizer).total
    compared = {"a.bias", "a.bias.layouts"} if compression is not NoCompression else set()
    handed = sum(count for name, count in traffic.sent.items() if name not in compared)
    assert total.sent_bytes == handed
    elements = sum(p.numel() for p in params.values())
    assert total.elements == 2 * elements
    assert total.dense_bytes == 2 * elements * dtype.itemsize
    if isinstance(compression, type):
        assert total.kept == total.elements
    else:
        assert total.fallbacks == 2

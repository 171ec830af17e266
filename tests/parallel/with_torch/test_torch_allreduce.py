"""`hvd.allreduce(tensor, compression=...)` outside an optimizer: right, or an error on every worker; never a hang."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import Reference
from torch_workers import assert_same_everywhere

from hvd_gradcomp.torch import (
    BF16,
    FP16,
    ConfigurationError,
    Int8,
    NoCompression,
    NonFiniteError,
    TopK,
    TopKInt8,
    UnsupportedError,
)

COMPRESSION = TopKInt8(ratio=0.05)
SHAPE = (60, 40)


def tensor(rank: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = np.random.default_rng(rank).standard_normal(shape)
    return torch.as_tensor(values).to(dtype)


def expected(compression: Any, average: bool = True, ranks: list[int] | None = None, **options: Any) -> torch.Tensor:
    reference = Reference(compression, ranks=ranks, average=average)
    numbers = range(hvd.size()) if ranks is None else ranks
    of_rank = {rank: {"x": tensor(rank, **options).float().numpy()} for rank in numbers}
    return torch.as_tensor(reference.step(of_rank)["x"])


@pytest.mark.parametrize(
    "compression", [COMPRESSION, TopKInt8, TopK(0.1), Int8], ids=["instance", "class", "TopK", "Int8"]
)
@pytest.mark.parametrize("op", [None, hvd.Average, hvd.Sum], ids=["default", "average", "sum"])
def test_average_and_sum(compression: Any, op: Any) -> None:
    mine = tensor(hvd.rank())
    before = mine.clone()
    result = hvd.allreduce(mine, compression=compression, op=op)
    torch.testing.assert_close(result, expected(compression, average=op != hvd.Sum), rtol=1e-6, atol=1e-6)
    assert result.shape == SHAPE
    assert torch.equal(mine, before), "the input was changed"
    assert_same_everywhere({"result": result})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    result = hvd.allreduce(tensor(hvd.rank(), dtype=dtype), compression=COMPRESSION)
    assert result.dtype == dtype
    wanted = expected(COMPRESSION, dtype=dtype)
    torch.testing.assert_close(result.double(), wanted.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_prescale_and_postscale(op: Any) -> None:
    result = hvd.allreduce(
        tensor(hvd.rank()), compression=COMPRESSION, op=op, prescale_factor=3.0, postscale_factor=-0.5
    )
    wanted = -1.5 * expected(COMPRESSION, average=op == hvd.Average)
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


def test_in_a_process_set(even_ranks: hvd.ProcessSet, last_ranks: hvd.ProcessSet) -> None:
    """The two sets exchange at the same time, and with four workers each has two of them."""
    for ranks in (even_ranks, last_ranks):
        if ranks.included():
            result = hvd.allreduce(tensor(hvd.rank()), name="in a set", compression=COMPRESSION, process_set=ranks)
            wanted = expected(COMPRESSION, ranks=list(ranks.ranks))
            torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


def test_grouped() -> None:
    """A group in which some tensors are compressed and some are not."""
    shapes = [SHAPE, (3000,), (5,), (1100,)]
    results = hvd.grouped_allreduce([tensor(hvd.rank(), shape) for shape in shapes], compression=COMPRESSION)
    for shape, result in zip(shapes, results, strict=True):
        torch.testing.assert_close(result, expected(COMPRESSION, shape=shape).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compression", [TopKInt8, FP16, NoCompression], ids=["topk_int8", "fp16", "none"])
def test_small_tensors_and_integers_are_not_compressed(compression: Any) -> None:
    rank, workers = hvd.rank(), hvd.size()
    metric = torch.tensor([1.0, 10.0, 100.0]) * (rank + 1)
    mean = (workers + 1) / 2
    torch.testing.assert_close(hvd.allreduce(metric, compression=compression), torch.tensor([1.0, 10, 100]) * mean)
    assert hvd.allreduce(torch.tensor(float(rank)), compression=compression).item() == (workers - 1) / 2
    assert hvd.allreduce(torch.zeros(0), compression=compression).shape == (0,)
    counts = torch.arange(5000) * (rank + 1)
    result = hvd.allreduce(counts, compression=compression, op=hvd.Sum)
    assert torch.equal(result, torch.arange(5000) * (workers * (workers + 1) // 2))
    half = torch.full((10,), float(rank), dtype=torch.bfloat16)
    result = hvd.allreduce(half, compression=compression, op=hvd.Sum)
    assert result.dtype == torch.bfloat16
    assert (result == workers * (workers - 1) / 2).all()
    assert hvd.allreduce(tensor(rank, (10, 20)).T, compression=compression).shape == (20, 10)


@pytest.mark.parametrize("compression", [FP16, BF16, NoCompression], ids=["fp16", "bf16", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compressors_that_add(compression: Any, dtype: torch.dtype) -> None:
    for op in (hvd.Average, hvd.Sum):
        result = hvd.allreduce(tensor(hvd.rank(), dtype=dtype), compression=compression, op=op, prescale_factor=2.0)
        total = sum(tensor(rank, dtype=dtype).double() for rank in range(hvd.size()))
        wanted = 2 * total / (hvd.size() if op == hvd.Average else 1)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=2e-1)
        assert_same_everywhere({"result": result})


def test_no_compression_keeps_horovods_gradient() -> None:
    x = tensor(hvd.rank()).requires_grad_()
    (hvd.allreduce(x, compression=NoCompression, op=hvd.Sum) * torch.ones(SHAPE)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full(SHAPE, float(hvd.size())))


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum], ids=["min", "max", "product", "adasum"])
@pytest.mark.parametrize("compression", [COMPRESSION, FP16], ids=["topk_int8", "fp16"])
def test_other_operations_are_errors(op: Any, compression: Any) -> None:
    if op == hvd.Adasum and not hvd.mpi_enabled():
        pytest.skip("Horovod has Adasum over MPI only")
    with pytest.raises(UnsupportedError, match=r"op=hvd.Sum and op=hvd.Average"):
        hvd.allreduce(tensor(hvd.rank()), compression=compression, op=op)


def test_reducescatter_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="reducescatter"):
        hvd.reducescatter(tensor(hvd.rank()), compression=COMPRESSION, op=hvd.Sum)


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_tensor_that_requires_a_gradient_is_an_error_everywhere(everywhere: bool) -> None:
    x = tensor(hvd.rank()).requires_grad_(everywhere or hvd.rank() == hvd.size() - 1)
    with pytest.raises(UnsupportedError, match=rf"ranks \[.*{hvd.size() - 1}\].*requires a gradient"):
        hvd.allreduce(x, compression=COMPRESSION)
    with torch.no_grad():
        result = hvd.allreduce(x, compression=COMPRESSION)
    torch.testing.assert_close(result, expected(COMPRESSION), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("compression", [COMPRESSION, BF16], ids=["topk_int8", "bf16"])
def test_a_tensor_that_is_not_finite_on_one_worker_is_an_error_everywhere(value: float, compression: Any) -> None:
    x = tensor(hvd.rank(), dtype=torch.float64)
    if hvd.rank() == 1:
        x[3, 3] = value
    with pytest.raises(NonFiniteError, match=r"ranks \[1\]"):
        hvd.allreduce(x, compression=compression)
    # Nothing is left over that the next call could trip over.
    wanted = expected(COMPRESSION, dtype=torch.float64)
    torch.testing.assert_close(
        hvd.allreduce(tensor(hvd.rank(), dtype=torch.float64), compression=COMPRESSION).float(), wanted
    )


def test_settings_that_differ_are_an_error_everywhere() -> None:
    compression = TopKInt8(ratio=0.05 if hvd.rank() else 0.1)
    with pytest.raises(ConfigurationError, match=r"rank \d has compression = .*ratio=0\.(05|1)"):
        hvd.allreduce(tensor(hvd.rank()), compression=compression)

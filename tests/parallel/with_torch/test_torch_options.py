"""Horovod's own options with a compressor of ours: each keeps its meaning, in the numbers of the reference."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import SHAPES, Reference, all_gradients, assert_gradients, backward, gradients, parameters
from torch_workers import assert_same_everywhere, optimizer_for

from hvd_gradcomp.torch import (
    BF16,
    FP16,
    ConfigurationError,
    ErrorFeedback,
    Int8,
    NoCompression,
    NoMemory,
    TopK,
    TopKInt8,
    compression_from_spec,
    counters,
)

COMPRESSION = TopKInt8(ratio=0.05)


def check(
    compression: Any,
    steps: int = 3,
    reference: Reference | None = None,
    ranks: hvd.ProcessSet = hvd.global_process_set,
    **options: Any,
) -> Any:
    """Some steps, each compared with the reference."""
    params = parameters()
    optimizer = optimizer_for(params, compression, **options)
    reference = reference or Reference(compression)
    for step in range(steps):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
        if ranks.included():
            assert_gradients(params, reference.step(all_gradients(step)), reference)
    if ranks.included():
        assert_same_everywhere(params, ranks)
    return optimizer


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize(
    "compression",
    [
        TopK(ratio=0.05),
        TopK(ratio=0.05, memory=NoMemory()),
        COMPRESSION,
        TopKInt8(ratio=0.002, dense_below=0),
        Int8(memory=ErrorFeedback()),
        compression_from_spec("topk(ratio=0.02) >> bf16"),
    ],
    ids=str,
)
def test_average_and_sum_are_the_references(compression: Any, op: Any) -> None:
    check(compression, op=op, reference=Reference(compression, average=op == hvd.Average))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("compression", [NoCompression, FP16, BF16], ids=["none", "fp16", "bf16"])
def test_compressors_whose_payloads_add_up(compression: Any, op: Any) -> None:
    params = parameters()
    optimizer = optimizer_for(params, compression, op=op)
    sent = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    wanted = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    steps = 4
    for step in range(steps):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
        for name, p in params.items():
            dense = np.mean([g[name].astype(np.float64) for g in all_gradients(step).values()], axis=0)
            wanted[name] += dense * (hvd.size() if op == hvd.Sum else 1)
            sent[name] += p.grad.double().numpy()
    # What is rounded away in one step comes in the next: the sum is right to a single rounding.
    digits = {NoCompression: 1e-6, FP16: 2e-3, BF16: 2e-2}[compression]
    for name in SHAPES:
        largest = max(np.abs(g[name]).max() for step in range(steps) for g in all_gradients(step).values())
        workers = hvd.size() if op == hvd.Sum else 1
        np.testing.assert_allclose(sent[name], wanted[name], atol=digits * largest * workers, rtol=0)
    assert_same_everywhere(params)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum], ids=["min", "max", "product", "adasum"])
@pytest.mark.parametrize("compression", [COMPRESSION, TopKInt8, FP16()], ids=["instance", "class", "sum"])
def test_other_operations_are_refused(compression: Any, op: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"op=hvd.Average.*op=hvd.Sum"):
        optimizer_for(parameters(), compression, op=op)


@pytest.mark.parametrize("groups", [1, 2, 3, 50])
def test_a_number_of_groups(groups: int) -> None:
    optimizer = check(COMPRESSION, groups=groups)
    compressed = 3
    assert len([name for name in counters(optimizer).buckets if name != "dense"]) == min(groups, compressed)


@pytest.mark.parametrize(
    ("groups", "buckets"),
    [
        ([["a.weight", "b.weight", "c"]], {"a.weight"}),
        ([["c", "a.weight"]], {"c", "b.weight"}),
        ([["b.bias", "c", "a.bias"], ["a.weight", "b.weight"]], {"c", "a.weight"}),
        ([["a.bias", "b.bias"]], {"a.weight", "b.weight", "c"}),
        ([[], ["c"]], {"a.weight", "b.weight", "c"}),
    ],
    ids=["all", "partial", "with small ones", "small ones alone", "empty"],
)
def test_lists_of_groups(groups: list[list[str]], buckets: set[str]) -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION, groups=[[params[name] for name in group] for group in groups])
    reference = Reference(COMPRESSION)
    for step in range(2):
        optimizer.zero_grad()
        # The last step brings a gradient to part of a group only.
        names = list(SHAPES) if step < 1 else ["c", "a.bias"]
        backward(params, {name: g for name, g in gradients(step, hvd.rank()).items() if name in names})
        optimizer.step()
        expected = {
            rank: {name: g if name in names else 0 * g for name, g in grads.items()}
            for rank, grads in all_gradients(step).items()
        }
        assert_gradients(params, reference.step(expected), reference)
    assert counters(optimizer).buckets.keys() - {"dense"} == buckets


@pytest.mark.parametrize("groups", [0, -1, "two", [["a"]], [[torch.zeros(1)], 3]])
def test_wrong_groups_are_refused(groups: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        optimizer_for(parameters(), COMPRESSION, groups=groups)


def test_a_parameter_in_two_groups_is_refused() -> None:
    params = parameters()
    with pytest.raises(ValueError, match="only appear once"):
        optimizer_for(params, COMPRESSION, groups=[[params["c"]], [params["c"]]])


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("groups", [None, 2])
def test_backward_passes_per_step(passes: int, groups: int | None) -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION, backward_passes_per_step=passes, groups=groups)
    reference = Reference(COMPRESSION)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(passes):
            backward(params, gradients(10 * step + part, hvd.rank()))
        optimizer.step()
        assert_gradients(params, reference.step(accumulated(step, passes)), reference)
    # One exchange a step, whatever the number of passes.
    assert all(bucket.exchanges == 2 for name, bucket in counters(optimizer).buckets.items() if name != "dense")


def test_a_step_before_all_backward_passes() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION, backward_passes_per_step=3)
    reference = Reference(COMPRESSION)
    for step, passes in enumerate((2, 3, 1)):
        optimizer.zero_grad()
        for part in range(passes):
            backward(params, gradients(10 * step + part, hvd.rank()))
        optimizer.step()
        assert_gradients(params, reference.step(accumulated(step, passes)), reference)


def accumulated(step: int, passes: int) -> dict[int, dict[str, np.ndarray]]:
    """What autograd adds up over the passes of one step, in float32 and in its order."""
    total = all_gradients(10 * step)
    for part in range(1, passes):
        for rank, grads in all_gradients(10 * step + part).items():
            total[rank] = {name: total[rank][name] + g for name, g in grads.items()}
    return total


@pytest.mark.parametrize("compression", [COMPRESSION, FP16], ids=["topk_int8", "fp16"])
def test_gradient_predivide_factor_changes_nothing_but_rounding(compression: Any) -> None:
    results = []
    for factor in (1.0, 4.0):
        params = parameters()
        optimizer = optimizer_for(params, compression, gradient_predivide_factor=factor)
        for step in range(2):
            optimizer.zero_grad()
            backward(params, gradients(step, hvd.rank()))
            optimizer.step()
        results.append(params)
    for name, p in results[0].items():
        torch.testing.assert_close(p, results[1][name], rtol=1e-5, atol=1e-5)


def test_a_static_process_set(even_ranks: hvd.ProcessSet) -> None:
    reference = Reference(COMPRESSION, ranks=even_ranks.ranks)
    check(COMPRESSION, process_set=even_ranks, reference=reference, ranks=even_ranks)


@pytest.mark.parametrize("compression", [COMPRESSION, BF16, NoCompression], ids=["topk_int8", "bf16", "none"])
def test_a_dynamic_process_set(last_ranks: hvd.ProcessSet, compression: Any) -> None:
    params = parameters()
    optimizer = optimizer_for(params, compression, process_set=last_ranks, op=hvd.Sum)
    backward(params, gradients(0, hvd.rank()))
    optimizer.step()
    if last_ranks.included():
        sums = {name: sum(gradients(0, rank)[name] for rank in last_ranks.ranks) for name in SHAPES}
        if compression is COMPRESSION:
            reference = Reference(compression, ranks=last_ranks.ranks, average=False)
            assert_gradients(params, reference.step(all_gradients(0)), reference)
        else:
            for name, g in sums.items():
                torch.testing.assert_close(params[name].grad, torch.as_tensor(g), rtol=2e-2, atol=0.3)
        assert_same_everywhere(params, last_ranks)
    else:
        # A worker outside keeps its own gradients, as with Horovod's own compressions.
        for name, g in gradients(0, hvd.rank()).items():
            assert torch.equal(params[name].grad, torch.as_tensor(g))


def test_two_process_sets_at_once(even_ranks: hvd.ProcessSet) -> None:
    """A worker may be in both; equal names do not meet, since each set has its own collectives."""
    params, params_too = parameters(), parameters()
    everybody = optimizer_for(params, COMPRESSION)
    some = optimizer_for(params_too, COMPRESSION, process_set=even_ranks)
    reference, reference_too = Reference(COMPRESSION), Reference(COMPRESSION, ranks=even_ranks.ranks)
    for step in range(2):
        everybody.zero_grad()
        some.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        backward(params_too, gradients(step, hvd.rank()))
        some.step()
        everybody.step()
        assert_gradients(params, reference.step(all_gradients(step)), reference)
        if even_ranks.included():
            assert_gradients(params_too, reference_too.step(all_gradients(step)), reference_too)

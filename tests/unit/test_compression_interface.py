"""Horovod's `Compression` interface where no Horovod runs: `compress` and `decompress` of classes and instances.

Gradients of every dtype, shape and layout go in; what receivers would decode comes back, as float32 in the same shape.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from arrays import COMPRESSORS, array_of, as_numpy, gradient, kinds, seeds, shapes
from hypothesis import given, settings

from hvd_gradcomp.compressors import (
    BF16,
    FP16,
    CountSketch,
    Int8,
    NoCompression,
    PowerSGD,
    SharedTernGrad,
    TopK,
    TopKInt8,
    base,
)
from hvd_gradcomp.errors import NonFiniteError, PayloadError, UnsupportedError
from hvd_gradcomp.ops import ops_for

ALL = [*COMPRESSORS, NoCompression(), TopK(ratio=1.0)]


@pytest.fixture(autouse=True)
def _no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have imported a framework's door, which would take over."""
    monkeypatch.setattr(base, "doors", {})


@pytest.mark.parametrize("compression", [TopKInt8, TopK, Int8, FP16, BF16, NoCompression])
def test_a_class_stands_for_all_defaults(ops, compression):
    x = array_of(ops, gradient("normal", (30, 10), 1))
    payload, ctx = compression.compress(x)
    other, other_ctx = compression().compress(x)
    assert ops.to_host(payload) == ops.to_host(other)
    np.testing.assert_array_equal(
        as_numpy(compression.decompress(payload, ctx)), as_numpy(compression().decompress(other, other_ctx))
    )


@pytest.mark.parametrize("compressor", ALL, ids=str)
@settings(max_examples=25)
@given(shape=shapes, kind=kinds, seed=seeds)
def test_shapes_come_back_and_the_input_is_left_alone(ops, compressor, shape, kind, seed):
    x = gradient(kind, shape, seed)
    tensor = array_of(ops, x)
    payload, ctx = compressor.compress(tensor)
    assert ops.dtype_of(payload) == "uint8"
    result = compressor.decompress(payload, ctx)
    assert (tuple(result.shape), ops.dtype_of(result)) == (shape, "float32")
    np.testing.assert_array_equal(as_numpy(tensor), x)
    if compressor in (NoCompression(), TopK(ratio=1.0)):
        np.testing.assert_array_equal(as_numpy(result), x)


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_tensors(ops, compressor, shape):
    payload, ctx = compressor.compress(array_of(ops, np.zeros(shape, np.float32)))
    assert compressor.decompress(payload, ctx).shape == shape


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_layouts_do_not_matter(ops, compressor):
    """Transposed, strided and broadcast inputs give what their contiguous copies give."""
    whole = array_of(ops, gradient("normal", (24, 36), 3))
    column = array_of(ops, gradient("normal", (24, 1), 4))
    stretched = column.expand(24, 36) if ops.name == "torch" else np.broadcast_to(column, (24, 36))
    for view in (whole.T, whole[::2, 1::3], whole[3], whole[:, 5], stretched):
        payload, ctx = compressor.compress(view)
        copied, _ = compressor.compress(array_of(ops, as_numpy(view)))
        assert ops.to_host(payload) == ops.to_host(copied)
        assert compressor.decompress(payload, ctx).shape == view.shape


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float64, torch.float16, torch.float64, torch.bfloat16], ids=str)
def test_other_float_dtypes_are_taken_as_float32(compressor, dtype):
    x = gradient("normal", (40,), 1)
    tensor = torch.from_numpy(x).to(dtype) if isinstance(dtype, torch.dtype) else x.astype(dtype)
    ops = ops_for(tensor)
    payload, ctx = compressor.compress(tensor)
    same, _ = compressor.compress(ops.flat32(tensor))
    assert ops.to_host(payload) == ops.to_host(same)
    assert ops.dtype_of(compressor.decompress(payload, ctx)) == "float32"


def test_parameters_and_recorded_tensors_of_torch():
    for tensor in (torch.nn.Parameter(torch.ones(20)), torch.ones(20, requires_grad=True) * 2):
        payload, ctx = TopKInt8(ratio=1.0).compress(tensor)
        result = TopKInt8.decompress(payload, ctx)
        assert not result.requires_grad
        np.testing.assert_allclose(result.numpy(), tensor.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(ops, compressor, poison):
    x = gradient("normal", (30,), 1)
    x[17] = poison
    with pytest.raises(NonFiniteError, match="tensor of 30 elements"):
        compressor.compress(array_of(ops, x))


def test_a_float64_beyond_float32_is_refused(ops):
    with pytest.raises(NonFiniteError, match="as float32"):
        TopK.compress(array_of(ops, np.array([1.0, 1e300])))


@pytest.mark.parametrize("tensor", [[1.0, 2.0], 3.0, None, "gradient"])
def test_what_is_no_array_is_refused(tensor):
    with pytest.raises(UnsupportedError, match=f"cannot compress a builtins.{type(tensor).__name__}"):
        TopK.compress(tensor)


def test_without_a_context_the_payload_is_the_result(ops):
    x = array_of(ops, np.ones(3, np.float32))
    assert TopK.decompress(x, None) is x


def test_a_payload_of_another_tensor_is_refused(ops):
    payload, _ = TopK.compress(array_of(ops, np.ones(30, np.float32)))
    _, ctx = TopK.compress(array_of(ops, np.ones(31, np.float32)))
    with pytest.raises(PayloadError, match="30 elements where one of 31"):
        TopK.decompress(payload, ctx)
    with pytest.raises(PayloadError, match="bytes more"):
        TopK.decompress(ops.concat([payload, payload]), TopK.compress(array_of(ops, np.ones(30, np.float32)))[1])


@pytest.mark.parametrize("compressor", [PowerSGD(rank=2), CountSketch(), SharedTernGrad()], ids=str)
def test_what_exists_between_workers_only_says_so(ops, compressor):
    name = type(compressor).__name__
    with pytest.raises(UnsupportedError, match=rf"no payload without workers: its {name}\.exchange .* hvd\.init\(\)"):
        compressor.compress(array_of(ops, np.ones(30, np.float32)))


def test_a_door_takes_over_for_its_arrays(ops, monkeypatch):
    class Door:
        def compress(self, compressor, tensor):
            return tensor, (compressor, "ctx")

        def decompress(self, compressor, payload, ctx):
            return payload, ctx

    monkeypatch.setitem(base.doors, ops.name, Door())
    x = array_of(ops, np.ones(3, np.float32))
    payload, ctx = TopKInt8.compress(x)
    assert payload is x
    assert TopKInt8.decompress(payload, ctx) == (x, (TopKInt8(), "ctx"))

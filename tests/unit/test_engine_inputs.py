"""Gradients of every dtype, shape and layout give an engine what their flat float32 copies give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from arrays import COMPRESSORS, as_numpy, gradient
from simulated_cluster import Cluster
from steps import engines_of, residuals_of

from hvd_gradcomp.compressors import NoCompression, TopKInt8
from hvd_gradcomp.engine import Parameter
from hvd_gradcomp.ops import ops_for

VALUES = [gradient("normal", (6, 8), seed) for seed in range(3)]


def three_steps(compressor: Any, gradients: list[Any], kind: str = "float32") -> tuple[list[bytes], list[bytes]]:
    """Each step's result and the last residuals, where two workers hand in the same gradient."""
    cluster = Cluster(2)
    engines = engines_of(cluster, compressor, [Parameter("p0", int(np.prod(gradients[0].shape)), kind)])

    def work(transport: Any) -> list[bytes]:
        engine = engines[transport.rank]
        found = []
        for one in gradients:
            engine.submit("p0", one.clone() if isinstance(one, torch.Tensor) else one.copy())
            (result,) = engine.finish().values()
            assert ops_for(result).dtype_of(result) == "float32"
            assert len(result.shape) == 1
            found.append(as_numpy(result).tobytes())
        return found

    return cluster.run(work)[0], [x.tobytes() for engine in engines for x in residuals_of(engine).values()]


@pytest.mark.parametrize("compressor", [*COMPRESSORS, NoCompression()], ids=str)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(compressor, kind):
    """torch has all of them; numpy has no bfloat16."""
    tensors = [torch.from_numpy(x.copy()).to(getattr(torch, kind)) for x in VALUES]
    expected = three_steps(compressor, [tensor.to(torch.float32).reshape(-1) for tensor in tensors], kind)
    assert three_steps(compressor, tensors, kind) == expected
    if kind != "bfloat16":
        assert three_steps(compressor, [tensor.numpy() for tensor in tensors], kind) == expected


LAYOUTS = {
    "transposed": lambda x: x.T,
    "every other row": lambda x: x[::2],
    "a column": lambda x: x[:, 3],
    "one element": lambda x: x[1, 1:2],
    "no dimension": lambda x: x[2, 2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_layouts(compressor, layout):
    views = [LAYOUTS[layout](torch.from_numpy(x.copy())) for x in VALUES]
    copies = [view.contiguous().reshape(-1) for view in views]
    assert three_steps(compressor, views) == three_steps(compressor, copies)
    arrays = [np.asarray(LAYOUTS[layout](x)) for x in VALUES]
    assert three_steps(compressor, arrays) == three_steps(compressor, copies)


def test_memory_that_is_not_the_engines_is_left_alone(ops):
    """What has to be converted is copied first: another dtype, or another order."""
    for one in (VALUES[0].astype(np.float16), VALUES[0].astype(np.float64), VALUES[0].T):
        given = torch.from_numpy(one.copy(order="K")) if ops.name == "torch" else one.copy(order="K")
        before = as_numpy(given)
        (engine,) = engines_of(Cluster(1), TopKInt8(ratio=0.1), [Parameter("p0", 48, "float32")])
        for _ in range(2):
            engine.submit("p0", given)
            engine.finish()
            np.testing.assert_array_equal(as_numpy(given), before)


def test_a_gradient_beyond_float32_is_a_skipped_step(ops):
    (engine,) = engines_of(Cluster(1), TopKInt8(ratio=0.1), [Parameter("p0", 3, "float64")])
    huge = np.array([1.0, 1e300, 2.0])
    engine.submit("p0", torch.from_numpy(huge) if ops.name == "torch" else huge)
    assert np.isnan(as_numpy(engine.finish()["p0"])).all()
    assert engine.counters.total.non_finite == 1


def test_a_residual_that_would_overflow_is_a_skipped_step(ops):
    """Gradient and residual are finite, their sum is not: the step counts as one with infinity, and it ends there."""
    (engine,) = engines_of(Cluster(1), TopKInt8(ratio=0.1), [Parameter("p0", 20, "float32")])
    x = np.full(20, 3e38, np.float32)
    outcomes = []
    for one in (x, x, -x):
        engine.submit("p0", torch.from_numpy(one.copy()) if ops.name == "torch" else one.copy())
        outcomes.append(bool(np.isfinite(as_numpy(engine.finish()["p0"])).all()))
    assert outcomes == [True, False, True]

"""Methods with every memory and granularity on a simulated cluster, and what the memories' formulas say in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from arrays import as_numpy, gradient
from simulated_cluster import Cluster
from steps import engines_of, parameters_of, step

from hvd_gradcomp.compressors import (
    BF16,
    DGC,
    FP16,
    QSGD,
    Calibrated,
    Chain,
    Compressor,
    CountSketch,
    Dynamic8,
    Int8,
    Linear,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    ScaledSign,
    SharedTernGrad,
    TernGrad,
    Threshold,
    TopK,
)
from hvd_gradcomp.engine import Engine
from hvd_gradcomp.feedback import ErrorFeedback, Memory, Momentum, MomentumCorrection, NoMemory
from hvd_gradcomp.ops import Ops

#: Every kind of method, with settings at which small tensors show something.
METHODS: tuple[Compressor, ...] = (
    TopK(ratio=0.1, dense_below=0),
    TopK(ratio=0.1, dense_below=0) >> Int8(),
    TopK(ratio=0.1, dense_below=0) >> FP16(),
    DGC(ratio=0.05, warmup_steps=3, dense_below=0),
    Threshold(value=0.8, dense_below=0),
    RandomK(ratio=0.1, dense_below=0),
    RandomK(ratio=0.1, dense_below=0) >> FP16(),
    RandomK(ratio=0.1, dense_below=0) >> BF16(),
    RandomK(ratio=0.1, dense_below=0) >> Int8(),
    Int8(block=64, dense_below=0),
    Linear(bits=4, dense_below=0),
    Dynamic8(block=64, dense_below=0),
    Calibrated(percentile=99, dense_below=0),
    Natural(dense_below=0),
    OneBit(block=32, dense_below=0),
    QSGD(bucket=64, dense_below=0),
    ScaledSign(dense_below=0),
    TernGrad(dense_below=0),
    SharedTernGrad(dense_below=0),
    TopK(ratio=0.1, dense_below=0) >> ScaledSign(block=32),
    FP16(dense_below=0),
    BF16(dense_below=0),
    PowerSGD(rank=2, dense_below=0),
    PowerSGD(rank=1, warm_start=False, dense_below=0),
    CountSketch(ratio=0.02, rows=3, width=4, dense_below=0),
)

#: One method for each way through the engine: gathered or summed, with positions or without, with an own exchange.
WAYS: tuple[Compressor, ...] = (
    TopK(ratio=0.1, dense_below=0) >> Int8(),
    RandomK(ratio=0.1, dense_below=0) >> FP16(),
    RandomK(ratio=0.1, dense_below=0) >> Int8(),
    Int8(block=64, dense_below=0),
    BF16(dense_below=0),
    PowerSGD(rank=2, dense_below=0),
    CountSketch(ratio=0.02, rows=3, width=4, dense_below=0),
)

#: Every memory, with every option that leads to another formula.
MEMORIES: tuple[Memory, ...] = (
    NoMemory(),
    ErrorFeedback(),
    ErrorFeedback(decay=0.5),
    MomentumCorrection(),
    MomentumCorrection(momentum=0.5, nesterov=True),
    MomentumCorrection(factor_masking=False),
    MomentumCorrection(clip=3.0),
    Momentum(beta=0.8),
)

SHAPES: tuple[tuple[int, ...], ...] = ((40,), (), (30, 20), (8, 3, 5))

#: The unit of rounding of the formats in which sums are made.
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

State = dict[str, dict[str, np.ndarray]]


def with_options(method: Compressor, **options: Any) -> Compressor:
    """`method` with another memory, granularity or `dense_below`."""
    if isinstance(method, Chain):
        return replace(method.sparsifier, **options) >> method.code
    return replace(method, **options)


def state_of(engine: Engine) -> State:
    """A copy of all that the engine keeps."""
    return {name: {part: as_numpy(x) for part, x in parts.items()} for name, parts in engine.state.items()}


def corrected(memory: Memory, g: np.ndarray, state: Mapping[str, np.ndarray], workers: int) -> dict[str, np.ndarray]:
    """The vector that `memory` hands to the compressor, as "x", and the parts that move on before: by the papers."""
    g = g.reshape(-1).astype(np.float64)
    zero = np.zeros_like(g)
    if isinstance(memory, ErrorFeedback):
        return {"x": g + memory.decay * state.get("residual", zero)}
    if isinstance(memory, Momentum):
        average = memory.beta * state.get("average", zero) + (1 - memory.beta) * g
        return {"x": average, "average": average}
    if isinstance(memory, MomentumCorrection):
        if memory.clip is not None:
            g = g * min(1.0, memory.clip / np.sqrt(workers) / max(np.linalg.norm(g), 1e-300))
        u, v = state.get("velocity", zero), state.get("residual", zero)
        if memory.nesterov:
            u = memory.momentum * (u + g)
            return {"x": v + u + g, "velocity": u}
        u = memory.momentum * u + g
        return {"x": v + u, "velocity": u}
    return {"x": g}


class Run:
    """Engines of one compressor on a cluster, and the gradients and states of their last step."""

    def __init__(
        self,
        ops: Ops,
        compressor: Compressor,
        workers: int = 3,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        **options: Any,
    ) -> None:
        self.ops = ops
        self.compressor = compressor
        self.shapes = shapes
        self.parameters = parameters_of(shapes)
        self.cluster = Cluster(workers)
        self.engines = engines_of(self.cluster, compressor, self.parameters, **options)
        self.steps = 0

    def gradients(self, kind: str = "normal") -> list[dict[str, np.ndarray]]:
        """Of each worker, new at every step; all share a part, as gradients of the same loss do."""
        return [
            {
                each.name: gradient(kind, shape, (self.steps, place))
                + np.float32(0.5) * gradient(kind, shape, (self.steps, place, rank))
                for place, (each, shape) in enumerate(zip(self.parameters, self.shapes, strict=True))
            }
            for rank in range(self.cluster.workers)
        ]

    def step(self, gradients: list[dict[str, np.ndarray]] | None = None) -> dict[str, np.ndarray]:
        """One step; the results, which must be the same bits on all workers."""
        self.steps += 1
        self.used = self.gradients() if gradients is None else gradients
        self.before = [state_of(engine) for engine in self.engines]
        for sent in self.cluster.sent:
            sent.clear()
        results = step(self.cluster, self.engines, self.ops, self.used)
        self.after = [state_of(engine) for engine in self.engines]
        for result in results[1:]:
            assert {name: x.tobytes() for name, x in result.items()} == {
                name: x.tobytes() for name, x in results[0].items()
            }
        return results[0]

    def assert_conserved(self, results: Mapping[str, np.ndarray]) -> None:
        """Assert of the last step that what was handed to the compressor is what arrived plus what is kept."""
        memory, workers = self.compressor.memory, self.cluster.workers
        kind = self.compressor.sum_kind if self.compressor.meets == "sum" else "float32"
        for each in self.parameters:
            arrived = results[each.name].astype(np.float64) * workers
            sizes = np.abs(arrived)
            due = np.zeros(each.size)
            for gradients, before, after in zip(self.used, self.before, self.after, strict=True):
                x = corrected(memory, gradients[each.name], before.get(each.name, {}), workers)["x"]
                kept = after.get(each.name, {}).get("residual", np.zeros(each.size)).astype(np.float64)
                due += x - kept
                sizes += np.abs(x) + np.abs(kept)
            if self.compressor.meets == "own":
                # Each element of a matrix product may be off by what the largest is off.
                sizes = sizes.max() * 20
            excess = np.abs(due - arrived) - (4 + 3 * workers) * EPSILON[kind] * sizes - workers * 2.0**-24
            assert (excess <= 0).all(), f"{each.name}: off by {excess.max()} too much"

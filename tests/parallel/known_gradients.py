"""Parameters whose gradients every worker knows for every worker, and what an exchange must make of these gradients.

The gradient of sum(p * g) is g, so a backward pass brings exactly the gradients that are wanted. The reference codes
all workers' gradients with the numpy backend on each worker; it shares nothing with Horovod, buckets or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from workers import WORKERS

from hvd_gradcomp.compressors.base import Compressor, Context, as_compressor
from hvd_gradcomp.ops import backend
from hvd_gradcomp.wire.parts import Reader

#: Three parameters above the default threshold of 1024 elements and two below, in two and one dimensions.
SHAPES = {"a.weight": (96, 40), "a.bias": (96,), "b.weight": (40, 50), "b.bias": (40,), "c": (5000,)}

Gradients = Mapping[str, np.ndarray]


def gradients(
    step: int, rank: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, np.ndarray]:
    """The gradients of one worker in one step: float32 values that `dtype` holds exactly, a few of them large."""
    found = {}
    for index, (name, shape) in enumerate(shapes.items()):
        random = np.random.default_rng([step, rank, index])
        values = random.standard_normal(shape) * np.exp(random.standard_normal(shape))
        found[name] = torch.as_tensor(values).to(dtype).to(torch.float32).numpy()
    return found


def parameters(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, torch.nn.Parameter]:
    """Zeros, the same on all workers."""
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def backward(params: Mapping[str, torch.nn.Parameter], grads: Gradients, order: Sequence[str] | None = None) -> None:
    """Bring each parameter named in `grads` its gradient; with `order`, one backward pass each, in that order."""
    terms = {name: (params[name] * torch.as_tensor(g).to(params[name].dtype)).sum() for name, g in grads.items()}
    if order is not None:
        for name in order:
            terms[name].backward()
    elif terms:
        torch.stack([term.to(torch.float64) for term in terms.values()]).sum().backward()


class Reference:
    """All workers' residuals, and the average (or sum) that comes of each step.

    Args:
        compression: of this package, a class or an instance.
        ranks: the workers that exchange.
        average: divide by their number.
    """

    def __init__(self, compression: Any, ranks: Sequence[int] | None = None, average: bool = True) -> None:
        found = as_compressor(compression)
        assert found is not None
        self.compressor: Compressor = found
        self.ranks = list(range(WORKERS)) if ranks is None else list(ranks)
        self.average = average
        self.residuals: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in self.ranks}
        self.ops = backend("numpy")

    def step(self, of_rank: Mapping[int, Gradients]) -> dict[str, np.ndarray]:
        """The result for each parameter, from each worker's gradients; a missing one counts as zeros.

        Compressed tensors are exact: bit for bit what every worker must get. Small ones, which Horovod adds in an order
        of its own, are given in float64.
        """
        shapes = {name: g.shape for grads in of_rank.values() for name, g in grads.items()}
        return {name: self._result(name, shape, of_rank) for name, shape in shapes.items()}

    def is_exact(self, g: np.ndarray) -> bool:
        """Whether a tensor is compressed."""
        return g.size >= max(1, self.compressor.dense_below)

    def _result(self, name: str, shape: tuple[int, ...], of_rank: Mapping[int, Gradients]) -> np.ndarray:
        size = int(np.prod(shape))
        all_gradients = [of_rank[rank].get(name, np.zeros(shape, np.float32)) for rank in self.ranks]
        if not self.is_exact(all_gradients[0]):
            total = np.sum([g.astype(np.float64) for g in all_gradients], axis=0)
            return total / len(self.ranks) if self.average else total
        total = np.zeros(size, np.float32)
        for place, (rank, gradient) in enumerate(zip(self.ranks, all_gradients, strict=True)):
            residual = self.residuals[rank].get(name)
            x = gradient.reshape(-1).copy()
            if residual is not None and self.compressor.memory.keeps:
                x = x + residual
            frame, left = self.compressor.encode(self.ops, x, Context(place, len(self.ranks), name, 0))
            total = self.compressor.decode_add(self.ops, Reader(self.ops, frame), total)
            self.residuals[rank][name] = left
        return (total / np.float32(len(self.ranks)) if self.average else total).reshape(shape)


def all_gradients(step: int, ranks: Sequence[int] | None = None, **options: Any) -> dict[int, dict[str, np.ndarray]]:
    """`gradients` of every worker."""
    return {rank: gradients(step, rank, **options) for rank in (range(WORKERS) if ranks is None else ranks)}


def assert_gradients(params: Mapping[str, torch.nn.Parameter], expected: Gradients, reference: Reference) -> None:
    """Each `p.grad` is what the reference says: bit for bit where it is exact, to float32 rounding elsewhere."""
    for name, values in expected.items():
        found = params[name].grad
        assert found is not None
        assert found.shape == params[name].shape
        assert found.dtype == params[name].dtype
        if reference.is_exact(values):
            wanted = torch.as_tensor(values).to(params[name].dtype)
            assert torch.equal(found.detach(), wanted), f"{name}: {(found - wanted).abs().max()} away"
        else:
            close = 1e-2 if found.dtype in (torch.bfloat16, torch.float16) else 1e-5
            np.testing.assert_allclose(found.detach().to(torch.float64).numpy(), values, rtol=close, atol=close)

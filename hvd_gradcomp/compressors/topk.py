"""Top-k: send the values of largest magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.chain import Sparsifier
from hvd_gradcomp.compressors.int8 import Int8
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops

# Below this size a sample would save nothing.
_SAMPLE_FROM = 1 << 14
_SAMPLE = 1 << 12


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Send the k = ceil(ratio * n) values of largest magnitude of a tensor of n elements, zeros excepted.

    Ties go to the lower position, so every backend selects the same. The selection is exact; a strided sample only
    gives a first bound, below which values are not looked at again. Cost: about three passes over the tensor.
    Biased, contraction: ||x - topk(x)||^2 <= (1 - k/n) ||x||^2; use it with error feedback.

    Args:
        ratio: fraction of the values to send, 0 < ratio <= 1.

    References:
        A. F. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
        S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    spec_name: ClassVar[str] = "topk"

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)) or not 0 < self.ratio <= 1:
            raise ConfigurationError(f"ratio must be a number with 0 < ratio <= 1, got {self.ratio!r}")
        # 1, 1.0 and numpy's 1.0 are equal and have to look so too: workers compare specs.
        object.__setattr__(self, "ratio", float(self.ratio))

    def kept(self, size: int) -> float:
        return min(size, math.ceil(self.ratio * size))

    def select(self, ops: Ops, x: Array, context: Context) -> Array:
        return top_positions(ops, ops.abs(x), min(len(x), math.ceil(self.ratio * len(x))))


class TopKInt8(Compressor):
    """`TopKInt8(ratio)` is `TopK(ratio) >> Int8()`: about two bytes for each value that is sent.

    Args:
        ratio: fraction of the values to send, 0 < ratio <= 1; 0.01 by default.
        options: `memory` and `dense_below`, as for every compressor.
    """

    def __new__(cls, ratio: float = 0.01, **options: Any) -> Compressor:  # type: ignore[misc]
        return TopK(ratio, **options) >> Int8()


def top_positions(ops: Ops, magnitudes: Array, k: int) -> Array:
    """The positions of the k largest of `magnitudes` (float32, >= 0), ascending; zeros are never among them.

    Args:
        magnitudes: float32, shape (n,).
        k: 1 <= k <= n; not looked at when n = 0.

    Returns:
        int64, shape (at most k,).
    """
    size = len(magnitudes)
    if not size:
        return ops.nonzero(magnitudes > 0)
    if size >= _SAMPLE_FROM and k <= size // 4:
        candidates = _candidates(ops, magnitudes, k)
        if candidates is not None:
            return ops.take(candidates, top_positions(ops, ops.take(magnitudes, candidates), k))
    threshold = ops.kth_largest(magnitudes, k)
    if threshold == 0:
        return ops.nonzero(magnitudes > 0)
    above = ops.nonzero(magnitudes > threshold)
    ties = ops.nonzero(magnitudes == threshold)[: k - len(above)]
    if not len(above):
        return ties
    marks = ops.zeros(size, "uint8", magnitudes)
    chosen = ops.concat([above, ties])
    return ops.nonzero(ops.put(marks, chosen, ops.zeros(len(chosen), "uint8", marks) + 1) > 0)


def _candidates(ops: Ops, magnitudes: Array, k: int) -> Array | None:
    """Positions that surely contain the k largest, if a sampled bound finds few enough of them; else None."""
    size = len(magnitudes)
    # At least 64 of the sample are to lie above the bound, so that its count is known to about 12 %.
    stride = min(size // _SAMPLE, k // 64)
    if stride < 2:
        return None
    sample = magnitudes[::stride]
    wanted = math.ceil(len(sample) * k / size)
    bound = ops.kth_largest(sample, min(len(sample), wanted + math.ceil(3 * math.sqrt(wanted)) + 1))
    if bound == 0:
        return None
    candidates = ops.nonzero(magnitudes >= bound)
    return candidates if k <= len(candidates) < size // 2 else None

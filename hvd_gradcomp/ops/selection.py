"""Exact selection of the largest magnitudes, said once in terms of the primitives: the reference for all kernels.

A strided sample gives a bound below which values are not looked at again; what is selected does not depend on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_gradcomp.ops.base import Array, Ops

# Below this size a sample would save nothing.
_SAMPLE_FROM = 1 << 14
_SAMPLE = 1 << 12


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

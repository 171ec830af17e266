"""Top-k: send the values of largest magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.chain import Sparsifier
from hvd_gradcomp.compressors.int8 import Int8
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Send the k = ceil(ratio * n) values of largest magnitude of a tensor of n elements, zeros excepted.

        sent_i = x_i  if |x_i| is among the k largest,  else 0

    Ties go to the lower position, so every backend selects the same. The selection is exact; a strided sample only
    gives a first bound, below which values are not looked at again. Cost: about three passes over the tensor.
    At 1 %: 8.1 bits for the position of a sent value and 32 for the value, 0.4 bits for each of the tensor; behind it
    `>> Int8()` makes that 0.16. Biased, contraction: ||x - topk(x)||^2 <= (1 - k/n) ||x||^2; use it with error
    feedback (the default), or momentum correction (`DGC`) at 0.1 % and below. Payloads do not add up: each worker
    sends other positions, so the payloads of all N workers arrive everywhere, and where that is more than a dense
    exchange (at 1 % in 8 bits from about 380 workers on) a dense one is used.

    The method to begin with: it sends the least for what training loses.

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

    def with_ratio(self, ratio: float) -> Compressor:
        return replace(self, ratio=ratio)

    def kept(self, size: int) -> float:
        return self.wanted(size)

    def wanted(self, size: int) -> int:
        return min(size, math.ceil(self.ratio * size))

    def select(self, ops: Ops, x: Array, context: Context) -> Array:
        return ops.top_positions(x, self.wanted(len(x)), context.candidates)


class TopKInt8(Compressor):
    """`TopKInt8(ratio)` is `TopK(ratio) >> Int8()`: about two bytes for each value that is sent.

    Args:
        ratio: fraction of the values to send, 0 < ratio <= 1; 0.01 by default.
        options: `memory` and `dense_below`, as for every compressor.
    """

    def __new__(cls, ratio: float = 0.01, **options: Any) -> Compressor:  # type: ignore[misc]
        return TopK(ratio, **options) >> Int8()

"""Random-k: send values at positions that all workers draw alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.chain import Sparsifier
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback.memory import number, require_number
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.ops.hashing import draw_positions
from hvd_gradcomp.wire.positions import encode_drawn


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Send k = ceil(ratio * n) values of a tensor x of n elements, at random positions, the same on all workers.

        sent_i = s * x_i  for i in S,  0 elsewhere;       S of size k drawn without replacement, anew at every step

    S follows from (seed, parameter name, step), so no index travels, and payloads add up: an allreduce adds k values.
    32 k / n bits a value; behind it `>> FP16()` still adds up (16 k / n), other value codes are gathered.

    With s = 1 it is biased, contraction: E||x - sent||^2 = (1 - k/n) ||x||^2; use it with a memory that feeds back.
    With `unbiased`, s = n/k: E[sent] = x and E||sent - x||^2 = (n/k - 1) ||x||^2, to be used with memory=none and a
    learning rate that stands such noise. Cost: passes over k numbers only (about 100), and one gather.

    Use it where indices or selection cost too much (very many workers, slow devices); top-k loses far less at equal k.

    Args:
        ratio: fraction of the values to send, 0 < ratio <= 1.
        seed: which draws; the same on all workers.
        unbiased: scale values by n/k; only without a residual.

    References:
        S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
        J. Wangni, J. Wang, J. Liu, T. Zhang, "Gradient Sparsification for Communication-Efficient Distributed
        Optimization", NeurIPS 2018.
    """

    meets: ClassVar[str] = "sum"
    draws: ClassVar[bool] = True
    spec_name: ClassVar[str] = "randomk"

    ratio: float = 0.01
    seed: int = 0
    unbiased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self, "ratio", "0 < ratio <= 1", 0 < number(self.ratio) <= 1)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigurationError(f"seed must be an integer, got {self.seed!r}")
        if self.unbiased and "residual" in self.memory.parts:
            raise ConfigurationError(
                f"unbiased=True scales values by n/k, and {self.memory} would feed that back as an error n/k times too "
                "large: pass memory=NoMemory() (memory=none in a spec), or leave unbiased out"
            )

    def with_ratio(self, ratio: float) -> Compressor:
        return replace(self, ratio=ratio)

    def kept(self, size: int) -> float:
        return min(size, math.ceil(self.ratio * size))

    def position_bits(self, size: int) -> float:
        return 0.0

    def select(self, ops: Ops, x: Array, context: Context) -> Array:
        return self._drawn(ops, len(x), x, context)

    def encode_positions(self, ops: Ops, positions: Array, size: int, like: Array, context: Context) -> Array:
        return encode_drawn(ops, len(positions), size, context.shared_key(self.seed), like)

    def summands(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        positions = self.select(ops, x, context)
        values = ops.take(x, positions)
        sent = values * self.scale(len(x))
        return sent, ops.put(x, positions, values - sent)

    def from_sum(self, ops: Ops, total: Array, size: int, context: Context) -> Array:
        return ops.put(ops.zeros(size, "float32", total), self._drawn(ops, size, total, context), total)

    def positions_sent(self, ops: Ops, frame: Array | None, like: Array, context: Context) -> Array | None:
        return None if self.kept(len(like)) == len(like) else self._drawn(ops, len(like), like, context)

    def scale(self, size: int) -> float:
        return size / self.kept(size) if self.unbiased and size else 1.0

    def _drawn(self, ops: Ops, size: int, like: Array, context: Context) -> Array:
        return draw_positions(ops, int(self.kept(size)), size, context.shared_key(self.seed), like)

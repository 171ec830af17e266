"""Numbers of blocks of consecutive values (extremes, norms, means), the same bits on every backend.

Sums are taken in one fixed order (`Ops.row_sum`), of values divided by the power of two at or below the block's largest
magnitude: that is exact, and nothing overflows. Some backends round subnormal numbers to zero, so none may matter:
ratios below 2**-60 count as zero, and so does a block whose values are all too small to be divided safely.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import WHOLE, block_count, spread

#: Above this a block's largest value could decode to infinity by rounding.
LARGEST = 3.4028e38
#: Steps and scales below this count as zero: far above subnormal numbers, far below any gradient that matters.
SMALLEST = 2.0**-100
#: The smallest normal float32.
TINY = 2.0**-126
_SMALLEST_RATIO = 2.0**-60
# The exponent's bits in a float32.
_EXPONENT = 0x7F800000


def check_block(block: int | None, name: str = "block") -> None:
    """Refuse a block length that is neither None (the whole tensor) nor a power of two.

    Raises:
        ConfigurationError: it is not.
    """
    if block is None:
        return
    if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= WHOLE or block & (block - 1):
        raise ConfigurationError(
            f"{name} must be a power of two up to 2**31, or None for the whole tensor, got {block!r}"
        )


def length_of(block: int | None) -> int:
    """The block length that `block` stands for."""
    return WHOLE if block is None else block


def block_max(ops: Ops, magnitudes: Array, block: int) -> Array:
    """The largest of each block of float32 `magnitudes` >= 0: shape (count,) to (blocks,)."""
    count = len(magnitudes)
    if not count:
        return magnitudes
    # A block longer than the values needs no padding up to its full length.
    width = min(block, count)
    return ops.row_max(ops.pad(magnitudes, width), width)


def usable(ops: Ops, scales: Array) -> Array:
    """float32 `scales` >= 0, those below SMALLEST replaced by zero."""
    return ops.where(scales >= SMALLEST, scales, 0.0)


def block_sum(ops: Ops, x: Array, block: int) -> Array:
    """The sum of each block, shape (count,) to (blocks,); see `Ops.row_sum`."""
    return ops.row_sum(x, min(block, 1 << max(len(x) - 1, 0).bit_length()))


@dataclass(frozen=True)
class Ratios:
    """Values divided by a power of two near the largest magnitude of their block.

    Attributes:
        values: float32, shape (count,), in (-2, 2), without subnormal numbers.
        powers: float32, shape (blocks,): what they were divided by; zero where all ratios were made zero.
        block: the block length.
    """

    values: Array
    powers: Array
    block: int

    @classmethod
    def of(cls, ops: Ops, x: Array, block: int) -> Ratios:
        """The ratios of float32 `x` (count,). Four passes."""
        powers = usable(ops, _power_of_two(ops, block_max(ops, ops.abs(x), block)))
        each = spread(ops, powers, block, len(x))
        ratios = ops.where(each > 0, x, 0.0) / ops.where(each > 0, each, 1.0)
        return cls(ops.where(ops.abs(ratios) >= _SMALLEST_RATIO, ratios, 0.0), powers, block)

    def norm(self, ops: Ops) -> Array:
        """The L2 norm of each block, at most LARGEST; shape (blocks,)."""
        roots = ops.sqrt(block_sum(ops, self.values * self.values, self.block))
        # The norm of the ratios is at least one wherever there is one that is not zero.
        divisors = ops.where(roots > 0, roots, 1.0)
        bound = (roots * 0.0 + LARGEST) / divisors
        return ops.where(self.powers > bound, bound, self.powers) * roots

    def root_mean_square(self, ops: Ops) -> Array:
        """sqrt(mean(x**2)) of each block, shape (blocks,)."""
        sums = block_sum(ops, self.values * self.values, self.block)
        return self.powers * ops.sqrt(sums / self._counts(ops))

    def mean_magnitude(self, ops: Ops) -> Array:
        """mean(|x|) of each block, shape (blocks,)."""
        return self.powers * (block_sum(ops, ops.abs(self.values), self.block) / self._counts(ops))

    def mean_where(self, ops: Ops, mask: Array) -> Array:
        """The mean of each block's values at which `mask` (bool, (count,)) is true, zero where there are none."""
        sums = block_sum(ops, ops.where(mask, self.values, 0.0), self.block)
        counts = block_sum(ops, ops.cast(mask, "float32"), self.block)
        means = self.powers * (sums / ops.where(counts > 0, counts, 1.0))
        return ops.where(ops.abs(means) >= TINY, means, 0.0)

    def _counts(self, ops: Ops) -> Array:
        """How many values each block holds, float32: all but the last one are full."""
        count = len(self.values)
        blocks = block_count(self.block, count)
        if not blocks:
            return self.powers
        zero = ops.zeros(1, "float32", self.values)
        last = zero + (count - (blocks - 1) * self.block)
        return ops.concat([ops.repeat(zero + self.block, blocks - 1), last]) if blocks > 1 else last


def _power_of_two(ops: Ops, x: Array) -> Array:
    """The largest power of two that is not above each of float32 `x` >= 0; zero for subnormal numbers."""
    bits = ops.cast(ops.from_bytes(ops.bytes_of(x), "int32"), "int64")
    return ops.from_bytes(ops.pack_uint(ops.bit_and(bits, _EXPONENT), 32), "float32")

"""Linear quantization: whole multiples of a step, 2 to 8 bits each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.blocks import LARGEST, block_max, check_block, length_of, usable
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import spread
from hvd_gradcomp.wire.levels import MOST_LEVELS, encode_levels, encode_linear8

# The distance between two draws of `Ops.uniform`.
_DRAW = 2.0**-24


@dataclass(frozen=True)
class Linear(ValueCode):
    """Equidistant levels with one float32 step for each block of values.

    In a block of values v, with s = 2**(bits - 1) - 1: step = max|v| / s, level = v / step rounded to an integer in
    [-s, s], decoded = level * step. `bits` + 32 / block bits a value.

    Rounding "nearest" (halves to even) is biased, |v - decoded| <= step / 2. Rounding "stochastic" goes up with the
    probability of the fraction, so that E[decoded] = v (to 2**-24 of a step) with variance <= step**2 / 4; it costs
    about 30 more passes, in cache, for the draws. Else five passes over the values and three over the levels. A step
    below 2**-100 counts as zero: such a block is not sent.

    Payloads do not add up: each block has a step of its own. Use 8 bits behind any sparsifier, 4 bits with error
    feedback where bandwidth is scarce; below 4 bits `TernGrad` (1.6 bits) and the sign codes say as much in fewer.
    Error feedback needs an error smaller than the values: that of nearest rounding always is, that of stochastic
    rounding only where the step is small against most values (from 4 bits up for normal ones).

    Args:
        bits: 2 to 8; a level has exactly that many.
        block: values that share a step, a power of two; None means the whole tensor.
        rounding: "nearest" or "stochastic".
        seed: of the draws; workers draw differently, and anew at every step.

    References:
        T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016.
        S. Gupta, A. Agrawal, K. Gopalakrishnan, P. Narayanan, "Deep Learning with Limited Numerical Precision",
        ICML 2015 (stochastic rounding).
    """

    spec_name: ClassVar[str] = "linear"

    bits: int = 4
    block: int | None = 512
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ConfigurationError(f"bits must be 2 to 8, got {self.bits!r}")
        check_block(self.block)
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigurationError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")
        check_seed(self.seed)

    def with_ratio(self, ratio: float) -> Compressor:
        return replace(self, bits=bits_for(ratio))

    def value_bits(self) -> float:
        return self.bits + 32 / length_of(self.block)

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        block, most = length_of(self.block), (1 << (self.bits - 1)) - 1
        if most == MOST_LEVELS and self.rounding == "nearest":
            at_once = ops.encode_linear8(values, block)
            if at_once is not None:
                return at_once
        largest = block_max(ops, ops.abs(values), block)
        steps = usable(ops, ops.divide(ops.clip(largest, 0.0, LARGEST), most))
        key = context.key(self.seed) if self.rounding == "stochastic" else None
        levels, decoded = quantize(ops, values, steps, block, most, key)
        if most == MOST_LEVELS:
            coded = encode_linear8(ops, ops.cast(levels, "int8"), steps, block.bit_length() - 1)
        else:
            coded = encode_levels(ops, ops.cast(levels, "int64"), steps, block.bit_length() - 1, most)
        return coded, decoded


def quantize(
    ops: Ops, values: Array, steps: Array, block: int, most: int, key: int | None = None
) -> tuple[Array, Array]:
    """Levels of `values` in steps of their block, and what these decode to.

    Args:
        values: float32, shape (count,).
        steps: float32, shape (blocks,), each zero or at least 2**-100. A block of step zero has level zero throughout.
        most: the largest level; beyond it values are cut.
        key: of the draws for stochastic rounding; None rounds to nearest.

    Returns:
        Levels (float32 integers in [-most, most], shape (count,)), and level * step (float32, shape (count,)).
    """
    each = spread(ops, steps, block, len(values))
    ratio = values / ops.where(each > 0, each, 1.0)
    if key is None:
        levels = ops.round(ratio)
    else:
        low = ops.floor(ratio)
        # A draw is a multiple of 2**-24. Lifted to (0, 1], it never exceeds the fraction of a whole ratio, nor of one
        # that is as good as whole because `values` is subnormal, which not every backend can tell from zero.
        rises = ops.uniform(len(values), key, values) + _DRAW <= ratio - low
        levels = low + ops.cast(rises, "float32")
    levels = ops.where(each > 0, ops.clip(levels, -most, most), 0.0)
    return levels, levels * each


def bits_for(ratio: float) -> int:
    """The bits of a level, 2 to 8, that come nearest to the fraction `ratio` of a float32 from below."""
    return min(8, max(2, int(32 * ratio + 1e-9)))


def check_seed(seed: int) -> None:
    """Refuse a seed that is no integer.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigurationError(f"seed must be an integer, got {seed!r}")

"""Eight-bit linear quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.compressors.base import Context
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.values import encode_linear8, spread

_LEVELS = 127
# Above this a block's largest value could decode to infinity by rounding.
_LARGEST = 3.4028e38


@dataclass(frozen=True)
class Int8(ValueCode):
    """Symmetric int8 levels with one float32 step for each block of values.

    In a block of values v: step = max|v| / 127, level = round(v / step) in [-127, 127], decoded = level * step.
    8 + 32 / block bits a value. Biased by rounding to nearest, |v - decoded| <= step / 2. Blocks follow the order of
    the values, so a tensor of small values is not starved by one of large values. Payloads do not add up: each block
    has a step of its own. Behind a sparsifier the cost is a few passes over the kept values only.

    Args:
        block: values that share a step; a power of two, at most 2**31.

    References:
        T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016.
    """

    spec_name: ClassVar[str] = "int8"

    block: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.block, int) or not 1 <= self.block <= 2**31 or self.block & (self.block - 1):
            raise ConfigurationError(f"block must be a power of two, at most 2**31, got {self.block!r}")

    def bits(self) -> float:
        return 8 + 32 / self.block

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        count = len(values)
        # A block longer than the values needs no padding up to its full length.
        width = min(self.block, max(count, 1))
        largest = ops.row_max(ops.pad(ops.abs(values), width), width) if count else values
        steps = ops.clip(largest, 0.0, _LARGEST) / _LEVELS
        each = spread(ops, steps, self.block, count)
        # A step of zero (a block of zeros, or of values too small to divide) has level zero throughout.
        ratio = values / ops.where(each > 0, each, 1.0)
        levels = ops.where(each > 0, ops.clip(ops.round(ratio), -_LEVELS, _LEVELS), 0.0)
        coded = encode_linear8(ops, ops.cast(levels, "int8"), steps, self.block.bit_length() - 1)
        return coded, levels * each

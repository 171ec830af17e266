"""Eight-bit linear quantization under its usual name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.blocks import length_of
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.compressors.linear import Linear, bits_for
from hvd_gradcomp.ops import Array, Ops


@dataclass(frozen=True)
class Int8(ValueCode):
    """`Linear(bits=8)`: symmetric int8 levels with one float32 step for each block of values.

    In a block of values v: step = max|v| / 127, level = round(v / step) in [-127, 127], decoded = level * step.
    8 + 32 / block bits a value. Biased by rounding to nearest, |v - decoded| <= step / 2. Blocks follow the order of
    the values, so a tensor of small values is not starved by one of large values. Payloads do not add up: each block
    has a step of its own. Behind a sparsifier the cost is a few passes over the kept values only.

    Args:
        block: values that share a step, a power of two; None means all.

    References:
        T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016.
    """

    spec_name: ClassVar[str] = "int8"

    block: int | None = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self._linear()

    def with_ratio(self, ratio: float) -> Compressor:
        return Linear(
            bits=bits_for(ratio),
            block=self.block,
            memory=self.memory,
            dense_below=self.dense_below,
            granularity=self.granularity,
            collective=self.collective,
        )

    def value_bits(self) -> float:
        return 8 + 32 / length_of(self.block)

    def encode_at_once(self, ops: Ops, x: Array, positions: Array | None) -> Array | None:
        return ops.encode_sparse8(x, positions, length_of(self.block))

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        return self._linear().encode_values(ops, values, context)

    def _linear(self) -> Linear:
        return Linear(bits=8, block=self.block)

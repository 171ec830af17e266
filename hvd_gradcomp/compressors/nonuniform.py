"""Non-uniform eight bits: more levels near zero, where most gradients are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.compressors.base import Context
from hvd_gradcomp.compressors.blocks import LARGEST, block_max, check_block, length_of, usable
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import spread
from hvd_gradcomp.wire.nonuniform import encode_dynamic8, nearest_indices, table_values


@dataclass(frozen=True)
class Dynamic8(ValueCode):
    """Dynamic tree quantization: eight bits into a table with seven decades on each side of zero.

    In a block of values v: scale = max|v|, index = the nearest entry of the table to v / scale, decoded =
    table[index] * scale. 8 + 32 / block bits a value, about eight passes and a binary search of eight steps. Biased:
    for 10**-(d + 1) <= |v| / scale <= 10**-d, |v - decoded| <= 0.45 * 10**-d / 2**(6 - d) of the scale: 0.7 % of it for
    the largest values, 0.14 % a decade below, 0.03 % two decades below; `Int8` is off by up to 0.4 % everywhere.
    Payloads do not add up.

    Use it for whole tensors whose values span several decades, with long blocks. Behind a sparsifier all values are
    large and `Int8` is the better choice; within a short block of normal values the two are alike.

    Args:
        block: values that share a scale, a power of two; None means the whole tensor.

    References:
        T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016.
        T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
    """

    spec_name: ClassVar[str] = "dynamic8"

    block: int | None = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self.block)

    def value_bits(self) -> float:
        return 8 + 32 / length_of(self.block)

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        block = length_of(self.block)
        scales = usable(ops, ops.clip(block_max(ops, ops.abs(values), block), 0.0, LARGEST))
        each = spread(ops, scales, block, len(values))
        ratio = ops.where(each > 0, values, 0.0) / ops.where(each > 0, each, 1.0)
        indices = nearest_indices(ops, ratio)
        coded = encode_dynamic8(ops, indices, scales, block.bit_length() - 1)
        return coded, table_values(ops, indices) * each

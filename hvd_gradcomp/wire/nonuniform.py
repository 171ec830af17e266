"""Eight bits a value into a fixed table that is dense near zero: decoded = TABLE[index] * scale.

    DYNAMIC8   header(log2 block, 0)   scales (float32 each) | indices (one byte each)

The table is Dettmers' dynamic tree: seven decades on each side of zero, of which the decade that ends at 10**-d holds
2**(6 - d) equidistant values, d = 0 ... 6; and 0 and 1.
Source: T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016; in the variant of
T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from __future__ import annotations

import struct
from itertools import pairwise

from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import DYNAMIC8, HEADER, read_block, read_per_block, spread
from hvd_gradcomp.wire.parts import Reader, write


def _dynamic_table() -> list[float]:
    positive = [
        (0.1 + 0.9 * (place + 0.5) / 2 ** (6 - decade)) / 10**decade
        for decade in range(7)
        for place in range(2 ** (6 - decade))
    ]
    return sorted([*positive, *(-value for value in positive), 0.0, 1.0])


#: The 256 values in ascending order, as they are before they are rounded to float32.
TABLE = tuple(_dynamic_table())
_TABLE = struct.pack("<256f", *TABLE)
_MIDDLES = struct.pack("<255f", *((low + high) / 2 for low, high in pairwise(TABLE)))


def nearest_indices(ops: Ops, x: Array) -> Array:
    """The index (int64) of the value in the table that is nearest to each of float32 `x`."""
    return ops.search_sorted(ops.from_bytes(ops.from_host(_MIDDLES, x), "float32"), x)


def table_values(ops: Ops, indices: Array) -> Array:
    """float32 values of the table at int64 `indices`."""
    return ops.take(ops.from_bytes(ops.from_host(_TABLE, indices), "float32"), indices)


def encode_dynamic8(ops: Ops, indices: Array, scales: Array, block_log2: int) -> Array:
    """The bytes of int64 `indices` (count,) and float32 `scales` (ceil(count / 2**block_log2),)."""
    header = HEADER.pack(DYNAMIC8, block_log2, 0)
    return write(ops, indices, header, ops.bytes_of(scales), ops.cast(indices, "uint8"))


def decode_dynamic8(reader: Reader, block_log2: int, _: int, count: int) -> Array:
    """The reverse of `encode_dynamic8`, after its header: float32 values (count,)."""
    ops, block = reader.ops, read_block(block_log2)
    scales = read_per_block(reader, block, count)
    indices = ops.cast(reader.bytes(count), "int64")
    return table_values(ops, indices) * spread(ops, scales, block, count)

"""What all value codes share: their numbers, their header, and one number for each block of values.

    0 FLOAT32, 1 FLOAT16, 2 BFLOAT16   the values in that format
    3 LINEAR8                          steps, then one int8 level a value
    4 LEVELS, 5 LEVELS_GAMMA           steps, then small levels: of equal width, or in an Elias code
    6 TRITS                            steps, then levels -1, 0, 1, five to a byte
    7 TWO_VALUES                       two values for each block, then one bit a value
    8 POWERS                           signs and exponents of powers of two
    9 DYNAMIC8                         scales, then one index a value into a fixed table of 256

A code of another package needs no number: it writes bytes of its own and gives `decode_values` itself.
"""

from __future__ import annotations

import struct

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.parts import Reader

FLOAT32, FLOAT16, BFLOAT16, LINEAR8, LEVELS, LEVELS_GAMMA, TRITS, TWO_VALUES, POWERS, DYNAMIC8 = range(10)
#: code, log2 of the block length (or a number of the code's own), a number of the code's own
HEADER = struct.Struct("<BBH")
#: The block length that makes any tensor one block.
WHOLE = 1 << 31


def block_count(block: int, count: int) -> int:
    """How many blocks of `block` values hold `count` values."""
    return -(-count // block)


def spread(ops: Ops, per_block: Array, block: int, count: int) -> Array:
    """Each block's number given to each of its values: shape (blocks,) to (count,)."""
    return ops.repeat(per_block, min(block, max(count, 1)))[:count]


def read_block(block_log2: int) -> int:
    """The block length behind a header's `block_log2`.

    Raises:
        PayloadError: there is no block of that length.
    """
    if block_log2 > 31:
        raise PayloadError(f"blocks of 2**{block_log2} values are not possible")
    return 1 << block_log2


def read_per_block(reader: Reader, block: int, count: int) -> Array:
    """The next float32 number of each block, shape (blocks,).

    Raises:
        PayloadError: they are not all there, or one is not finite, which no worker sends.
    """
    ops = reader.ops
    numbers = ops.from_bytes(reader.bytes(4 * block_count(block, count)), "float32")
    if not ops.all_finite(numbers):
        raise PayloadError("a block's scale is not finite")
    return numbers

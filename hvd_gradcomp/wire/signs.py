"""One bit a value: which of the two values of its block it decodes to.

TWO_VALUES   header(log2 block, 0)   value of each block for bit 0, for bit 1 (float32 each) | bits
"""

from __future__ import annotations

from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import HEADER, TWO_VALUES, read_block, read_per_block, spread
from hvd_gradcomp.wire.parts import Reader, write


def encode_two_values(ops: Ops, bits: Array, low: Array, high: Array, block_log2: int) -> Array:
    """The bytes of one bit for each value.

    Args:
        bits: uint8, shape (count,), 0 or 1.
        low, high: float32, shape (ceil(count / 2**block_log2),): what 0 and 1 decode to.
    """
    header = HEADER.pack(TWO_VALUES, block_log2, 0)
    return write(ops, bits, header, ops.bytes_of(low), ops.bytes_of(high), ops.pack_bits(bits))


def decode_two_values(reader: Reader, block_log2: int, _: int, count: int) -> Array:
    """The reverse of `encode_two_values`, after its header: float32 values (count,)."""
    ops, block = reader.ops, read_block(block_log2)
    low = read_per_block(reader, block, count)
    high = read_per_block(reader, block, count)
    bits = ops.unpack_bits(reader.bytes((count + 7) // 8), count)
    return ops.where(bits > 0, spread(ops, high, block, count), spread(ops, low, block, count))

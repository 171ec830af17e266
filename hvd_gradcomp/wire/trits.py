"""Ternary values, five to a byte (3**5 = 243 of 256): 1.6 bits each, where the entropy of a trit is 1.585.

    TRITS   header(log2 block, 0)   steps (float32 each) | bytes of five trits, the first of weight 1, the last of 81

A trit is level + 1 for the levels -1, 0, 1; the last byte is filled up with zeros. decoded = level * step.
"""

from __future__ import annotations

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import HEADER, TRITS, read_block, read_per_block, spread
from hvd_gradcomp.wire.parts import Reader, write

#: Trits in a byte.
IN_BYTE = 5


def encode_trits(ops: Ops, levels: Array, steps: Array, block_log2: int) -> Array:
    """The bytes of float32 `levels` (count,) in {-1, 0, 1} and float32 `steps` (ceil(count / 2**block_log2),)."""
    header = HEADER.pack(TRITS, block_log2, 0)
    return write(ops, levels, header, ops.bytes_of(steps), pack_trits(ops, levels))


def decode_trits(reader: Reader, block_log2: int, _: int, count: int) -> Array:
    """The reverse of `encode_trits`, after its header: float32 values (count,)."""
    ops, block = reader.ops, read_block(block_log2)
    steps = read_per_block(reader, block, count)
    levels = unpack_trits(ops, reader.bytes(-(-count // IN_BYTE)), count)
    return ops.cast(levels, "float32") * spread(ops, steps, block, count)


def pack_trits(ops: Ops, levels: Array) -> Array:
    """float32 `levels` (count,) in {-1, 0, 1} as ceil(count / IN_BYTE) bytes (uint8)."""
    trits = ops.pad(ops.cast(levels + 1.0, "uint8"), IN_BYTE)
    # Horner's rule from the last trit down; no sum exceeds 242.
    octets = trits[IN_BYTE - 1 :: IN_BYTE]
    for place in range(IN_BYTE - 2, -1, -1):
        octets = octets * 3 + trits[place::IN_BYTE]
    return octets


def unpack_trits(ops: Ops, data: Array, count: int) -> Array:
    """The reverse of `pack_trits`: int64 levels (count,).

    Raises:
        PayloadError: a byte holds something else.
    """
    left = ops.cast(data, "int64")
    if ops.total(left > 3**IN_BYTE - 1):
        raise PayloadError("a byte does not hold five trits")
    trits = []
    for _place in range(IN_BYTE):
        # left // 3 for left < 512, without a division.
        third = ops.shift_right(left * 171, 9)
        trits.append(left - third * 3)
        left = third
    return ops.interleave(trits)[:count] - 1

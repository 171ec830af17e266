"""Value codes: the kept values, as bytes that say how to read themselves.

    0 FLOAT32, 1 FLOAT16, 2 BFLOAT16   the values in that format
    3 LINEAR8                          blocks of values: one float32 step for each block, then int8 levels

Only layouts live here; how values are rounded to levels is the business of a compressor.
"""

from __future__ import annotations

import struct

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array
from hvd_gradcomp.ops.base import FLOAT_BYTES, Ops
from hvd_gradcomp.wire.parts import Reader, write

FLOAT_KINDS = ("float32", "float16", "bfloat16")
LINEAR8 = 3
#: code, log2 of the block length, 2 unused bytes
HEADER = struct.Struct("<BBH")


def encode_floats(ops: Ops, values: Array, kind: str) -> Array:
    """float32 `values` (count,) in the float format `kind` ("float32", "float16", "bfloat16")."""
    header = HEADER.pack(FLOAT_KINDS.index(kind), 0, 0)
    return write(ops, values, header, ops.pack_float(values, kind))


def encode_linear8(ops: Ops, levels: Array, steps: Array, block_log2: int) -> Array:
    """int8 `levels` (count,) and float32 `steps` (ceil(count / 2**block_log2),)."""
    header = HEADER.pack(LINEAR8, block_log2, 0)
    return write(ops, levels, header, ops.bytes_of(steps), ops.bytes_of(levels))


def decode_values(reader: Reader, count: int) -> Array:
    """The next `count` values as float32.

    Raises:
        PayloadError: the bytes are no valid value code.
    """
    ops = reader.ops
    code, block_log2, _ = reader.header(HEADER)
    if code < len(FLOAT_KINDS):
        kind = FLOAT_KINDS[code]
        return ops.unpack_float(reader.bytes(FLOAT_BYTES[kind] * count), kind)
    if code == LINEAR8:
        if block_log2 > 31:
            raise PayloadError(f"blocks of 2**{block_log2} values are not possible")
        block = 1 << block_log2
        steps = ops.from_bytes(reader.bytes(4 * -(-count // block)), "float32")
        levels = ops.cast(ops.from_bytes(reader.bytes(count), "int8"), "float32")
        return levels * spread(ops, steps, block, count)
    raise PayloadError(f"unknown value code {code}")


def spread(ops: Ops, per_block: Array, block: int, count: int) -> Array:
    """Each block's number given to each of its values: shape (blocks,) to (count,)."""
    return ops.repeat(per_block, min(block, max(count, 1)))[:count]

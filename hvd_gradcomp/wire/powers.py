"""Values that are zero or a power of two: a sign and an exponent.

    POWERS   header(lowest, bits)   2 * index + sign in `bits` bits each

index 0 is zero, index i the power 2**(lowest + i - 1 - 127); `lowest` is the smallest exponent (as float32 counts them)
of the tensor, and `bits` as many as its largest needs. So what is sent is at most the 9 bits of float32's own sign and
exponent, and usually 6 or 7.
"""

from __future__ import annotations

import struct

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import HEADER, POWERS
from hvd_gradcomp.wire.parts import Reader, write

#: The largest exponent of a finite float32.
LARGEST_EXPONENT = 254
# Exponent field -> its power of two, and zero for the field zero (where float32 keeps zero and subnormal numbers).
_POWERS = struct.pack("<255f", 0.0, *(2.0 ** (exponent - 127) for exponent in range(1, 255)))


def powers_of_two(ops: Ops, exponents: Array) -> Array:
    """float32 powers for int64 exponent fields in [0, 254]; 0 stands for zero."""
    return ops.take(ops.from_bytes(ops.from_host(_POWERS, exponents), "float32"), exponents)


def encode_powers(ops: Ops, exponents: Array, negative: Array) -> Array:
    """The bytes of signed powers of two.

    Args:
        exponents: int64, shape (count,), the exponent field of a float32: 1 to 254, or 0 for the value zero.
        negative: int64, shape (count,), 1 where the value is below zero, else 0; 0 for the value zero.
    """
    present = ops.take(exponents, ops.nonzero(exponents > 0))
    if not len(present):
        return write(ops, exponents, HEADER.pack(POWERS, 1, 0), ops.zeros(0, "uint8", exponents))
    floats = ops.cast(present, "float32")
    largest, lowest = int(ops.kth_largest(floats, 1)), -int(ops.kth_largest(-floats, 1))
    indices = ops.where(exponents > 0, exponents - (lowest - 1), 0)
    bits = (2 * (largest - lowest + 1) + 1).bit_length()
    return write(ops, exponents, HEADER.pack(POWERS, lowest, bits), ops.pack_uint(indices * 2 + negative, bits))


def decode_powers(reader: Reader, lowest: int, bits: int, count: int) -> Array:
    """The reverse of `encode_powers`, after its header: float32 values (count,)."""
    ops = reader.ops
    if bits > 9 or not 1 <= lowest <= LARGEST_EXPONENT:
        raise PayloadError(f"powers of two in {bits} bits from exponent {lowest}")
    coded = ops.unpack_uint(reader.bytes((bits * count + 7) // 8), bits, count)
    indices = ops.shift_right(coded, 1)
    exponents = ops.where(indices > 0, indices + (lowest - 1), 0)
    if ops.total(exponents > LARGEST_EXPONENT) or ops.total(coded == 1):
        raise PayloadError("a power of two lies outside float32, or zero has a sign")
    powers = powers_of_two(ops, exponents)
    return ops.where(ops.bit_and(coded, 1) > 0, -powers, powers)

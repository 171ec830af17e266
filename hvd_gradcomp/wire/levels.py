"""Values as whole multiples of a step that their block shares: decoded = level * step.

    LINEAR8        header(log2 block, 0)   steps (float32 each) | levels (int8 each)
    LEVELS         header(log2 block, s)   steps | level + s in the fewest bits that hold 2 s
    LEVELS_GAMMA   header(log2 block, s)   steps | bytes of the unary stream (u32) | unary | rest

The gamma code is Elias's for v = |level| + 1: floor(log2 v) in unary, then the lower bits of v; and a sign where the
level is not zero. It wins where most levels are zero. For array operations its streams are kept apart: all unary parts,
then bit 0 of every v that has one, bit 1, ..., then the signs.
Source: P. Elias, "Universal codeword sets and representations of the integers", IEEE Trans. Inf. Theory 21, 1975.
"""

from __future__ import annotations

import struct

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import HEADER, LEVELS, LEVELS_GAMMA, LINEAR8, read_block, read_per_block, spread
from hvd_gradcomp.wire.parts import Reader, write

#: The most levels on each side of zero.
MOST_LEVELS = 127
_UNARY = struct.Struct("<I")


def encode_linear8(ops: Ops, levels: Array, steps: Array, block_log2: int) -> Array:
    """int8 `levels` (count,) and float32 `steps` (ceil(count / 2**block_log2),)."""
    return write(ops, levels, HEADER.pack(LINEAR8, block_log2, 0), ops.bytes_of(steps), ops.bytes_of(levels))


def encode_levels(ops: Ops, levels: Array, steps: Array, block_log2: int, most: int, shorter: bool = False) -> Array:
    """The bytes of levels of at most `most` on each side of zero.

    Args:
        levels: int64, shape (count,), in [-most, most].
        steps: float32, shape (ceil(count / 2**block_log2),).
        most: 1 <= most <= MOST_LEVELS.
        shorter: use the gamma code where that is shorter.
    """
    count, width = len(levels), level_bits(most)
    if shorter and count:
        magnitudes = ops.where(levels < 0, levels * -1, levels)
        lengths = _lengths(ops, magnitudes, most)
        unary_bits = count + ops.total(lengths)
        rest_bits = ops.total(lengths) + ops.total(magnitudes > 0)
        if _UNARY.size + _octets(unary_bits) + _octets(rest_bits) < _octets(width * count):
            header = HEADER.pack(LEVELS_GAMMA, block_log2, most)
            ends = ops.cumsum(lengths) + ops.arange(count, levels)
            marks = ops.put(ops.zeros(unary_bits, "uint8", levels), ends, ops.zeros(count, "uint8", levels) + 1)
            unary = ops.pack_bits(marks)
            rest = _rest(ops, levels, magnitudes, lengths)
            return write(ops, levels, header, ops.bytes_of(steps), _UNARY.pack(len(unary)), unary, rest)
    packed = ops.pack_uint(levels + most, width)
    return write(ops, levels, HEADER.pack(LEVELS, block_log2, most), ops.bytes_of(steps), packed)


def level_bits(most: int) -> int:
    """Bits of a level in [-most, most] at equal width."""
    return (2 * most).bit_length()


def gamma_bits(magnitude: int) -> int:
    """Bits of a level of that magnitude in the gamma code."""
    length = (magnitude + 1).bit_length() - 1
    return 2 * length + 1 + (magnitude > 0)


def decode_linear8(reader: Reader, block_log2: int, _: int, count: int) -> Array:
    """The reverse of `encode_linear8`, after its header: float32 values (count,)."""
    ops, block = reader.ops, read_block(block_log2)
    steps = read_per_block(reader, block, count)
    levels = ops.from_bytes(reader.bytes(count), "int8")
    return ops.cast(levels, "float32") * spread(ops, steps, block, count)


def decode_levels(reader: Reader, block_log2: int, most: int, count: int) -> Array:
    """The reverse of `encode_levels` at equal width, after its header: float32 values (count,)."""
    ops, block = reader.ops, read_block(block_log2)
    _check_most(most)
    steps = read_per_block(reader, block, count)
    width = level_bits(most)
    raised = ops.unpack_uint(reader.bytes(_octets(width * count)), width, count)
    if ops.total(raised > 2 * most):
        raise PayloadError(f"a level lies outside -{most} ... {most}")
    return ops.cast(raised - most, "float32") * spread(ops, steps, block, count)


def decode_gamma_levels(reader: Reader, block_log2: int, most: int, count: int) -> Array:
    """The reverse of `encode_levels` in the gamma code, after its header: float32 values (count,)."""
    ops, block = reader.ops, read_block(block_log2)
    _check_most(most)
    steps = read_per_block(reader, block, count)
    (unary_bytes,) = reader.header(_UNARY)
    # Looked at before anything is unpacked, so that the memory is bounded by the tensor's.
    if unary_bytes > _octets((_longest(most) + 1) * count):
        raise PayloadError(f"{unary_bytes} bytes of unary lengths for {count} levels")
    ends = ops.nonzero(ops.unpack_bits(reader.bytes(unary_bytes), 8 * unary_bytes) > 0)
    if len(ends) != count:
        raise PayloadError(f"gamma code holds {len(ends)} levels, {count} are expected")
    if not count:
        return ops.zeros(0, "float32", reader.data)
    lengths = ops.concat([ends[:1], ends[1:] - ends[:-1] - 1])
    if ops.total(lengths > _longest(most)):
        raise PayloadError(f"a level lies outside -{most} ... {most}")
    levels = _read_rest(reader, lengths, most)
    return ops.cast(levels, "float32") * spread(ops, steps, block, count)


def _octets(bits: int) -> int:
    return (bits + 7) // 8


def _check_most(most: int) -> None:
    if not 1 <= most <= MOST_LEVELS:
        raise PayloadError(f"{most} levels on each side of zero; 1 to {MOST_LEVELS} are possible")


def _longest(most: int) -> int:
    """floor(log2(most + 1)): the largest length."""
    return (most + 1).bit_length() - 1


def _lengths(ops: Ops, magnitudes: Array, most: int) -> Array:
    """floor(log2(magnitude + 1)) of each, int64."""
    lengths = ops.cast(magnitudes > 0, "int64")
    for bit in range(2, _longest(most) + 1):
        lengths = lengths + ops.cast(magnitudes + 1 >= 1 << bit, "int64")
    return lengths


def _rest(ops: Ops, levels: Array, magnitudes: Array, lengths: Array) -> Array:
    """The lower bits of magnitude + 1, plane by plane, then the signs."""
    positions = ops.nonzero(lengths > 0)
    signs = ops.take(levels, positions) < 0
    planes = []
    bit = 0
    while len(positions):
        values = ops.take(magnitudes, positions) + 1
        planes.append(ops.cast(ops.bit_and(ops.shift_right(values, bit), 1), "uint8"))
        bit += 1
        positions = ops.take(positions, ops.nonzero(ops.take(lengths, positions) > bit))
    return ops.pack_bits(ops.concat([*planes, ops.cast(signs, "uint8")]))


def _read_rest(reader: Reader, lengths: Array, most: int) -> Array:
    """The levels (int64) whose unary parts are `lengths`."""
    ops = reader.ops
    positions = nonzero = ops.nonzero(lengths > 0)
    total = ops.total(lengths) + len(nonzero)
    bits = ops.cast(ops.unpack_bits(reader.bytes(_octets(total)), total), "int64")
    # The topmost bit of each value is not sent: its length says which one it is.
    powers = ops.concat([ops.zeros(1, "int64", lengths) + (1 << length) for length in range(_longest(most) + 1)])
    values = ops.take(powers, lengths)
    bit = start = 0
    while len(positions):
        values = ops.put_add(values, positions, bits[start : start + len(positions)] * (1 << bit))
        start, bit = start + len(positions), bit + 1
        positions = ops.take(positions, ops.nonzero(ops.take(lengths, positions) > bit))
    magnitudes = values - 1
    if ops.total(magnitudes > most):
        raise PayloadError(f"a level lies outside -{most} ... {most}")
    negative = ops.put(ops.zeros(len(lengths), "int64", lengths), nonzero, bits[start:])
    return magnitudes * (1 - 2 * negative)

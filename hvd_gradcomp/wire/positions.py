"""Index codes: which `count` of a tensor's `size` elements are in the payload.

    0 ALL      every element; no bytes
    1 RICE     gaps between positions: the low `rice_bits` bits of all gaps, packed, then the rest of each in unary
    2 BITMAP   one bit an element
    3 RAW      32 bits a position
    4 DRAWN    a 64-bit key from which every worker draws the same positions

DRAWN is for positions that were drawn; of the others the smallest is chosen. Positions of a top-k are nearly random, so
gaps are nearly geometric, and for those a Rice code is within about 1 % of the entropy (8.1 bits at 1 % kept). Low bits
and unary parts are kept in two streams instead of interleaved, so that both can be read with array operations.
Source: R. F. Rice, "Some practical universal noiseless coding techniques", JPL 79-22, 1979.
"""

from __future__ import annotations

import math
import struct

from hvd_gradcomp.errors import PayloadError, UnsupportedError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.ops.hashing import draw_positions
from hvd_gradcomp.wire.parts import Reader, write

ALL, RICE, BITMAP, RAW, DRAWN = range(5)
#: code, Rice bits, 2 unused bytes, bytes of the unary stream
HEADER = struct.Struct("<BB2xI")
_KEY = struct.Struct("<Q")
_MAX_SIZE = 2**31 - 1


def encode_positions(ops: Ops, positions: Array | None, size: int, like: Array) -> Array:
    """The bytes for ascending distinct `positions` (int64) in [0, size), or for all positions when None.

    Args:
        positions: int64, shape (count,), ascending; None means every position.
        size: number of elements of the tensor.
        like: an array on the device where the bytes are wanted.

    Raises:
        UnsupportedError: `size` does not fit the format.
    """
    _require_fit(size)
    if positions is None or len(positions) == size:
        return write(ops, like, HEADER.pack(ALL, 0, 0))
    at_once = ops.encode_positions(positions, size)
    if at_once is not None:
        return at_once
    count = len(positions)
    gaps = _gaps(ops, positions)
    rice_bits, unary_bits = _best_rice(ops, gaps, count, size)
    rice_bytes = _octets(rice_bits * count) + _octets(unary_bits)
    sizes = {RICE: rice_bytes, BITMAP: _octets(size), RAW: 4 * count}
    code = min(sizes, key=lambda each: (sizes[each], each))
    if code == RICE:
        quotients = ops.shift_right(gaps, rice_bits)
        low = ops.pack_uint(ops.bit_and(gaps, (1 << rice_bits) - 1), rice_bits)
        ends = ops.cumsum(quotients) + ops.arange(count, like)
        unary = ops.pack_bits(_marks(ops, ends, unary_bits, like))
        return write(ops, like, HEADER.pack(RICE, rice_bits, len(unary)), low, unary)
    if code == BITMAP:
        return write(ops, like, HEADER.pack(BITMAP, 0, 0), ops.pack_bits(_marks(ops, positions, size, like)))
    return write(ops, like, HEADER.pack(RAW, 0, 0), ops.pack_uint(positions, 32))


def encode_drawn(ops: Ops, count: int, size: int, key: int, like: Array) -> Array:
    """The bytes for the positions that `draw_positions` draws with `key`, in its order."""
    _require_fit(size)
    if count == size:
        return write(ops, like, HEADER.pack(ALL, 0, 0))
    return write(ops, like, HEADER.pack(DRAWN, 0, 0), _KEY.pack(key))


def decode_positions(reader: Reader, size: int, count: int) -> Array | None:
    """The `count` positions in [0, size) as given to `encode_positions`, or as drawn; None for all.

    Raises:
        PayloadError: the bytes are no valid code for that.
    """
    ops = reader.ops
    at_once = ops.decode_positions(reader.data, reader.position, size, count)
    if at_once is not None:
        positions, reader.position = at_once
        return positions
    code, rice_bits, unary_bytes = reader.header(HEADER)
    if code == ALL:
        if count != size:
            raise PayloadError(f"payload says all of {size} elements are kept, but counts {count}")
        return None
    if code == DRAWN:
        # Distinct and inside the tensor by construction.
        return draw_positions(ops, count, size, reader.header(_KEY)[0], reader.data)
    if code == RICE:
        positions = _decode_rice(reader, rice_bits, size, count, unary_bytes)
    elif code == BITMAP:
        positions = ops.nonzero(ops.unpack_bits(reader.bytes(_octets(size)), size) > 0)
    elif code == RAW:
        words = ops.cast(ops.from_bytes(reader.bytes(4 * count), "int32"), "int64")
        positions = ops.bit_and(words, 0xFFFFFFFF)
    else:
        raise PayloadError(f"unknown index code {code}")
    _check(ops, positions, count, size)
    return positions


def expected_bits(ratio: float) -> float:
    """Bits a kept position costs when a fraction `ratio` of all positions, chosen at random, is kept."""
    if ratio >= 1.0:
        return 0.0
    rice_bits = max(0, round(math.log2(math.log(2) / ratio)))
    # E[gap >> b] of a geometric gap is 1 / ((1 - ratio) ** -(2 ** b) - 1).
    unary = 1.0 / math.expm1(-(2.0**rice_bits) * math.log1p(-ratio))
    return min(rice_bits + 1 + unary, 1.0 / ratio, 32.0)


def _require_fit(size: int) -> None:
    if size > _MAX_SIZE:
        raise UnsupportedError(f"a tensor of {size} elements is too large, at most {_MAX_SIZE} fit: split it")


def _octets(bits: int) -> int:
    return (bits + 7) // 8


def _gaps(ops: Ops, positions: Array) -> Array:
    if not len(positions):
        return positions
    return ops.concat([positions[:1], positions[1:] - positions[:-1] - 1])


def _best_rice(ops: Ops, gaps: Array, count: int, size: int) -> tuple[int, int]:
    """The Rice parameter of fewest bits, and the bits of its unary stream."""
    if not count:
        return 0, 0
    # The best parameter for geometric gaps is near log2(ln 2 * mean gap); clustered positions want a smaller one.
    # Its whole part is read off the exponent, which is the same on every machine, unlike a computed logarithm.
    guess = math.frexp(max(1.0, math.log(2) * size / count))[1] - 1
    best = (2**62, 0, 0)
    for bits in range(max(0, guess - 2), guess + 2):
        unary = count + ops.total(ops.shift_right(gaps, bits))
        best = min(best, (bits * count + unary, bits, unary))
    return best[1], best[2]


def _marks(ops: Ops, positions: Array, size: int, like: Array) -> Array:
    """`size` values in uint8: 1 at `positions`, 0 elsewhere."""
    marks = ops.zeros(size, "uint8", like)
    if not len(positions):
        return marks
    return ops.put(marks, positions, ops.zeros(len(positions), "uint8", like) + 1)


def _decode_rice(reader: Reader, rice_bits: int, size: int, count: int, unary_bytes: int) -> Array:
    ops = reader.ops
    # More low bits than `_best_rice` considers would be a waste to write, and cost much memory to unpack.
    if rice_bits > 31 or count << rice_bits > 2 * size:
        raise PayloadError(f"Rice code with {rice_bits} low bits for {count} of {size} positions is not possible")
    packed = reader.bytes(_octets(rice_bits * count))
    ends = ops.nonzero(ops.unpack_bits(reader.bytes(unary_bytes), 8 * unary_bytes) > 0)
    if len(ends) != count:
        raise PayloadError(f"Rice code holds {len(ends)} gaps, its header says {count}")
    if not count:
        return ends
    gaps = _gaps(ops, ends) * (1 << rice_bits) + ops.unpack_uint(packed, rice_bits, count)
    return ops.cumsum(gaps + 1) - 1


def _check(ops: Ops, positions: Array, count: int, size: int) -> None:
    """Positions that arrive must be distinct and inside the tensor before anything is written there."""
    if len(positions) != count:
        raise PayloadError(f"payload holds {len(positions)} positions, its header says {count}")
    if not count:
        return
    outside = ops.total(positions < 0) + ops.total(positions >= size)
    if outside or ops.total(positions[1:] <= positions[:-1]):
        raise PayloadError(f"payload positions are not ascending within a tensor of {size} elements")

"""The payload format read and written in plain Python, from docs/format.md and not from the package: slow, and plain.

Tests compare the package with this, so that a mistake in the package does not hide behind its own reverse.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import reference_values

ALL, RICE, BITMAP, RAW = range(4)


@dataclass
class Frame:
    """One tensor as the bytes say it: its size, where values are, how, and which."""

    size: int
    index_code: int
    positions: list[int]
    value_code: int
    values: np.ndarray


class Bytes:
    """Reads a byte string from its start, part by part; every part ends at a multiple of 4."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        padded = count + -count % 4
        assert len(self.data) >= padded, "truncated"
        part, padding, self.data = self.data[:count], self.data[count:padded], self.data[padded:]
        assert not any(padding)
        return part

    def fields(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))


def bits_of(data: bytes) -> list[int]:
    """Lowest bit first."""
    return [byte >> place & 1 for byte in data for place in range(8)]


def pack(bits: list[int]) -> bytes:
    """The reverse, zero padded to whole bytes."""
    padded = bits + [0] * (-len(bits) % 8)
    return bytes(
        sum(bit << place for place, bit in enumerate(padded[start : start + 8])) for start in range(0, len(padded), 8)
    )


def number(bits: list[int]) -> int:
    return sum(bit << place for place, bit in enumerate(bits))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_payload(data: bytes, frames: int) -> tuple[int, bool, list[Frame]]:
    """The fingerprint, whether it is not finite, and `frames` frames."""
    magic, version, flags, fingerprint, length, checksum = struct.unpack("<2sBBIII", data[:16])
    assert (magic, version, length) == (b"HG", 1, len(data))
    assert checksum == zlib.crc32(data[:12] + struct.pack("<II", _weighted(data[16:]), _weighted(data[18:-2])))
    rest = Bytes(data[16:])
    found = [_read_frame(rest) for _ in range(frames)]
    assert not rest.data
    return fingerprint, bool(flags & 1), found


def _weighted(data: bytes) -> int:
    words = struct.unpack(f"<{len(data) // 4}I", data)
    return sum((2 * place + 1) * word for place, word in enumerate(words)) % 2**32


def read_frame(data: bytes) -> Frame:
    """A frame that stands alone."""
    rest = Bytes(data)
    frame = _read_frame(rest)
    assert not rest.data
    return frame


def _read_frame(rest: Bytes) -> Frame:
    algorithm, size, kept, length = rest.fields("<B3xIII")
    assert algorithm == 1
    body = Bytes(rest.take(length))
    code, positions = read_positions(body, size, kept)
    value_code, values = read_values(body, kept)
    assert not body.data
    return Frame(size, code, positions, value_code, values)


def read_positions(body: Bytes, size: int, kept: int) -> tuple[int, list[int]]:
    code, rice_bits, unary_length = body.fields("<BB2xI")
    if code == ALL:
        return code, list(range(size))
    if code == RICE:
        low = bits_of(body.take(math.ceil(rice_bits * kept / 8)))
        unary = bits_of(body.take(unary_length))
        positions, place = [], -1
        for item in range(kept):
            zeros = unary.index(1)
            unary = unary[zeros + 1 :]
            place += 1 + (zeros << rice_bits) + number(low[rice_bits * item : rice_bits * (item + 1)])
            positions.append(place)
        return code, positions
    if code == BITMAP:
        return code, [place for place, bit in enumerate(bits_of(body.take(math.ceil(size / 8)))) if bit]
    assert code == RAW
    return code, list(struct.unpack(f"<{kept}I", body.take(4 * kept)))


def read_values(body: Bytes, kept: int) -> tuple[int, np.ndarray]:
    code, block_log2, number = body.fields("<BBH")
    if code == 0:
        return code, np.frombuffer(body.take(4 * kept), "<f4")
    if code == 1:
        return code, np.frombuffer(body.take(2 * kept), "<f2").astype(np.float32)
    if code == 2:
        upper = struct.unpack(f"<{kept}H", body.take(2 * kept))
        return code, np.array([struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in upper], np.float32)
    if code > 3:
        return code, reference_values.read(code, block_log2, number, body, kept)
    assert code == 3
    steps = np.frombuffer(body.take(4 * math.ceil(kept / 2**block_log2)), "<f4")
    levels = np.frombuffer(body.take(kept), np.int8)
    # float32 by float32, as a receiver multiplies.
    return code, np.array(
        [np.float32(level) * steps[place >> block_log2] for place, level in enumerate(levels)], np.float32
    )


# -- writing ----------------------------------------------------------------------------------------------------------


def rice(positions: list[int], rice_bits: int) -> tuple[bytes, bytes]:
    """The low bits and the unary stream."""
    gaps = [place - before - 1 for before, place in zip([-1, *positions], positions, strict=False)]
    low = [gap >> place & 1 for gap in gaps for place in range(rice_bits)]
    unary = [bit for gap in gaps for bit in [0] * (gap >> rice_bits) + [1]]
    return pack(low), pack(unary)


def write_positions(positions: list[int], size: int) -> bytes:
    """The smallest code for `positions`; ties go to the lower code."""
    if len(positions) == size:
        return struct.pack("<BB2xI", ALL, 0, 0)
    guess = int(math.log2(max(1.0, math.log(2) * size / len(positions)))) if positions else 2
    streams = {}
    for rice_bits in range(max(0, guess - 2), guess + 2):
        gaps = [place - before - 1 for before, place in zip([-1, *positions], positions, strict=False)]
        streams[rice_bits] = rice_bits * len(positions) + sum((gap >> rice_bits) + 1 for gap in gaps)
    best = min(streams, key=lambda bits: (streams[bits], bits))
    low, unary = rice(positions, best)
    sizes = {RICE: len(low) + len(unary), BITMAP: math.ceil(size / 8), RAW: 4 * len(positions)}
    code = min(sizes, key=lambda each: (sizes[each], each))
    if code == RICE:
        return struct.pack("<BB2xI", RICE, best, len(unary)) + padded(low) + padded(unary)
    if code == BITMAP:
        kept = set(positions)
        return struct.pack("<BB2xI", BITMAP, 0, 0) + padded(pack([int(place in kept) for place in range(size)]))
    return struct.pack("<BB2xI", RAW, 0, 0) + struct.pack(f"<{len(positions)}I", *positions)

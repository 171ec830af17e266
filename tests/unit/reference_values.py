"""Value codes from 4 up read in plain Python, from docs/format.md and not from the package; see reference_format."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np


def read(code: int, first: int, second: int, body: Any, kept: int) -> np.ndarray:
    """The values behind a header (code, first, second); `body` is a `reference_format.Bytes`."""
    readers = {4: _levels, 5: _gamma_levels, 6: _trits, 7: _two_values, 8: _powers, 9: _dynamic8}
    return np.array(readers[code](first, second, body, kept), np.float32)


def _bits(data: bytes) -> list[int]:
    return [byte >> place & 1 for byte in data for place in range(8)]


def _numbers(body: Any, width: int, kept: int) -> list[int]:
    bits = _bits(body.take(math.ceil(width * kept / 8)))
    return [sum(bit << place for place, bit in enumerate(bits[width * item :][:width])) for item in range(kept)]


def _per_block(body: Any, block_log2: int, kept: int) -> list[np.float32]:
    """Each value's number, from the number of its block."""
    blocks = math.ceil(kept / 2**block_log2)
    numbers = [np.float32(each) for each in struct.unpack(f"<{blocks}f", body.take(4 * blocks))]
    return [numbers[place >> block_log2] for place in range(kept)]


def _levels(block_log2: int, most: int, body: Any, kept: int) -> list[np.float32]:
    steps = _per_block(body, block_log2, kept)
    width = math.ceil(math.log2(2 * most + 1))
    return [(level - most) * step for level, step in zip(_numbers(body, width, kept), steps, strict=True)]


def _gamma_levels(block_log2: int, most: int, body: Any, kept: int) -> list[np.float32]:
    steps = _per_block(body, block_log2, kept)
    (unary_length,) = struct.unpack("<I", body.take(4))
    unary, lengths = _bits(body.take(unary_length)), []
    for _ in range(kept):
        lengths.append(unary.index(1))
        unary = unary[lengths[-1] + 1 :]
    assert not any(unary)
    signed = sum(1 for length in lengths if length)
    rest = iter(_bits(body.take(math.ceil((sum(lengths) + signed) / 8))))
    values = [1 << length for length in lengths]
    for place in range(max(lengths, default=0)):
        for item, length in enumerate(lengths):
            if length > place:
                values[item] += next(rest) << place
    levels = [(value - 1) * (-1 if length and next(rest) else 1) for value, length in zip(values, lengths, strict=True)]
    assert all(abs(level) <= most for level in levels)
    return [level * step for level, step in zip(levels, steps, strict=True)]


def _trits(block_log2: int, zero: int, body: Any, kept: int) -> list[np.float32]:
    assert zero == 0
    steps = _per_block(body, block_log2, kept)
    trits = [byte // 3**place % 3 for byte in body.take(math.ceil(kept / 5)) for place in range(5)]
    return [(trit - 1) * step for trit, step in zip(trits, steps, strict=False)]


def _two_values(block_log2: int, zero: int, body: Any, kept: int) -> list[np.float32]:
    assert zero == 0
    low, high = _per_block(body, block_log2, kept), _per_block(body, block_log2, kept)
    bits = _bits(body.take(math.ceil(kept / 8)))
    return [pair[bit] for bit, *pair in zip(bits, low, high, strict=False)]


def _powers(lowest: int, width: int, body: Any, kept: int) -> list[float]:
    numbers = _numbers(body, width, kept)
    return [(-1) ** (each & 1) * 2.0 ** (lowest + (each >> 1) - 1 - 127) if each >> 1 else 0.0 for each in numbers]


def _dynamic8(block_log2: int, zero: int, body: Any, kept: int) -> list[np.float32]:
    assert zero == 0
    scales = _per_block(body, block_log2, kept)
    positive = [
        (0.1 + 0.9 * (place + 0.5) / 2 ** (6 - decade)) / 10**decade
        for decade in range(7)
        for place in range(2 ** (6 - decade))
    ]
    table = [np.float32(each) for each in sorted([*positive, *(-each for each in positive), 0.0, 1.0])]
    return [table[index] * scale for index, scale in zip(body.take(kept), scales, strict=True)]

"""Index codes on the GPU: the twin of wire/positions.py, which describes the format.

Writing asks the device once, for the sums that decide on the code and its length. Reading never does: what is wrong
with the bytes is noted on the device, and positions outside the tensor are never used to write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops.triton import bits
from hvd_gradcomp.ops.triton.launch import BLOCK, cover, launch

ALL, RICE, BITMAP, RAW = range(4)
HEADER_BYTES = 8
_GUESSES = 4  # from two below the guess to one above
_OCTETS = 512


def padded(count: int) -> int:
    """`count` bytes and the padding behind them."""
    return count + -count % 4


@dataclass(frozen=True)
class Plan:
    """The smallest code for some positions.

    Attributes:
        gaps: int64, what lies between each position and the one before.
        bytes: of all of it, the header and all padding included.
    """

    code: int
    rice_bits: int
    unary_bytes: int
    bytes: int
    gaps: torch.Tensor | None = None

    @property
    def header(self) -> tuple[int, int]:
        """The header as two 32-bit words."""
        return self.code | self.rice_bits << 8, self.unary_bytes


def plan(positions: torch.Tensor | None, count: int, size: int) -> Plan | None:
    """The code for int64 `positions` (count,), or for all of `size` elements when None.

    None where they are not ascending, distinct and inside the array. Waits for the device, unless all are there.
    """
    if positions is None:
        return Plan(ALL, 0, 0, HEADER_BYTES)
    gaps = torch.empty_like(positions)
    sums = torch.zeros(1 + _GUESSES, dtype=torch.int64, device=positions.device)
    # The best parameter is near log2(ln 2 * mean gap).
    guess = math.frexp(max(1.0, math.log(2) * size / count))[1] - 1 if count else 0
    lowest = max(0, guess - 2)
    launch(_measure, cover(count), positions, positions, gaps, sums, count, size, LOWEST=lowest, BLOCK=BLOCK)
    wrong, *shifted = sums.tolist()
    if wrong:
        return None
    if count == size:
        return Plan(ALL, 0, 0, HEADER_BYTES)
    # Bits, parameter, bits of the unary stream.
    _, rice_bits, unary_bits = min(
        ((lowest + place) * count + count + total, lowest + place, count + total)
        for place, total in enumerate(shifted)
        if lowest + place < guess + 2
    )
    low, unary = cover(rice_bits * count, 8), cover(unary_bits, 8)
    if not count:
        return Plan(RICE, 0, 0, HEADER_BYTES, gaps)
    sizes = {RICE: low + unary, BITMAP: cover(size, 8), RAW: 4 * count}
    code = min(sizes, key=lambda each: (sizes[each], each))
    if code == RICE:
        return Plan(RICE, rice_bits, unary, HEADER_BYTES + padded(low) + padded(unary), gaps)
    return Plan(code, 0, 0, HEADER_BYTES + padded(sizes[code]), gaps)


def write(plan: Plan, positions: torch.Tensor | None, out: torch.Tensor) -> None:
    """What follows the header, into uint8 `out`: zeros, and as many bytes as the plan says, aligned to 4."""
    if plan.code == ALL or positions is None or plan.gaps is None:
        return
    count = len(positions)
    if plan.code == RAW:
        bits.pack(positions, 32, out)
        return
    ends, rice = positions, plan.code == RICE
    if rice:
        bits.pack(plan.gaps, plan.rice_bits, out)
        out = out[padded(cover(plan.rice_bits * count, 8)) :]
        ends = (plan.gaps >> plan.rice_bits).cumsum(0)
    launch(_mark, cover(count), ends, ends, out.view(torch.int32), count, RICE=rice, BLOCK=BLOCK)


@dataclass(frozen=True)
class Coded:
    """Where a code lies in uint8 `data`, all of whose bytes are there."""

    data: torch.Tensor
    code: int
    rice_bits: int
    count: int
    size: int
    #: where what follows the header begins
    start: int
    unary_bytes: int

    @property
    def parts(self) -> tuple[int, ...] | None:
        """The lengths in bytes of what follows the header; None where no right code is like this."""
        if self.code == ALL:
            return () if self.count == self.size else None
        if self.code == BITMAP:
            return (cover(self.size, 8),)
        if self.code == RAW:
            return (4 * self.count,)
        if self.code != RICE or self.rice_bits > 31 or self.count << self.rice_bits > 2 * self.size:
            return None
        # Fewer bits than positions are wrong, and far more than the tensor needs could overflow later on.
        if not self.count <= 8 * self.unary_bytes < 1 << 32:
            return None
        return cover(self.rice_bits * self.count, 8), self.unary_bytes


def read(coded: Coded, wrong: torch.Tensor) -> torch.Tensor | None:
    """The positions (int64), or None for all. `wrong` (int32, one element) becomes 1 where the bytes are no code."""
    parts = coded.parts
    assert parts is not None, "the caller has looked"
    data, count, size, start = coded.data, coded.count, coded.size, coded.start
    if coded.code == ALL:
        return None
    positions = torch.empty(count, dtype=torch.int64, device=data.device)
    if coded.code == RAW:
        bits.unpack(data, start, 32, positions)
        launch(_check, cover(count), data, positions, wrong, count, size, BLOCK=BLOCK)
        return positions
    if coded.code == BITMAP:
        _read_marks(data[start:], size, positions, wrong)
        return positions
    low = torch.empty_like(positions)
    if coded.rice_bits:
        bits.unpack(data, start, coded.rice_bits, low)
    else:
        low.zero_()
    _read_marks(data[start + padded(parts[0]) :], 8 * coded.unary_bytes, positions, wrong)
    sums, shift = low.cumsum(0), coded.rice_bits
    launch(_join, cover(count), data, positions, sums, wrong, count, size, SHIFT=shift, BLOCK=BLOCK)
    return positions


def _read_marks(data: torch.Tensor, length: int, ends: torch.Tensor, wrong: torch.Tensor) -> None:
    """The numbers of the set bits among the first `length` of `data`: as many as `ends` holds, or they are wrong."""
    octets = cover(length, 8)
    blocks = cover(octets, _OCTETS)
    found = torch.empty(blocks, dtype=torch.int32, device=data.device)
    launch(_count_marks, blocks, data, data, found, length, BLOCK=8 * _OCTETS)
    reached = found.cumsum(0)
    arguments = (data, found, reached, ends, wrong, length, len(ends))
    launch(_place_marks, blocks, data, *arguments, BLOCK=8 * _OCTETS)


@triton.jit(do_not_specialize=["count", "size"])
def _measure(positions, gaps, sums, count, size, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    position = tl.load(positions + item, mask=inside, other=0)
    before = tl.load(positions + item - 1, mask=inside & (item > 0), other=-1)
    gap = tl.where(inside, position - before - 1, 0)
    tl.store(gaps + item, gap, mask=inside)
    wrong = inside & ((gap < 0) | (position < 0) | (position >= size))
    tl.atomic_add(sums, tl.sum(wrong.to(tl.int64), axis=0))
    for place in tl.static_range(0, 4):
        tl.atomic_add(sums + 1 + place, tl.sum(gap >> (LOWEST + place), axis=0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["words"])
def _mark(ends, words, count, RICE: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    end = tl.load(ends + item, mask=inside, other=0)
    if RICE:
        end = end + item
    one = tl.full([BLOCK], 1, tl.int32)
    tl.atomic_or(words + (end >> 5), one << (end & 31).to(tl.int32), mask=inside)


@triton.jit
def _bit_at(data, bit, length):
    octet = tl.load(data + bit // 8, mask=bit < length, other=0).to(tl.int32)
    return (octet >> (bit % 8).to(tl.int32)) & 1


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["data"])
def _count_marks(data, found, length, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    bit = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(found + block, tl.sum(_bit_at(data, bit, length), axis=0))


@triton.jit(do_not_specialize=["length", "count"], do_not_specialize_on_alignment=["data"])
def _place_marks(data, found, reached, ends, wrong, length, count, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    bit = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mark = _bit_at(data, bit, length)
    reached_here = tl.load(reached + block)
    rank = reached_here - tl.load(found + block) + tl.cumsum(mark, axis=0) - mark
    tl.store(ends + rank, bit, mask=(mark > 0) & (rank < count))
    last = block == tl.num_programs(0) - 1
    tl.atomic_max(wrong, (last & (reached_here != count)).to(tl.int32))


@triton.jit(do_not_specialize=["count", "size"])
def _join(ends, sums, wrong, count, size, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    # Before the i-th position lie i others, the low bits of i + 1 gaps, and as many steps of 2**SHIFT as there are
    # zeros before the i-th mark.
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    end = tl.load(ends + item, mask=inside, other=0)
    position = ((end - item) << SHIFT) + tl.load(sums + item, mask=inside, other=0) + item
    tl.store(ends + item, position, mask=inside)
    outside = inside & ((position < 0) | (position >= size))
    tl.atomic_max(wrong, tl.max(outside.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["count", "size"])
def _check(positions, wrong, count, size, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    position = tl.load(positions + item, mask=inside, other=0)
    before = tl.load(positions + item - 1, mask=inside & (item > 0), other=-1)
    outside = inside & ((position <= before) | (position >= size))
    tl.atomic_max(wrong, tl.max(outside.to(tl.int32), axis=0))

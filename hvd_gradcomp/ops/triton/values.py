"""Value codes on the GPU: int8 levels with a step for each block written, these and float formats read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops.triton.bits import word_at
from hvd_gradcomp.ops.triton.launch import BLOCK, cover, launch

FLOAT32, FLOAT16, BFLOAT16, LINEAR8 = range(4)
HEADER_BYTES = 4
#: Bytes of a value of each code.
VALUE_BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, LINEAR8: 1}

# What compressors/blocks.py calls LARGEST and SMALLEST.
_LARGEST: tl.constexpr = tl.constexpr(3.4028e38)
_SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)


def linear8_bytes(count: int, block: int) -> int:
    """The bytes of a LINEAR8 code, its header and padding included."""
    return HEADER_BYTES + 4 * cover(count, block) + count + -count % 4


def write_linear8(
    x: torch.Tensor, positions: torch.Tensor | None, count: int, block: int, out: torch.Tensor, decoded: torch.Tensor
) -> None:
    """Steps and levels of `count` values of `x` (those at int64 `positions`, or the first) behind the header.

    Args:
        x: float32. What the values decode to is taken from them where they are, unless `decoded` is given.
        block: values that share a step, a power of two.
        out: uint8, aligned to 4, of the length of both, without the header.
        decoded: float32 (count,), for what the values decode to; or `x` itself.
    """
    blocks = cover(count, block)
    steps, levels = out[: 4 * blocks].view(torch.float32), out[4 * blocks :].view(torch.int8)
    width = min(block, BLOCK)
    largest = torch.zeros(blocks if block > BLOCK else 1, dtype=torch.int32, device=x.device)
    where = x if positions is None else positions
    constants = {"GATHER": positions is not None, "BLOCK": BLOCK, "WIDTH": width}
    log2 = block.bit_length() - 1
    if block > BLOCK:
        launch(_largest, cover(count), x, x, where, largest, count, log2, **constants)
    arguments = (x, where, largest, steps, levels, decoded, count, blocks, log2)
    launch(_quantize, cover(count), x, *arguments, WIDE=block > BLOCK, RESIDUAL=decoded is x, **constants)


def check_steps(data: torch.Tensor, start: int, blocks: int, wrong: torch.Tensor) -> None:
    """`wrong` (int32, one element) becomes 1 where one of the steps at `start` of uint8 `data` is not finite."""
    launch(_check_steps, cover(blocks), data, data[start:], wrong, blocks, BLOCK=BLOCK)


def add(
    data: torch.Tensor,
    code: int,
    block_log2: int,
    start: int,
    positions: torch.Tensor | None,
    count: int,
    out: torch.Tensor,
) -> None:
    """`out[positions] += values`, for the values behind a header that ends at `start` of uint8 `data`.

    Positions outside of `out` are left out; the others must be distinct, or it is not said what `out` holds then.
    """
    levels = start + 4 * cover(count, 1 << block_log2) if code == LINEAR8 else start
    where = out if positions is None else positions
    arguments = (data[start:], data[levels:], where, out, count, len(out), block_log2)
    launch(_add, cover(count), out, *arguments, CODE=code, GATHER=positions is not None, BLOCK=BLOCK)


@triton.jit
def _step(largest_bits):
    largest = largest_bits.to(tl.float32, bitcast=True)
    step = tl.div_rn(tl.where(largest > _LARGEST, _LARGEST, largest), tl.full([1], 127.0, tl.float32))
    return tl.where(step >= _SMALLEST, step, 0.0)


@triton.jit
def _value(x, where, item, inside, GATHER: tl.constexpr):
    place = tl.load(where + item, mask=inside, other=0) if GATHER else item
    return tl.load(x + place, mask=inside, other=0.0), place


@triton.jit(do_not_specialize=["count", "block_log2"])
def _largest(x, where, largest, count, block_log2, GATHER: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    item = start + tl.arange(0, BLOCK)
    value, _ = _value(x, where, item, item < count, GATHER)
    key = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(largest + (start >> block_log2), tl.max(key, axis=0))


@triton.jit(do_not_specialize=["count", "blocks", "block_log2"], do_not_specialize_on_alignment=["steps", "levels"])
def _quantize(
    x,
    where,
    largest,
    steps,
    levels,
    decoded,
    count,
    blocks,
    block_log2,
    WIDE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # A tile of whole blocks, one a row; or a part of one block, whose largest value is known.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row = tl.arange(0, BLOCK // WIDTH)
    item = start + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = item < count
    value, place = _value(x, where, item, inside, GATHER)
    block = (start >> block_log2) + row
    if WIDE:
        step = _step(tl.load(largest + block))
    else:
        step = _step(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    tl.store(steps + block, step, mask=(block < blocks) & ((block << block_log2) >= start))
    each = step[:, None] + tl.zeros([BLOCK // WIDTH, WIDTH], tl.float32)
    ratio = tl.div_rn(value, tl.where(each > 0.0, each, 1.0))
    # Adding 1.5 * 2**23 leaves no bits for a fraction: halves go to even. The sign of zero is put back.
    level = (ratio + 12582912.0) - 12582912.0
    sign = ratio.to(tl.int32, bitcast=True) & -2147483648
    level = ((level.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)
    level = tl.where(level > -127.0, level, -127.0)
    level = tl.where(level < 127.0, level, 127.0)
    level = tl.where(each > 0.0, level, 0.0)
    tl.store(levels + item, level.to(tl.int32).to(tl.int8), mask=inside)
    product = level * each
    if RESIDUAL:
        tl.store(x + place, value - product, mask=inside)
    else:
        tl.store(decoded + item, product, mask=inside)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["steps"])
def _check_steps(steps, wrong, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = word_at(steps, 4 * block, block < blocks)
    tl.atomic_max(wrong, tl.max(((bits & 0x7FFFFFFF) >= 0x7F800000).to(tl.int32), axis=0))


@triton.jit
def _half_at(data, at, inside):
    low = tl.load(data + at, mask=inside, other=0).to(tl.int32)
    return low | (tl.load(data + at + 1, mask=inside, other=0).to(tl.int32) << 8)


@triton.jit(do_not_specialize=["count", "size", "block_log2"], do_not_specialize_on_alignment=["start", "values"])
def _add(
    start, values, where, out, count, size, block_log2, CODE: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr
):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    place = item
    if GATHER:
        place = tl.load(where + item, mask=inside, other=0)
        inside = inside & (place >= 0) & (place < size)
    if CODE == 0:
        value = word_at(values, 4 * item, inside).to(tl.int32).to(tl.float32, bitcast=True)
    elif CODE == 1:
        half = _half_at(values, 2 * item, inside)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif CODE == 2:
        value = (_half_at(values, 2 * item, inside) << 16).to(tl.float32, bitcast=True)
    else:
        step = word_at(start, 4 * (item >> block_log2), inside).to(tl.int32).to(tl.float32, bitcast=True)
        level = tl.load(values + item, mask=inside, other=0).to(tl.int8, bitcast=True)
        value = level.to(tl.float32) * step
    total = tl.load(out + place, mask=inside, other=0.0) + value
    tl.store(out + place, total, mask=inside)

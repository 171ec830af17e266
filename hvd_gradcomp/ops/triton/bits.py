"""Small integers and single bits packed on the GPU, lowest bit first; and the checksum of 32-bit words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops.triton.launch import BLOCK, cover, launch

_OCTETS = 256


def pack(values: torch.Tensor, width: int, out: torch.Tensor) -> None:
    """`width` bits of each of `values` (int64 or, for one bit, uint8) into ceil(count * width / 8) bytes of `out`."""
    octets = cover(len(values) * width, 8)
    launch(_pack, cover(octets, _OCTETS), values, values, out, len(values), octets, WIDTH=width, BLOCK=_OCTETS)


def unpack(data: torch.Tensor, start: int, width: int, out: torch.Tensor) -> None:
    """The reverse: `out` (int64 or uint8) from the bytes at `start` of uint8 `data`, which must be there."""
    launch(_unpack, cover(len(out)), out, data[start:], out, len(out), WIDTH=width, BLOCK=BLOCK)


def checksum(data: torch.Tensor) -> int:
    """See `Ops.checksum`; waits for the device."""
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    words = len(data) // 4
    launch(_checksum, cover(words), data, data, total, words, BLOCK=BLOCK)
    return int(total) & 0xFFFFFFFF


@triton.jit
def word_at(data, at, inside):
    """The 32-bit word (int64) that begins at byte `at`, wherever that is; 0 outside."""
    word = tl.load(data + at, mask=inside, other=0).to(tl.int64)
    for place in tl.static_range(1, 4):
        word = word | (tl.load(data + at + place, mask=inside, other=0).to(tl.int64) << (8 * place))
    return word


@triton.jit(do_not_specialize=["count", "octets"], do_not_specialize_on_alignment=["out"])
def _pack(values, out, count, octets, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    octet = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 8)
    bit = octet[:, None] * 8 + place[None, :]
    item = bit // WIDTH
    value = tl.load(values + item, mask=item < count, other=0).to(tl.int64)
    bits = ((value >> (bit - item * WIDTH)) & 1) << place[None, :]
    tl.store(out + octet, tl.sum(bits, axis=1).to(tl.uint8), mask=octet < octets)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["data"])
def _unpack(data, out, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = item * WIDTH
    last = (first + WIDTH - 1) // 8
    word = tl.zeros([BLOCK], tl.int64)
    for place in tl.static_range(0, (WIDTH + 14) // 8):
        at = first // 8 + place
        octet = tl.load(data + at, mask=(item < count) & (at <= last), other=0)
        word = word | (octet.to(tl.int64) << (8 * place))
    value = (word >> (first % 8)) & ((1 << WIDTH) - 1)
    tl.store(out + item, value.to(out.dtype.element_ty), mask=item < count)


@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["data"])
def _checksum(data, total, words, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = word_at(data, 4 * item, item < words)
    # Cut to 32 bits before they are added: the sum of fewer than 2**29 of them fits 64.
    tl.atomic_add(total, tl.sum((word * (2 * item + 1)) & 0xFFFFFFFF, axis=0))

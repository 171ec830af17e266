"""Whole frames on the GPU: written in one go from positions and values, and read onto a dense tensor.

The length of a frame has to be known where its memory is asked for, and headers of other workers where kernels are
chosen: writing waits for the device once, reading twice, however many frames are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops.triton import positions as index
from hvd_gradcomp.ops.triton import values
from hvd_gradcomp.ops.triton.bits import word_at
from hvd_gradcomp.ops.triton.launch import cover, launch
from hvd_gradcomp.ops.triton.positions import padded

_SPARSE_FRAME = 1
_FRAME_BYTES = 16
#: A frame's header, that of its positions, and that of its values, which may lie further behind.
_LEAST_BYTES = _FRAME_BYTES + index.HEADER_BYTES + values.HEADER_BYTES
_FIELDS = 9
_LARGEST_WORD = 2**32 - 1


def encode_positions(positions: torch.Tensor, size: int) -> torch.Tensor | None:
    """See `Ops.encode_positions`."""
    plan = index.plan(positions, len(positions), size)
    if plan is None:
        return None
    words, out = _room(plan.bytes, positions)
    _store(words, 0, plan.header)
    index.write(plan, positions, out[index.HEADER_BYTES :])
    return out


def encode_linear8(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.encode_linear8`."""
    words, out = _room(values.linear8_bytes(len(x), block), x)
    _store(words, 0, (_linear8_header(block),))
    decoded = torch.empty_like(x)
    values.write_linear8(x, None, len(x), block, out[values.HEADER_BYTES :], decoded)
    return out, decoded


def encode_sparse8(x: torch.Tensor, positions: torch.Tensor | None, block: int) -> torch.Tensor | None:
    """See `Ops.encode_sparse8`."""
    size = len(x)
    count = size if positions is None else len(positions)
    plan = index.plan(positions, count, size)
    if plan is None:
        return None
    body = plan.bytes + values.linear8_bytes(count, block)
    if body > _LARGEST_WORD:
        return None
    words, out = _room(_FRAME_BYTES + body, x)
    _store(words, 0, (_SPARSE_FRAME, size, count, body, *plan.header))
    index.write(plan, positions, out[_FRAME_BYTES + index.HEADER_BYTES : _FRAME_BYTES + plan.bytes])
    start = _FRAME_BYTES + plan.bytes
    _store(words, start // 4, (_linear8_header(block),))
    chosen = None if plan.code == index.ALL else positions
    values.write_linear8(x, chosen, count, block, out[start + values.HEADER_BYTES :], x)
    return out


def decode_positions(data: torch.Tensor, start: int, size: int, count: int) -> tuple[torch.Tensor, int] | None:
    """See `Ops.decode_positions`."""
    if len(data) - start < index.HEADER_BYTES:
        return None
    table = torch.zeros(_FIELDS, dtype=torch.int64, device=data.device)
    launch(_read_code, 1, data, data[start:], table)
    code, rice_bits, unary_bytes = table.tolist()[:3]
    at = start + index.HEADER_BYTES
    coded = index.Coded(data, code, rice_bits, count, size, at, unary_bytes)
    end = _skip(coded.parts, at, len(data))
    if end is None or code == index.ALL:
        return None
    wrong = _nothing_wrong(data)
    positions = index.read(coded, wrong)
    return None if positions is None or wrong.item() else (positions, end)


@dataclass(frozen=True)
class _Frame:
    """A frame whose headers are right, and all of whose bytes are there."""

    positions: index.Coded
    value_code: int
    block_log2: int
    #: where what follows the header of the values begins
    values: int
    end: int

    def read_positions(self, wrong: torch.Tensor) -> torch.Tensor | None:
        coded = self.positions
        if self.value_code == values.LINEAR8:
            values.check_steps(coded.data, self.values, cover(coded.count, 1 << self.block_log2), wrong)
        return index.read(coded, wrong)

    def add(self, positions: torch.Tensor | None, out: torch.Tensor) -> None:
        coded = self.positions
        values.add(coded.data, self.value_code, self.block_log2, self.values, positions, coded.count, out)


def decode_add(data: torch.Tensor, start: int, out: torch.Tensor) -> int | None:
    """See `Ops.decode_add`."""
    frames = _open([(data, start)], len(out))
    if frames is None:
        return None
    (frame,) = frames
    wrong = _nothing_wrong(data)
    positions = frame.read_positions(wrong)
    if wrong.item():
        return None
    frame.add(positions, out)
    return frame.end


def decode_mean(places: Sequence[tuple[torch.Tensor, int]], out: torch.Tensor) -> list[int] | None:
    """See `Ops.decode_mean`, but for the division: each frame is added at once, in order, onto the one tensor."""
    frames = _open(places, len(out))
    if frames is None:
        return None
    out.zero_()
    wrong = _nothing_wrong(out)
    for frame in frames:
        frame.add(frame.read_positions(wrong), out)
    return None if wrong.item() else [frame.end for frame in frames]


def _open(places: Sequence[tuple[torch.Tensor, int]], size: int) -> list[_Frame] | None:
    """The frames at `places`, for tensors of `size` elements; None where a header is wrong or of no kind known here."""
    if not places or any(len(data) - start < _LEAST_BYTES for data, start in places):
        return None
    table = torch.zeros(len(places), _FIELDS, dtype=torch.int64, device=places[0][0].device)
    for row, (data, start) in zip(table, places, strict=True):
        launch(_read_heads, 1, data, data[start:], row, len(data) - start)
    frames = []
    for (data, start), fields in zip(places, table.tolist(), strict=True):
        frame = _frame(data, start, size, fields)
        if frame is None:
            return None
        frames.append(frame)
    return frames


def _frame(data: torch.Tensor, start: int, size: int, fields: list[int]) -> _Frame | None:
    code, rice_bits, unary_bytes, algorithm, found_size, count, body, value_code, block_log2 = fields
    at = start + _FRAME_BYTES
    if algorithm != _SPARSE_FRAME or found_size != size or count > size or body > len(data) - at:
        return None
    end = at + body
    coded = index.Coded(data, code, rice_bits, count, size, at + index.HEADER_BYTES, unary_bytes)
    header = _skip(coded.parts, at + index.HEADER_BYTES, end)
    if header is None or header + values.HEADER_BYTES > end or value_code not in values.VALUE_BYTES:
        return None
    if value_code != values.LINEAR8:
        block_log2 = 31
    if block_log2 > 31:
        return None
    first = header + values.HEADER_BYTES
    steps = (4 * cover(count, 1 << block_log2),) if value_code == values.LINEAR8 else ()
    if _skip((*steps, values.VALUE_BYTES[value_code] * count), first, end) != end:
        return None
    return _Frame(coded, value_code, block_log2, first, min(at + padded(body), len(data)))


def _skip(parts: Sequence[int] | None, start: int, end: int) -> int | None:
    """Where padded `parts` that begin at `start` end; None where some do not end before `end`. As wire.parts.Reader."""
    if parts is None:
        return None
    for length in parts:
        if length > end - start:
            return None
        start = min(start + padded(length), end)
    return start


def _linear8_header(block: int) -> int:
    return values.LINEAR8 | (block.bit_length() - 1) << 8


def _nothing_wrong(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def _room(count: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` zeroed bytes, a multiple of 4, as int32 and as uint8."""
    words = torch.zeros(count // 4, dtype=torch.int32, device=like.device)
    return words, words.view(torch.uint8)


def _store(words: torch.Tensor, place: int, numbers: Sequence[int]) -> None:
    """Unsigned 32-bit `numbers` at `place`; as arguments of a kernel they reach the device without a copy."""
    signed = [number - (1 << 32) if number >> 31 else number for number in numbers]
    signed += [0] * (6 - len(signed))
    launch(_store_words, 1, words, words[place:], *signed, COUNT=len(numbers))


@triton.jit(do_not_specialize=["a", "b", "c", "d", "e", "f"], do_not_specialize_on_alignment=["words"])
def _store_words(words, a, b, c, d, e, f, COUNT: tl.constexpr):
    tl.store(words, a)
    if COUNT > 1:
        tl.store(words + 1, b)
    if COUNT > 2:
        tl.store(words + 2, c)
        tl.store(words + 3, d)
        tl.store(words + 4, e)
        tl.store(words + 5, f)


@triton.jit(do_not_specialize_on_alignment=["data", "table"])
def _read_code(data, table):
    tl.store(table, tl.load(data).to(tl.int64))
    tl.store(table + 1, tl.load(data + 1).to(tl.int64))
    tl.store(table + 2, word_at(data, 4, True))


@triton.jit(do_not_specialize=["left"], do_not_specialize_on_alignment=["data", "table"])
def _read_heads(data, table, left):
    tl.store(table + 3, tl.load(data).to(tl.int64))
    size = word_at(data, 4, True)
    count = word_at(data, 8, True)
    tl.store(table + 4, size)
    tl.store(table + 5, count)
    tl.store(table + 6, word_at(data, 12, True))
    _read_code(data + 16, table)
    # The values begin behind what the code of the positions takes, if that is there.
    code = tl.load(data + 16).to(tl.int64)
    low = (tl.load(data + 17).to(tl.int64) * count + 7) // 8
    unary = word_at(data, 20, True)
    octets = tl.where(code == 1, (low + 3) // 4 * 4 + (unary + 3) // 4 * 4, 0)
    octets = tl.where(code == 2, ((size + 7) // 8 + 3) // 4 * 4, octets)
    octets = tl.where(code == 3, 4 * count, octets)
    header = 24 + octets
    there = header + 4 <= left
    tl.store(table + 7, tl.where(there, tl.load(data + header, mask=there, other=0).to(tl.int64), -1))
    tl.store(table + 8, tl.load(data + header + 1, mask=there, other=0).to(tl.int64))

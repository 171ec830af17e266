"""Residual, finiteness and exact selection on the GPU: the twin of ops/selection.py, without waiting for the device.

The k-th largest magnitude is found by its bits, 12, 10 and 9 at a time: a histogram of the next bits of all values that
share the bits found so far, and one program that picks the bucket in which the k-th lies. The first histogram is made
in the pass that adds the residual. Then every block counts what it holds above the threshold and at it, prefix sums of
these say where it writes, and of values at the threshold the first ones are taken. k is known, so nothing but the
number of values that are not zero need ever be read back, and that comes with the question whether all are finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops.triton.launch import cover, launch

_BLOCK = 4096
# Programs of a pass that leaves a histogram: enough to fill a GPU, few enough that adding theirs up costs nothing.
_PROGRAMS = 1024
_INFINITY = 0x7F800000
# The bits of a magnitude, from the uppermost: how many are found at a time, and how many are then left below.
_DIGITS = ((12, 19), (10, 9), (9, 0))


class Seen:
    """What one pass saw of a vector: on the device, until somebody asks.

    True where all values are finite. Asking waits for the device, once.
    """

    def __init__(self, size: int, marks: torch.Tensor, counts: torch.Tensor | None) -> None:
        self.size = size
        #: int32 histogram of the uppermost bits, or None where nobody was going to select.
        self.counts = counts
        self._marks = marks
        self._known: list[int] | None = None

    def _read(self) -> list[int]:
        if self._known is None:
            self._known = self._marks.tolist()
        return self._known

    def __bool__(self) -> bool:
        return self._read()[0] < _INFINITY

    @property
    def nonzero(self) -> int:
        """How many values are not zero."""
        return self._read()[1]


def look(x: torch.Tensor, addend: torch.Tensor | None, selects: bool) -> Seen:
    """`x += addend` (unless None) in place, and what is seen of the sum in that pass.

    Args:
        x, addend: float32, shape (n,), contiguous.
        selects: make the histogram that `top_positions` begins with.
    """
    size = len(x)
    marks = torch.zeros(2, dtype=torch.int32, device=x.device)
    bins = 1 << _DIGITS[0][0]
    counts = torch.zeros(bins, dtype=torch.int32, device=x.device) if selects else None
    launch(
        _look,
        min(cover(size, _BLOCK), _PROGRAMS),
        x,
        x,
        x if addend is None else addend,
        marks,
        marks if counts is None else counts,
        size,
        ADD=addend is not None,
        COUNT=selects,
        BINS=bins,
        SHIFT=_DIGITS[0][1],
        BLOCK=_BLOCK,
    )
    return Seen(size, marks, counts)


def top_positions(x: torch.Tensor, k: int, seen: Seen | None) -> torch.Tensor:
    """The positions (int64) of the k largest magnitudes, ascending, ties to the lower position, zeros never.

    Args:
        x: float32, shape (n,), contiguous, all finite; 1 <= k <= n < 2**31.
        seen: what `look` saw of these values; anything else is not used.
    """
    size = len(x)
    if seen is None or seen.counts is None or seen.size != size:
        seen = look(x, None, True)
    blocks = cover(size, _BLOCK)
    # The bits found so far, and which of the values that share them is looked for.
    state = torch.zeros(2, dtype=torch.int32, device=x.device)
    counts, above = seen.counts, 31
    for width, shift in _DIGITS:
        if above < 31:
            counts = torch.zeros(1 << width, dtype=torch.int32, device=x.device)
            arguments = {"ABOVE": above, "SHIFT": shift, "BINS": 1 << width, "BLOCK": _BLOCK}
            launch(_narrow, min(blocks, _PROGRAMS), x, x, state, counts, size, **arguments)
        launch(_pick, 1, x, counts, state, k, FIRST=above == 31, BINS=1 << width)
        above = shift
    found = torch.empty(2, blocks, dtype=torch.int32, device=x.device)
    launch(_count, blocks, x, x, state, found, size, blocks, BLOCK=_BLOCK)
    positions = torch.empty(k, dtype=torch.int64, device=x.device)
    launch(_write, blocks, x, x, state, found, found.cumsum(1), positions, size, blocks, BLOCK=_BLOCK)
    # Reading it last leaves the device busy meanwhile, if it was not read before.
    return positions[: min(k, seen.nonzero)]


@triton.jit
def _magnitude(value):
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _look(
    x,
    addend,
    marks,
    counts,
    size,
    ADD: tl.constexpr,
    COUNT: tl.constexpr,
    BINS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    largest = tl.zeros([BLOCK], tl.int32)
    present = tl.zeros([BLOCK], tl.int32)
    histogram = tl.zeros([BINS], tl.int32)
    first = tl.program_id(0).to(tl.int64)
    for block in range(first, tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        value = tl.load(x + at, mask=inside, other=0.0)
        if ADD:
            value = value + tl.load(addend + at, mask=inside, other=0.0)
            tl.store(x + at, value, mask=inside)
        key = _magnitude(value)
        largest = tl.maximum(largest, key)
        present += (key > 0).to(tl.int32)
        if COUNT:
            # Places outside count as zeros: in the lowest bucket, of which nobody asks how much it holds.
            histogram += tl.histogram(key >> SHIFT, BINS)
    tl.atomic_max(marks, tl.max(largest, axis=0))
    tl.atomic_add(marks + 1, tl.sum(present, axis=0))
    if COUNT:
        tl.atomic_add(counts + tl.arange(0, BINS), histogram, mask=histogram > 0)


@triton.jit
def _narrow(x, state, counts, size, ABOVE: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    prefix = tl.load(state)
    histogram = tl.zeros([BINS], tl.int32)
    first = tl.program_id(0).to(tl.int64)
    for block in range(first, tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        key = _magnitude(tl.load(x + at, mask=inside, other=0.0))
        shares = inside & ((key >> ABOVE) == prefix)
        # What does not share the bits goes to the lowest bucket, of which nobody asks how much it holds.
        histogram += tl.histogram(tl.where(shares, (key >> SHIFT) & (BINS - 1), 0), BINS)
    tl.atomic_add(counts + tl.arange(0, BINS), histogram, mask=histogram > 0)


@triton.jit(do_not_specialize=["k"])
def _pick(counts, state, k, FIRST: tl.constexpr, BINS: tl.constexpr):
    bucket = tl.arange(0, BINS)
    held = tl.load(counts + bucket)
    if FIRST:
        prefix, rank = 0, k
    else:
        prefix, rank = tl.load(state), tl.load(state + 1)
    # What lies in higher buckets, so what the lowest one holds matters nowhere.
    above = tl.sum(held, axis=0) - tl.cumsum(held, axis=0)
    chosen = (above < rank) & (above + held >= rank)
    tl.store(state, prefix * BINS + tl.sum(tl.where(chosen, bucket, 0), axis=0))
    tl.store(state + 1, rank - tl.sum(tl.where(chosen, above, 0), axis=0))


@triton.jit(do_not_specialize=["blocks"])
def _count(x, state, found, size, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = _magnitude(tl.load(x + at, mask=at < size, other=0.0))
    threshold = tl.load(state)
    tl.store(found + block, tl.sum((key > threshold).to(tl.int32), axis=0))
    # With a threshold of zero there are fewer than k values that are not, and no zero is to join them.
    tl.store(found + blocks + block, tl.sum(((key == threshold) & (key > 0)).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["blocks"])
def _write(x, state, found, reached, positions, size, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = _magnitude(tl.load(x + at, mask=at < size, other=0.0))
    threshold, wanted_ties = tl.load(state), tl.load(state + 1)
    above = (key > threshold).to(tl.int32)
    tie = ((key == threshold) & (key > 0)).to(tl.int32)
    # How many of each kind stand before each value.
    before = tl.load(reached + block) - tl.load(found + block) + tl.cumsum(above, axis=0) - above
    ties = tl.load(reached + blocks + block) - tl.load(found + blocks + block) + tl.cumsum(tie, axis=0) - tie
    chosen = (above > 0) | ((tie > 0) & (ties < wanted_ties))
    tl.store(positions + before + tl.minimum(ties, wanted_ties), at, mask=chosen)

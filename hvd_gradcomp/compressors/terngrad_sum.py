"""TernGrad whose workers share their scales, so that an allreduce can add the ternary values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hvd_gradcomp.collectives import Allreduce, Exchange, Transport
from hvd_gradcomp.compressors.base import Compressor, Item, Sent
from hvd_gradcomp.compressors.linear import quantize
from hvd_gradcomp.compressors.terngrad import TernGrad
from hvd_gradcomp.errors import UnsupportedError
from hvd_gradcomp.feedback import Memory, NoMemory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import WHOLE, spread

# Whole numbers up to here are exact in float32, whatever the order in which they are added.
_EXACT = 1 << 24
# Digits are divided by multiplying with a reciprocal of so many bits, which is exact for bases below 2**16.
_RECIPROCAL_BITS = 40
_MOST_WORKERS = (1 << 15) - 1


@dataclass(frozen=True)
class TernGradSum(Compressor):
    """TernGrad with scale sharing: s is the largest of the workers' scales, and levels are added by an allreduce.

        round 1   s = max over workers w of s_w,  s_w as in `TernGrad`      one number a tensor    allreduce of maxima
        round 2   sum over workers = s * sum_w level_w,  level_w in {-1, 0, 1}                      allreduce

    A sum of N levels is one of 2 N + 1 numbers. As many of these as fit (7 for N = 4, 5 for 8, 4 for 16, 3 for 64) are
    packed as digits into the 24 bits in which float32 counts exactly, so Horovod's own allreduce adds them: 32 divided
    by that many bits a value, and nothing more however many workers there are. With TernGrad's allgather each worker
    receives (N - 1) * 1.6 bits a value, here it sends about twice 32 / digits: use this from 16 workers up, `TernGrad`
    below 8.

    Unbiased but for what each worker clips, with variance s ||w||_1 - ||w||_2^2 on each worker. As s is the largest of
    all s_w, that is more than TernGrad's where workers' gradients differ in size. About 15 passes, and 30 in cache for
    the draws. No memory by default, for the reasons given in `TernGrad`.

    Args:
        clip: see `TernGrad`.
        seed: of the draws; workers draw differently, and anew at every step.

    References:
        W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary Gradients to Reduce Communication in
        Distributed Deep Learning", NeurIPS 2017 (section 3.2, scaler sharing).
    """

    meets: ClassVar[str] = "own"
    spec_name: ClassVar[str] = "terngrad_sum"

    clip: float | None = 2.5
    seed: int = 0
    memory: Memory = field(default=NoMemory(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._code()

    def expected_bytes(self, size: int) -> float:
        """With four workers."""
        return 4 * size / digits_in_word(4)

    def exchange(self, ops: Ops, items: Sequence[Item], transport: Transport) -> Exchange[list[Sent] | None]:
        like, workers = items[0].x, transport.workers
        if workers > _MOST_WORKERS:
            raise UnsupportedError(f"{self} adds the levels of at most {_MOST_WORKERS} workers, these are {workers}")
        finite = all(ops.all_finite(item.x) for item in items)
        nothing = ops.zeros(1, "float32", like)
        own = [self._code().scales(ops, item.x) if finite else nothing for item in items]
        # What a maximum makes of NaN is not defined, so a number of its own says that there is one.
        shared = yield Allreduce(ops.concat([*own, nothing if finite else nothing + 1.0]), "float32", "max")
        if ops.total(shared[-1:] > 0):
            return None
        levels, decoded = [], []
        for index, (item, scale) in enumerate(zip(items, own, strict=True)):
            limits = spread(ops, scale, WHOLE, len(item.x))
            limited = ops.where(item.x > limits, limits, ops.where(item.x < -limits, -limits, item.x))
            step = shared[index : index + 1]
            each = quantize(ops, limited, step, WHOLE, 1, item.context.key(self.seed))
            levels.append(each[0])
            decoded.append(each[1])
        total = yield Allreduce(pack_digits(ops, ops.concat(levels) + 1.0, workers), "float32")
        sums = unpack_digits(ops, total, workers, sum(len(item.x) for item in items)) - workers
        sent = []
        start = 0
        for index, item in enumerate(items):
            size = len(item.x)
            step = spread(ops, shared[index : index + 1], WHOLE, size)
            sent.append(Sent(ops.cast(sums[start : start + size], "float32") * step, item.x - decoded[index]))
            start += size
        return sent

    def _code(self) -> TernGrad:
        return TernGrad(clip=self.clip, seed=self.seed)


def digits_in_word(workers: int) -> int:
    """How many sums of `workers` digits 0, 1 or 2 are counted by one float32."""
    base, digits = 2 * workers + 1, 1
    while base ** (digits + 1) <= _EXACT:
        digits += 1
    return digits


def pack_digits(ops: Ops, digits: Array, workers: int) -> Array:
    """float32 `digits` (count,) in {0, 1, 2} as words of `digits_in_word(workers)` each, the first of weight 1.

    Returns:
        float32, whole numbers, shape (ceil(count / digits_in_word),); `workers` of them can be added exactly.
    """
    width, base = digits_in_word(workers), float(2 * workers + 1)
    padded = ops.pad(digits, width)
    words = padded[width - 1 :: width]
    for place in range(width - 2, -1, -1):
        words = words * base + padded[place::width]
    return words


def unpack_digits(ops: Ops, words: Array, workers: int, count: int) -> Array:
    """The sums of the digits in the sum of `workers` arrays made by `pack_digits`: int64, shape (count,)."""
    width, base = digits_in_word(workers), 2 * workers + 1
    reciprocal = (1 << _RECIPROCAL_BITS) // base + 1
    left = ops.cast(words, "int64")
    digits = []
    for _ in range(width):
        quotient = ops.shift_right(left * reciprocal, _RECIPROCAL_BITS)
        digits.append(left - quotient * base)
        left = quotient
    return ops.interleave(digits)[:count]

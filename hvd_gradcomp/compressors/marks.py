"""A few marks beside summed values, by which all workers see at once whether they may be added, and are finite.

What an allreduce has added carries no header, so nothing would show that one worker meant other positions, another step
or another factor than the rest. Each worker therefore adds the 32 bits of a number that stands for all that must agree,
one bit an element. A sum that is neither 0 nor the worker count shows everybody the same thing: they differ.
"""

from __future__ import annotations

from enum import Enum

from hvd_gradcomp.ops import Array, Ops

#: How many elements the marks take.
MARKS = 32


# Up to here every format counts workers exactly.
_EXACT = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}


class Verdict(Enum):
    """What the sum of the marks says."""

    AGREED = "agreed"
    DIFFERENT = "different"
    NOT_FINITE = "not finite"


def marks_fit(kind: str, workers: int) -> bool:
    """Whether marks can be added in the format `kind` by so many workers."""
    return workers <= _EXACT[kind]


def marks(ops: Ops, number: int, finite: bool, like: Array) -> Array:
    """This worker's marks: float32, shape (MARKS,).

    Args:
        number: what must be the same on all workers, 32 bits.
        finite: whether this worker's values are.
    """
    data = ops.from_host(number.to_bytes(4, "little"), like)
    bits = ops.cast(ops.unpack_bits(data, MARKS), "float32")
    return bits if finite else bits + float("nan")


def verdict(ops: Ops, total: Array, workers: int) -> Verdict:
    """What `total`, the sum of the marks of all `workers`, says; the same on each of them."""
    if not ops.all_finite(total):
        return Verdict.NOT_FINITE
    differing = ops.total((total != 0) & (total != workers))
    return Verdict.DIFFERENT if differing else Verdict.AGREED

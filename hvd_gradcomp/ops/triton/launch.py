"""How kernels are started, and what all of them need so that their results have the bits of the reference.

- `enable_fp_fusion=False` keeps the compiler from making one rounding (fma) out of a multiplication and an addition.
- Quotients are `tl.div_rn`, which rounds correctly; Triton's `/` of float32 need not.
- Triton flushes no subnormal number, except inside functions of libdevice, none of which is called.
- Atomic operations are maxima, unions of bits and sums of integers: their order changes nothing.
`tests/unit/test_triton_code.py` looks for the wrong instructions in what the compiler makes.

Numbers, and places in bytes, that differ from tensor to tensor and step to step are named in `do_not_specialize`:
Triton would compile a kernel again for those that are one or multiples of 16.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

#: Elements of one program where nothing speaks for another number.
BLOCK = 1024


def launch(kernel: Any, programs: int, like: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Start `programs` programs of `kernel` on the device of `like`, on torch's current stream there."""
    if programs:
        with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
            kernel[(programs,)](*arguments, **constants, **options(constants))


def options(constants: dict[str, Any]) -> dict[str, Any]:
    """What the compiler is told about a kernel with these constants."""
    # With fewer warps the largest blocks need more registers than a thread has.
    elements = max(constants.get("BLOCK", 0), constants.get("BINS", 0))
    return {"enable_fp_fusion": False, "num_warps": 16 if elements >= 4096 else 4}


def cover(count: int, block: int = BLOCK) -> int:
    """How many blocks hold `count` elements."""
    return -(-count // block)

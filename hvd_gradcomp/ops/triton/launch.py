"""How kernels are started, and what all of them need so that their results have the bits of the reference.

- `enable_fp_fusion=False` keeps the compiler from making one rounding (fma) out of a multiplication and an addition.
- Quotients are `tl.div_rn`, which rounds correctly; Triton's `/` of float32 need not.
- Triton flushes no subnormal number, except inside functions of libdevice, none of which is called.
- Atomic operations are maxima, unions of bits and sums of integers: their order changes nothing.
`tests/unit/test_triton_code.py` looks for the wrong instructions in what the compiler makes.
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
            kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def cover(count: int, block: int = BLOCK) -> int:
    """How many blocks hold `count` elements."""
    return -(-count // block)

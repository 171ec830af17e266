"""What the tests of the native kernels share: every instruction set of this processor, and the plain references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hvd_gradcomp.ops import Ops, native
from hvd_gradcomp.ops.numpy_ops import NativeNumpyOps, NumpyOps
from hvd_gradcomp.ops.torch_ops import NativeTorchOps

#: Every native variant, by (instruction set, backend); empty where there are no kernels.
VARIANTS = tuple(
    (instruction_set, cls)
    for instruction_set in (native.load().instruction_sets() if native.available() else ())
    for cls in (NativeNumpyOps, NativeTorchOps)
)

#: The oracle: numpy, step by step.
REFERENCE = NumpyOps()


@contextmanager
def variant(instruction_set: str, cls: type[Ops]) -> Iterator[Ops]:
    """The primitives `cls` with the kernels for `instruction_set`."""
    kernels = native.load()
    usual = kernels.instruction_set()
    kernels.use_instruction_set(instruction_set)
    try:
        yield cls()
    finally:
        kernels.use_instruction_set(usual)


#: Sizes around the kernels' groups (16, 64), blocks (512), chunks (4096), and above the first that is sampled (32768).
SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 513, 4095, 4097, 32768, 70001)


def guarded(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`array` copied into the middle of a larger one, and that: what a kernel writes beside it shows."""
    around = np.full(len(array) + 128, 77, array.dtype)
    inside = around[64 : 64 + len(array)]
    inside[:] = array
    return inside, around


def unharmed(around: np.ndarray) -> bool:
    """Whether nothing but the middle of what `guarded` made has changed."""
    return bool((around[:64] == 77).all() and (around[-64:] == 77).all())

"""CPU tensors as numpy arrays without a copy, and exact floating point inside TensorFlow's threads.

TensorFlow's threads flush subnormal numbers to zero, in everything that runs on them: numpy and native kernels inside
a `tf.py_function` as well. Gradients of half precision and the residuals of error feedback reach such values, so the
engine runs with the processor's default settings, as it does in every other door.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

# FE_DFL_ENV of glibc and musl, on x86 as on ARM: the environment at the start of a program.
_DEFAULT = ctypes.c_void_p(-1)
# Larger than any platform's fenv_t (x86: 32 bytes).
_FENV_BYTES = 256
_process = ctypes.CDLL(None)


@contextmanager
def exact_floats() -> Iterator[None]:
    """Run with IEEE subnormals on this thread, then give it back as it was."""
    saved = ctypes.create_string_buffer(_FENV_BYTES)
    _process.fegetenv(saved)
    _process.fesetenv(_DEFAULT)
    try:
        yield
    finally:
        _process.fesetenv(saved)


def is_on_host(tensor: tf.Tensor) -> bool:
    """Whether an eager tensor lives in host memory."""
    return "CPU" in tensor.device.upper()


def view(tensor: tf.Tensor) -> np.ndarray:
    """The memory of an eager CPU tensor, read only."""
    return np.asarray(memoryview(tensor))


def own(tensor: tf.Tensor) -> np.ndarray | tf.Tensor:
    """What the engine may keep and change: a numpy copy of a CPU tensor; another tensor as it is, they never change."""
    return view(tensor).copy() if is_on_host(tensor) else tensor

"""Whether Triton is here, without importing it, and its kernels once they are wanted."""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

SWITCH = "HVD_GRADCOMP_TRITON"


def available() -> bool:
    """Whether Triton is installed and not turned off; whether there is a GPU shows when a tensor on one arrives."""
    return not _turned_off() and find_spec("triton") is not None


@cache
def load() -> Any:
    """The module `steps`, which imports Triton; None where that fails (then it warns, once)."""
    try:
        _refuse_after_tensorflow()
        return import_module("hvd_gradcomp.ops.triton.steps")
    except (ImportError, AttributeError, TypeError) as error:  # an old Triton lacks words that the kernels use
        warnings.warn(
            f"hvd_gradcomp runs without its GPU kernels ({error}): results are the same, by more and slower torch "
            f"operations. Install the Triton that belongs to this torch, or set {SWITCH}=0 to silence this",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _refuse_after_tensorflow() -> None:
    """Do not load Triton's LLVM behind TensorFlow's: it would end the process ("registered more than once!").

    Seen with TensorFlow 2.21 and Triton 3.9; the other way round both work. TensorBoard's writer for torch loads
    TensorFlow as well, where it is installed.

    Raises:
        ImportError: TensorFlow is loaded, and Triton is not.
    """
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        raise ImportError("TensorFlow was imported before Triton, and both need an LLVM: `import triton` first")


def status() -> str:
    """One line for people: whether tensors on GPUs meet kernels, and if not, why."""
    if _turned_off():
        return f"no GPU kernels: turned off by {SWITCH}={os.environ[SWITCH]}"
    if not available():
        return "no GPU kernels: Triton is not installed (pip install triton)"
    return "GPU kernels by Triton for CUDA tensors"


def _turned_off() -> bool:
    return os.environ.get(SWITCH, "1").lower() in ("0", "off", "no", "false")

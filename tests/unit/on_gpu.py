"""What the tests of the Triton kernels share: the kernels on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from arrays import array_of

from hvd_gradcomp.ops import Array
from hvd_gradcomp.ops.torch_ops import TorchOps
from hvd_gradcomp.ops.triton.kernels import TritonKernels

#: On which device the tests run.
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
if DEVICE == "cpu":
    # Kernels find out when they are imported whether they are to be interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

needs_triton = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton is not installed: see docs/kernels.md for how to run these tests"
    ),
    # In words, so that it is asked when the test begins.
    pytest.mark.skipif(
        "'tensorflow' in sys.modules and 'triton' not in sys.modules",
        reason="TensorFlow is loaded, after which Triton cannot be: see docs/kernels.md for how to run these tests",
    ),
]


class OnGpu(TritonKernels, TorchOps):
    """The kernels for every tensor, also those on the CPU: these are for the interpreter."""

    def on_device(self, x: Array) -> bool:
        return True


def on_device(x: np.ndarray) -> torch.Tensor:
    """A copy of numpy `x` where the kernels run."""
    found: torch.Tensor = array_of(TorchOps(), x).to(DEVICE)
    return found

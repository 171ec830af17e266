"""Finds the primitives for an array. A framework is imported only if one of its arrays is at hand (or asked for)."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from hvd_gradcomp.errors import UnsupportedError
from hvd_gradcomp.ops import native, triton
from hvd_gradcomp.ops.base import Array, Ops

# Top-level module of an array's class -> where its primitives live. Beside a class there may be others, with "Native"
# before its name, that has native kernels for what they can reach, and with "Triton" before either, for GPUs.
_BACKENDS = {
    "numpy": ("hvd_gradcomp.ops.numpy_ops", "NumpyOps"),
    "torch": ("hvd_gradcomp.ops.torch_ops", "TorchOps"),
    "tensorflow": ("hvd_gradcomp.ops.tensorflow_ops", "TensorFlowOps"),
}


@cache
def backend(name: str) -> Ops:
    """The primitives called `name`: "numpy", "torch" or "tensorflow".

    Raises:
        UnsupportedError: there is no backend of that name.
    """
    if name not in _BACKENDS:
        raise UnsupportedError(f"no array primitives for {name!r}; known: {', '.join(sorted(_BACKENDS))}")
    module, cls = import_module(_BACKENDS[name][0]), _BACKENDS[name][1]
    for kernels, present in (("Native", native.available()), ("Triton", triton.available())):
        if present and hasattr(module, kernels + cls):
            cls = kernels + cls
    primitives: Ops = getattr(module, cls)()
    return primitives


def ops_for(array: Array) -> Ops:
    """The primitives for the framework that `array` belongs to.

    Raises:
        UnsupportedError: the array belongs to no known framework.
    """
    # Subclasses (torch.nn.Parameter, user types) count as their first known base.
    for cls in type(array).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _BACKENDS:
            return backend(root)
    raise UnsupportedError(
        f"cannot compress a {type(array).__module__}.{type(array).__qualname__}; "
        f"expected an array of one of: {', '.join(sorted(_BACKENDS))}"
    )

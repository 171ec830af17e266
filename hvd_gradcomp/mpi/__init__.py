"""The door for numpy arrays over MPI, with no deep-learning framework and no Horovod: needs mpi4py.

    from hvd_gradcomp.mpi import Reducer, TopKInt8
    reducer = Reducer(TopKInt8(ratio=0.01))
    gradients = reducer.reduce({"weight": weight_gradient, "bias": bias_gradient})

    mpirun -np 4 python -m mpi4py script.py

For code of one's own, tests and experiments; `python -m mpi4py` ends all workers when one fails.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("mpi4py") is None:
    raise ImportError(
        "hvd_gradcomp.mpi needs mpi4py, which is not installed: pip install 'hvd_gradcomp[mpi]', or pip install mpi4py "
        "(an MPI such as Open MPI must be there as well). The doors of PyTorch and TensorFlow do not need it"
    )

from hvd_gradcomp.compressors import (
    BF16,
    DGC,
    FP16,
    Compressor,
    Int8,
    NoCompression,
    PowerSGD,
    TopK,
    TopKInt8,
    compression_from_spec,
)
from hvd_gradcomp.errors import ConfigurationError, GradcompError, PayloadError, UnsupportedError
from hvd_gradcomp.mpi.reducer import Reducer

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "Compressor",
    "ConfigurationError",
    "GradcompError",
    "Int8",
    "NoCompression",
    "PayloadError",
    "PowerSGD",
    "Reducer",
    "TopK",
    "TopKInt8",
    "UnsupportedError",
    "compression_from_spec",
]

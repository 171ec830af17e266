"""Kernels in C++ for arrays in host memory, behind the same `Ops`: the same bytes, sooner.

They are built with the package where there is a C++ compiler, and need nothing else: no framework's headers, no SIMD
flags (the best version for the processor is chosen at run time). Without them everything works by numpy and torch
operations. `HVD_GRADCOMP_NATIVE=0` in the environment turns them off, `HVD_GRADCOMP_THREADS=N` lets a call use
N threads; `status()` tells what is in use.
"""

from hvd_gradcomp.ops.native.library import available, load, status

__all__ = ["available", "load", "status"]

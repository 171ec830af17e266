"""Triton kernels for tensors on GPUs, as a layer over torch operations; see docs/kernels.md.

Only `library` and `kernels` are imported without Triton. What imports it is imported with the first tensor on a GPU.
"""

from hvd_gradcomp.ops.triton.library import available, status

__all__ = ["available", "status"]

"""What can be seen of gradients: in whose memory they lie, how they are laid out, whether they are finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def owns_its_memory(gradient: torch.Tensor) -> bool:
    """Whether nothing but this gradient lies in its memory, so that the engine may keep it as a residual."""
    storage = gradient.untyped_storage()
    whole = storage.nbytes() == gradient.numel() * gradient.element_size()
    # Memory that cannot be resized is somebody else's, such as a numpy array's. A tensor made by detach() looks at the
    # same memory without being a view, so only the count of those that hold it can tell: the gradient and `storage`
    # here, and inside a hook autograd, twice, if it has just made the gradient.
    alone = storage.resizable() and _holders(storage) in (2, 4)
    return whole and alone and gradient.is_contiguous() and not gradient._is_view()


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    finite = [(t._values() if t.is_sparse else t).isfinite().all() for t in tensors]
    return not finite or bool(torch.stack(finite).all())


def _holders(storage: torch.UntypedStorage) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return -1 if count is None else int(count(storage._cdata))


def sparse_dims(p: torch.Tensor) -> int:
    """The number of sparse dimensions of the gradient of `p`, 0 for none or a dense one."""
    return p.grad.sparse_dim() if p.grad is not None and p.grad.is_sparse else 0

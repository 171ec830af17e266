"""Memories: how what was not sent comes back. Pure rules with explicit state; the state itself lives in the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.ops import Array, Ops


@dataclass(frozen=True)
class Memory:
    """Base of the memories: hyper-parameters only, printable, comparable and hashable."""

    spec_name: ClassVar[str]
    #: Whether a residual is kept at all.
    keeps: ClassVar[bool]

    def correct(self, ops: Ops, gradient: Array, residual: Array | None) -> Array:
        """The vector to compress, from the gradient and the residual of the last step.

        Args:
            gradient: float32, shape (n,); its memory may be reused.
            residual: float32, shape (n,), never changed here; None before the first step.

        Returns:
            float32, shape (n,).
        """
        raise NotImplementedError


@dataclass(frozen=True)
class NoMemory(Memory):
    """Forget what was not sent.

    Biased compressors (top-k, sign) may then not converge; see `ErrorFeedback`.
    """

    spec_name: ClassVar[str] = "none"
    keeps: ClassVar[bool] = False

    def correct(self, ops: Ops, gradient: Array, residual: Array | None) -> Array:
        return gradient


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """Add what was not sent to the next gradient: x_t = g_t + e_t,  e_{t+1} = x_t - sent_t.

    Costs one float32 value a gradient element on each worker, and one pass over both.

    References:
        S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes", ICML 2019.
    """

    spec_name: ClassVar[str] = "ef"
    keeps: ClassVar[bool] = True

    def correct(self, ops: Ops, gradient: Array, residual: Array | None) -> Array:
        return gradient if residual is None else ops.accumulate(gradient, residual)

"""A fixed threshold: send the values above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.compressors.base import Context
from hvd_gradcomp.compressors.chain import Sparsifier
from hvd_gradcomp.feedback.memory import number, require_number
from hvd_gradcomp.ops import Array, Ops


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """Send the values with |x_i| > value; possibly none, possibly all.

        sent_i = x_i  if |x_i| > value,  else 0

    Bits a value: 32 (or those of the value code) for each value sent, and what its position costs. Biased, but with a
    bounded error: ||x - sent||_inf <= value, so what error feedback holds back of any value never exceeds it. One pass,
    the cheapest selection there is. Payloads do not add up: each worker sends other positions.

    How much is sent follows the gradients and nobody knows it beforehand, so the dense fallback at high worker counts
    is never taken. For gradients of a known scale; top-k follows the scale by itself, and is what most should use.

    Args:
        value: > 0, in the units of the gradient.

    References:
        N. Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015.
        A. Dutta et al., "On the Discrepancy between the Theoretical Analysis and Practical Implementations of
        Compressed Communication for Distributed Deep Learning", AAAI 2020.
    """

    spec_name: ClassVar[str] = "threshold"

    value: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self, "value", "value > 0", 0 < number(self.value) < float("inf"))

    def kept(self, size: int) -> float:
        return 0

    def select(self, ops: Ops, x: Array, context: Context) -> Array:
        return ops.nonzero(ops.abs(x) > self.value)

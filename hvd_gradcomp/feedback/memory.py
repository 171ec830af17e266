"""Memories: how what was not sent comes back. Pure rules with explicit state; the state itself lives in the engine.

A memory's state is one float32 vector of the tensor's length for each of its `parts`. Each step has two halves, and
state is only replaced after the second, so that a step that is skipped between them leaves no trace:

    x, advanced = memory.correct(gradient, state)        x is compressed and sent
    state = memory.update(advanced, residual, sent)      residual = x - what was sent of it

Other memories than these can be written outside this package: derive from `Memory`, pass it as `memory=`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Corrected, Ops


@dataclass(frozen=True)
class Memory:
    """Base of the memories: hyper-parameters only, printable, comparable and hashable."""

    spec_name: ClassVar[str]
    #: The names of the vectors that make up the state of one tensor; "residual" is what was not sent.
    parts: ClassVar[tuple[str, ...]] = ()
    #: Whether it takes the place of the optimizer's momentum. Then every tensor needs it, however small.
    is_momentum: ClassVar[bool] = False

    @property
    def masks(self) -> bool:
        """Whether `update` wants to know the positions that were sent."""
        return False

    @property
    def is_linear(self) -> bool:
        """Whether `correct` of a sum of workers' gradients and states is the sum of what it gives for each."""
        return True

    @property
    def keeps(self) -> bool:
        """Whether there is any state."""
        return bool(self.parts)

    def of_owner(self) -> Memory:
        """The memory of a worker that adds up what others have sent and compresses the sum once more.

        Momentum has been applied before; so only what is not sent has to be kept.
        """
        return ErrorFeedback() if "residual" in self.parts else NoMemory()

    def correct(
        self, ops: Ops, gradient: Array, state: Mapping[str, Array], workers: int
    ) -> tuple[Array, dict[str, Array]]:
        """The vector to compress, and the parts of the state that have moved on before it is.

        Args:
            gradient: float32, shape (n,); its memory may be reused.
            state: part -> float32 (n,), never changed here; a part is missing before its first step.
            workers: how many workers exchange.

        Returns:
            float32, shape (n,); and part -> float32 (n,), in memory that shares nothing with the first.
        """
        raise NotImplementedError

    def correct_and_look(
        self, ops: Ops, gradient: Array, state: Mapping[str, Array], workers: int, wanted: int
    ) -> tuple[Corrected, dict[str, Array]]:
        """`correct`, and what `Ops.correct` sees of the vector, which a memory that only adds has in one pass."""
        x, advanced = self.correct(ops, gradient, state, workers)
        return ops.correct(x, None, wanted), advanced

    def update(
        self, ops: Ops, advanced: dict[str, Array], residual: Array | None, sent: Array | None
    ) -> dict[str, Array]:
        """The new state.

        Args:
            advanced: what `correct` returned with the vector; may change in place.
            residual: float32 (n,), the vector minus what was sent of it; None where everything was sent.
            sent: int64 positions of the elements that were sent; None where every element is, or if not `masks`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class NoMemory(Memory):
    """Forget what was not sent.

    x_t = g_t. Conservation: g_t = sent_t + what is forgotten. For unbiased methods (QSGD, TernGrad, random-k with
    `unbiased=True`); biased ones (top-k, sign) may then not converge, see `ErrorFeedback`. Costs nothing.
    """

    spec_name: ClassVar[str] = "none"

    def correct(
        self, ops: Ops, gradient: Array, state: Mapping[str, Array], workers: int
    ) -> tuple[Array, dict[str, Array]]:
        return gradient, {}

    def update(
        self, ops: Ops, advanced: dict[str, Array], residual: Array | None, sent: Array | None
    ) -> dict[str, Array]:
        return {}


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """Add what was not sent to the next gradient: x_t = g_t + decay * e_t,  e_{t+1} = x_t - sent_t.

    Conservation: g_t + decay * e_t = sent_t + e_{t+1}; with decay = 1 nothing is ever lost. A decay below 1 forgets old
    errors, whose gradients belong to parameters of long ago: for very small ratios, or where the loss swings with full
    error feedback. Costs one float32 value a gradient element on each worker, and one pass over both.

    Args:
        decay: 0 < decay <= 1, how much of the residual comes back.

    References:
        S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes", ICML 2019.
        J. Wu, W. Huang, J. Huang, T. Zhang, "Error Compensated Quantized SGD and its Applications to Large-scale
        Distributed Optimization", ICML 2018 (decay).
    """

    spec_name: ClassVar[str] = "ef"
    parts: ClassVar[tuple[str, ...]] = ("residual",)

    decay: float = 1.0

    def __post_init__(self) -> None:
        require_number(self, "decay", "0 < decay <= 1", 0 < number(self.decay) <= 1)

    def of_owner(self) -> Memory:
        return self

    def correct(
        self, ops: Ops, gradient: Array, state: Mapping[str, Array], workers: int
    ) -> tuple[Array, dict[str, Array]]:
        if "residual" not in state:
            return gradient, {}
        residual = state["residual"]
        return ops.accumulate(gradient, residual if self.decay == 1 else residual * self.decay), {}

    def correct_and_look(
        self, ops: Ops, gradient: Array, state: Mapping[str, Array], workers: int, wanted: int
    ) -> tuple[Corrected, dict[str, Array]]:
        if self.decay != 1:
            return super().correct_and_look(ops, gradient, state, workers, wanted)
        return ops.correct(gradient, state.get("residual"), wanted), {}

    def update(
        self, ops: Ops, advanced: dict[str, Array], residual: Array | None, sent: Array | None
    ) -> dict[str, Array]:
        return {} if residual is None else {"residual": residual}


def require_number(part: object, name: str, condition: str, holds: bool) -> None:
    """Refuse the hyper-parameter `name` of the frozen dataclass `part`, or make it a float.

    1, 1.0 and numpy's 1.0 are equal and have to look so too: workers compare specs.

    Raises:
        ConfigurationError: it is no number, or `holds` is false.
    """
    value = getattr(part, name)
    if math.isnan(number(value)) or not holds:
        raise ConfigurationError(f"{name} must be a number with {condition}, got {value!r}")
    object.__setattr__(part, name, float(value))


def number(value: object) -> float:
    """`value` as a float to compare; NaN, for which no comparison holds, when it is no number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan

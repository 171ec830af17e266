"""Memories that carry momentum: for methods that hold gradients back, and for those that send signs of averages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback.memory import Memory, number, require_number
from hvd_gradcomp.ops import Array, Ops


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """Momentum before compression, as in Deep Gradient Compression; it replaces the momentum of the optimizer.

    With velocity u and residual v, both shape (n,):

        u_t = momentum * u_{t-1} + g_t,       x_t = v_{t-1} + u_t,             v_t = x_t - sent_t
        u_t = momentum * (u_{t-1} + g_t),     x_t = v_{t-1} + u_t + g_t,       v_t = x_t - sent_t     (Nesterov)

    Factor masking then sets u_t to zero at the positions that were sent, so that momentum of long ago does not push a
    value that has just been updated. Where a method sends every element (quantizers, PowerSGD, a dense fallback),
    nothing is held back and nothing is masked: that is ordinary momentum SGD. With `clip`, each worker first scales its
    gradient of each tensor down to an L2 norm of at most clip / sqrt(workers), so that their sum has about norm clip.

    Conservation: v_{t-1} + u_t = sent_t + v_t (plus g_t on the left for Nesterov); masking forgets velocity, never
    residual. Give the optimizer no momentum of its own; it would be applied twice. Tensors below `dense_below` go
    through the same memory, uncompressed. Costs two float32 values a gradient element on each worker, and three passes.

    Args:
        momentum: 0 <= momentum < 1.
        nesterov: use Nesterov's form.
        factor_masking: clear the velocity where values were sent.
        clip: the bound on the gradient's norm; None for no clipping.

    References:
        Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth
        for Distributed Training", ICLR 2018.
    """

    spec_name: ClassVar[str] = "dgc"
    parts: ClassVar[tuple[str, ...]] = ("residual", "velocity")
    is_momentum: ClassVar[bool] = True

    momentum: float = 0.9
    nesterov: bool = False
    factor_masking: bool = True
    clip: float | None = None

    def __post_init__(self) -> None:
        require_number(self, "momentum", "0 <= momentum < 1", 0 <= number(self.momentum) < 1)
        if self.clip is not None:
            require_number(self, "clip", "clip > 0 (or None)", number(self.clip) > 0)
        for name in ("nesterov", "factor_masking"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def masks(self) -> bool:
        return self.factor_masking

    @property
    def is_linear(self) -> bool:
        return self.clip is None

    def correct(
        self, ops: Ops, gradient: Array, state: Mapping[str, Array], workers: int
    ) -> tuple[Array, dict[str, Array]]:
        if self.clip is not None:
            gradient = _clipped(ops, gradient, self.clip / workers**0.5)
        velocity = state.get("velocity")
        if self.nesterov:
            advanced = gradient * self.momentum if velocity is None else (velocity + gradient) * self.momentum
            x = ops.accumulate(gradient, advanced)
        else:
            advanced = gradient if velocity is None else ops.accumulate(gradient, velocity * self.momentum)
            # A residual added below gives memory of its own; without one the two must not share theirs.
            x = advanced if "residual" in state else ops.copy(advanced)
        if "residual" in state:
            x = x + state["residual"]
        return x, {"velocity": advanced}

    def update(
        self, ops: Ops, advanced: dict[str, Array], residual: Array | None, sent: Array | None
    ) -> dict[str, Array]:
        velocity = advanced["velocity"]
        if sent is not None and len(sent):
            velocity = ops.put(velocity, sent, ops.zeros(len(sent), "float32", velocity))
        return {"velocity": velocity} if residual is None else {"velocity": velocity, "residual": residual}


@dataclass(frozen=True)
class Momentum(Memory):
    """Compress an exponential average of the gradients, as Signum does: x_t = m_t = beta * m_{t-1} + (1 - beta) * g_t.

    What is not sent of x_t is forgotten. Conservation: beta * m_{t-1} + (1 - beta) * g_t = sent_t + what is forgotten.
    With a sign method this is Signum: the average of each worker is steadier than its gradient, so fewer signs are
    wrong. Give the optimizer no momentum of its own. Costs one float32 value a gradient element, and two passes.

    Args:
        beta: 0 <= beta < 1; with 0 it is `NoMemory`.

    References:
        J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: Compressed Optimisation for Non-Convex
        Problems", ICML 2018.
    """

    spec_name: ClassVar[str] = "momentum"
    parts: ClassVar[tuple[str, ...]] = ("average",)
    is_momentum: ClassVar[bool] = True

    beta: float = 0.9

    def __post_init__(self) -> None:
        require_number(self, "beta", "0 <= beta < 1", 0 <= number(self.beta) < 1)

    def correct(
        self, ops: Ops, gradient: Array, state: Mapping[str, Array], workers: int
    ) -> tuple[Array, dict[str, Array]]:
        average = gradient * (1 - self.beta)
        if "average" in state:
            average = ops.accumulate(average, state["average"] * self.beta)
        return ops.copy(average), {"average": average}

    def update(
        self, ops: Ops, advanced: dict[str, Array], residual: Array | None, sent: Array | None
    ) -> dict[str, Array]:
        return advanced


def _clipped(ops: Ops, x: Array, bound: float) -> Array:
    """`x` (n,) scaled down to an L2 norm of `bound` where it is longer."""
    # Divided by the largest magnitude first: the square of a large gradient would be infinite.
    largest = ops.row_max(ops.abs(x), len(x))
    unit = x / ops.where(largest > 0, largest, 1.0)
    norm = largest * ops.sqrt(ops.matmul(unit, unit, 1, len(x), 1))
    return ops.where(norm > bound, unit * (bound / ops.where(norm > bound, norm, 1.0) * largest), x)

"""Accordion: compress little in critical regimes, where gradients change fast, and much in between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.base import (
    Observed,
    Policy,
    State,
    check_count,
    check_number,
    check_ratio,
    checks_of,
    interval_of,
)


@dataclass(frozen=True)
class Accordion(Policy):
    """Two ratios, chosen by how much the gradient's norm changed from one window to the next.

        change = | norm_previous - norm_now | / norm_previous,     critical  <=>  change >= eta

    norm is the mean over the window's observations (ten, evenly spread) and over the workers of a gradient's L2 norm,
    residuals left out. In a critical regime `low` compression applies (the larger ratio), else `high`. Training begins
    critical, as nobody has compared anything yet. The paper also goes back to `low` when the learning rate decays,
    which nobody tells this policy; a decay that matters shows in the norms of the next window. Ratios are chosen for
    the whole model, in the paper for each layer.

    Costs one small collective and two passes over the gradients in a tenth of a window's steps.

    Args:
        low: ratio in critical regimes; None sends dense.
        high: ratio in between.
        eta: the relative change that makes a regime critical.
        window: steps; the paper compares epochs, ten of them apart.

    References:
        S. Agarwal, H. Wang, K. Lee, S. Venkataraman, D. Papailiopoulos, "Accordion: Adaptive Gradient Communication via
        Critical Learning Regime Identification", MLSys 2021.
    """

    spec_name: ClassVar[str] = "accordion"
    observes_gradients: ClassVar[bool] = True

    low: float | None = 0.1
    high: float = 0.01
    eta: float = 0.5
    window: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", check_ratio(self.low, "low"))
        if self.high is None:
            raise ConfigurationError("high must be a number with 0 < high <= 1, got None")
        object.__setattr__(self, "high", check_ratio(self.high, "high"))
        if self.low is not None and self.low < self.high:
            raise ConfigurationError(
                f"low is the ratio of low compression and must not be below high, got low={self.low}, high={self.high}"
            )
        check_number(self, "eta", 0)
        check_count(self, "window")

    # State: whether the regime is critical; the last window's norm (-1 before there is one); sum and count of this one.

    def init(self) -> State:
        return (1.0, -1.0, 0.0, 0.0)

    def ratio(self, state: State, step: int) -> float | None:
        return self.low if state[0] else self.high

    def report(self, state: State, step: int) -> dict[str, float]:
        """Ratio; whether the regime is critical; the last window's norm, NaN before there is one."""
        return {**super().report(state, step), "critical": state[0], "norm": math.nan if state[1] < 0 else state[1]}

    def observes(self, step: int) -> bool:
        return (step + 1) % interval_of(self.window) == 0

    def update(self, state: State, observed: Observed) -> State:
        critical, previous, total, count = state
        total, count = total + observed.norm, count + 1
        if count < checks_of(self.window):
            return (critical, previous, total, count)
        norm = total / count
        if previous >= 0:
            critical = float(abs(previous - norm) >= self.eta * previous)
        return (critical, norm, 0.0, 0.0)

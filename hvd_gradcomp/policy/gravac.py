"""GraVAC: raise the compression factor while the gradients lose little by it, and fall back when they lose more."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.base import (
    Observed,
    Policy,
    State,
    check_count,
    check_number,
    checks_of,
    interval_of,
    smoothed,
)

SCALINGS = ("geometric", "exponential")
THROUGHPUTS = ("seconds", "bytes")

# The level at which nothing is compressed, and what stands for "not measured yet".
_DENSE = -1
_UNKNOWN = -1.0


@dataclass(frozen=True)
class _Search:
    """The state, by name.

    Attributes:
        level: place in `factors` of the factor in use; _DENSE for none.
        settled: whether the search has ended.
        gain: smoothed gain of the factor in use.
        candidate: smoothed gain of the next one (of the lowest, while dense).
        checks: observations in this window.
        cost: seconds or bytes a step, the least of them: a validation or a busy machine lies in some, hardly in all.
        results: compression throughput measured at each level.
    """

    level: int
    settled: bool
    gain: float
    candidate: float
    checks: int
    cost: float
    results: tuple[float, ...]

    def pack(self) -> State:
        numbers = (self.level, self.settled, self.gain, self.candidate, self.checks, self.cost)
        return (*map(float, numbers), *self.results)

    @staticmethod
    def unpack(state: State) -> _Search:
        level, settled, gain, candidate, checks, cost, *results = state
        return _Search(int(level), bool(settled), gain, candidate, int(checks), cost, tuple(results))

    def at(self, level: int, gain: float = _UNKNOWN) -> _Search:
        """A new window at `level`."""
        return replace(self, level=level, gain=gain, candidate=_UNKNOWN, checks=0, cost=0.0)


@dataclass(frozen=True)
class GraVAC(Policy):
    """Search the compression factor for which training advances fastest, by what compression leaves of the gradient.

    For a factor t (1/t of the values are sent), with x_t the gradient plus its residual:

        gain(t) = E||compressed(x)||^2 / E||x||^2       smoothed exponentially over a window, mean of the workers
        compression throughput(t) = system throughput(t) * gain(t)

    The search begins at theta_min. At the end of every window the next factor is taken if its gain, which was measured
    on the way from what the factor in use sends (multi-level compression, nearly free), is at least epsilon. It ends at
    theta_max, when the two best compression throughputs differ by less than omega, or when a factor's is lower than one
    before it by more than that (not in the paper, which goes on); the best factor stays. When
    the gain of the factor in use falls below epsilon (looked at ten times in a window), training falls back to
    theta_min and the search begins again; if that is not enough either, gradients are sent dense until the gain of
    theta_min, which is measured meanwhile, has recovered.

    The defaults suit the digits of examples/train.py with error feedback; see docs/adaptive.md.

    Costs one small collective (48 bytes a worker) and a few passes over the gradients in a tenth of a window's steps
    (one step of ten in windows of 100), and one copy of a bucket.

    Args:
        theta_min: the lowest factor, > 1; 10 sends a tenth of the values.
        theta_max: the highest.
        epsilon: the gain that has to remain, from 0 to 1.
        omega: relative difference of throughputs that ends the search.
        window: steps.
        scaling: "geometric" multiplies the factor by `growth` each time (10, 20, 40, 80, ...); "exponential" squares
            the multiplier each time (10, 20, 40, 160, 2560, ...), to be fast at the top.
        growth: the multiplier, > 1.
        throughput: what system throughput is one over: "seconds" of a step as measured, all workers' mean, or "bytes"
            that a step sends, for networks that are the bottleneck: then a run can be repeated exactly.

    References:
        S. Tyagi, M. Swany, "GraVAC: Adaptive Compression for Communication-Efficient Distributed DL Training", IEEE
        CLOUD 2023.
    """

    spec_name: ClassVar[str] = "gravac"
    observes_gradients: ClassVar[bool] = True

    theta_min: float = 10.0
    theta_max: float = 1000.0
    epsilon: float = 0.2
    omega: float = 0.01
    window: int = 100
    scaling: str = "geometric"
    growth: float = 2.0
    throughput: str = "seconds"

    def __post_init__(self) -> None:
        check_number(self, "theta_min", 1, open_low=True)
        check_number(self, "theta_max", self.theta_min)
        check_number(self, "epsilon", 0, 1)
        check_number(self, "omega", 0)
        check_number(self, "growth", 1.01)
        check_count(self, "window")
        for name, known in (("scaling", SCALINGS), ("throughput", THROUGHPUTS)):
            if getattr(self, name) not in known:
                raise ConfigurationError(f"{name} must be one of {known}, got {getattr(self, name)!r}")

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """The factors that are tried, ascending, from theta_min to theta_max."""
        found, multiplier = [self.theta_min], self.growth
        while found[-1] * multiplier < self.theta_max:
            found.append(found[-1] * multiplier)
            if self.scaling == "exponential" and len(found) > 2:
                multiplier *= multiplier
        return (*found, self.theta_max) if self.theta_max > found[-1] else tuple(found)

    def init(self) -> State:
        return _Search(0, False, _UNKNOWN, _UNKNOWN, 0, 0.0, (0.0,) * len(self.factors)).pack()

    def ratio(self, state: State, step: int) -> float | None:
        level = _Search.unpack(state).level
        return None if level == _DENSE else 1 / self.factors[level]

    def candidate(self, state: State, step: int) -> float | None:
        level = _Search.unpack(state).level
        return 1 / self.factors[level + 1] if level + 1 < len(self.factors) else None

    def observes(self, step: int) -> bool:
        return (step + 1) % interval_of(self.window) == 0

    def update(self, state: State, observed: Observed) -> State:
        search = _Search.unpack(state)
        if observed.candidate is not None:
            search = replace(search, candidate=smoothed(search.candidate, observed.candidate, self.window))
        if search.level == _DENSE:
            recovered = search.candidate >= self.epsilon
            return (search.at(0, search.candidate) if recovered else search).pack()
        search = replace(search, gain=smoothed(search.gain, observed.gain, self.window))
        if search.gain < self.epsilon:
            begin = replace(search, settled=False, results=(0.0,) * len(self.factors))
            return begin.at(0 if search.level > 0 else _DENSE).pack()
        cost = observed.seconds if self.throughput == "seconds" else observed.sent_bytes
        search = replace(search, checks=search.checks + 1, cost=min(cost, search.cost) if search.checks else cost)
        if search.checks < checks_of(self.window):
            return search.pack()
        return self._next_window(search).pack()

    def _next_window(self, search: _Search) -> _Search:
        """What a whole window at one factor leads to."""
        if search.settled:
            return replace(search, checks=0, cost=0.0)
        results = list(search.results)
        results[search.level] = search.gain / search.cost if search.cost > 0 else 0.0
        search = replace(search, results=tuple(results))
        best = max(range(len(results)), key=results.__getitem__)
        first, second = sorted(results, reverse=True)[:2] if len(results) > 1 else (results[0], 0.0)
        alike = second > 0 and first - second < self.omega * first
        # The throughput rises with the factor, up to where sending less saves less time than it loses gradient.
        passed = 0 < results[search.level] < (1 - self.omega) * first
        if alike or passed or search.level == len(results) - 1:
            settled = replace(search, settled=True)
            # Without any measurement of time there is no best one, and the highest that keeps its gain stays.
            return settled.at(best if first > 0 else search.level, search.gain if best == search.level else _UNKNOWN)
        if search.candidate >= self.epsilon:
            return search.at(search.level + 1, search.candidate)
        return replace(search, checks=0, cost=0.0)

    def report(self, state: State, step: int) -> dict[str, float]:
        """Ratio; factor (1 while dense); smoothed gain (of theta_min while dense), NaN before it was measured."""
        search, ratio = _Search.unpack(state), super().report(state, step)["ratio"]
        gain = search.candidate if search.level == _DENSE else search.gain
        return {"ratio": ratio, "factor": 1 / ratio, "gain": math.nan if gain < 0 else gain}

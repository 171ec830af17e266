"""Policies: pure rules with explicit state that say which fraction of the values to send.

A policy is asked before each step (`ratio`), and told now and then what came of it (`update`). What it is told is the
mean over the workers, the same bits on each of them, and it knows nothing else; so all workers decide alike. Its state
is a tuple of numbers of one length, which the engine keeps and checkpoints hold. Nothing here knows compressors or
arrays; how a fraction becomes a compressor is in `compressors.adaptive`, who measures is in `engine.adaptation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias

from hvd_gradcomp.errors import ConfigurationError

#: What a policy remembers: finite numbers, always as many.
State: TypeAlias = tuple[float, ...]

#: How often a window is looked into.
CHECKS = 10


@dataclass(frozen=True)
class Observed:
    """What the workers saw in one step, as their mean; the same bits on every worker.

    Attributes:
        gain: 1 - ||x - sent||^2 / ||x||^2 of the gradient with its residual x, from 0 to 1. For methods that select
            values it is ||sent||^2 / ||x||^2; those that round at random cannot gain by their own noise.
        candidate: the same for the ratio that `Policy.candidate` named; None where it named none.
        norm: the L2 norm of a worker's gradient, without residual.
        seconds: mean duration of the steps since the last observation; 0 where unknown.
        sent_bytes: mean bytes that a worker sent in each of these steps.
        waited_s: mean seconds of each of these steps spent on the exchange (compressing, waiting for collectives,
            decoding), by the worker that spent least: others also wait for workers that are late.
        predicted: for each ratio that `Policy.to_predict` named, by how many seconds its exchange is expected to make a
            step longer; None where it named none.
    """

    gain: float
    candidate: float | None
    norm: float
    seconds: float
    sent_bytes: float
    waited_s: float = 0.0
    predicted: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Policy:
    """Base of the policies: hyper-parameters only, printable, comparable and hashable."""

    spec_name: ClassVar[str]
    #: Whether `update` goes by gains or norms, to measure which takes passes over the gradients.
    observes_gradients: ClassVar[bool] = False

    def init(self) -> State:
        """The state before the first step."""
        return ()

    def ratio(self, state: State, step: int) -> float | None:
        """The fraction of the values to send in step `step` (from 0), in (0, 1]; None sends the gradient as it is."""
        raise NotImplementedError

    def candidate(self, state: State, step: int) -> float | None:
        """A smaller ratio (or, while nothing is compressed, any) whose gain is to be measured in step `step` as well.

        The values that it would send are selected from those that are sent, which costs next to nothing.
        """
        return None

    def to_predict(self, state: State) -> tuple[float | None, ...]:
        """Ratios (None: dense) of which the next `update` has to be told what their exchanges will take."""
        return ()

    def observes(self, step: int) -> bool:
        """Whether to measure in step `step`, and to call `update` after it."""
        return False

    def update(self, state: State, observed: Observed) -> State:
        """The state after a step in which the workers measured."""
        return state

    def report(self, state: State, step: int) -> dict[str, float]:
        """What to show of the state: the ratio of step `step` (1 while gradients are sent dense), and why."""
        ratio = self.ratio(state, step)
        return {"ratio": 1.0 if ratio is None else ratio}

    def __str__(self) -> str:
        return f"{self.spec_name}({self.arguments()})"

    def arguments(self) -> str:
        """The hyper-parameters that differ from their defaults, as spec strings spell them."""
        changed = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return ", ".join(f"{name}={spelled(value)}" for name, value, default in changed if value != default)


def spelled(value: object) -> str:
    """A value as specs spell it: words without quotes."""
    if isinstance(value, Policy):
        return str(value)
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


def interval_of(window: int) -> int:
    """Steps between two observations, CHECKS (or a few more) of them in a window."""
    return max(1, window // CHECKS)


def checks_of(window: int) -> int:
    """Observations in a window."""
    return window // interval_of(window)


def smoothed(old: float, new: float, window: int) -> float:
    """The exponentially weighted mean of the observations of about one window; `old` is negative before the first."""
    weight = 2 / (checks_of(window) + 1)
    return new if old < 0 else old + weight * (new - old)


def check_number(part: object, name: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Refuse the field `name` of a frozen dataclass unless it is in [low, high], or make it a float.

    Raises:
        ConfigurationError: it is not.
    """
    value = getattr(part, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):
        below = f" and <= {high:g}" if high < math.inf else ""
        raise ConfigurationError(f"{name} must be a number {'>' if open_low else '>='} {low:g}{below}, got {value!r}")
    # 1, 1.0 and numpy's 1.0 are equal and have to look so too: workers compare specs.
    object.__setattr__(part, name, float(value))


def check_count(part: object, name: str, least: int = 1) -> None:
    """Refuse the field `name` unless it is an integer >= `least`.

    Raises:
        ConfigurationError: it is not.
    """
    value = getattr(part, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_ratio(value: object, name: str) -> float | None:
    """`value` as a ratio: a float in (0, 1], or None for no compression.

    Raises:
        ConfigurationError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigurationError(f"{name} must be a number with 0 < ratio <= 1, or None for dense, got {value!r}")
    return float(value)

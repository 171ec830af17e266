"""Schedules: the ratio as a function of the step, the epoch, or whatever a user's function makes of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.base import Policy, State, check_count, check_ratio, spelled


@dataclass(frozen=True)
class Schedule(Policy):
    """Base of the policies without state. A subclass gives `at`."""

    def at(self, step: int) -> float | None:
        """The ratio in step `step` (from 0); None for dense."""
        raise NotImplementedError

    def ratio(self, state: State, step: int) -> float | None:
        return self.at(step)


@dataclass(frozen=True)
class Exponential(Schedule):
    """From `start` down to `end` in `stages` equal stages over `steps` steps, each a constant fraction of the last.

        ratio(t) = start * (end / start)^(floor(stages * t / steps) / stages)  for t < steps,  end afterwards

    With four stages from 25 % to 0.1 % these are 25 %, 6.3 %, 1.6 %, 0.4 %: the warm-up of Deep Gradient Compression.

    Args:
        start: ratio of the first stage.
        end: ratio after the last.
        steps: how long the whole takes; the paper takes four epochs.
        stages: how many there are.

    References:
        Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth
        for Distributed Training", ICLR 2018.
    """

    spec_name: ClassVar[str] = "exponential"

    start: float = 0.25
    end: float = 0.001
    steps: int = 1000
    stages: int = 4

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if getattr(self, name) is None:
                raise ConfigurationError(f"{name} must be a number with 0 < {name} <= 1, got None")
            object.__setattr__(self, name, check_ratio(getattr(self, name), name))
        check_count(self, "steps")
        check_count(self, "stages")

    def at(self, step: int) -> float | None:
        if step >= self.steps:
            return self.end
        stage = self.stages * step // self.steps
        return float(self.start * (self.end / self.start) ** (stage / self.stages))


@dataclass(frozen=True)
class Piecewise(Schedule):
    """One ratio after another: `ratios[0]` before step `boundaries[0]`, `ratios[i]` from `boundaries[i - 1]` on.

    Args:
        boundaries: steps, ascending.
        ratios: one more than boundaries; None sends dense.
    """

    spec_name: ClassVar[str] = "piecewise"

    boundaries: tuple[int, ...] = ()
    ratios: tuple[float | None, ...] = (0.01,)

    def __post_init__(self) -> None:
        boundaries, ratios = tuple(self.boundaries), tuple(self.ratios)
        if len(ratios) != len(boundaries) + 1:
            raise ConfigurationError(
                f"piecewise needs one ratio more than boundaries, got {len(ratios)} and {len(boundaries)}"
            )
        whole = all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in boundaries)
        if not whole or list(boundaries) != sorted(set(boundaries)):
            raise ConfigurationError(f"boundaries must be steps > 0 in ascending order, got {boundaries!r}")
        object.__setattr__(self, "boundaries", boundaries)
        object.__setattr__(self, "ratios", tuple(check_ratio(each, "each ratio") for each in ratios))

    def at(self, step: int) -> float | None:
        return self.ratios[sum(step >= boundary for boundary in self.boundaries)]


@dataclass(frozen=True)
class ByEpoch(Schedule):
    """Another schedule, counting epochs where it counts steps: `ByEpoch(Piecewise((5,), (0.1, 0.01)), 312)`.

    Args:
        schedule: by epoch, the first one being 0.
        steps_per_epoch: exchanges in an epoch, the same on all workers (with `backward_passes_per_step`, fewer than
            batches).
    """

    spec_name: ClassVar[str] = "by_epoch"

    schedule: Schedule
    steps_per_epoch: int

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise ConfigurationError(f"by_epoch takes a schedule such as Piecewise(...), got {self.schedule!r}")
        check_count(self, "steps_per_epoch")

    def at(self, step: int) -> float | None:
        return self.schedule.at(step // self.steps_per_epoch)


@dataclass(frozen=True)
class ByFunction(Schedule):
    """`function(step)` is the ratio; None is dense. The function must say the same on every worker.

    Workers compare its name, since its code cannot be compared: functions of one name are taken for the same.

    Args:
        function: takes the step (from 0), returns a ratio in (0, 1], or None.
    """

    spec_name: ClassVar[str] = "by_function"

    function: Callable[[int], float | None]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigurationError(f"by_function takes a function of the step, got {self.function!r}")

    def at(self, step: int) -> float | None:
        return check_ratio(self.function(step), f"what {self.arguments()} returned for step {step}")

    def arguments(self) -> str:
        kind = type(self.function)
        return spelled(
            f"{getattr(self.function, '__module__', kind.__module__)}."
            f"{getattr(self.function, '__qualname__', kind.__qualname__)}"
        )

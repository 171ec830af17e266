"""Auto: dense, or the least compression that pays here, by the planner's model and by what exchanges then take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.base import Observed, Policy, State, check_count, check_ratio

# Differences below this are within what a prediction, or one measurement, can tell.
ALIKE = 1.1
# Predictions that differ by more than this from the last ones say that the network, or the training, is another one.
_CHANGED = 1.25
# The highest ratio that is tried, and by how much the next one is lower.
_HIGHEST = 0.1
_APART = 10.0
_UNKNOWN = -1.0
# The first observation, by when a few steps have been timed.
_FIRST = 3


@dataclass(frozen=True)
class _Known:
    """The state, by name.

    Attributes:
        choice: place in `candidates` of the one in use.
        looks: observations since the last prediction; negative before the first.
        alone_s: seconds of a step without its exchange.
        predicted: for each candidate, seconds by which its exchange makes a step longer, by the model.
        measured: the same as last seen; negative where it was not.
    """

    choice: int
    looks: int
    alone_s: float
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    def pack(self) -> State:
        return (float(self.choice), float(self.looks), self.alone_s, *self.predicted, *self.measured)

    @staticmethod
    def unpack(state: State) -> _Known:
        choice, looks, alone_s, *rest = state
        count = len(rest) // 2
        return _Known(int(choice), int(looks), alone_s, tuple(rest[:count]), tuple(rest[count:]))

    def with_measured(self, place: int, seconds: float) -> _Known:
        """With what was measured of one candidate."""
        return replace(self, measured=(*self.measured[:place], seconds, *self.measured[place + 1 :]))

    def step_s(self, place: int) -> float:
        """Seconds of a step with a candidate: as measured, or else as predicted."""
        seconds = self.measured[place] if self.measured[place] >= 0 else self.predicted[place]
        return self.alone_s + seconds


@dataclass(frozen=True)
class Auto(Policy):
    """Send dense, unless steps become faster by compressing; then at the highest ratio that makes them about as fast.

    Training begins dense. After the first steps the workers measure the network, rehearse an exchange at each ratio,
    and the planner's model predicts how much longer than its computing a step takes with each candidate: dense, 0.1,
    0.01 and so on down to `ratio`. Taken is the candidate that sends most among those whose steps take at most 10 %
    longer than the fastest one's; accuracy comes first.

    Every `window` steps the prediction for the candidate in use is replaced by what its exchanges took: the seconds
    spent on compressing, waiting and decoding in a step, of the worker that waited least, so that stragglers and pauses
    between steps are not taken for the network. Where that makes another candidate the better one by more than 10 %,
    or dense no worse, that one is used from then on. Every `every` steps all is measured and predicted anew; where
    predictions differ by more than a quarter from the last ones, what was measured before is forgotten.

    Costs some megabytes of collectives and a few rehearsed exchanges (about as long as two or three steps' exchanges)
    every `every` steps, and one small collective (48 bytes a worker) every `window` steps.

    Args:
        lowest: the lowest ratio that may be used; what training loses at it is for the user to judge.
        window: steps between two looks.
        every: steps between two predictions, a whole number of windows.

    References:
        S. Agarwal, H. Wang, S. Venkataraman, D. Papailiopoulos, "On the Utility of Gradient Compression in Distributed
        Training Systems", MLSys 2022 (when compression does not pay).
    """

    spec_name: ClassVar[str] = "auto"

    lowest: float = 0.01
    window: int = 50
    every: int = 1000

    def __post_init__(self) -> None:
        if self.lowest is None:
            raise ConfigurationError("lowest must be a number with 0 < lowest <= 1, got None")
        object.__setattr__(self, "lowest", check_ratio(self.lowest, "lowest"))
        check_count(self, "window")
        check_count(self, "every")
        if self.every % self.window:
            raise ConfigurationError(
                f"every must be a whole number of windows, got every={self.every}, window={self.window}"
            )

    @cached_property
    def candidates(self) -> tuple[float | None, ...]:
        """Ratios, from the one that sends most; None is dense."""
        found: list[float | None] = [None]
        ratio = _HIGHEST
        # One that is hardly above the lowest would be no choice.
        while ratio > 1.5 * self.lowest:
            found.append(ratio)
            ratio /= _APART
        return (*found, self.lowest)

    def init(self) -> State:
        unknown = (_UNKNOWN,) * len(self.candidates)
        return _Known(0, -1, 0.0, unknown, unknown).pack()

    def ratio(self, state: State, step: int) -> float | None:
        return self.candidates[_Known.unpack(state).choice]

    def observes(self, step: int) -> bool:
        return step == _FIRST - 1 or (step + 1) % self.window == 0

    def to_predict(self, state: State) -> tuple[float | None, ...]:
        looks = _Known.unpack(state).looks
        return self.candidates if looks < 0 or looks + 1 >= self.every // self.window else ()

    def update(self, state: State, observed: Observed) -> State:
        known = _Known.unpack(state)
        is_new = observed.predicted is not None
        if observed.seconds > 0:
            alone = max(0.0, observed.seconds - observed.waited_s)
            # Pauses between steps only ever add to it.
            known = replace(known, alone_s=alone if is_new or known.looks < 0 else min(alone, known.alone_s))
            known = known.with_measured(known.choice, observed.waited_s)
        if observed.predicted is not None:
            known = self._predicted(known, observed.predicted)
        elif known.looks >= 0:
            known = replace(known, looks=known.looks + 1)
        return replace(known, choice=self._best(known)).pack() if known.looks >= 0 else known.pack()

    def _predicted(self, known: _Known, predicted: tuple[float, ...]) -> _Known:
        """What is known with new predictions."""
        now = known.measured[known.choice]
        if known.looks < 0 and now >= 0:
            # The first steps hold what is done once only, which is not the network's doing.
            now = min(now, predicted[known.choice])
        steps = [known.alone_s + each for each in predicted]
        before = [known.alone_s + each for each in known.predicted]
        if known.looks < 0 or any(
            max(one, other) > _CHANGED * min(one, other) for one, other in zip(steps, before, strict=True)
        ):
            known = replace(known, measured=(_UNKNOWN,) * len(predicted))
        return replace(known, predicted=predicted, looks=0).with_measured(known.choice, now)

    def _best(self, known: _Known) -> int:
        """The place of the candidate to use from now on."""
        steps = [known.step_s(place) for place in range(len(self.candidates))]
        limit = ALIKE * min(steps)
        in_use = steps[known.choice]
        if in_use <= limit and all(each > in_use for each in steps[: known.choice]):
            return known.choice
        return next(place for place, seconds in enumerate(steps) if seconds <= limit)

    def report(self, state: State, step: int) -> dict[str, float]:
        """Ratio; seconds of a step without its exchange; by how many an exchange makes it longer, dense and as it is.

        The seconds are NaN before anything was predicted.
        """
        known = _Known.unpack(state)
        found = super().report(state, step)
        if known.looks < 0:
            return {**found, "alone": math.nan, "exchange": math.nan, "dense": math.nan}
        return {
            **found,
            "alone": known.alone_s,
            "exchange": known.step_s(known.choice) - known.alone_s,
            "dense": known.step_s(0) - known.alone_s,
        }

"""How many steps workers take on their own before they meet, for local SGD: a number, or a schedule of the steps done.

A schedule must depend on nothing but the steps done, so that all workers meet at the same ones.

References:
    S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (post-local).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from hvd_gradcomp.errors import ConfigurationError

#: a number of steps, or a function that gives it for the number of steps done so far
LocalSteps: TypeAlias = int | Callable[[int], int]


@dataclass(frozen=True)
class PostLocal:
    """Post-local SGD: meet after every step at first, when gradients change fast, and every `local_steps` later.

    Args:
        local_steps: steps between two meetings after the switch, >= 1.
        after: the number of steps after which it begins, >= 0; the paper switches where the learning rate first drops.
    """

    local_steps: int
    after: int

    def __post_init__(self) -> None:
        for name, least in (("local_steps", 1), ("after", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} must be a whole number >= {least}, got {value!r}")

    def __call__(self, done: int) -> int:
        return self.local_steps if done >= self.after else 1


class Clock:
    """Counts the local steps of one worker and says when it is time to meet.

    Args:
        sync_every: the steps between two meetings.

    Attributes:
        steps: how many this worker has taken.
        since_meeting: how many of them since it last met the others.
        until_meeting: how many there are between that meeting and the next.

    Raises:
        ConfigurationError: see `steps_until_meeting`.
    """

    def __init__(self, sync_every: LocalSteps) -> None:
        self.sync_every = sync_every
        self.steps = 0
        self.since_meeting = 0
        self.until_meeting = steps_until_meeting(sync_every, 0)

    def count(self, steps: int = 1) -> bool:
        """Count steps; whether it is time to meet after them."""
        self.steps += steps
        self.since_meeting += steps
        return self.since_meeting >= self.until_meeting

    def meet(self) -> None:
        """The workers have met, whether or not it was time."""
        self.since_meeting = 0
        self.until_meeting = steps_until_meeting(self.sync_every, self.steps)

    def settings(self) -> dict[str, object]:
        """What must be the same on all workers that meet."""
        return {"sync_every": describe(self.sync_every), "local steps": self.steps}

    def state_dict(self) -> dict[str, int]:
        """The counts, to be saved."""
        return {"steps": self.steps, "since_meeting": self.since_meeting, "until_meeting": self.until_meeting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.steps = int(state["steps"])
        self.since_meeting = int(state["since_meeting"])
        self.until_meeting = int(state["until_meeting"])


def check_outer(outer_lr: float, outer_momentum: float) -> None:
    """Check the values of DiLoCo's outer Nesterov momentum.

    Raises:
        ConfigurationError: they are out of their range.
    """
    if not (outer_lr > 0 and 0 <= outer_momentum < 1):
        raise ConfigurationError(
            f"expected outer_lr > 0 and 0 <= outer_momentum < 1, got {outer_lr!r} and {outer_momentum!r}"
        )


def steps_until_meeting(sync_every: LocalSteps, done: int) -> int:
    """The number of steps from one meeting, after `done` steps in all, to the next.

    Raises:
        ConfigurationError: `sync_every` is or gives something else than a whole number >= 1.
    """
    steps = sync_every(done) if callable(sync_every) else sync_every
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        given = (
            f"{describe(sync_every)} gave {steps!r} after {done} steps" if callable(sync_every) else f"got {steps!r}"
        )
        raise ConfigurationError(f"sync_every must be a whole number of steps >= 1, or a function giving one; {given}")
    return steps


def describe(sync_every: LocalSteps) -> str:
    """A text by which workers compare: equal for equal numbers and schedules of this module; a function's name."""
    if callable(sync_every):
        return getattr(sync_every, "__qualname__", None) or repr(sync_every)
    return str(sync_every)

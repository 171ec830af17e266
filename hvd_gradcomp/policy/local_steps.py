"""How many steps workers take on their own before they meet, for local SGD: a number, or a schedule of the steps done.

A schedule must depend on nothing but the steps done, so that all workers meet at the same ones.

References:
    S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (post-local).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

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

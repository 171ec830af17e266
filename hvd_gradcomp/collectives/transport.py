"""What an exchange may ask for, and what a door must provide."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from hvd_gradcomp.ops import Array

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Allgather:
    """Every worker gets all workers' `payload` (uint8, any length each), concatenated in rank order.

    Here and below, `among` is the transport of those who take part, by default all workers of the engine. A `label`
    takes the place of the number of the round in the collective's name, for one before which not all have as many.
    """

    payload: Array
    among: Transport | None = field(default=None, kw_only=True)
    label: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Allreduce:
    """Every worker gets the sum of all workers' `values` (float32, same length), added in the format `kind`.

    With `op` "max" it is the largest of each element instead; what becomes of NaN is then not defined.
    """

    values: Array
    kind: str
    op: Literal["sum", "max"] = "sum"
    among: Transport | None = field(default=None, kw_only=True)
    label: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Alltoall:
    """Worker r gets the r-th part of every worker's `payload` (uint8), concatenated in rank order.

    `splits` are the lengths of the parts, one for each worker.
    """

    payload: Array
    splits: tuple[int, ...]
    among: Transport | None = field(default=None, kw_only=True)
    label: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Confirm:
    """No collective, but the question whether to go on, when what was exchanged is here and nothing is changed yet.

    `usable` is whether all workers' gradients were finite here. The answer (a bool) is whether they were in all
    exchanges of the step: loss scaling skips whole steps, and what had been sent in one that is skipped would be lost.
    """

    usable: bool


Request: TypeAlias = Allgather | Allreduce | Alltoall
Exchange: TypeAlias = Generator[Request, Array, _Result]


class Transport(Protocol):
    """Asynchronous collectives among the workers of one process set, matched by name."""

    @property
    def rank(self) -> int:
        """This worker's rank among them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their ranks in the whole job, by which messages call them."""

    @property
    def workers(self) -> int:
        """How many they are."""

    def adds(self, kind: str) -> bool:
        """Whether `Allreduce` can add values in the format `kind`."""

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks (among these workers) of each node's workers, by their first. A collective call at first."""

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        """The transport of that one of `groups` (of ranks among these workers) which this worker belongs to.

        A collective call: all workers make it, with the same groups, of which each worker belongs to one.

        Raises:
            UnsupportedError: such groups cannot be made here; the message says what to set.
        """

    def start(self, request: Request, name: str) -> Any:
        """Begin `request`; the other workers begin theirs under the same `name`, in any order. Returns a handle."""

    def wait(self, handle: Any) -> Array:
        """The result of the request behind `handle`, once all workers have begun it."""

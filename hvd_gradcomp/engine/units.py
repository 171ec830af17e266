"""Units: which of a bucket's tensors are compressed as one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.ops import Array, Ops


@dataclass(frozen=True)
class Unit:
    """What is compressed as one vector: one tensor, or all those of a bucket, one after another."""

    parameters: tuple[Parameter, ...]

    @cached_property
    def name(self) -> str:
        """The name of its first parameter."""
        return self.parameters[0].name

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its tensor; None when there are several, or when the door did not say."""
        return self.parameters[0].shape if len(self.parameters) == 1 else None

    def join(self, ops: Ops, vectors: Mapping[str, Array]) -> Array:
        """The vectors of its parameters as one; a single vector is handed on as it is."""
        if len(self.parameters) == 1:
            return vectors[self.name]
        return ops.concat([vectors[parameter.name] for parameter in self.parameters])

    def split(self, joined: Array) -> dict[str, Array]:
        """The reverse of `join`; the parts may share the memory of `joined`."""
        if len(self.parameters) == 1:
            return {self.name: joined}
        bounds = pairwise(accumulate((parameter.size for parameter in self.parameters), initial=0))
        return {
            parameter.name: joined[start:end] for parameter, (start, end) in zip(self.parameters, bounds, strict=True)
        }


def units_of(parameters: Sequence[Parameter], granularity: str) -> tuple[Unit, ...]:
    """The units of `parameters`, which are exchanged together: each by itself at "layer", else all as one."""
    if granularity == "layer":
        return tuple(Unit((parameter,)) for parameter in parameters)
    return (Unit(tuple(parameters)),)

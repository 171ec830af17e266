"""Segments: which of a bucket's tensors share a frame where each owner of a share gets a frame of its own.

With many owners an owner's share of a small tensor is a few values, and a header for each would be larger than they
are. So neighbouring tensors share a frame until it is worth its header; large ones keep one each, and with it scales of
their own. A pure function of sizes: all workers find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.compressors.chain import Sparsifier
from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.engine.units import Unit
from hvd_gradcomp.feedback.shares import share_size
from hvd_gradcomp.ops import Array

# A frame's headers take about 40 bytes.
_LEAST_BYTES = 1024
# Besides a frame, a payload has 16 bytes of headers.
_LEAST_PAYLOAD = 1024
# A tensor so large that rounding does not show.
_MANY = 1 << 20
# A sparsifier rounds the number of values it sends up, for every vector that it selects from.
_LEAST_KEPT = 16


@dataclass(frozen=True)
class Segment:
    """Neighbouring units that are compressed by one method, and whose shares travel in one frame for each owner."""

    units: tuple[Unit, ...]
    method: Compressor

    @property
    def name(self) -> str:
        """The name of its first parameter."""
        return self.units[0].name

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Those of all its units, in their order."""
        return tuple(parameter for unit in self.units for parameter in unit.parameters)

    def size(self, owner: int, owners: int) -> int:
        """How many elements `owner` has of all its parameters."""
        return sum(share_size(each.name, each.size, owner, owners) for each in self.parameters)

    def split(self, shares: Array, owner: int, owners: int) -> dict[str, Array]:
        """The shares of each parameter, by name, of what `owner` has of the segment, one after another."""
        found = {}
        start = 0
        for each in self.parameters:
            end = start + share_size(each.name, each.size, owner, owners)
            found[each.name] = shares[start:end]
            start = end
        return found

    def selections(self, sparsifier: Sparsifier, owner: int, owners: int) -> list[tuple[int, int]]:
        """From where to where, in what `owner` has of the segment, values are selected together.

        Each unit by itself, as far as the share of it is large enough that rounding up does not count.
        """
        bounds = [0]
        end = 0
        for unit in self.units:
            end += sum(share_size(each.name, each.size, owner, owners) for each in unit.parameters)
            if end > bounds[-1] and sparsifier.kept(end - bounds[-1]) >= _LEAST_KEPT:
                bounds.append(end)
        if end > bounds[-1]:
            # What is left over at the end goes with the last.
            bounds[max(len(bounds) - 1, 1) :] = [end]
        return list(pairwise(bounds))


def least_bucket_bytes(compressor: Compressor, owners: int) -> int:
    """How many bytes of float32 gradient a bucket has to hold for an owner's payload to be worth its headers."""
    expected = compressor.expected_bytes(_MANY) / _MANY
    return int(4 * owners * _LEAST_PAYLOAD / expected) if expected else 0


def segments_of(units: Sequence[Unit], method_of: Callable[[Unit], Compressor], owners: int) -> list[Segment]:
    """The segments of `units`, which an exchange among `owners` sends together."""
    runs: list[list[Unit]] = []
    size = 0
    for unit in units:
        method = method_of(unit)
        if runs and method == method_of(runs[-1][0]) and method.expected_bytes(max(1, size // owners)) < _LEAST_BYTES:
            runs[-1].append(unit)
            size += unit.size
        else:
            runs.append([unit])
            size = unit.size
    return [Segment(tuple(run), method_of(run[0])) for run in runs]

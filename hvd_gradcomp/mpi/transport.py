"""MPI's collectives as the transport of the engine, by mpi4py.

MPI matches collectives by their order, where the engine matches them by name. So each begins with a small one in which
workers say what they are about to do: a worker that does something else is an error on all, not a hang. Collectives
run to their end in `start`; nothing overlaps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_gradcomp.collectives import Allgather, Allreduce, Request, node_key, nodes_of
from hvd_gradcomp.collectives.topology import KEY_BYTES, NODES_VARIABLE
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array


class MPITransport:
    """Collectives among the workers of a communicator, on numpy arrays.

    Args:
        comm: the communicator.
        ranks: the workers' ranks in the whole job; by default those in the communicator.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int] | None = None) -> None:
        self.comm = comm
        self._ranks = tuple(range(self.workers) if ranks is None else ranks)

    @property
    def rank(self) -> int:
        """This worker's rank in the communicator."""
        return int(self.comm.Get_rank())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers' ranks in the whole job."""
        return self._ranks

    @property
    def workers(self) -> int:
        """The size of the communicator."""
        return int(self.comm.Get_size())

    def adds(self, kind: str) -> bool:
        """MPI adds float32; it knows no 16-bit format."""
        return kind == "float32"

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Workers who can share memory share a node, or as `HVD_GRADCOMP_NODES` says."""
        if os.environ.get(NODES_VARIABLE):
            key = node_key(self.rank, self.workers)
        else:
            local = self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
            key = int(local.bcast(self.rank)).to_bytes(KEY_BYTES, "little")
            local.Free()
        return nodes_of(b"".join(self.comm.allgather(key)))

    def part(self, groups: Sequence[Sequence[int]]) -> MPITransport:
        """The workers of that group which this one is in."""
        number = next(number for number, group in enumerate(groups) if self.rank in group)
        mine = [self._ranks[rank] for rank in sorted(groups[number])]
        return MPITransport(MPI.Intracomm(self.comm.Split(number, self.rank)), mine)

    def start(self, request: Request, name: str) -> Array:
        """Carry out a request; the handle is its result.

        Raises:
            ConfigurationError: some worker is about to do something else.
        """
        if isinstance(request, Allreduce):
            self._meet("allreduce", name, (len(request.values),), equal=True)
            values = np.ascontiguousarray(request.values, np.float32)
            total = np.empty_like(values)
            self.comm.Allreduce(values, total, op=MPI.MAX if request.op == "max" else MPI.SUM)
            return total
        payload = np.ascontiguousarray(request.payload, np.uint8)
        if isinstance(request, Allgather):
            counts = [lengths[0] for lengths in self._meet("allgather", name, (len(payload),))]
            received = np.empty(sum(counts), np.uint8)
            self.comm.Allgatherv([payload, MPI.BYTE], [received, _layout(counts), MPI.BYTE])
            return received
        counts = [splits[self.rank] for splits in self._meet("alltoall", name, request.splits)]
        received = np.empty(sum(counts), np.uint8)
        self.comm.Alltoallv([payload, _layout(list(request.splits)), MPI.BYTE], [received, _layout(counts), MPI.BYTE])
        return received

    def wait(self, handle: Array) -> Array:
        """The result of a request."""
        return handle

    def _meet(self, kind: str, name: str, lengths: tuple[int, ...], equal: bool = False) -> list[tuple[int, ...]]:
        """Every worker's `lengths`, once all have said that they do the same."""
        messages: list[Any] = self.comm.allgather((kind, name, lengths))
        for rank, (theirs, what, sizes) in enumerate(messages):
            if (theirs, what) != (kind, name) or (equal and sizes != lengths):
                raise ConfigurationError(
                    f"rank {rank} is at the {theirs} of {what!r} ({sum(sizes)} long) while rank {self.rank} is at the "
                    f"{kind} of {name!r} ({sum(lengths)} long): every worker must reduce the same arrays, by the same "
                    "compression, equally often"
                )
        return [sizes for _, _, sizes in messages]


def _layout(counts: list[int]) -> tuple[list[int], list[int]]:
    """Counts and displacements of consecutive parts."""
    return counts, list(accumulate(counts[:-1], initial=0))

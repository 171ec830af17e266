"""Horovod's collectives for PyTorch as the transport of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_gradcomp.collectives import Allgather, Allreduce, Request, Transport, node_key, nodes_of, process_set_of
from hvd_gradcomp.errors import ConfigurationError, UnsupportedError
from hvd_gradcomp.wire.payload import JOIN_ADVICE

_ADDS = {"float32": torch.float32, "float16": torch.float16}


class HorovodTransport:
    """Collectives among the workers of a Horovod process set."""

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        self.process_set = process_set

    @property
    def rank(self) -> int:
        """This worker's rank in the process set."""
        return int(self.process_set.rank())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers' ranks in the whole job."""
        return tuple(self.process_set.ranks)

    @property
    def workers(self) -> int:
        """The size of the process set."""
        return int(self.process_set.size())

    def adds(self, kind: str) -> bool:
        """Horovod adds float32 and float16; it refuses bfloat16."""
        return kind in _ADDS

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Workers of one host share a node."""
        key = torch.tensor(list(node_key(hvd.rank(), hvd.size())), dtype=torch.uint8)
        name = f"hvd_gradcomp.nodes.{self.process_set.process_set_id}"
        keys = wait(mpi_ops.allgather_async(key, name=name, process_set=self.process_set))
        return nodes_of(bytes(keys.tolist()))

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        """The workers of that group which this one is in; process sets that are missing are made.

        Raises:
            UnsupportedError: they cannot be made.
        """
        ranks = self.ranks
        named = [sorted(ranks[place] for place in group) for group in groups]
        mine = next(group for group in named if hvd.rank() in group)
        number = process_set_of(
            named,
            hvd.rank(),
            mpi_ops._basics._get_process_set_ids_and_ranks,
            hvd.add_process_set,
            everyone=len(ranks) == hvd.size(),
        )
        found = process_sets._temp_process_set_object(number)
        found.ranks = mine
        return HorovodTransport(found)

    def start(self, request: Request, name: str) -> Callable[[], torch.Tensor]:
        """Begin a request; the handle is a function that waits for its result."""
        if isinstance(request, Allgather):
            handle = mpi_ops.allgather_async(request.payload, name=name, process_set=self.process_set)
            return lambda: wait(handle)
        if isinstance(request, Allreduce):
            values = request.values.to(_ADDS[request.kind])
            op = mpi_ops.Max if request.op == "max" else mpi_ops.Sum
            handle = mpi_ops.allreduce_async_(values, name=name, op=op, process_set=self.process_set)
            return lambda: wait(handle).to(torch.float32)
        splits = torch.tensor(request.splits, dtype=torch.int32)
        handle = mpi_ops.alltoall_async(request.payload, splits=splits, name=name, process_set=self.process_set)
        return lambda: wait(handle)[0]

    def wait(self, handle: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result behind a handle of `start`."""
        return handle()


def wait(handle: int | None) -> Any:
    """Horovod's `synchronize`, with a clearer word where a worker has called `hvd.join()` or compresses otherwise.

    Raises:
        UnsupportedError: a worker has joined.
        ConfigurationError: another worker sends this gradient in another way.
        HorovodInternalError: as Horovod raises it.
    """
    try:
        result = mpi_ops.synchronize(handle)
    except HorovodInternalError as error:
        if "Mismatched" in str(error):
            raise ConfigurationError(
                f"Horovod said: {error} Some worker does not compress its gradients as this one does: give every "
                "worker the same compression= (one may have Horovod's own), the same model and the same Horovod options"
            ) from error
        if "Join" not in str(error):
            raise
        raise UnsupportedError(
            f"Horovod said: {error}. A worker called hvd.join() while others still exchange compressed gradients: "
            f"{JOIN_ADVICE}"
        ) from error
    for each in result if isinstance(result, tuple) else (result,):
        if isinstance(each, torch.Tensor) and each.is_cuda:
            _join_stream(each)
    return result


def _join_stream(x: torch.Tensor) -> None:
    """Let work on the current CUDA stream use `x`, which comes from Horovod.

    Horovod waits for the stream on which a tensor was handed in, but knows nothing of the one on which the result will
    be used. Its own thread, which has the default stream, allocates what an allgather returns, and with
    HOROVOD_ENABLE_ASYNC_COMPLETION lets that stream alone wait for the collective. On any other stream the work would
    begin too early, and the memory could be given to somebody else before the work is done.
    """
    current, default = torch.cuda.current_stream(x.device), torch.cuda.default_stream(x.device)
    if current != default:
        current.wait_stream(default)
        x.record_stream(current)

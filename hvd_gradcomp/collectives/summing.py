"""Adding float vectors over the workers, also in formats that the transport cannot add itself."""

from __future__ import annotations

from itertools import pairwise

from hvd_gradcomp.collectives.transport import Allgather, Allreduce, Alltoall, Exchange, Transport
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.ops.base import FLOAT_BYTES


def add(ops: Ops, values: Array, kind: str, transport: Transport) -> Exchange[Array]:
    """The sum over the workers of float32 `values` (n,), which are exact in the format `kind`.

    Where the transport cannot add `kind` (Horovod and bfloat16), each worker adds one share: an alltoall brings it all
    workers' values of its share, which it adds in float32 in rank order and rounds to `kind`, and an allgather returns
    the shares. Each worker sends 2 (N - 1) / N times the bytes of the vector, as an allreduce does.
    """
    if transport.adds(kind):
        return (yield Allreduce(values, kind))
    size, workers = len(values), transport.workers
    width = FLOAT_BYTES[kind]
    bounds = [size * worker // workers for worker in range(workers + 1)]
    shares = tuple(width * (end - start) for start, end in pairwise(bounds))
    received = ops.unpack_float((yield Alltoall(ops.pack_float(values, kind), shares)), kind)
    share = shares[transport.rank] // width
    total = ops.copy(received[:share])
    for worker in range(1, workers):
        total = ops.accumulate(total, received[worker * share : (worker + 1) * share])
    return ops.unpack_float((yield Allgather(ops.pack_float(total, kind))), kind)

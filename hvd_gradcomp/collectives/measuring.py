"""How long collectives among workers take, measured with the transport's own, or the network as the user says."""

from __future__ import annotations

import math
import os
from time import perf_counter

from hvd_gradcomp.collectives.transport import Allgather, Allreduce, Alltoall, Request, Transport
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops

#: Overrides what is measured: seconds of an empty collective and bytes per second, between the nodes, and optionally
#: within them: "5e-5,1.25e9" or "5e-5,1.25e9,2e-5,2e10".
NETWORK_VARIABLE = "HVD_GRADCOMP_NETWORK"
#: How often a collective is repeated; the first time does not count.
TRIES = 3


def configured_network() -> tuple[tuple[float, float], ...]:
    """Seconds and bytes per second, between the nodes and perhaps within; empty where nobody said.

    Raises:
        ConfigurationError: what is said is no such thing.
    """
    text = os.environ.get(NETWORK_VARIABLE, "")
    if not text:
        return ()
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 4) or not all(math.isfinite(each) and each > 0 for each in numbers):
        raise ConfigurationError(
            f"{NETWORK_VARIABLE}={text!r} must give seconds and bytes per second, between the nodes and, if you like, "
            "within them, such as '5e-5,1.25e9' or '5e-5,1.25e9,2e-5,2e10'"
        )
    return tuple((numbers[place], numbers[place + 1]) for place in range(0, len(numbers), 2))


def measure(ops: Ops, transport: Transport, kind: str, size: int, name: str, like: Array) -> float:
    """Seconds of a collective into which each worker puts `size` bytes. A collective call.

    Args:
        kind: "allreduce", "allgather" or "alltoall".
        name: of the collectives.
        like: an array on the device that collectives use.
    """
    # The first has to wait for workers that are late.
    return min([_timed(ops, transport, kind, size, f"{name}.{kind}.{size}.{each}", like) for each in range(TRIES)][1:])


def _timed(ops: Ops, transport: Transport, kind: str, size: int, name: str, like: Array) -> float:
    request: Request
    if kind == "allreduce":
        request = Allreduce(ops.zeros(max(1, size // 4), "float32", like), "float32")
    elif kind == "allgather":
        request = Allgather(ops.zeros(size, "uint8", like))
    else:
        workers = transport.workers
        splits = tuple(size * (rank + 1) // workers - size * rank // workers for rank in range(workers))
        request = Alltoall(ops.zeros(size, "uint8", like), splits)
    start = perf_counter()
    transport.wait(transport.start(request, name))
    return perf_counter() - start


def agree(ops: Ops, transport: Transport, numbers: list[float], name: str, like: Array) -> list[float]:
    """The geometric mean of each number over all workers: the same bits on every one."""
    # In logarithms: a float32 has no room for a sum of some bandwidths, and no worker's outlier decides.
    values = ops.cast(ops.zeros(len(numbers), "float32", like), "float32")
    for place, number in enumerate(numbers):
        mark = ops.arange(len(numbers), like) == place
        values = ops.where(mark, values * 0.0 + math.log(number), values)
    total = transport.wait(transport.start(Allreduce(values, "float32"), name))
    return [math.exp(float(each) / transport.workers) for each in total]

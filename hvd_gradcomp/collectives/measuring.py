"""Latency and bandwidth among workers, measured with the transport's own collectives, or as the user says."""

from __future__ import annotations

import math
import os
from time import perf_counter

from hvd_gradcomp.collectives.transport import Allgather, Allreduce, Transport
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops

#: Overrides what is measured: seconds of an empty collective and bytes per second, between the nodes, and optionally
#: within them: "5e-5,1.25e9" or "5e-5,1.25e9,2e-5,2e10".
NETWORK_VARIABLE = "HVD_GRADCOMP_NETWORK"
_TRIES = 4
# Large enough that latency does not count, small enough to take no time even on slow links.
_BYTES = 1 << 18


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


def measure(ops: Ops, transport: Transport, name: str, like: Array) -> tuple[float, float]:
    """Seconds of a collective that carries next to nothing, and bytes per second that a worker receives.

    A collective call, of about a megabyte for each other worker.
    """
    seconds = {}
    for size in (1, _BYTES):
        times = []
        for attempt in range(_TRIES):
            payload = ops.zeros(size, "uint8", like)
            start = perf_counter()
            transport.wait(transport.start(Allgather(payload), f"{name}.{size}.{attempt}"))
            times.append(perf_counter() - start)
        # The first has to wait for workers that are late.
        seconds[size] = min(times[1:])
    moved = (transport.workers - 1) * _BYTES
    return seconds[1], max(moved, 1) / max(seconds[_BYTES] - seconds[1], 1e-9)


def agree(ops: Ops, transport: Transport, numbers: list[float], name: str, like: Array) -> list[float]:
    """The geometric mean of each number over all workers: the same bits on every one."""
    # In logarithms: a float32 has no room for a sum of some bandwidths, and no worker's outlier decides.
    values = ops.cast(ops.zeros(len(numbers), "float32", like), "float32")
    for place, number in enumerate(numbers):
        mark = ops.arange(len(numbers), like) == place
        values = ops.where(mark, values * 0.0 + math.log(number), values)
    total = transport.wait(transport.start(Allreduce(values, "float32"), name))
    return [math.exp(float(each) / transport.workers) for each in total]

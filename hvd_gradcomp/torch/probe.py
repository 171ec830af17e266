"""Measuring for the planner: the network with Horovod's collectives, and compressing on this machine without a network.

All workers make the calls together, so that what they share (cores, cards) is shared while it is measured. Results are
the slowest worker's, the same on all of them.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

from hvd_gradcomp.compressors import Compressor, NoCompression
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.engine.reduction import Reduction
from hvd_gradcomp.engine.rehearsal import Echo, divisible, made_up
from hvd_gradcomp.policy.cost import COSTS, FREE, Links, Network, Topology, fit_network
from hvd_gradcomp.policy.planner import Compute, Machines, Method, Sending

#: Kind of collective -> bytes that a worker hands in, next to nothing and as much as a bucket or a fused gradient.
SIZES = {"allreduce": (4, 32 << 20), "allgather": (4, 8 << 20), "alltoall": (4, 8 << 20)}
_REPEATS = 3
# Seconds after which a call is not repeated any more to see whether its time has settled, and after which not at all;
# by how much times differ that have settled; how often it is repeated at most.
_LONG = 3.0
_TOO_LONG = 15.0
_SETTLED = 1.1
_MOST = 10
# Of a small computation, enough to be timed.
_ROUNDS = 200
#: Values of a model that compressing is measured on; times of larger models are extrapolated.
SAMPLE = 32 << 20
# A dense exchange is many tensors, which Horovod copies together first.
_PIECES = 16


@contextmanager
def workers() -> Iterator[bool]:
    """Horovod, running, with as many threads as there are cores for each worker, unless OMP_NUM_THREADS says how many.

    Tells whether this is rank 0.
    """
    hvd.init()
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    yield hvd.rank() == 0
    # A worker that ends before the others may take them down.
    _meet()


def topology() -> Topology:
    """Which workers share a node, as Horovod sees it."""
    local_ranks = hvd.allgather(torch.tensor([hvd.local_rank()]), name="plan.local_ranks").tolist()
    sizes: list[int] = []
    for rank in local_ranks:
        if rank == 0:
            sizes.append(0)
        sizes[-1] += 1
    return Topology(tuple(sizes))


def machines() -> Machines:
    """The networks between the workers, by kind of collective, from small and large ones."""
    where = topology()
    flat = where if where.nodes > 1 else Topology.even(where.workers)
    within = _within(where)
    links = {}
    for kind in COSTS:
        # How many bytes the busiest link carries is what the cost model says for a network of one byte a second.
        unit = Links(Network(0.0, 1.0), FREE)
        points = [(COSTS[kind](size, flat, unit).seconds, _seconds(_collective(kind, size))) for size in SIZES[kind]]
        network = fit_network(points)
        links[kind] = Links(network, network if where.nodes == 1 else within)
    return Machines(where, links, overlap())


def _within(where: Topology) -> Network:
    """The network within the nodes, measured on all of them at once; needs dynamic process sets."""
    if where.nodes == 1 or max(where.local_sizes) == 1:
        return FREE
    starts = [sum(where.local_sizes[:node]) for node in range(where.nodes)]
    nodes = [
        hvd.add_process_set(range(start, start + size))
        for start, size in zip(starts, where.local_sizes, strict=True)
        if size > 1
    ]
    mine = next((each for each in nodes if each.included()), None)
    largest = Topology.even(max(where.local_sizes))
    points = []
    for size in SIZES["allreduce"]:
        moved = COSTS["allreduce"](size, largest, Links(Network(0.0, 1.0))).seconds
        call = _collective("allreduce", size, mine) if mine else _nothing
        points.append((moved, _seconds(call)))
    for each in nodes:
        hvd.remove_process_set(each)
    return fit_network(points)


def _nothing() -> None:
    pass


def ways(compressor: Compressor, where: Topology) -> list[str]:
    """The collectives by which `compressor` may be of use there."""
    found = ["allgather"]
    if compressor.meets == "gather" and not compressor.learns:
        found += ["scatter_reduce"] if where.workers > 2 else []
        nodewise = where.nodes > 1 and max(where.local_sizes) > 1
        found += ["hierarchical"] if nodewise and compressor.memory.is_linear and not compressor.votes else []
    return found


def method(
    name: str,
    compressor: Compressor,
    shapes: Sequence[tuple[int, ...]],
    where: Topology,
    way: str = "allgather",
    average: bool = True,
) -> Method:
    """What compressing a model's gradients takes here, and what it hands to collectives, bucket by bucket."""
    parameters = _parameters(shapes)
    sample = _sampled(parameters)
    if way != "allgather":
        sample = divisible(sample, where.local_sizes)
        compressor = compressor.with_collective(way)
    scale = sum(each.size for each in parameters) / sum(each.size for each in sample)
    echo = Echo(where.local_sizes)
    reduction = Reduction(compressor, sample, echo, average=average)
    like = torch.zeros(1)
    seconds = []
    # The first step has no residual yet.
    for step in range(1 + _REPEATS):
        gradients = made_up(sample, step, like)
        echo.requests.clear()
        echo.seconds = 0.0
        reduction.counters.reset()
        _meet()
        started = time.perf_counter()
        reduction.reduce(gradients)
        whole = time.perf_counter() - started - echo.seconds
        compress = reduction.counters.total.compress_seconds
        if step:
            seconds.append([_slowest(compress), _slowest(whole) - _slowest(compress)])
    # The least: whatever else the machine was doing meanwhile only ever adds to it.
    compress, decompress = (scale * max(0.0, min(each)) for each in zip(*seconds, strict=True))
    kinds = {kind for requests in echo.requests.values() for kind, _ in requests}
    collective = way if way != "allgather" else "allgather" if "allgather" in kinds else "allreduce"
    return Method(name, collective, _buckets(reduction, echo, scale), compress, decompress)


def dense(shapes: Sequence[tuple[int, ...]]) -> Method:
    """Horovod's own exchange, whose copying is part of what was measured of the network."""
    buckets = Engine(NoCompression(), _parameters(shapes), Echo((1,))).buckets
    sendings = (Sending(4.0 * each.size, (("allreduce", 4.0 * each.size),)) for each in buckets)
    return Method("dense", "allreduce", tuple(sendings))


def compute(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Compute:
    """Seconds of the forward and the backward pass of `module(*inputs)`, all workers computing at once."""
    found = []
    for _ in range(1 + _REPEATS):
        _meet()
        started = time.perf_counter()
        output = module(*inputs)
        loss = output.float().sum() if isinstance(output, torch.Tensor) else _first_tensor(output).float().sum()
        _finished(loss)
        between = time.perf_counter()
        loss.backward()
        _finished(loss)
        found.append((_slowest(between - started), _slowest(time.perf_counter() - between)))
        module.zero_grad()
    return Compute(*(min(each) for each in zip(*found[1:], strict=True)))


def _parameters(shapes: Sequence[tuple[int, ...]]) -> list[Parameter]:
    return [Parameter(f"p{number}_", math.prod(shape), "float32", tuple(shape)) for number, shape in enumerate(shapes)]


def _sampled(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Parameters that are like the model's, about SAMPLE values at most: the same number, of fewer rows each."""
    total = sum(each.size for each in parameters)
    if total <= SAMPLE:
        return list(parameters)
    share = SAMPLE / total
    found = []
    for each in parameters:
        rows = each.shape[0] if each.shape else 1
        kept = max(1, round(rows * share))
        shape = (kept, *each.shape[1:]) if each.shape else each.shape
        found.append(Parameter(each.name, math.prod(shape or (1,)), each.kind, shape))
    return found


def _buckets(reduction: Reduction, echo: Echo, scale: float) -> tuple[Sending, ...]:
    """The collectives of a step; those of the sampled tensors stand for the whole model."""
    found = []
    pieces = max(1, round(scale))
    share = scale / pieces
    for engine in (reduction.small, reduction.large):
        for bucket in engine.buckets:
            requests = echo.requests[f"{engine.scope}{bucket.name}"]
            sending = Sending(share * 4.0 * bucket.size, tuple((kind, share * size) for kind, size in requests))
            found += [sending] * pieces
    return tuple(found)


def _collective(kind: str, size: int, among: hvd.ProcessSet = hvd.global_process_set) -> Callable[[], Any]:
    """A collective among some workers in which each hands in `size` bytes."""
    if kind == "allreduce":
        pieces = _PIECES if size >= 64 << 10 else 1
        tensors = [torch.zeros(size // 4 // pieces) for _ in range(pieces)]
        return lambda: [
            hvd.synchronize(handle)
            for handle in [
                hvd.allreduce_async_(each, op=hvd.Sum, name=f"plan.{size}.{number}", process_set=among)
                for number, each in enumerate(tensors)
            ]
        ]
    payload = torch.zeros(size, dtype=torch.uint8)
    if kind == "allgather":
        return lambda: hvd.allgather(payload, name=f"plan.gather.{size}")
    share = [size * (rank + 1) // hvd.size() - size * rank // hvd.size() for rank in range(hvd.size())]
    splits = torch.tensor(share, dtype=torch.int32)
    return lambda: hvd.alltoall(payload, splits=splits, name=f"plan.alltoall.{size}")


def _seconds(call: Callable[[], Any]) -> float:
    """How long a call takes once its time has settled, from a common start.

    Connections and buffers take some hundred megabytes to get to the speed that they keep, and a training has thousands
    of steps. Calls that take long are made three times, and no more than once if even that takes a quarter of a minute.
    """
    found: list[float] = []
    while True:
        _meet()
        started = time.perf_counter()
        call()
        found.append(_slowest(time.perf_counter() - started))
        last = found[-_REPEATS:]
        settled = len(found) > _REPEATS and max(last) < _SETTLED * min(last)
        long = sum(found) > _LONG and len(found) >= _REPEATS
        if long or settled or len(found) == _MOST or sum(found) > _TOO_LONG:
            return statistics.median(last)


def overlap() -> float:
    """Which part of the network's time passes while a worker computes, from 0 to 1.

    Less than all of it where a worker's computing leaves no core to Horovod's own thread.
    """
    call = _collective("allgather", 2 << 20)
    values = torch.zeros(256 << 10)

    def computing(times: int) -> None:
        for _ in range(times):
            values.add_(1.0)

    network = _seconds(call)
    rounds = max(1, round(_ROUNDS * min(network, _LONG) / _seconds(lambda: computing(_ROUNDS))))
    alone = _seconds(lambda: computing(rounds))

    def both() -> None:
        handle = hvd.allgather_async(torch.zeros(2 << 20, dtype=torch.uint8), name="plan.overlap")
        computing(rounds)
        hvd.synchronize(handle)

    return min(1.0, max(0.0, (network + alone - _seconds(both)) / min(network, alone)))


def _meet() -> None:
    hvd.allreduce(torch.zeros(1), name="plan.meet")


def _slowest(seconds: float) -> float:
    return float(hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Max, name="plan.slowest"))


def _finished(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _first_tensor(output: Any) -> torch.Tensor:
    """The first tensor with a gradient in a model's output, which may be a tuple or a mapping."""
    values = output.values() if hasattr(output, "values") else output
    return next(each for each in values if isinstance(each, torch.Tensor) and each.requires_grad)

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

from hvd_gradcomp.collectives import Allgather, Allreduce, Request
from hvd_gradcomp.compressors import Compressor, NoCompression
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.engine.reduction import Reduction
from hvd_gradcomp.policy.cost import FREE, Links, Network, Topology
from hvd_gradcomp.policy.planner import COSTS, Compute, Machines, Method, Sending, fit_network

#: Kind of collective -> bytes that a worker hands in, next to nothing and as much as a bucket or a fused gradient.
SIZES = {"allreduce": (4, 32 << 20), "allgather": (4, 2 << 20), "alltoall": (4, 4 << 20)}
_REPEATS = 3
# Seconds after which a collective is not repeated.
_LONG = 1.0
#: Values of a model that compressing is measured on; times of larger models are extrapolated.
SAMPLE = 32 << 20
# A dense exchange is many tensors, which Horovod copies together first.
_PIECES = 16


@contextmanager
def workers() -> Iterator[bool]:
    """Horovod, running, with one thread a worker where workers share cores; tells whether this is rank 0."""
    hvd.init()
    if not torch.cuda.is_available():
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
    return Machines(where, links)


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


def method(name: str, compressor: Compressor, shapes: Sequence[tuple[int, ...]], average: bool = True) -> Method:
    """What compressing a model's gradients takes here, and what it hands to collectives, bucket by bucket."""
    parameters = _parameters(shapes)
    sample = _sampled(parameters)
    scale = sum(each.size for each in parameters) / sum(each.size for each in sample)
    transport = Repeating(hvd.size())
    reduction = Reduction(compressor, sample, transport, average=average)
    generator = torch.Generator().manual_seed(hvd.rank())
    pool = torch.randn(max(each.size for each in sample), generator=generator)
    pool *= torch.exp(torch.randn(len(pool), generator=generator))
    seconds = []
    # The first step has no residual yet.
    for step in range(1 + _REPEATS):
        gradients = {each.name: pool[: each.size].roll(step) for each in sample}
        transport.requests.clear()
        reduction.counters.reset()
        _meet()
        reduction.reduce(gradients)
        total = reduction.counters.total
        if step:
            seconds.append([_slowest(total.compress_seconds), _slowest(total.decompress_seconds)])
    # The least: whatever else the machine was doing meanwhile only ever adds to it.
    compress, decompress = (scale * min(each) for each in zip(*seconds, strict=True))
    kinds = {kind for requests in transport.requests.values() for kind, _ in requests}
    return Method(
        name,
        "allgather" if "allgather" in kinds else "allreduce",
        _buckets(reduction, transport, scale),
        compress,
        decompress,
    )


def dense(shapes: Sequence[tuple[int, ...]]) -> Method:
    """Horovod's own exchange, whose copying is part of what was measured of the network."""
    buckets = Engine(NoCompression(), _parameters(shapes), Repeating(1)).buckets
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


class Repeating:
    """A transport without a network: every worker is taken to have sent what this one sends.

    Args:
        workers: how many there are to be.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.rank = 0
        self.ranks = tuple(range(workers))
        #: name of a bucket -> kind and bytes of its collectives
        self.requests: dict[str, list[tuple[str, float]]] = {}

    def adds(self, kind: str) -> bool:
        """As Horovod: not bfloat16."""
        return kind != "bfloat16"

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """One worker on each, so that nothing is done nodewise."""
        return tuple((rank,) for rank in self.ranks)

    def part(self, groups: Sequence[Sequence[int]]) -> Repeating:
        """Of workers who are all alike."""
        return Repeating(len(groups[0]))

    def start(self, request: Request, name: str) -> torch.Tensor:
        """The result at once."""
        # What follows the bucket's name says which of its collectives this is.
        its = self.requests.setdefault(name.partition(".")[0], [])
        if isinstance(request, Allreduce):
            width = 2 if request.kind in ("float16", "bfloat16") else 4
            its.append(("allreduce", float(width * len(request.values))))
            return request.values * (1 if request.op == "max" else self.workers)
        if isinstance(request, Allgather):
            its.append(("allgather", float(len(request.payload))))
            return request.payload.repeat(self.workers)
        its.append(("alltoall", float(len(request.payload))))
        return request.payload[: request.splits[0]].repeat(self.workers)

    def wait(self, handle: torch.Tensor) -> torch.Tensor:
        """See `Transport.wait`."""
        return handle


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


def _buckets(reduction: Reduction, transport: Repeating, scale: float) -> tuple[Sending, ...]:
    """The collectives of a step; those of the sampled tensors stand for the whole model."""
    found = []
    pieces = max(1, round(scale))
    share = scale / pieces
    for engine in (reduction.small, reduction.large):
        for bucket in engine.buckets:
            requests = transport.requests[f"{engine.scope}{bucket.name}"]
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
    """The median of a few calls, each from a common start; the first is not counted, unless it takes long."""
    found: list[float] = []
    while len(found) <= _REPEATS and not (found and found[-1] > _LONG):
        _meet()
        started = time.perf_counter()
        call()
        found.append(_slowest(time.perf_counter() - started))
    return statistics.median(found[1:] or found)


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

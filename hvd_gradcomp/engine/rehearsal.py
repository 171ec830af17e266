"""Exchanges rehearsed by one worker alone: what it would ask the network for, and how long its own computing takes.

The other workers are played by an echo, which answers as if all of them had sent what this one sends. Whoever wants to
know what an exchange costs adds what its collectives take (`policy/cost.py`). Values are made up; nothing lasts.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

from hvd_gradcomp.collectives import Allgather, Allreduce, Confirm, Request
from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine.adaptation import Adaptation
from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.engine.choice import dense_for
from hvd_gradcomp.engine.nodes import NodePassage, Nodes
from hvd_gradcomp.engine.passage import KIND_BYTES, Passage
from hvd_gradcomp.ops import Array, Ops, ops_for
from hvd_gradcomp.telemetry import BucketCounters

# Random values that gradients are cut from: enough to be like no pattern, and quickly made.
_POOL = 1 << 17


class Echo:
    """A transport without a network: every worker is taken to have sent what this one sends.

    Args:
        sizes: the number of workers on each node.

    Attributes:
        requests: name of a bucket -> kind and bytes of its collectives; "node" or "across" precedes the kind of those
            among the workers of a node, and among those of other nodes that have the same share.
        seconds: that the echo itself has taken.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.workers = sum(self.sizes)
        self.rank = 0
        self.ranks = tuple(range(self.workers))
        self.requests: dict[str, list[tuple[str, float]]] = {}
        self.seconds = 0.0
        self._where = ""
        self._whole = self

    def adds(self, kind: str) -> bool:
        """As Horovod: not bfloat16."""
        return kind != "bfloat16"

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """See `Transport.nodes`."""
        return tuple(tuple(range(*bounds)) for bounds in pairwise(accumulate(self.sizes, initial=0)))

    def part(self, groups: Sequence[Sequence[int]]) -> Echo:
        """The group that this worker is in."""
        mine = next(tuple(group) for group in groups if 0 in group)
        found = Echo((1,) * len(mine))
        found.requests = self.requests
        found._whole = self._whole
        found._where = "node " if mine == self.nodes()[0] else "across "
        return found

    def start(self, request: Request, name: str) -> Array:
        """The result at once."""
        started = perf_counter()
        # What follows the bucket's name says which of its collectives this is.
        its = self.requests.setdefault(name.partition(".")[0], [])
        if isinstance(request, Allreduce):
            its.append((f"{self._where}allreduce", float(KIND_BYTES[request.kind] * len(request.values))))
            result = request.values * (1 if request.op == "max" else self.workers)
        else:
            kind = "allgather" if isinstance(request, Allgather) else "alltoall"
            its.append((f"{self._where}{kind}", float(len(request.payload))))
            own = request.payload if isinstance(request, Allgather) else request.payload[: request.splits[0]]
            result = ops_for(own).concat([own] * self.workers)
        self._whole.seconds += perf_counter() - started
        return result

    def wait(self, handle: Array) -> Array:
        """See `Transport.wait`."""
        return handle


@dataclass
class _Stage:
    """What a rehearsed passage belongs to, in place of an engine."""

    compressor: Compressor
    transport: Echo
    adaptation: Adaptation
    average: bool = True
    state: dict[str, dict[str, Array]] = field(default_factory=dict)

    def fingerprint(self, parameters: Sequence[Parameter]) -> int:
        return 0


@dataclass(frozen=True)
class Rehearsed:
    """What one worker does in one exchange of a bucket.

    Attributes:
        before_s: seconds of computing until the first collective begins.
        after_s: seconds of computing afterwards.
        requests: kind and bytes of its collectives, as `Echo.requests`.
    """

    before_s: float
    after_s: float
    requests: tuple[tuple[str, float], ...]


def rehearse(
    method: Compressor, parameters: Sequence[Parameter], sizes: Sequence[int], way: str, like: Array
) -> Rehearsed:
    """The exchange of a bucket by this worker alone.

    Args:
        method: how it is compressed.
        parameters: those of the bucket.
        sizes: the number of workers on each node.
        way: "dense", "allgather", "scatter_reduce" or "hierarchical"; "allgather" for methods whose payloads are added.
        like: an array on the device of the gradients.
    """
    if way in ("scatter_reduce", "hierarchical"):
        parameters = divisible(parameters, sizes)
    echo = Echo(sizes)
    stage = _Stage(method, echo, Adaptation(method))
    nodes = Nodes(echo) if way == "hierarchical" else None
    found = Rehearsed(0.0, 0.0, ())
    # The first time there is no residual, and memory is new.
    for step in range(2):
        gradients = made_up(parameters, step, like)
        counters = BucketCounters()
        echo.seconds = 0.0
        echo.requests.clear()
        started = perf_counter()
        passage: Passage | NodePassage
        if nodes is not None:
            passage = NodePassage(stage, method, parameters, gradients, counters, step, nodes)
        else:
            used = dense_for(parameters) if way == "dense" else method
            collective = "scatter_reduce" if way == "scatter_reduce" else "allgather"
            passage = Passage(stage, used, parameters, gradients, counters, step, collective)
        exchange = passage.exchange()
        request = next(exchange)
        begun = perf_counter()
        results = _run(exchange, request, echo)
        # On another device the work is done when something of it is there.
        ops_for(like).all_finite(next(iter(results.values()))[:1])
        after = perf_counter() - begun - echo.seconds
        found = Rehearsed(begun - started, after, tuple(each for its in echo.requests.values() for each in its))
    return found


def divisible(parameters: Sequence[Parameter], sizes: Sequence[int]) -> list[Parameter]:
    """The parameters with as many more elements as it takes for all workers' shares to be of one size.

    What an echo repeats is of the size of this worker's share.
    """
    multiple = math.lcm(sum(sizes), min(sizes) * len(sizes))
    return [replace(each, size=-(-each.size // multiple) * multiple, shape=None) for each in parameters]


def made_up(parameters: Sequence[Parameter], step: int, like: Array) -> dict[str, Array]:
    """Gradients in float32: heavy-tailed random values, others in each step."""
    ops = ops_for(like)
    centred = ops.uniform(_POOL, step, like) - 0.5
    pool = centred * centred * centred
    return {
        each.name: _cut(ops, pool, 7919 * number % (_POOL // 2), each.size) for number, each in enumerate(parameters)
    }


def _cut(ops: Ops, pool: Array, start: int, size: int) -> Array:
    """`size` values of the pool, round and round; memory of their own."""
    rounds = (start + size) // _POOL + 1
    joined = pool if rounds == 1 else ops.concat([pool] * rounds)
    return ops.copy(joined[start : start + size])


def _run(
    exchange: Generator[Request | Confirm, Any, dict[str, Array]], request: Request | Confirm, echo: Echo
) -> dict[str, Array]:
    """What comes of an exchange among workers that are all alike, from its first request on."""
    while True:
        answer: object = True
        if not isinstance(request, Confirm):
            among = request.among or echo
            answer = among.wait(among.start(request, ""))
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            results: dict[str, Array] = end.value
            return results
